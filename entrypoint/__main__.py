"""Starts the entrypoint: `python -m entrypoint`."""

from __future__ import annotations

import sys
from pathlib import Path

# The folder of both packages goes first: a train.py in the user's folder or on PYTHONPATH must not be imported instead.
# This process only plans, so the user's program is not affected.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Run the command line and return the exit code; a rank's own start imports no more than it needs."""
    if sys.argv[1:] == ["rank"]:
        from entrypoint.cli.rank_command import main as run
    else:
        from entrypoint.cli.commands import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
