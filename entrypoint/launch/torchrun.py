"""torchrun's own agent, ending as the entrypoint promises: the first failure in one line, its exit code kept.

torchrun itself prints a page for every failure, sorts failures that fall into one second by rank, and exits 1
whatever the ranks' codes were. It is started where ranks may have to start again, and where a person asks for it;
`spawn` starts the others. This module and `elastic` are the parts of the entrypoint that import torch: they run
in the agent's process, which is torchrun's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from entrypoint.core.errors import ExitCode, UserError, first_line
from entrypoint.core.process import fast_exit, gc_paused
from entrypoint.launch.failures import Failure, first_failure, parse_error_file, print_final_message, report_stop
from entrypoint.machine.oom import oom_message, read_memory
from entrypoint.machine.procfs import ROOT
from entrypoint.plan.model import PLAN_VAR, Plan


def main(argv: list[str]) -> int:
    """Run torchrun's agent with torchrun's arguments and return the job's exit code."""
    with gc_paused():
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from entrypoint.launch.elastic_agent import agent_address_args, install_restart_policy

    plan = Plan.from_variable(os.environ[PLAN_VAR])
    ended_by_agent, memory = capture_agent_log(), read_memory(ROOT)

    def first(failures: dict[int, Any]) -> tuple[str, int]:
        return first_failure(convert_failures(failures, ended_by_agent), oom_message(memory, read_memory(ROOT)))

    warned = forward_user_signals()
    try:
        argv = [*agent_address_args(plan, os.environ), *argv]
    except UserError as error:
        return print_final_message(str(error), error.code)
    install_restart_policy(plan, warned, lambda failures: first(failures)[0])
    with tempfile.TemporaryDirectory(prefix="entrypoint-") as folder:
        try:
            torchrun.run(torchrun.parse_args([f"--log-dir={folder}", *argv]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            return print_final_message(*first(error.failures))
        except SignalException as error:
            return report_stop(Path(folder), error.sigval)
        except (RuntimeError, OSError) as error:
            return print_final_message(
                f"the ranks could not be brought together: {first_line(error)}", ExitCode.RENDEZVOUS
            )
    return ExitCode.DONE


def convert_failures(failures: dict[int, Any], ended_by_agent: set[int]) -> list[Failure]:
    """Return torch's own records of failures, by rank, as ours."""
    return [
        Failure(
            *(rank, one.local_rank, one.pid, one.exitcode, one.timestamp * 10**9, one.pid in ended_by_agent),
            parse_error_file(one.error_file_data),
        )
        for rank, one in failures.items()
    ]


def forward_user_signals() -> list[int]:
    """Pass on a scheduler's warning and the wish to save, which would end the agent: its ranks know what to do.

    Returns the list that each warning is put into.
    """
    seen: list[int] = []

    def tell_ranks(number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            seen.append(number)
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in children.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, tell_ranks)
    return seen


class KilledPidRecorder(logging.Handler):
    """Notes which processes the agent has ended itself; torch 2.13 counts those among the failed ones."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.pids: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Note the process of `Sending process %s closing signal %s` and of `Unable to shutdown process %s …`."""
        if "process %s" in record.msg and isinstance(record.args, tuple) and isinstance(record.args[0], int):
            self.pids.add(record.args[0])


def capture_agent_log() -> set[int]:
    """Keep the agent's own pages of log off the terminal; return the set that its victims' pids go into."""
    witness = KilledPidRecorder()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [logging.NullHandler()], False
    agent = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    agent.setLevel(logging.WARNING)
    agent.handlers, agent.propagate = [witness], False
    return witness.pids


if __name__ == "__main__":
    fast_exit(main(sys.argv[1:]))
