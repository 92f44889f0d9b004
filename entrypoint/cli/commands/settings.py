"""`entrypoint settings`: print the list of settings, or their JSON schema, by which editors complete a `run.toml`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from entrypoint.cli.command_table import all_groups
from entrypoint.cli.help import help_all
from entrypoint.cli.parser import Invocation
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode
from entrypoint.core.setting_types import BOOLEANS, NUMBER
from entrypoint.core.settings_base import Settings, annotations_of, describe_settings


def run(invocation: Invocation) -> int:
    """Print all settings."""
    groups = all_groups()
    as_schema = "json-schema" in invocation.command.switches
    write_stdout(json.dumps(schema_of(groups), indent=1) if as_schema else help_all(groups.values()))
    return ExitCode.DONE


def schema_of(groups: Mapping[str, type[Settings]]) -> dict[str, Any]:
    """Return the schema of a file with a table for each group of settings, each with its default as text."""
    tables = {
        table: {
            about.name.rstrip("_"): {
                **value_schema(annotations_of(model)[about.name]),
                "description": f"{about.description} Default: {about.default or 'unset'}.",
            }
            for about in describe_settings(model)
        }
        for table, model in groups.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "settings of entrypoint",
        **object_schema({table: object_schema(properties) for table, properties in tables.items()}),
    }


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a table with these entries and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def value_schema(annotation: Any) -> dict[str, Any]:
    """Return the schema of a value, in which a path is a text and null, which TOML has not, is no choice.

    A file's values become the texts of variables, so a number may be written as a text and the other way round.
    """
    schema: dict[str, Any] = msgspec.json.schema(annotation, schema_hook=path_schema)
    choices = [choice for choice in schema.get("anyOf", [schema]) if choice != {"type": "null"}]
    types = {choice.get("type") for choice in choices}
    if types & {"integer", "number"}:
        choices.append({"type": "string", "pattern": f"^({NUMBER.pattern})$"})
    if "boolean" in types:
        choices.append({"enum": [0, 1, *BOOLEANS]})
    if types == {"string"}:
        choices.append({"type": "number"})
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def path_schema(kind: type) -> dict[str, Any]:
    """Return the schema of a type that JSON has not; raises NotImplementedError for another one than a path."""
    if issubclass(kind, Path):
        return {"type": "string"}
    raise NotImplementedError(kind)
