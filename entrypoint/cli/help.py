"""Text of the command line's help: commands, settings and exit codes."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable

from entrypoint.cli.command_table import COMMANDS
from entrypoint.core.settings_base import SettingField, Settings, describe_settings

EXIT_CODES = (
    "exit codes: 0 success, 2 usage error, 3 unsupported machine, 4 rendezvous failed,\n"
    "            5 a rank failed, 75 preempted (run again to resume)"
)
# More choices than these are listed in the text of a flag, not next to it.
MAX_METAVAR_CHOICES = 3
GROUP_TITLES = {
    "LAUNCH_": "launcher settings",
    "TRAIN_": "trainer settings",
    "TUNE_": "tuner settings",
    "PREDICT_": "settings of predict",
}


class HelpFormatter(argparse.HelpFormatter):
    """Help in two columns, the first wide enough for the longest flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(100, shutil.get_terminal_size().columns))


def metavar(about: SettingField) -> str:
    """Return the placeholder of a flag's value in help."""
    if about.is_boolean and not about.choices:
        return "0|1"
    return "VALUE" if about.accepts_other or len(about.choices) > MAX_METAVAR_CHOICES else "|".join(about.choices)


def help_text(about: SettingField) -> str:
    """Return the help of a setting: description, choices and default."""
    listed = about.choices and not about.accepts_other and len(about.choices) > MAX_METAVAR_CHOICES
    choices = f" One of: {', '.join(about.choices)}." if listed else ""
    return f"{about.description}{choices} [{about.default or 'unset'}]".replace("%", "%%")


def overview() -> str:
    """Return the help of the entrypoint itself: its commands."""
    lines = [
        "usage: entrypoint COMMAND [flags] [script and its arguments]",
        "",
        "commands:",
        *(f"  {name:<10} {command.help}" for name, command in COMMANDS.items()),
        "",
        "  entrypoint COMMAND --help   the most used flags of a command",
        "  entrypoint --help-all       all settings, as flags and variables",
        "  entrypoint --version        the version",
        "",
        EXIT_CODES,
    ]
    return "\n".join(lines)


def help_all(groups: Iterable[type[Settings]]) -> str:
    """Return every setting as a flag and a variable with its default."""
    import textwrap

    lines = [overview()]
    for model in groups:
        lines += ["", f"{GROUP_TITLES[model.PREFIX]}, as a flag or a variable [default]:"]
        for about in describe_settings(model):
            lines.append(f"  {about.flag}, {about.variable}")
            lines += [f"      {line}" for line in textwrap.wrap(help_text(about).replace("%%", "%"), 90)]
    return "\n".join(lines)
