"""`entrypoint stacks`: print the stacks of ranks on this node, by their process ids or by a run of the trainer."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import asdict

from entrypoint.cli.parser import Invocation
from entrypoint.core.console import log, write_stdout
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.files import is_folder
from entrypoint.doctor.running_ranks import describe_stacks, stacks_of_ranks


def run(invocation: Invocation) -> int:
    """Print the stacks of the ranks on this node, of runs or processes that the words name."""
    ranks = stacks_of_ranks(processes_of("stacks", invocation.command.words))
    write_stdout(
        json.dumps(list(map(asdict, ranks)), indent=2)
        if invocation.command.json
        else "\n\n".join(map(describe_stacks, ranks))
    )
    return ExitCode.DONE


def processes_of(command: str, words: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of the processes that a command's words name, none for no words; raises `UserError`."""
    found: list[int] = []
    for word in words:
        if re.fullmatch(r"[1-9]\d{0,9}", word, re.ASCII) and not is_folder(word):
            found.append(int(word))
        elif is_folder(word):
            found += processes_of_run(command, Path(word))
        else:
            raise UserError(
                f"{command} {printable(word)}: neither a run folder nor a process id. Use `entrypoint {command}`,"
                f" `entrypoint {command} RUN` or `entrypoint {command} PID`."
            )
    return tuple(found)


def processes_of_run(command: str, folder: Path) -> list[int]:
    """Return the ids of a run's ranks on this node that still run; raises `UserError` for none.

    A line names the nodes of the others.
    """
    from entrypoint.doctor.running_ranks import iter_rank_processes
    from train.planning.run_selection import recorded_ranks

    here, recorded = socket.gethostname(), recorded_ranks(folder)
    if not recorded:
        raise UserError(
            f"{command} {printable(folder)}: has no ranks.json that says where the run's ranks are. Name PIDs."
        )
    running = {(int(process), environ["RANK"]) for process, environ in iter_rank_processes()}
    own = [one.process for one in recorded if one.node == here and (one.process, str(one.rank)) in running]
    others = sorted({one.node for one in recorded} - {here})
    elsewhere = f"on {', '.join(map(printable, others[:8]))}{', …' if len(others) > 8 else ''}" if others else ""
    if not own:
        where = f"; other ranks were started {elsewhere}" if elsewhere else ""
        raise UserError(f"{command} {printable(folder)}: no rank of this run runs on {printable(here)}{where}.")
    if elsewhere:
        log(f"other ranks of this run are {elsewhere}: use the command there too")
    return own
