"""Starts TensorBoard on a folder of runs, without links such as `latest`, which would be second runs.

    python -m train.report.tensorboard FOLDER [TENSORBOARD-OPTION ...]

TensorBoard follows links, in its own loader and in the fast one of its data server, and has no option against it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator


def walk_without_links(top: str) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield each folder below `top` with the paths of its files, as TensorBoard's walk does; follow no link."""
    for folder, _, names in os.walk(top):
        yield folder, (os.path.join(folder, name) for name in names)  # noqa: PTH118  # TensorBoard compares strings


def main(argv: list[str]) -> int:
    """Run TensorBoard until it is stopped and return its exit code."""
    from tensorboard import default, program
    from tensorboard.backend.event_processing import io_wrapper

    io_wrapper.ListRecursivelyViaWalking = walk_without_links
    board = program.TensorBoard(default.get_plugins())
    board.configure(argv=["tensorboard", "--logdir", argv[0], "--load_fast=false", *argv[1:]])
    return int(board.main() or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
