"""One measurement in a process: `python -m benchmarks.stream.measure LOADER DATA TASK SIDE SECONDS`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.stream.loaders import LOADERS, Task


def pss_mib() -> float:
    """Return the memory of this process and its children, shared pages divided among those that share them (MiB)."""
    total = 0
    for process in descendants(os.getpid()):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def descendants(process: int) -> list[int]:
    """Return a process and all below it."""
    found = [process]
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            for child in task.read_text().split():
                found += descendants(int(child))
    return found


def measure(batches: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return images per second over SECONDS or one batch, the longer, and the memory halfway (MiB)."""
    began, images, memory = time.monotonic(), 0, 0.0
    while (took := time.monotonic() - began) < seconds:
        images += next(batches)
        if not memory and time.monotonic() - began > seconds / 2:
            paused = time.monotonic()
            memory = pss_mib()
            began += time.monotonic() - paused
    return images / took, memory


def main(name: str, data: Path, task: str, side: int, seconds: float) -> None:
    """Print images per second and memory as JSON; the first batches, with which workers start, do not count."""
    loader = LOADERS[name]
    import torch

    torch.set_num_threads(1)  # the two workers have the cores
    batches = loader(Task(data, task == "train", side))
    warm = time.monotonic() + min(1.5, seconds / 2)
    for _ in range(3):
        next(batches)
    while time.monotonic() < warm:
        next(batches)
    rate, memory = measure(batches, seconds)
    print(json.dumps({"images_per_second": rate, "pss_mib": memory}), flush=True)
    os._exit(0)  # workers and threads of the loaders end with it


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
