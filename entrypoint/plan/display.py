"""The plan as text that a person reads: the machine, then each decision with its reason."""

from __future__ import annotations

import shlex

from entrypoint.plan.model import Plan


def plan_lines(plan: Plan, *, command: bool = False, only: str = "") -> list[str]:
    """Return the plan's lines, or of the decisions `only` one; with `command` also what would be executed."""
    rows = [(one.what, one.value, one.why) for one in plan.decisions if only in ("", one.what)]
    what_width = max(len(what) for what, _, _ in rows)
    value_width = min(24, max(len(value) for _, value, _ in rows))
    lines = [f"plan: {plan.node}"]
    lines += [f"  {line}" for line in plan.map if not only]
    lines += [f"  {what:<{what_width}}  {value:<{value_width}}  {why}".rstrip() for what, value, why in rows]
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    if command:
        lines.append(f"  would run: {shlex.join(plan.command)}")
        if plan.command != plan.program.argv:
            lines.append(f"  each rank: {shlex.join(plan.program.argv)}")
    return lines
