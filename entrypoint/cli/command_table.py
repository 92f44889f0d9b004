"""The commands by name: what each does, the settings and switches that it takes, and the module that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from msgspec import Struct

from entrypoint.core.settings_base import Settings

# The programs that a `plan` or `tune` is for.
TARGETS = ("train", "run")
# Settings by the name of their table in a configuration file: the module and the class.
GROUPS: Mapping[str, tuple[str, str]] = {
    "launch": ("entrypoint.settings", "LaunchSettings"),
    "train": ("train.settings", "TrainSettings"),
    "tune": ("entrypoint.tune.search", "TuneSettings"),
    "predict": ("train.predict_settings", "PredictSettings"),
}
SWITCHES = {
    "json": "print plan, checks, ranks or result as JSON",
    "dry-run": "show the plan and start nothing",
    "verbose": "show every decision of the plan",
    "network": "show how data travels between the nodes, and measure it",
}


class Command(Struct, frozen=True, kw_only=True):
    """One command: its module in `entrypoint.cli.commands`, its help, and what may follow it.

    `words` are shown in its usage, and empty for a command that takes flags alone. `flags_may_follow` its words.
    """

    module: str
    help: str
    words: str = ""
    groups: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    flags_may_follow: bool = False


# Of commands that `train` or `run SCRIPT` may follow.
TARGET_WORDS = f" [{'|'.join(TARGETS)} ...]"
COMMANDS: Mapping[str, Command] = {
    "train": Command(
        module="train_run",
        help="train with the built-in trainer",
        groups=("launch", "train"),
        switches=("dry-run", "verbose"),
    ),
    "run": Command(
        module="train_run",
        help="run your own training script or module",
        words=" SCRIPT|-m MODULE [arguments]",
        groups=("launch",),
        switches=("dry-run", "verbose"),
    ),
    "plan": Command(
        module="train_run",
        help="show what `train` or `run SCRIPT` would do, and why; start nothing",
        words=TARGET_WORDS,
        groups=("launch", "train"),
        switches=("json", "verbose"),
    ),
    "evaluate": Command(
        module="evaluate",
        help="evaluate a trained model: a run folder, a checkpoint, or its model.safetensors",
        words=" RUN [flags]",
        groups=("launch", "train"),
        switches=("json", "dry-run", "verbose"),
        flags_may_follow=True,
    ),
    "quantize": Command(
        module="evaluate",
        help="write a trained model in int8 for CPUs, with what that costs and gains",
        words=" RUN [flags]",
        groups=("launch", "train"),
        switches=("dry-run", "verbose"),
        flags_may_follow=True,
    ),
    "average": Command(
        module="evaluate",
        help="write the mean of a run's best checkpoints, or of several models, and evaluate it",
        words=" RUN [RUN ...] [flags]",
        groups=("launch", "train"),
        switches=("dry-run", "verbose"),
        flags_may_follow=True,
    ),
    "predict": Command(
        module="predict",
        help="print the class of each image by a trained model",
        words=" RUN IMAGE ... [flags]",
        groups=("predict",),
        switches=("json",),
        flags_may_follow=True,
    ),
    "export": Command(
        module="predict",
        help="write a trained model for other runtimes: ONNX, torch.export, OpenVINO, ExecuTorch",
        words=" RUN FORMAT ... [flags]",
        groups=("predict",),
        flags_may_follow=True,
    ),
    "report": Command(module="report", help="write report.html of a finished run again", words=" RUN ..."),
    "compare": Command(
        module="report",
        help="print finished runs side by side, with the settings in which they differ",
        words=" RUN RUN ...",
    ),
    "runs": Command(module="report", help="list the runs of a folder: state, score, minutes", words=" [FOLDER]"),
    "tune": Command(
        module="tune",
        help="find the fastest plan for `train` or `run SCRIPT` and keep it for later runs",
        words=TARGET_WORDS,
        groups=("launch", "train", "tune"),
    ),
    "doctor": Command(
        module="doctor",
        help="check machine, container, packages and plan; exit code 3 if a check fails",
        groups=("launch", "train"),
        switches=("json", "network"),
    ),
    "verify": Command(
        module="verify",
        help="compare the ranks that run on this node with their plans",
        words=" [RUN|PID ...]",
        switches=("json",),
    ),
    "stacks": Command(
        module="stacks",
        help="print what each rank on this node does: the stacks of all its threads",
        words=" [RUN|PID ...]",
        switches=("json",),
    ),
    "selftest": Command(module="selftest", help="run the tests of an image or a clone that need only this machine"),
}


def load_group(name: str) -> type[Settings]:
    """Return a group of settings; `run` needs the launcher's alone, and starts sooner without importing the others."""
    module, kind = GROUPS[name]
    group: type[Settings] = getattr(import_module(module), kind)
    return group


def all_groups() -> dict[str, type[Settings]]:
    """Return all settings by the name of their table in a configuration file."""
    return {name: load_group(name) for name in GROUPS}
