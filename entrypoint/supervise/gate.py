"""The gate before a rank's program: it starts when rank 0 has answered, and not if the job is over."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.process import TERMINATING
from entrypoint.supervise.admission import code_after, failure_message
from entrypoint.supervise.child import fork_exec, has_exited
from entrypoint.supervise.failure_channel import FailureChannel


class Gate(Struct, frozen=True):
    """A program that waits for a byte of this pipe, and the signals that it defers until it runs."""

    child: int
    pipe: int
    deferred: Sequence[signal.Signals]


def spawn_gated(argv: tuple[str, ...], environment: Mapping[str, str], deferred: Sequence[signal.Signals]) -> Gate:
    """Fork the program, which waits at the gate; the monitor forks before it starts threads."""
    read_end, pipe = os.pipe()
    child = fork_exec(argv, environment, gate=read_end, deferred=deferred)
    os.close(read_end)
    return Gate(child, pipe, deferred)


def open_gate(gate: Gate, channel: FailureChannel, received: list[int], timeout_s: float) -> None:
    """Wait for rank 0 if the ranks' port comes from the job's id, and let the program start.

    If the program has died meanwhile, it does not start. A terminating signal ends this process. Raises `UserError` if
    another rank has failed, or if the scheduler announces the job's end.
    """
    ends = (*TERMINATING, *(number for number in gate.deferred if number == signal.SIGUSR1))

    def stops() -> list[int]:
        return [number for number in received if number in ends]

    answered = not channel.waits_for_rank0 or channel.wait_for_rank0(
        timeout_s, log, lambda: bool(stops() or channel.first_failure) or has_exited(gate.child)
    )
    if not answered and stops():
        number = stops()[0]
        if number == signal.SIGUSR1:
            raise UserError("stopped by SIGUSR1 before the first step. Nothing is to be saved.", ExitCode.PREEMPTED)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)
    if channel.first_failure and channel.waits_for_rank0 and not channel.listens:
        raise UserError(failure_message(channel.first_failure), code_after(channel.first_failure))
    if answered:
        with suppress(BrokenPipeError):
            os.write(gate.pipe, b".")
    os.close(gate.pipe)
