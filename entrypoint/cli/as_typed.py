"""Messages name a setting as the user typed it: by its flag, or by its line of the configuration file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from entrypoint.cli.command_table import GROUPS, load_group
from entrypoint.cli.parser import CommandLine
from entrypoint.core.errors import printable
from entrypoint.core.settings_base import flag_name, variable_name
from entrypoint.plan.model import Plan

TABLE, KEY = re.compile(r"\s*\[\s*(\w+)\s*\]"), re.compile(r"\s*(?:(\w+)\.)?\"?(\w+)\"?\s*=")


def typed_flags(command: CommandLine) -> dict[str, str]:
    """Return `--epochs=3` by `TRAIN_EPOCHS=3` for each flag."""
    return {
        f"{variable}={printable(value)}": f"{flag_name(variable.partition('_')[2].lower())}={printable(value)}"
        for variable, value in command.flags.items()
    }


def typed_lines(path: Path, text: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `run.toml, line 2: epochs=3` by `TRAIN_EPOCHS=3` for each variable that a file's text sets."""
    table, typed = "", {}
    for number, line in enumerate(text.splitlines(), 1):
        if head := TABLE.match(line):
            table = head[1]
        elif (key := KEY.match(line)) and (key[1] or table) in GROUPS:
            variable = variable_name(load_group(key[1] or table).PREFIX, key[2])
            if variable in variables:
                value = printable(variables[variable])
                typed[f"{variable}={value}"] = f"{printable(path)}, line {number}: {key[2]}={value}"
    return typed


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
