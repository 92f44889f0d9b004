"""Starts what the plan says, by exec: signals reach it, and no extra process stays behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from entrypoint.job import Job
from entrypoint.plan import VARIABLE, Plan
from entrypoint.rank import become_program, replace_process

# When the whole command began (Unix time, s): the trainer's total_seconds counts from here.
STARTED = "ENTRYPOINT_STARTED"


def launch(plan: Plan, job: Job, environ: Mapping[str, str], started: float) -> NoReturn:
    """Become torchrun's agent where ranks must be started, else become the program as this job's rank."""
    environ = {**environ, STARTED: str(started)}
    if plan.launcher != "torchrun":
        become_program(plan, job, environ)
    replace_process(plan.command, {**environ, **plan.environment, VARIABLE: plan.to_variable()})
