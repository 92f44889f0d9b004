"""What Python itself costs a process with torch in it, at its start and at its end, made less."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def gc_paused() -> Iterator[None]:
    """Look for no garbage while modules are imported within, nor later among what they have made, which stays.

    Torch makes 150,000 objects, among which Python looks again and again: a tenth of its import (2.5 s on two cores),
    and 0.1 s of drawing a run's curves, whose library is imported later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def fast_exit(code: int) -> NoReturn:
    """End this process; where all went well once what is registered for that has run, without tearing Python down.

    With torch that takes 0.2 s, in which a thread of Gloo's may abort the process (see `last_breath`). Threads are not
    waited for then; after a failure they are, since one may still be writing a checkpoint.
    """
    if code:
        sys.exit(code)
    from entrypoint.core import exit_delay

    atexit.unregister(exit_delay.delay_exit)
    atexit._run_exitfuncs()
    with suppress(OSError):  # a reader that has gone: Python's own end tells that
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(0)


PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def die_with_parent() -> None:
    """Have the kernel ask this process to end when its launcher or guard is gone (prctl(2), PR_SET_PDEATHSIG).

    A launcher that was killed cannot end its ranks: they would train on unseen, and hold their peers.
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def name_process(name: str) -> None:
    """Give this process the name that `verify` knows it by, of 15 letters at most (prctl(2), PR_SET_NAME)."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def replace_process(argv: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    """Go on as another program, with nothing of ours left unwritten."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, environment)
