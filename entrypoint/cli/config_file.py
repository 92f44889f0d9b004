"""Read settings from a TOML file: `--config run.toml`, with the tables [launch], [train], [tune] and [predict]."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.core.errors import UserError, did_you_mean, first_line, printable
from entrypoint.core.files import read_regular
from entrypoint.core.settings_base import Settings, describe_field, groups_of


def read_config(path: Path, groups: Mapping[str, type[Settings]]) -> dict[str, str]:
    """Return the variables that a file sets; `groups` are the settings by the name of their table.

    Raises `UserError` for a file that cannot be read, and for a table or a name that is no setting.
    """
    source = f"--config={printable(path)}"
    try:
        text = read_regular(path).removeprefix("\ufeff")  # Windows' editors begin a file so
        if "\x00" in text:
            raise UserError(f"{source}: is not UTF-8 but UTF-16, or no text. Save it as UTF-8.")
        tables = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror}). Check the path.") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{source}: is no TOML ({printable(first_line(error))}). Correct it.") from None
    variables: dict[str, str] = {}
    for table, values in tables.items():
        model = groups.get(table)
        if model is None or not isinstance(values, dict):
            hint = f"Write [{table}]. " if model else did_you_mean(table, groups)
            tables_text = ", ".join(f"[{one}]" for one in groups)
            raise UserError(f"{source}: {printable(table)} is no table of settings. {hint}Use {tables_text}.")
        known = {name.rstrip("_"): name for name in groups_of(model) if name not in model.OF_TRAINER}
        for name, value in values.items():
            if name not in known:
                raise UserError(
                    f"{source}: {printable(name)} in [{table}] is no setting. {did_you_mean(name, known)}`entrypoint"
                    " --help-all` lists all."
                )
            about = describe_field(model, known[name])
            if isinstance(value, bool) and not about.is_boolean:
                raise UserError(f"{source}: {table}.{name} is no switch. Write {about.expected}.")
            variables[model.variable(name)] = value_text(source, f"{table}.{name}", value)
    return variables


def value_text(source: str, name: str, value: Any) -> str:
    """Return a TOML value as the text of a variable; raises `UserError` for a table, a list or a date."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (int, float, str)):
        return str(value)
    raise UserError(f"{source}: {name} is a {type(value).__name__}. Write a number, a text, true or false.")


def with_config(environ: Mapping[str, str], path: Path, groups: Mapping[str, type[Settings]]) -> dict[str, str]:
    """Return the environment with the settings of a file; variables that are set already win."""
    set_already = {name: value for name, value in environ.items() if value != ""}
    variables = {name: text for name, text in read_config(path, groups).items() if name not in set_already}
    return {**environ, **variables}
