"""torchrun's own agent, ending as the entrypoint promises: the first failure in one line, its exit code kept.

torchrun itself prints a page for every failure, sorts failures that fall into one second by rank, and exits 1
whatever the ranks' codes were. This module and `elastic` are the parts of the entrypoint that import torch: they run
in the agent's process, which is torchrun's.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from entrypoint.errors import Exit, Refused, first_line, how_ended, prefix
from entrypoint.interpreter import leave, uncollected
from entrypoint.launcher_defaults import ROOT
from entrypoint.oom import out_of_memory, read_memory
from entrypoint.plan import VARIABLE, Plan


def main(argv: list[str]) -> int:
    """Run torchrun's agent with torchrun's arguments and return the job's exit code."""
    with uncollected():
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from entrypoint.elastic import restarting, where_agents_meet

    plan = Plan.from_variable(os.environ[VARIABLE])
    ended_by_agent, memory = watch_agent(), read_memory(ROOT)

    def first(failures: dict[int, Any]) -> tuple[str, int]:
        return first_failure(failures, ended_by_agent, out_of_memory(memory, read_memory(ROOT)))

    warned = signals_for_ranks()
    try:
        argv = [*where_agents_meet(plan, os.environ), *argv]
    except Refused as error:
        return say(str(error), error.code)
    restarting(plan, warned, lambda failures: first(failures)[0])
    with tempfile.TemporaryDirectory(prefix="entrypoint-") as folder:
        try:
            torchrun.run(torchrun.parse_args([f"--log-dir={folder}", *argv]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            return say(*first(error.failures))
        except SignalException as error:
            return tell_end(Path(folder), error.sigval)
        except (RuntimeError, OSError) as error:
            return say(f"the ranks could not be brought together: {first_line(error)}", Exit.RENDEZVOUS)
    return Exit.DONE


def signals_for_ranks() -> list[int]:
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


class Witness(logging.Handler):
    """Notes which processes the agent has ended itself; torch 2.13 counts those among the failed ones."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.pids: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Note the process of `Sending process %s closing signal %s` and of `Unable to shutdown process %s …`."""
        if "process %s" in record.msg and isinstance(record.args, tuple) and isinstance(record.args[0], int):
            self.pids.add(record.args[0])


def watch_agent() -> set[int]:
    """Keep the agent's own pages of log off the terminal; return the set that its victims' pids go into."""
    witness = Witness()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [logging.NullHandler()], False
    agent = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    agent.setLevel(logging.WARNING)
    agent.handlers, agent.propagate = [witness], False
    return witness.pids


def tell_end(folder: Path, number: signal.Signals) -> int:
    """Say how the ranks took a signal that the agent has passed on to them: saved, to go on, or just ended.

    `folder` holds the file of each rank that had something to say, in a folder for each time that ranks were started.
    """
    for file in sorted(folder.glob("**/error.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        message = json.loads(file.read_text())["message"]
        if isinstance(message, dict) and message.get("extraInfo", {}).get("code") == Exit.PREEMPTED:
            return say(message["message"], Exit.PREEMPTED)
    return say(f"stopped by {number.name}", 128 + number)


def first_failure(failures: dict[int, Any], ended_by_agent: set[int], memory: str = "") -> tuple[str, int]:
    """Return which rank failed first and with what, and the code to end with.

    A rank that the agent has ended, or that only lost its peer, is a consequence, so it comes after any other
    failure. A rank's own code is kept; one that a signal ended gives 5, with what `memory` tells of the kernel.
    """
    rank, failure = min(failures.items(), key=lambda item: order(item[0], item[1], ended_by_agent))
    extra = extra_info(failure)
    if extra.get("refused"):
        return failure.message["message"], failure.exitcode
    place = f"rank {rank} of this job (local rank {failure.local_rank}, pid {failure.pid})"
    if failure.exitcode < 0:
        return f"{place} failed first: {how_ended(failure.exitcode, memory)}", Exit.RANK_FAILED
    return f"{place} failed first, with exit code {failure.exitcode}", failure.exitcode


def order(rank: int, failure: Any, ended_by_agent: set[int]) -> tuple[bool, bool, int, int]:
    """Return the sorting key of a failure: causes before consequences, signals first, then by time and rank.

    A rank that a signal ended wrote no time, and one that ends by itself in the same second may be reacting.
    """
    extra = extra_info(failure)
    consequence = failure.pid in ended_by_agent or bool(extra.get("lost_peer"))
    when_ns = int(extra.get("time_ns", failure.timestamp * 10**9))
    return consequence, failure.exitcode > 0, when_ns, rank


def extra_info(failure: Any) -> dict[str, Any]:
    """Return what a rank wrote beside its message into its error file, nothing where it wrote none."""
    message = failure.error_file_data.get("message")
    return dict(message.get("extraInfo", {})) if isinstance(message, dict) else {}


def say(message: str, code: int) -> int:
    """Print the job's last line and return its code."""
    print(f"{prefix(code)}{message}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
