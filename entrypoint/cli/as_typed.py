"""Messages name a setting as the user typed it: by its flag, where it has one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import replace

from entrypoint.cli.parser import CommandLine
from entrypoint.core.errors import printable
from entrypoint.core.settings_base import flag_name
from entrypoint.plan.model import Plan


def typed_flags(command: CommandLine) -> dict[str, str]:
    """Return `--epochs=3` by `TRAIN_EPOCHS=3` for each flag."""
    return {
        f"{variable}={printable(value)}": f"{flag_name(variable.partition('_')[2].lower())}={printable(value)}"
        for variable, value in command.flags.items()
    }


def as_typed(text: str, typed: Mapping[str, str]) -> str:
    """Return a message with settings as they were typed, in place of variables with the same value."""
    for variable, written in typed.items():
        text = re.sub(rf"\b{re.escape(variable)}(?!\w|\.\w)", lambda _, shown=written: shown, text)  # type: ignore[misc]
    return text


def plan_as_typed(plan: Plan, typed: Mapping[str, str]) -> Plan:
    """Return the plan with the settings in its reasons and warnings as they were typed."""
    decisions = tuple(
        replace(one, setting=as_typed(one.setting, typed), reason=as_typed(one.reason, typed)) for one in plan.decisions
    )
    warnings = tuple(as_typed(line, typed) for line in plan.warnings)
    prominent = as_typed(plan.prominent_warning, typed)
    return replace(plan, decisions=decisions, warnings=warnings, prominent_warning=prominent)
