"""Workarounds for Python, each with its source and the versions that need it.

Three others are part of an algorithm, and stay there. `exit_delay` is imported by a .pth file.
`process.fast_exit` skips the shutdown for the same reason.
The trainer forks its loader workers early (gh-112275, fixed in Python 3.11.10; see docs/architecture.md).
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn


def exit_if_item_cannot_be_sent() -> None:
    """Make this process exit if a multiprocessing queue cannot send an item.

    Python prints a traceback and drops the item, so the receiver waits forever.
    Source: `Queue._on_queue_feeder_error` in Lib/multiprocessing/queues.py (Python 3.11 to 3.13).
    """
    from multiprocessing.queues import Queue

    queue_class: Any = Queue
    queue_class._on_queue_feeder_error = staticmethod(exit_at_once)


def silence_unfetched_items() -> None:
    """Print no traceback for items that an exited process did not fetch; other uncaught exceptions are silent too.

    Source: `_ResourceSharer._serve` in Lib/multiprocessing/resource_sharer.py (Python 3.11 to 3.13).
    """
    sys.excepthook = no_traceback


def no_traceback(*_: object) -> None:
    """Print nothing."""


def exit_at_once(*_: object) -> NoReturn:
    """Exit this process without Python's shutdown."""
    os._exit(1)
