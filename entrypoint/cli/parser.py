"""The command line: argparse sub-commands whose flags are the settings' own names, as messages name them too."""

from __future__ import annotations

import argparse
import re
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct, field
from msgspec.structs import replace

from entrypoint.cli.command_table import COMMANDS, SWITCHES, TARGET_WORDS, TARGETS, all_groups, load_group
from entrypoint.cli.help import GROUP_TITLES, HelpFormatter, help_all, help_text, metavar, overview
from entrypoint.cli.program import find_program
from entrypoint.core.errors import UserError, did_you_mean, printable
from entrypoint.core.files import exists, is_folder
from entrypoint.core.packages import PROJECT, package_version
from entrypoint.core.settings_base import SettingField, Settings, describe_settings, flag_name
from entrypoint.machine.cpu_load import LoadSample
from entrypoint.plan.model import Plan, Program


class CommandLine(Struct, frozen=True, kw_only=True):
    """A parsed command line. `flags` are by variable; `program` is None for the built-in trainer.

    `help_text` is set if only help or the version is to be printed. `words` are those after the flags, and `target` is
    the program that a `plan` or `tune` is for.
    """

    command: str
    target: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    config: Path | None = None
    program: Program | None = None
    words: tuple[str, ...] = ()
    help_text: str = ""

    @property
    def json(self) -> bool:
        """Return whether the output is JSON."""
        return "json" in self.switches

    @property
    def launches(self) -> bool:
        """Return whether a launch follows, rather than a plan on the screen."""
        return self.command != "plan" and "dry-run" not in self.switches

    @property
    def program_words(self) -> tuple[str, ...]:
        """Return the words that start the program after `entrypoint`."""
        return ("run", *self.words) if self.target == "run" else ("train",)


class Invocation(Struct, frozen=True, kw_only=True):
    """A command with its environment; `began_s` and `load` are the wall-clock time and all CPU time at its start.

    `typed` has what the user typed for settings (see `as_typed`).
    """

    command: CommandLine
    environ: Mapping[str, str]
    typed: Mapping[str, str] = field(default_factory=dict)
    began_s: float
    load: LoadSample


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as `UserError` and never guesses abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, add_help=False, allow_abbrev=False, formatter_class=HelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` for an error of argparse."""
        problem = message.removeprefix("argument ").replace("expected one argument", "needs a value")
        raise UserError(f"{problem}. See `{self.prog} --help`.")


def parse_command_line(argv: Sequence[str], *, in_image: bool = False) -> CommandLine:
    """Parse a command line; raises `UserError` for an unknown command or flag, or a script that does not exist.

    In an image (`in_image`) any other program may follow the entrypoint: `docker run IMAGE bash`.
    """
    words = deque(argv or ["--help"])
    name = words.popleft()
    if text := general_help(name):
        return CommandLine(command="help", help_text=text)
    if name not in COMMANDS:
        if in_image and (path := shutil.which(name)):
            return CommandLine(command="other", program=Program("other", (path, *words)))
        hint = did_you_mean(name, COMMANDS)
        if name.startswith("-"):
            meant = next((word for word in words if word in COMMANDS), "train")
            raise UserError(
                f"{printable(name)}: flags follow the command. Use `entrypoint {meant} {printable(name)} …`."
            )
        raise UserError(f"{printable(name)}: no such command. {hint}Use one of: {', '.join(COMMANDS)}.")
    command = COMMANDS[name]
    groups = [load_group(group) for group in command.groups]
    # The setting of each flag that takes a value, None for a file.
    fields: dict[str, SettingField | None] = {"--config": None}
    fields |= {about.flag: about for group in groups for about in describe_settings(group)}
    flags, target = take_target(name, words, fields)
    if target == "run":
        groups = [group for group in groups if group.PREFIX != "TRAIN_"]
    if command.flags_may_follow:
        flags += take_mixed(words, fields)
    if {"--help", "-h", "--help-all"} & set(flags):
        parser = build_parser(name, groups, show_all="--help-all" in flags)
        return CommandLine(command="help", help_text=parser.format_help())
    return read_arguments(name, target, flags, tuple(words), groups)


def take_target(name: str, words: deque[str], fields: Mapping[str, SettingField | None]) -> tuple[list[str], str]:
    """Take the flags, the program that a `plan` or `tune` is for, and a folder of data; return flags and program."""
    flags, target = take_flags(words, fields), name
    if COMMANDS[name].words == TARGET_WORDS:
        target = "train"
        if words and words[0] in TARGETS:
            target = words.popleft()
            flags += take_flags(words, fields)
    if target == "train" and words and (is_folder(words[0]) or "://" in words[0]):  # `entrypoint train photos`
        folder, more = f"--data-dir={words.popleft()}", take_flags(words, fields)
        if other := next((flag for flag in (*flags, *more) if flag.startswith("--data-dir=")), ""):
            raise UserError(f"{printable(folder)} and {printable(other)} contradict: name one folder of data.")
        flags += [folder, *more]
    return flags, target


def general_help(word: str) -> str:
    """Return the help that a first word asks for, empty if it is a command."""
    if word in ("--help", "-h", "help"):
        return overview()
    if word == "--version":
        return f"entrypoint {package_version(PROJECT) or '(not installed)'}"
    return help_all(all_groups().values()) if word in ("--help-all", "settings") else ""


def take_flags(words: deque[str], fields: Mapping[str, SettingField | None]) -> list[str]:
    """Take the flags off the front of the words, each joined with its value (`--threads=2`), and return them.

    The first word that is no flag ends them: it is a script, whose own flags follow it. A boolean flag may stand
    without a value, which then is 1.
    """
    flags: list[str] = []
    while words and words[0].startswith("-") and words[0] != "-m":
        word = words.popleft()
        if word == "--":  # ends the flags of any command
            break
        about = fields.get(word)
        if about and about.is_boolean and not about.choices:
            word += f"={words.popleft() if words and words[0] in ('0', '1') else '1'}"
        elif word in fields and words:
            word += f"={words.popleft()}"
        flags.append(word)
    return flags


def take_mixed(words: deque[str], fields: Mapping[str, SettingField | None]) -> list[str]:
    """Take the flags that stand between and after the words, which stay, and return them; `--` ends the flags."""
    flags: list[str] = []
    plain: list[str] = []
    while words:
        word = words.popleft()
        if word == "--":
            break
        plain.append(word)
        flags += take_flags(words, fields)
    words.extendleft(reversed(plain))
    return flags


def build_parser(name: str, groups: Sequence[type[Settings]], *, show_all: bool = False) -> Parser:
    """Return the parser of a command; unless `show_all`, help shows the most used settings only."""
    command = COMMANDS[name]
    more = "" if show_all or not groups else f" All flags: entrypoint {name} --help-all."
    parser = Parser(
        prog=f"entrypoint {name}",
        usage=f"entrypoint {name} [flags]{command.words}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        epilog=f"Each flag is also a variable, such as LAUNCH_THREADS for --threads.{more}" if groups else None,
    )
    switches = parser.add_argument_group("switches")
    for switch in command.switches:
        switches.add_argument(f"--{switch}", action="store_true", help=SWITCHES[switch])
    if groups:
        switches.add_argument(
            "--config", metavar="FILE", help="read settings from a TOML file; variables and flags win"
        )
    switches.add_argument("-h", "--help", action="store_true", help="show the most used flags")
    switches.add_argument("--help-all", action="store_true", help="show all flags")
    for model in groups:
        group = parser.add_argument_group(GROUP_TITLES[model.PREFIX])
        for about in describe_settings(model):
            visible = show_all or about.is_basic
            group.add_argument(
                about.flag,
                dest=about.variable,
                default=argparse.SUPPRESS,
                metavar=metavar(about),
                help=help_text(about) if visible else argparse.SUPPRESS,
            )
    return parser


def read_arguments(
    name: str, target: str, flag_words: list[str], words: tuple[str, ...], groups: Sequence[type[Settings]]
) -> CommandLine:
    """Return the command line of a command's flags and the words after them; raises `UserError`."""
    command = COMMANDS[name]
    arguments, unknown = build_parser(name, groups).parse_known_args(flag_words)
    values = vars(arguments)
    if sum(word.startswith("--config=") for word in flag_words) > 1:
        raise UserError("--config: names two files. Write what both set into one.")
    takes_words = target == "run" or command.words not in ("", TARGET_WORDS)
    stray: tuple[str, ...] = () if takes_words else words
    if unknown or stray:
        raise unknown_word(name, target, [*unknown, *stray][0], groups)
    return CommandLine(
        command=name,
        target=target,
        flags={name: str(value) for name, value in values.items() if name.startswith(tuple(GROUP_TITLES))},
        switches=frozenset(switch for switch in command.switches if values[switch.replace("-", "_")]),
        config=Path(values["config"]) if values.get("config") else None,
        program=find_program(words) if target == "run" else None,
        words=words,
    )


def unknown_word(name: str, target: str, word: str, groups: Sequence[type[Settings]]) -> UserError:
    """Return the error for a word that the command does not accept."""
    flag = word.partition("=")[0]
    if flag in TARGETS:
        return UserError(f"{name} {flag}: takes no program. Use `entrypoint {name}` or `entrypoint plan {flag}`.")
    if target == "train" and not flag.startswith("-") and not flag.endswith((".py", ".ipynb")) and not exists(flag):
        return UserError(f"{name} {printable(flag)}: no such folder. Name a folder of data.")
    if not flag.startswith("-"):
        return UserError(
            f"{printable(flag)}: unexpected. Use `entrypoint run {printable(flag)}` to run your own script."
        )
    if target == "run" and any(about.flag == flag for about in describe_settings(load_group("train"))):
        return UserError(f"{flag}: a flag of the trainer. Write the script's own flags after its name.")
    if flag.removeprefix("--") in (*SWITCHES, "config"):
        return UserError(f"{flag}: {name} does not take it. Leave it out, or see `entrypoint {name} --help`.")
    known = [about.flag for group in groups for about in describe_settings(group)]
    known += [f"--{switch}" for switch in (*COMMANDS[name].switches, *(("config",) if groups else ()))]
    return UserError(f"{printable(flag)}: no such flag. {did_you_mean(flag, known)}See `entrypoint {name} --help`.")


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
