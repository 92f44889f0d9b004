"""`entrypoint init`: write a TOML file with the settings that users change, each commented out with its default."""

from __future__ import annotations

import json
from pathlib import Path

from entrypoint.cli.command_table import load_group
from entrypoint.cli.parser import Invocation
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.settings_base import describe_settings
from entrypoint.plan.display import wrap_words

DEFAULT_FILE = "run.toml"
COLUMNS = 98


def run(invocation: Invocation) -> int:
    """Write the file, which must not exist."""
    name, *others = invocation.command.words or (DEFAULT_FILE,)
    if others:
        raise UserError(f"init {printable(others[0])}: one file at a time. Write each by itself.")
    try:
        with Path(name).open("x") as file:
            file.write(settings_file(name))
    except FileExistsError:
        raise UserError(f"init {printable(name)}: is there already. Name another file.") from None
    write_stdout(f"{printable(name)}: remove the # of what you set, then: entrypoint train --config {printable(name)}")
    return ExitCode.DONE


def settings_file(name: str) -> str:
    """Return the text of the file."""
    lines = [
        f"# entrypoint train --config {printable(name)}",
        "# Variables and flags win; docs/settings.md has the rest.",
    ]
    for table in ("train", "launch"):
        model = load_group(table)
        defaults = model().to_json()
        lines += ["", f"[{table}]"]
        for about in (one for one in describe_settings(model) if one.is_basic):
            choices = f" One of: {', '.join(about.choices)}." if about.choices and not about.accepts_other else ""
            text = wrap_words(about.description + choices, COLUMNS)
            default = "" if defaults[about.name] is None else defaults[about.name]
            lines += [*(f"# {line}" for line in text), f"# {about.name.rstrip('_')} = {json.dumps(default)}"]
    return "\n".join(lines) + "\n"
