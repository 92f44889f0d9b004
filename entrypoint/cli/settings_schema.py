"""The settings as a JSON schema, which editors use to check and complete a `run.toml`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from entrypoint.core.setting_types import BOOLEANS, NUMBER
from entrypoint.core.settings_base import Settings, annotations_of, describe_settings

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(groups: Mapping[str, type[Settings]]) -> dict[str, Any]:
    """Return the schema of a file with a table for each group of settings."""
    return {
        "$schema": DRAFT,
        "title": "settings of entrypoint",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: table_schema(model) for name, model in groups.items()},
    }


def table_schema(model: type[Settings]) -> dict[str, Any]:
    """Return the schema of one table, with the default of each setting as text."""
    annotations = annotations_of(model)
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            about.name.rstrip("_"): {
                **value_schema(annotations[about.name]),
                "description": f"{about.description} Default: {about.default or 'unset'}.",
            }
            for about in describe_settings(model)
        },
    }


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


def schema_text(groups: Mapping[str, type[Settings]]) -> str:
    """Return the schema as indented JSON."""
    return json.dumps(schema_of(groups), indent=1)
