"""The command line: argparse sub-commands whose flags are the settings' own names."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct, field

from entrypoint.cli.help import COMMANDS, GROUPS, HelpFormatter, help_all, help_text, metavar, overview, version_text
from entrypoint.cli.program import find_program
from entrypoint.core.errors import UserError, did_you_mean, printable
from entrypoint.core.settings_base import SettingField, Settings, describe_settings
from entrypoint.plan.model import Program
from entrypoint.settings import LaunchSettings

# The command that a `plan` or `tune` is for.
TARGETS = ("train", "run")
# Commands that take words of their own after the flags.
WITH_WORDS = ("verify", "stacks", "predict", "report", "compare", "completion")
# Commands that have switches alone.
WITHOUT_SETTINGS = ("verify", "stacks", "selftest", "report", "compare", "settings", "completion")
# Commands whose flags may follow their words.
MIXED = ("evaluate", "predict")
SWITCHES = {
    "json": "print plan, checks or ranks as JSON",
    "dry-run": "show the plan and start nothing",
    "json-schema": "settings: print a JSON schema",
    "network": "doctor: show how data travels between the nodes, and measure it",
}


class CommandLine(Struct, frozen=True, kw_only=True):
    """A parsed command line. Flags are by field name; `program` is None for the built-in trainer.

    `help_text` is set if only help or the version is to be printed; `words` start the program after `entrypoint`.
    """

    command: str
    launch_flags: Mapping[str, str] = field(default_factory=dict)
    train_flags: Mapping[str, str] = field(default_factory=dict)
    predict_flags: Mapping[str, str] = field(default_factory=dict)
    tune_flags: Mapping[str, str] = field(default_factory=dict)
    json: bool = False
    dry_run: bool = False
    json_schema: bool = False
    network: bool = False
    config: Path | None = None
    program: Program | None = None
    processes: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    help_text: str = ""

    @property
    def launches(self) -> bool:
        """Return whether a launch follows, rather than a plan on the screen."""
        return self.command != "plan" and not self.dry_run and not self.json


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as `UserError` and never guesses abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, add_help=False, allow_abbrev=False, formatter_class=HelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` for an error of argparse."""
        missing = re.match(r"argument (--[\w-]+): expected one argument", message)
        if missing:
            raise UserError(f"{missing[1]}: needs a value. {self.help_of(missing[1])}")
        raise UserError(f"{message}. See `{self.prog} --help`.")

    def help_of(self, flag: str) -> str:
        """Return the description of a flag."""
        return next((str(one.help) for one in self._actions if flag in one.option_strings and one.help), "")


def parse_command_line(
    argv: Sequence[str], setting_groups: Mapping[str, type[Settings]], *, in_image: bool = False
) -> CommandLine:
    """Parse a command line; raises `UserError` for an unknown command or flag, or a script that does not exist.

    `setting_groups` maps "train" and "tune" to the settings whose flags those commands accept.
    In an image (`in_image`) any other program may follow the entrypoint: `docker run IMAGE bash`.
    """
    words = list(argv)
    if not words or words[0] in ("--help", "-h", "help"):
        return CommandLine(command="help", help_text=overview())
    if words[0] == "--version":
        return CommandLine(command="help", help_text=version_text())
    if words[0] == "--help-all":
        return CommandLine(command="help", help_text=help_all(setting_groups))
    command = words.pop(0)
    if command not in COMMANDS:
        if in_image and (path := shutil.which(command)):
            return CommandLine(command="other", program=Program("other", (path, *words)))
        hint = did_you_mean(command, COMMANDS)
        raise UserError(f"{printable(command)}: no such command. {hint}Use one of: {', '.join(COMMANDS)}.")
    known: list[type[Settings]] = [LaunchSettings, *setting_groups.values()]
    flags, words = split_words(words, known)
    target = command
    if command in ("plan", "tune"):
        target = "train"
        if words and words[0] in TARGETS:
            target = words[0]
            more, words = split_words(words[1:], known)
            flags += more
    if command in MIXED:
        flags, words = collect_flags(flags, words, known)
    if command == "evaluate":
        flags, words = [*flags, *(f"--evaluate={word}" for word in words[:1])], words[1:]
    models = models_for(command, target, setting_groups)
    show_all = "--help-all" in flags
    if show_all or {"--help", "-h"} & set(flags):
        parser = build_parser(command, models, show_all=show_all)
        return CommandLine(command="help", help_text=parser.format_help())
    return read_arguments(command, target, flags, words, models)


def split_words(words: Sequence[str], models: Sequence[type[Settings]]) -> tuple[list[str], list[str]]:
    """Return the flags, each joined with its value (`--threads=2`), and the words after them.

    The first word that is no flag ends them: it is a script, whose own flags follow it. A boolean flag may stand
    without a value, which then is 1.
    """
    fields: dict[str, SettingField | None] = {"--config": None}
    for model in models:
        fields |= {about.flag: about for about in describe_settings(model)}
    flags: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        word = rest.pop(0)
        if word in fields:
            about_word = fields[word]
            if about_word and about_word.is_boolean and not about_word.choices:
                word += f"={rest.pop(0) if rest and rest[0] in ('0', '1') else '1'}"
            elif rest:
                word += f"={rest.pop(0)}"
        flags.append(word)
    return flags, rest


def collect_flags(flags: list[str], words: list[str], models: Sequence[type[Settings]]) -> tuple[list[str], list[str]]:
    """Return the flags before, between and after the words, and the words; `--` ends the flags."""
    plain: list[str] = []
    while words:
        if words[0] == "--":
            return flags, [*plain, *words[1:]]
        plain.append(words.pop(0))
        more, words = split_words(words, models)
        flags = [*flags, *more]
    return flags, plain


def models_for(command: str, target: str, setting_groups: Mapping[str, type[Settings]]) -> list[type[Settings]]:
    """Return the groups of settings whose flags a command accepts."""
    if command in WITHOUT_SETTINGS:
        return []
    if command == "predict":
        return [setting_groups["predict"]]
    models: list[type[Settings]] = [LaunchSettings]
    if target != "run":
        models += [setting_groups["train"]] if "train" in setting_groups else []
    if command == "tune":
        models.append(setting_groups["tune"])
    return models


def build_parser(command: str, models: Sequence[type[Settings]], *, show_all: bool = False) -> Parser:
    """Return the parser of a command; unless `show_all`, help shows the most used settings only."""
    program = {
        "run": " SCRIPT|-m MODULE [arguments]",
        "verify": " [PID ...]",
        "stacks": " [RUN|PID ...]",
        "evaluate": " RUN [flags]",
        "predict": " RUN IMAGE ... [flags]",
        "report": " RUN ...",
        "compare": " RUN RUN ...",
        "completion": " bash|zsh",
    }.get(command, f" [{'|'.join(TARGETS)} ...]" if command in ("plan", "tune") else "")
    more = "" if show_all or not models else f" All flags: entrypoint {command} --help-all."
    parser = Parser(
        prog=f"entrypoint {command}",
        usage=f"entrypoint {command} [flags]{program}",
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}.",
        epilog=f"Each flag is also a variable, such as LAUNCH_THREADS for --threads.{more}",
    )
    switches = parser.add_argument_group("switches")
    for name, text in SWITCHES.items():
        switches.add_argument(f"--{name}", action="store_true", help=text)
    switches.add_argument("--config", metavar="FILE", help="read settings from a TOML file; variables and flags win")
    switches.add_argument("-h", "--help", action="store_true", help="show the most used flags")
    switches.add_argument("--help-all", action="store_true", help="show all flags")
    for model in models:
        group = parser.add_argument_group(GROUPS[model.PREFIX])
        for about in describe_settings(model):
            visible = show_all or about.name in model.BASIC
            group.add_argument(
                about.flag,
                dest=model.PREFIX + about.name,
                default=argparse.SUPPRESS,
                metavar=metavar(about),
                help=help_text(about) if visible else argparse.SUPPRESS,
            )
    return parser


def read_arguments(
    command: str, target: str, flags: list[str], words: list[str], models: Sequence[type[Settings]]
) -> CommandLine:
    """Return the command line of a command's flags and the words after them; raises `UserError`."""
    found, unknown = build_parser(command, models).parse_known_args(flags)
    values = vars(found)
    stray = words if target != "run" and command not in WITH_WORDS else []
    if unknown or stray:
        raise unknown_word(command, target, [*unknown, *stray][0], models)
    by_group: dict[str, dict[str, str]] = {prefix: {} for prefix in GROUPS}
    for model in models:
        names = [name for name in values if name.startswith(model.PREFIX)]
        by_group[model.PREFIX] = {name.removeprefix(model.PREFIX): str(values[name]) for name in names}
    return CommandLine(
        command=command,
        launch_flags=by_group["LAUNCH_"],
        train_flags=by_group["TRAIN_"],
        tune_flags=by_group["TUNE_"],
        predict_flags=by_group["PREDICT_"],
        json=values["json"],
        dry_run=values["dry_run"],
        json_schema=values["json_schema"],
        network=values["network"],
        config=Path(values["config"]) if values["config"] else None,
        program=find_program(words) if target == "run" else None,
        processes=parse_pids(words) if command == "verify" else (),
        words=words_after_entrypoint(command, target, words),
    )


def words_after_entrypoint(command: str, target: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that start the program, or those that a command without ranks takes."""
    if target == "run":
        return ("run", *words)
    return tuple(words) if command in ("stacks", "predict", "report", "compare", "completion") else ("train",)


def unknown_word(command: str, target: str, word: str, models: Sequence[type[Settings]]) -> UserError:
    """Return the error for a word that the command does not accept."""
    name = word.partition("=")[0]
    if name in TARGETS:
        return UserError(f"{command} {name}: takes no program. Use `entrypoint {command}` or `entrypoint plan {name}`.")
    if not name.startswith("-"):
        return UserError(
            f"{printable(name)}: unexpected. Use `entrypoint run {printable(name)}` to run your own script."
        )
    if target == "run":
        from train.settings import TrainSettings

        if any(about.flag == name for about in describe_settings(TrainSettings)):
            return UserError(f"{name}: a flag of the trainer. Write the script's own flags after its name.")
    known = [about.flag for model in models for about in describe_settings(model)]
    known += ["--config", *(f"--{switch}" for switch in SWITCHES)]
    return UserError(f"{printable(name)}: no such flag. {did_you_mean(name, known)}See `entrypoint {command} --help`.")


def parse_pids(words: Sequence[str]) -> tuple[int, ...]:
    """Return the process ids that `verify` was given; raises `UserError` for anything else."""
    for word in words:
        if not re.fullmatch(r"[1-9]\d{0,9}", word, re.ASCII):
            raise UserError(
                f"verify {printable(word)}: not a process id. Use `entrypoint verify` or `entrypoint verify PID`."
            )
    return tuple(map(int, words))
