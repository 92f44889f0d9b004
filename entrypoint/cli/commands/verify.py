"""`entrypoint verify`: compare the ranks that run on this node with their plans."""

from __future__ import annotations

import re
from collections.abc import Sequence

from entrypoint.cli.invocation import Invocation
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.doctor.running_ranks import as_json, describe, verify_running


def run(invocation: Invocation) -> int:
    """Print what the ranks have; exit code 3 if one differs from its plan."""
    command = invocation.command
    ranks = verify_running(parse_pids(command.words))
    write_stdout(as_json(ranks) if command.json else "\n".join(line for rank in ranks for line in describe(rank)))
    return ExitCode.MACHINE if any(rank.differences for rank in ranks) else ExitCode.DONE


def parse_pids(words: Sequence[str]) -> tuple[int, ...]:
    """Return the process ids that words are; raises `UserError` for anything else."""
    for word in words:
        if not re.fullmatch(r"[1-9]\d{0,9}", word, re.ASCII):
            raise UserError(
                f"verify {printable(word)}: not a process id. Use `entrypoint verify` or `entrypoint verify PID`."
            )
    return tuple(map(int, words))
