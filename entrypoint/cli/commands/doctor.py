"""`entrypoint doctor`: check machine, container, packages and plan."""

from __future__ import annotations

from importlib.util import find_spec

from msgspec.structs import replace

from entrypoint.cli.build_plan import build_plan, run_folders
from entrypoint.cli.commands import train_run
from entrypoint.cli.parser import CommandLine, Invocation
from entrypoint.cli.plan_inputs import read_plan_inputs
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode, refuse_if
from entrypoint.core.process import module_command
from entrypoint.doctor import report
from entrypoint.plan.model import Program


def run(invocation: Invocation) -> int:
    """Print every check; exit code 3 if one fails."""
    command = invocation.command
    if "network" in command.switches:
        refuse_if(
            {"--network: needs torch, which is not installed here. Install it.": find_spec("torch") is None},
            ExitCode.MACHINE,
        )
        return train_run.run(replace(invocation, command=network_command(command)))
    inputs = read_plan_inputs(invocation, counts_load=True)
    checks = report.run_checks(inputs, lambda: build_plan(command, inputs), run_folders(command, inputs))
    write_stdout(report.format_report(checks, as_json=command.json))
    return ExitCode.MACHINE if any(check.state == "failure" for check in checks) else ExitCode.DONE


def network_command(command: CommandLine) -> CommandLine:
    """Return the command that measures the network: its program is started as any other, on all nodes of the job."""
    words = module_command("entrypoint.doctor.network_speed", *(("--json",) if command.json else ()))
    return replace(
        command,
        command="run",
        target="run",
        program=Program("module", words),
        flags={"LAUNCH_QUIET": "1", **command.flags},
        switches=frozenset(),
        words=words[1:],
    )
