"""`entrypoint plan`: show what `train` or `run SCRIPT` would do, and start nothing."""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.cli.commands.train_run import print_plan, tuned_plan
from entrypoint.cli.parser import CommandLine
from entrypoint.cli.plan_inputs import read_plan_inputs
from entrypoint.cli.start import ProcessStart
from entrypoint.core.errors import ExitCode


def run(command: CommandLine, environ: Mapping[str, str], start: ProcessStart) -> int:
    """Print the plan."""
    print_plan(command, tuned_plan(command, read_plan_inputs(command, environ, start.load)))
    return ExitCode.DONE
