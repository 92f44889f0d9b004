"""The command of a rank that a launcher starts; imports no more than a rank needs."""

from __future__ import annotations

import os

from entrypoint.core.console import report_error
from entrypoint.core.errors import UserError
from entrypoint.job.detect import detect_job
from entrypoint.plan.model import PLAN_VAR, Plan
from entrypoint.rank.bootstrap import exec_program


def main() -> int:
    """Become one rank's program by the plan in the environment; returns an exit code only for an error."""
    try:
        try:
            plan = Plan.from_json(os.environ[PLAN_VAR])
        except (KeyError, TypeError, ValueError, RecursionError):
            raise UserError(
                f"{PLAN_VAR}: holds no plan. A launcher starts `entrypoint rank`; do not run it by hand."
            ) from None
        exec_program(plan, detect_job(os.environ), os.environ)
    except UserError as error:
        return report_error(error)
