"""The command line: verbs, flags that are the settings' own names, and what is left for the program."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrypoint.errors import Refused, did_you_mean, shown
from entrypoint.plan import Program
from entrypoint.settings import PREFIX, LaunchSettings
from entrypoint.variables import Settings, describe, flag_name, numeric, words

VERBS = {
    "train": "train with the built-in trainer (flags: launcher and trainer)",
    "run": "run SCRIPT args… or run -m MODULE args…: any training script under the same plan",
    "plan": "show what `train` (or `plan run SCRIPT`) would do and why; starts nothing",
    "tune": "try plans for `train` (or `tune run SCRIPT`) and keep the fastest for later runs on such a machine",
    "doctor": "check machine, container, packages and plan; exit 3 where something fails",
    "selftest": "test this installation itself: planning, data, a few real runs (a minute)",
    "verify": "show what the ranks that run here really have, beside their plans (or verify PID…)",
}
SWITCHES = {
    "--json": "plan, checks or ranks as JSON",
    "--dry-run": "show the plan, start nothing",
    "--help": "this text",
}


@dataclass(frozen=True)
class Request:
    """A command line taken apart: flags are by field name, the program is None for our trainer."""

    verb: str
    launch_flags: Mapping[str, str]
    train_flags: Mapping[str, str]
    switches: frozenset[str]
    program: Program | None
    processes: tuple[int, ...] = ()
    tune_flags: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @property
    def starts(self) -> bool:
        """Tell whether anything is to be started, or only shown."""
        return self.verb != "plan" and not self.switches & {"--dry-run", "--json"}


def parse(argv: Sequence[str], train_model: type[Settings] | None, *, in_image: bool = False) -> Request:
    """Take a command line apart; raises `Refused` for an unknown verb or flag, or a script that is not there.

    `train_model` are the trainer's settings, whose flags every verb but `run` takes. Where the entrypoint is an
    image's own (`in_image`), any other program may follow it: `docker run IMAGE bash`.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        return Request("help", {}, {}, frozenset(), None)
    verb, tokens = argv[0], list(argv[1:])
    if verb not in VERBS and in_image and (path := shutil.which(verb)):
        return Request("other", {}, {}, frozenset(), Program("other", (path, *tokens)))
    if verb not in VERBS:
        raise Refused(f"{shown(verb)}: no such command. {did_you_mean(verb, VERBS)}One of: {', '.join(VERBS)}.")
    both: list[type[Settings]] = [LaunchSettings, *([train_model] if train_model else [])]
    own = tune_settings() if verb == "tune" else []
    launch_fields, own_fields = LaunchSettings.model_fields, own[0].model_fields if own else {}
    target = verb
    flags: dict[str, str] = {}
    switches: set[str] = set()
    while True:
        more, seen, tokens = take_flags(tokens, (both[:1] if target == "run" else both) + own)
        flags |= more
        switches |= seen
        if target not in ("plan", "tune") or not tokens or tokens[0] not in ("train", "run"):
            break
        target, tokens = tokens[0], tokens[1:]
    if "--help" in switches:
        return Request("help", {}, {}, frozenset(), None)
    if target == "verify":
        return Request(verb, {}, {}, frozenset(switches), None, process_ids(tokens))
    if target in ("selftest", "verify") and flags:
        raise Refused(f"{target}: takes no {flag_name(next(iter(flags)))}; see `entrypoint --help`")
    if target != "run" and tokens:
        raise Refused(f"{shown(tokens[0])}: unexpected; `entrypoint run {shown(tokens[0])}` runs a script of yours")
    if target == "run" and (stray := [name for name in flags if name not in launch_fields and name not in own_fields]):
        raise Refused(f"{flag_name(stray[0])}: a trainer's flag; a script's own flags go after its name")
    return Request(
        verb,
        {name: value for name, value in flags.items() if name in launch_fields},
        {name: value for name, value in flags.items() if name not in launch_fields and name not in own_fields},
        frozenset(switches),
        find_program(tokens) if target == "run" else None,
        tune_flags={name: value for name, value in flags.items() if name in own_fields},
        words=("run", *tokens) if target == "run" else ("train",),
    )


def tune_settings() -> list[type[Settings]]:
    """Return the tuner's settings, whose flags only its own verb takes."""
    from entrypoint.tune import TuneSettings

    return [TuneSettings]


def take_flags(tokens: list[str], models: Sequence[type[Settings]]) -> tuple[dict[str, str], set[str], list[str]]:
    """Consume leading flags: return them by field name, the switches seen, and the tokens that are left."""
    fields = {flag_name(field): (field, info) for model in models for field, info in model.model_fields.items()}
    flags: dict[str, str] = {}
    switches: set[str] = set()
    rest = list(tokens)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, equals, value = rest.pop(0).partition("=")
        if name in ("-h", *SWITCHES) and not equals:
            switches.add("--help" if name == "-h" else name)
            continue
        if name not in fields:
            known = [*fields, *SWITCHES]
            raise Refused(f"{shown(name)}: no such flag. {did_you_mean(name, known)}See `entrypoint --help`.")
        field, info = fields[name]
        if not equals and info.annotation is bool:
            value = rest.pop(0) if rest and rest[0] in ("0", "1") else "1"
        elif not equals:
            if not rest:
                raise Refused(f"{name}: needs a value. {info.description}")
            value = rest.pop(0)
        flags[field] = value
    return flags, switches, rest


def process_ids(tokens: Sequence[str]) -> tuple[int, ...]:
    """Return the processes that `verify` was given; raises `Refused` for what is no process id."""
    for token in tokens:
        if not re.fullmatch(r"[1-9]\d{0,9}", token, re.ASCII):
            raise Refused(
                f"verify {shown(token)}: no process id; write `entrypoint verify` or `entrypoint verify PID…`"
            )
    return tuple(map(int, tokens))


def find_program(tokens: Sequence[str]) -> Program:
    """Return the person's own program; raises `Refused` where the script is not there."""
    if not tokens:
        raise Refused("run: no script; write `entrypoint run SCRIPT args…` or `entrypoint run -m MODULE args…`")
    if tokens[0] == "-m":
        if len(tokens) == 1:
            raise Refused("run -m: no module; write `entrypoint run -m MODULE args…`")
        return Program("module", (sys.executable, "-m", *tokens[1:]))
    script = Path(tokens[0])
    if not script.exists():
        raise Refused(f"{shown(tokens[0])}: no such script in {Path.cwd()}; check the path")
    if script.is_dir() and not (script / "__main__.py").exists():
        raise Refused(f"{shown(tokens[0])}: a folder without __main__.py; name the script in it")
    return Program("script", (sys.executable, *tokens))


def help_text() -> str:
    """Return the whole help: verbs, switches, every setting as flag and variable with its default."""
    from entrypoint.tune import PREFIX as TUNE_PREFIX
    from train.settings import PREFIX as TRAIN_PREFIX
    from train.settings import TrainSettings

    lines = ["usage: entrypoint VERB [flags] [script and its arguments]", ""]
    lines += [f"  {verb:<8} {text}" for verb, text in VERBS.items()]
    lines += ["", *(f"  {name:<11} {text}" for name, text in SWITCHES.items())]
    groups: tuple[tuple[str, type[Settings], str], ...] = (
        ("launcher", LaunchSettings, PREFIX),
        ("trainer", TrainSettings, TRAIN_PREFIX),
        ("tuner", tune_settings()[0], TUNE_PREFIX),
    )
    for title, model, prefix in groups:
        lines += ["", f"settings of the {title}, as a flag or a variable [default]:"]
        for flag, variable, default, info in describe(model, prefix):
            choices = () if numeric(info.annotation) else words(info.annotation)
            listed = f" One of: {', '.join(choices)}." if choices else ""
            lines.append(f"  {flag:<20} {variable:<26} {info.description}{listed} [{default}]")
    lines += ["", "exit codes: 0 done, 2 usage, 3 machine, 4 rendezvous, 5 a rank failed, 75 preempted"]
    return "\n".join(lines)
