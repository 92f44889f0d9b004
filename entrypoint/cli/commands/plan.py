"""`entrypoint plan`: show what `train` or `run SCRIPT` would do, and start nothing."""

from __future__ import annotations

from entrypoint.cli.as_typed import plan_as_typed
from entrypoint.cli.commands.train_run import print_plan, tuned_plan
from entrypoint.cli.invocation import Invocation
from entrypoint.cli.plan_inputs import read_plan_inputs
from entrypoint.core.errors import ExitCode


def run(invocation: Invocation) -> int:
    """Print the plan."""
    command = invocation.command
    plan = tuned_plan(command, read_plan_inputs(invocation, counts_load=True))
    print_plan(command, plan_as_typed(plan, invocation.typed))
    return ExitCode.DONE
