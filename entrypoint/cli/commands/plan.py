"""`entrypoint plan`: show what `train` or `run SCRIPT` would do, and start nothing."""

from __future__ import annotations

from entrypoint.cli.commands.train_run import print_plan, tuned_plan
from entrypoint.cli.invocation import Invocation
from entrypoint.cli.plan_inputs import read_plan_inputs
from entrypoint.core.errors import ExitCode


def run(invocation: Invocation) -> int:
    """Print the plan."""
    print_plan(invocation.command, tuned_plan(invocation, read_plan_inputs(invocation, counts_load=True)))
    return ExitCode.DONE
