"""Reads the stacks of a running rank from outside: by its own signal handler.

They say which ranks of this node are missing from a collective, and where they are.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from traceback import FrameSummary

from msgspec import Struct
from msgspec.structs import replace

from entrypoint.core.collective_error import EXIT_FUNCTION, collective_of, place_of
from entrypoint.core.errors import one_line, printable
from entrypoint.core.process import signal_sender
from entrypoint.core.stack_signal import FILE_NAME, STACK_SIGNAL
from entrypoint.machine.procfs import ROOT, STOPPED, memory_file, read_lines, state_of, state_text

# A rank answers within milliseconds, unless it waits in the kernel.
ANSWER_LIMIT_S = 3.0
POLL_INTERVAL_S = 0.01
WITHOUT_HANDLER = "without the handler for stacks: no Python, another version, or its files are closed"
FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)


class NoStacksError(Exception):
    """Why a process gives no stacks, as the end of a sentence about it."""


def read_python_stacks(process: int, limit_s: float = ANSWER_LIMIT_S) -> str:
    """Return the stacks of all Python threads, the main thread last; raises `NoStacksError` after `limit_s` at most.

    A stopped process is not signalled: it would answer when it goes on, and nobody would read that.
    """
    if state_of(process) in STOPPED:
        raise NoStacksError(state_text(process))
    try:
        with open_answer(process, limit_s) as answer:
            return ask(process, answer, limit_s)
    except OSError as error:
        raise NoStacksError(f"not to be asked ({error.strerror or type(error).__name__})") from None


@contextmanager
def open_answer(process: int, limit_s: float) -> Iterator[int]:
    """Open a rank's file of stacks for this reader alone; raises `NoStacksError` without one, OSError."""
    path = memory_file(process, FILE_NAME)
    if path is None:
        raise NoStacksError(WITHOUT_HANDLER)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoStacksError("being asked by another process") from None
                time.sleep(POLL_INTERVAL_S)
        yield file
    finally:
        os.close(file)


def ask(process: int, answer: int, limit_s: float) -> str:
    """Send the signal and return what the process adds to its file; raises `NoStacksError`, OSError."""
    blocked_before, before = blocking_threads(process), os.fstat(answer).st_size
    send = signal_sender(process)  # to this process, should another one get its number
    if not has_signal(f"{process}/status", "SigCgt"):  # without a handler it would end
        raise NoStacksError(WITHOUT_HANDLER)
    send(STACK_SIGNAL)
    deadline = time.monotonic() + limit_s
    while os.fstat(answer).st_size <= before or not has_answered(process, blocked_before):
        if time.monotonic() > deadline:
            raise NoStacksError(state_text(process) or f"without an answer in {limit_s:.0f} s: it blocks all signals")
        time.sleep(POLL_INTERVAL_S)
    return os.pread(answer, os.fstat(answer).st_size - before, before).decode(errors="replace")


def has_answered(process: int, blocked_before: set[str]) -> bool:
    """Return whether the handler has run: the kernel blocks the signal in its thread meanwhile."""
    pending = has_signal(f"{process}/status", "ShdPnd")
    return not pending and blocking_threads(process) <= blocked_before


def blocking_threads(process: int) -> set[str]:
    """Return the threads of a process that block the signal."""
    with suppress(OSError):
        threads = os.listdir(f"/proc/{process}/task")
        return {thread for thread in threads if has_signal(f"{process}/task/{thread}/status", "SigBlk")}
    return set()


def has_signal(status: str, field: str) -> bool:
    """Return whether the signal is in a set of signals of a status file below /proc."""
    lines = read_lines(ROOT / "proc" / status)
    value = next((line.split()[1] for line in lines if line.startswith(f"{field}:")), "0")
    return bool(int(value, 16) >> (STACK_SIGNAL - 1) & 1)


def stacks_text(title: str, stacks: str) -> str:
    """Return stacks as lines below a title, printable on any terminal."""
    lines = [one_line(line) for line in stacks.strip().splitlines()]
    return "\n".join([title, *(f"  {line}" for line in lines if line)])


def main_thread_frames(stacks: str) -> list[FrameSummary]:
    """Return the frames of the main thread, innermost first; it is the oldest, and so the last one of the text."""
    block = stacks.rstrip().rpartition("\n\n")[2]
    return [
        FrameSummary(file, int(line) if line.isdecimal() else 0, function, lookup_line=False)
        for file, line, function in FRAME.findall(block)
    ]


# A rank that has lost another one waits for this answer before it ends.
ANSWER_LIMIT_S = 1.0
ENDED = ("", "Z", "X")
# Ranks that are looked for; more are not of use to a reader.
MAX_DESCRIBED = 4


class Whereabouts(Struct, frozen=True):
    """Where a process is, as the end of a sentence, its place in the program, its collective, and its stacks.

    The last three are empty where they are unknown. With `is_exiting` the process is about to end.
    """

    text: str
    place: str = ""
    collective: str = ""
    stacks: str = ""
    is_exiting: bool = False


def locate(process: int) -> Whereabouts:
    """Return where the main thread of a process is."""
    try:
        stacks = read_python_stacks(process, ANSWER_LIMIT_S)
    except NoStacksError as error:
        return Whereabouts(f"is {error}")
    frames = main_thread_frames(stacks)
    place, collective = place_of(frames), collective_of(frames)
    inside = f"in {collective} " if collective else ""
    return Whereabouts(
        text=f"is {inside}at {printable(place)}",
        place=place,
        collective=collective,
        stacks=stacks,
        is_exiting=any(frame.name == EXIT_FUNCTION for frame in frames),
    )


def program_of(process: int, monitor_name: str) -> int:
    """Return the process of a rank's program: itself, or the child of its monitor; 0 if that has ended."""
    if "".join(read_lines(ROOT / f"proc/{process}/comm")) != monitor_name:
        return process
    children = "".join(read_lines(ROOT / f"proc/{process}/task/{process}/children")).split()
    return int(children[0]) if children else 0


def find_missing(running: Mapping[int, int], place: str, monitor_name: str) -> dict[int, Whereabouts]:
    """Return where the ranks are that are not in the collective at this place of the program.

    `running` maps ranks to their processes, which may be monitors of that name.
    A rank in another collective may wait too, so it counts only if no rank is outside of one. A rank that ends
    meanwhile is no cause.
    """
    outside: dict[int, Whereabouts] = {}
    elsewhere: dict[int, Whereabouts] = {}
    # faulthandler writes places in ASCII
    waited_at = place.encode("ascii", "backslashreplace").decode()
    for rank, process in sorted(running.items()):
        if len(outside) == MAX_DESCRIBED:  # each that does not answer takes a second
            break
        program = program_of(process, monitor_name)
        located = locate(program)
        if state_of(program) in ENDED or located.is_exiting:
            continue
        missing = replace(located, text=f"process {program} {located.text}")
        if not located.collective:
            outside[rank] = missing
        elif place and located.place != waited_at:
            elsewhere[rank] = missing
    return outside or elsewhere


def missing_line(missing: Mapping[int, Whereabouts], lost: Mapping[str, str], rank: int, waited: str) -> str:
    """Return one line about the missing ranks; `lost` says which collective failed for `rank`."""
    place = f" at {printable(lost['place'])}" if lost.get("place") else ""
    collective = f"{printable(lost.get('called', 'a collective'))}{place}, where rank {rank} waited {waited}"
    if len(missing) == 1:
        ((only, absent),) = missing.items()
        return f"rank {only} is missing from {collective}: {absent.text}"
    count = f"{MAX_DESCRIBED} ranks or more" if len(missing) >= MAX_DESCRIBED else f"{len(missing)} ranks"
    places = "; ".join(f"rank {other}: {absent.text}" for other, absent in list(missing.items())[:MAX_DESCRIBED])
    return f"{count} are missing from {collective}: {places}"
