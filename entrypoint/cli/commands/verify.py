"""`entrypoint verify`: compare the ranks that run on this node with their plans."""

from __future__ import annotations

import json

from msgspec.structs import asdict

from entrypoint.cli.commands.stacks import processes_of
from entrypoint.cli.parser import Invocation
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode
from entrypoint.doctor.running_ranks import describe, verify_running


def run(invocation: Invocation) -> int:
    """Print what the ranks have; exit code 3 if one differs from its plan."""
    command = invocation.command
    ranks = verify_running(processes_of("verify", command.words))
    checked = [
        {"process": one.observed.process, "seen": asdict(one.observed), "warnings": one.differences} for one in ranks
    ]
    lines = [line for rank in ranks for line in describe(rank)]
    write_stdout(json.dumps(checked, indent=2) if command.json else "\n".join(lines))
    return ExitCode.MACHINE if any(rank.differences for rank in ranks) else ExitCode.DONE
