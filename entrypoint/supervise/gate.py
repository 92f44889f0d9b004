"""The gate before a rank's program: it starts when rank 0 has sent the rendezvous port, and not if the job is over."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from entrypoint.core.console import log
from entrypoint.core.errors import NOT_RETRYABLE, ExitCode, UserError
from entrypoint.core.signals import TERMINATING
from entrypoint.supervise.admission import FirstFailure
from entrypoint.supervise.child import fork_exec
from entrypoint.supervise.failure_channel import FailureChannel


class Gate(Struct, frozen=True):
    """A program that waits, the pipe from which it reads its port, and the signals that it defers until it runs."""

    child: int
    port_pipe: int
    deferred: Sequence[signal.Signals]


def spawn_gated(
    argv: tuple[str, ...], environment: Mapping[str, str], deferred: Sequence[signal.Signals]
) -> tuple[int, int]:
    """Fork the program, and return its process id and the pipe that it waits on for its port.

    The program starts when the rendezvous port is written to that pipe. This monitor forks before it starts threads.
    """
    read_end, port_pipe = os.pipe()
    child = fork_exec(argv, environment, port_pipe=read_end, deferred=deferred)
    os.close(read_end)
    return child, port_pipe


def open_gate(gate: Gate, port: int, channel: FailureChannel, received: list[int], timeout_s: float) -> None:
    """Wait for rank 0's port if the ranks take a common one, and let the program start.

    If the program has died meanwhile, it does not start. A terminating signal ends this process. Raises `UserError` if
    another rank has failed, or if the scheduler announces the job's end.
    """
    ends = (*TERMINATING, *(number for number in gate.deferred if number == signal.SIGUSR1))

    def stops() -> list[int]:
        return [number for number in received if number in ends]

    if channel.ports:
        port = channel.wait_for_port(timeout_s, log, lambda: bool(stops()) or has_exited(gate.child))
    if channel.ports and not port and stops():
        number = stops()[0]
        if number == signal.SIGUSR1:
            raise UserError("stopped by SIGUSR1 before the first step. Nothing is to be saved.", ExitCode.PREEMPTED)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)
    if channel.first_failure and not port:
        raise UserError(failure_message(channel.first_failure), code_after(channel.first_failure))
    if port:
        with suppress(BrokenPipeError):
            os.write(gate.port_pipe, str(port).encode())
    os.close(gate.port_pipe)


def has_exited(child: int) -> bool:
    """Return whether a child has exited; it stays to be reaped."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def failure_message(failure: FirstFailure) -> str:
    """Return the line that names the rank that failed first, or the node that could not start."""
    if failure.before_start:
        return f"{failure.node}: {failure.how}"
    return f"rank {failure.rank} on {failure.node} failed first: {failure.how}"


def code_after(failure: FirstFailure) -> ExitCode:
    """Return the exit code of the ranks that end because another one failed."""
    kept = failure.before_start or failure.code in NOT_RETRYABLE
    return ExitCode(failure.code) if kept else ExitCode.RANK_FAILED
