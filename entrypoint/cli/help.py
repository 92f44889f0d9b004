"""Text of the command line's help: commands, settings and exit codes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence

from entrypoint.cli.command_table import COMMANDS, FILES, SWITCHES
from entrypoint.core.packages import PROJECT, package_version
from entrypoint.core.settings_base import SettingField, Settings, describe_settings
from entrypoint.plan.display import wrap_after, wrap_words

EXIT_CODES = (
    "exit codes: 0 success, 2 usage error, 3 unsupported machine, 4 rendezvous failed,\n"
    "            5 a rank failed, 75 preempted (run again to resume)"
)
# The column of the help next to a flag, and the widest line.
TEXT_COLUMN, MAX_COLUMNS = 30, 100
# More choices than these are listed in the text of a flag, not next to it.
MAX_METAVAR_CHOICES = 3
GROUP_TITLES = {
    "LAUNCH_": "launcher settings",
    "TRAIN_": "trainer settings",
    "TUNE_": "tuner settings",
    "PREDICT_": "settings of predict",
}


def metavar(about: SettingField) -> str:
    """Return the placeholder of a flag's value in help."""
    if about.is_boolean and not about.choices:
        return "0|1"
    return "VALUE" if about.accepts_other or len(about.choices) > MAX_METAVAR_CHOICES else "|".join(about.choices)


def help_text(about: SettingField) -> str:
    """Return the help of a setting: description, choices and default."""
    listed = about.choices and not about.accepts_other and len(about.choices) > MAX_METAVAR_CHOICES
    choices = f" One of: {', '.join(about.choices)}." if listed else ""
    return f"{about.description}{choices} [{about.default or 'unset'}]"


def version_text() -> str:
    """Return name and version of the project."""
    return f"entrypoint {package_version(PROJECT) or '(not installed)'}"


def overview() -> str:
    """Return the help of the entrypoint itself: its commands."""
    lines = ["usage: entrypoint COMMAND [flags] [script and its arguments]", "", "commands:"]
    lines += [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    lines += ["", "  entrypoint COMMAND --help   the most used flags of a command"]
    lines += ["  entrypoint --help-all       all settings, as flags and variables"]
    lines += ["  entrypoint --version        the version", "", EXIT_CODES]
    return "\n".join(lines)


def help_all(groups: Iterable[type[Settings]]) -> str:
    """Return every setting as a flag and a variable with its default."""
    lines = [overview()]
    for model in groups:
        lines += ["", f"{GROUP_TITLES[model.PREFIX]}, as a flag or a variable [default]:"]
        for about in describe_settings(model):
            lines.append(f"  {about.flag}, {about.variable}")
            lines += [f"      {line}" for line in wrap_words(help_text(about), 90)]
    return "\n".join(lines)


def command_help(name: str, groups: Sequence[type[Settings]], *, show_all: bool) -> str:
    """Return the help of a command; unless `show_all`, with the most used settings only."""
    command = COMMANDS[name]
    rows = [(f"--{switch}", SWITCHES[switch]) for switch in command.switches]
    rows += [(f"--{file} FILE", FILES[file]) for file in command.files if groups]
    rows += [("-h, --help", "show the most used flags"), ("--help-all", "show all flags")]
    lines = [f"usage: entrypoint {name} [flags]{command.words}", ""]
    lines += [f"{command.help[0].upper()}{command.help[1:]}.", "", "switches:", *in_columns(rows)]
    for model in groups:
        fields = [about for about in describe_settings(model) if show_all or about.is_basic]
        rows = [(f"{about.flag} {metavar(about)}", help_text(about)) for about in fields]
        lines += ["", f"{GROUP_TITLES[model.PREFIX]}:", *in_columns(rows)]
    if groups:
        more = "" if show_all else f" All flags: entrypoint {name} --help-all."
        lines += ["", *wrap_words(f"Each flag is also a variable, such as LAUNCH_THREADS for --threads.{more}", 90)]
    return "\n".join(lines)


def in_columns(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of flags, each with its text in a second column."""
    columns = min(MAX_COLUMNS, shutil.get_terminal_size().columns)
    for flag, text in rows:
        yield from wrap_after(f"  {flag}  ".ljust(TEXT_COLUMN), text, columns)
