"""The command of a rank that a launcher starts; imports no more than a rank needs."""

from __future__ import annotations

import os

from entrypoint.core.console import report
from entrypoint.core.errors import Refused
from entrypoint.job.detect import read_job
from entrypoint.plan.model import VARIABLE, Plan
from entrypoint.rank.bootstrap import become_program


def main() -> int:
    """Become one rank's program by the plan in the environment; returns an exit code only for an error."""
    try:
        try:
            plan = Plan.from_variable(os.environ[VARIABLE])
        except (KeyError, TypeError, ValueError):
            raise Refused(
                f"{VARIABLE}: holds no plan. A launcher starts `entrypoint rank`; do not run it by hand."
            ) from None
        become_program(plan, read_job(os.environ), os.environ)
    except Refused as error:
        return report(error)
