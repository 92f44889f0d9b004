"""Random command lines, environments and states of the file system, each from the number of its case."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entrypoint.cli.command_table import COMMANDS
from entrypoint.core.errors import ExitCode
from entrypoint.core.settings_base import SettingField, describe_settings
from entrypoint.job.launchers import LAUNCHERS
from entrypoint.plan.environment import USER_OVERRIDABLE
from entrypoint.settings import LaunchSettings
from entrypoint.tune.search import TuneSettings
from tests.conftest import clean_environment, paint
from train.settings import TrainSettings

# A start takes a second, and some also import torch, on a machine that other processes use too.
PROCESS_LIMIT_S = 120
DOCUMENTED = frozenset(map(int, ExitCode))
# What no line of ours may hold.
FAULTS = ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error", "Error processing line")
# Lines of the dynamic loader, about a variable of the user.
OTHERS_LINES = ("ERROR: ld.so: ",)
LONG = "x" * 300
LONGER = "y" * 5000
# Fields whose values start what takes long, or leaves this machine: their cases show a plan only.
STARTS_MORE = frozenset({"hosts", "launcher", "nnodes", "node_rank", "max_restarts", "backend", "nproc_per_node"})
# A rank that waits for others does so for this long.
SHORT_WAITS = {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "1", "LAUNCH_COLLECTIVE_TIMEOUT_S": "1", "LAUNCH_GRACE_PERIOD_S": "1"}

OUTSIDE = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPU_BIND_TYPE"),
    *("SLURM_NODEID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PTY_PORT"),
    *("SLURM_HET_SIZE", "OMPI_MCA_hwloc_base_binding_policy", "HYDRA_USER_PROVIDED_BINDING", "I_MPI_PIN_DOMAIN"),
    *("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK", "SM_HOSTS", "TF_CONFIG"),
    *("NODE_RANK", "KUBERNETES_SERVICE_HOST", "CLUSTER_SPEC", "SM_CURRENT_HOST", "SM_RESOURCE_CONFIG"),
)
OF_LAUNCHERS = tuple(
    name
    for row in LAUNCHERS
    for name in (*row.present, row.rank, row.world_size, row.local_rank, *row.local_world_size, *row.job_id)
    if name
)
OF_THE_SHELL = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_ERROR_FILE", "CXX", "PATH")
# Names in the folder of a case; `populate` makes what is not meant to be missing.
PATHS = (
    *("ok.py", "exit7.py", "folder", "package", "fifo", "fifo.py", "socket", "loop", "loop.py", "dangling", "binary"),
    *("script.sh", "good.ipynb", "bad.ipynb", "nested.ipynb", "empty", "hosts", "images", "odd-images", "runs"),
    *("missing", "missing.py", "ok.py/below", LONG, f"{LONG}.py", f"{LONG}/x", LONGER, "/dev/null"),
    *("/dev/zero", "/proc/self/mem", "/", ".", "..", "", "~", "a b.py", "\udcff.py", "new\nline.py", "-", "--", "é"),
)
LIKELY = ("", "0", "1", "2", "-1", "auto", "off", "on", "cpu", "cuda", "gnu", "1.5", "nan", "inf", "1e309", "9" * 400)
ODD = ("\udcff\udcfe", "a\nb", "\x1b[2J", "x" * 70_000, "%s%n", "{}", "[" * 2000, "١", "None", " 1", "0x10", "1_0")
LISTS = ("2(x3),1", "n[1-3]", "n[1-", "a:1,b:2", "127.0.0.1", "localhost:0", "r1:4", "1:4", "4:1", "3x32x32")


@dataclass(frozen=True)
class Case:
    """A command line and its environment."""

    number: int
    words: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def launches(self) -> bool:
        """Return whether a program may be started, which has an exit code of its own."""
        return self.words[:1] in (("run",), ("tune",))


FIELDS = {model: describe_settings(model) for model in (LaunchSettings, TrainSettings, TuneSettings)}
VARIABLES = {about.variable: about for fields in FIELDS.values() for about in fields}
PATH_FIELDS = frozenset({"hosts", "tuning_store", "data_dir", "cache_dir", "output_dir", "resume", "run_name"})
# Command lines, and how often each is tried. A word in capitals is replaced by `CaseMaker.expand`.
KINDS = {
    "plan TRAIN_FLAGS": 40,
    "plan FLAGS run FLAGS PROGRAM": 15,
    "train --dry-run TRAIN_FLAGS": 13,
    "train --dry-run TRAIN_FLAGS STRAY": 2,
    "run --dry-run FLAGS PROGRAM": 8,
    "run LAUNCHED_FLAGS PROGRAM": 7,
    "tune TUNE_FLAGS --tuning-store off": 3,
    "tune LAUNCHED_FLAGS --minutes 0.001 --seconds 0.01 run PROGRAM": 2,
    "doctor TRAIN_FLAGS --nope": 2,
    "verify FLAGS NUMBER": 2,
    "stacks FLAGS NUMBER": 1,
    "selftest SWITCH": 1,
    "COMMAND SWITCH": 2,
    "SWITCH": 1,
    "rank": 1,
    "ODD FLAGS": 2,
}
FLAGS_OF = {
    "FLAGS": (LaunchSettings,),
    "LAUNCHED_FLAGS": (LaunchSettings,),
    "TRAIN_FLAGS": (LaunchSettings, TrainSettings),
    "TUNE_FLAGS": (LaunchSettings, TrainSettings, TuneSettings),
}
WORDS = {
    "STRAY": (*PATHS, "run", "train"),
    "NUMBER": ("1", "0", "-1", "x", "99999999", "9" * 40, "١", *PATHS),
    "SWITCH": ("--help", "-h", "--help-all", "--version", "help", "--nope"),
    "COMMAND": tuple(COMMANDS),
    "ODD": (*ODD, *PATHS, "pln", "Train", "bash"),
}
STRANGE_FLAGS = ("--json", "--nope", "--thread=2", "-x", "--", "-", "--=", "--\udcff")


def starts_more(name: str) -> bool:
    """Return whether a variable may make a launch wait for other ranks, or start them elsewhere."""
    about = VARIABLES.get(name)
    return about is not None and about.name in STARTS_MORE


class CaseMaker:
    """Draws one case; equal numbers give equal cases."""

    def __init__(self, number: int) -> None:
        self.number, self.random = number, random.Random(number)

    def make(self) -> Case:
        """Return the case."""
        kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
        names = [self.variable_name() for _ in range(self.random.choice((0, 0, 1, 1, 2, 3, 6)))]
        environ = {name: self.value_for(name) for name in names}
        if "LAUNCHED_FLAGS" in kind:
            environ = {name: value for name, value in environ.items() if not starts_more(name)} | SHORT_WAITS
        if kind == "rank":
            environ["ENTRYPOINT_PLAN"] = self.random.choice((*ODD, "{}", "[]", '{"ranks": []}', "[" * 90_000))
        words = (word for part in kind.split() for word in self.expand(part))
        return Case(self.number, tuple(word.replace("\0", "") for word in words), environ)

    def expand(self, part: str) -> list[str]:
        """Return the words of a part of a command line."""
        if part in FLAGS_OF:
            return self.flags(part)
        if part == "PROGRAM":
            return self.program()
        return [self.random.choice(WORDS[part])] if part in WORDS else [part]

    def program(self) -> list[str]:
        """Return the program of `run` with its own words."""
        first = ["-m"] if self.random.random() < 0.1 else []
        name = self.random.choice(("ok.py", "ok.py", "package", *PATHS, "torchrun", "python", "mpirun", "env"))
        own = self.random.choices(("--lr=3", "x", "--", "-m", *ODD), k=self.random.choice((0, 0, 1, 1, 2, 3)))
        return [*first, name, *own]

    def flags(self, part: str) -> list[str]:
        """Return flags, most of them known to the command."""
        known = [about for model in FLAGS_OF[part] for about in FIELDS[model]]
        if part == "LAUNCHED_FLAGS":
            known = [about for about in known if about.name not in STARTS_MORE and not about.name.endswith("_s")]
        words: list[str] = []
        for about in self.random.choices(known, k=self.random.choice((0, 0, 1, 1, 2, 3, 5))):
            value = self.value_of(about)
            words += [f"{about.flag}={value}"] if self.random.random() < 0.5 else [about.flag, value]
        return words + self.random.choices(STRANGE_FLAGS, k=int(self.random.random() < 0.05))

    def value_of(self, about: SettingField) -> str:
        """Return a value of a setting, mostly one that it accepts or almost does."""
        if about.choices and self.random.random() < 0.7:
            return self.random.choice(about.choices)
        if about.name in PATH_FIELDS and self.random.random() < 0.7:
            return self.random.choice(PATHS)
        if about.name == "metric":
            return self.random.choice(("(x)", "(", "([0-9.]+)", "x{99999999999}", "(" * 200 + ")" * 200, "()()"))
        return self.value()

    def value(self) -> str:
        """Return any text that a process may get."""
        kinds = (LIKELY, LIKELY, LISTS, ODD, PATHS, (str(self.random.randint(-5, 5000)),))
        return self.random.choice(self.random.choice(kinds))

    def variable_name(self) -> str:
        """Return the name of a variable that something reads."""
        misspelt = self.random.choice(("LAUNCH_", "TRAIN_", "TUNE_", "launch_")) + self.random.choice("ABXYZ_")
        kinds = (VARIABLES, VARIABLES, OUTSIDE, OF_LAUNCHERS, OF_THE_SHELL, USER_OVERRIDABLE, (misspelt, "LD_PRELOAD"))
        return self.random.choice(self.random.choice([tuple(kind) for kind in kinds]))

    def value_for(self, name: str) -> str:
        """Return a value of a variable."""
        if name == "TORCHELASTIC_ERROR_FILE":
            return self.random.choice(("error.json", "fifo", "folder", "missing/x", "loop", LONG, "/dev/null", "/"))
        if name == "LD_PRELOAD":  # the loader prints the name as it is
            return self.random.choice([path for path in PATHS if "\n" not in path])
        if name in OF_THE_SHELL:
            return self.random.choice(PATHS)
        about = VARIABLES.get(name)
        return self.value_of(about) if about else self.value()


def make_case(number: int) -> Case:
    """Return the case of a number."""
    return CaseMaker(number).make()


def populate(folder: Path) -> None:
    """Make what the paths of cases lead to."""
    for name, text in {
        "ok.py": "",
        "exit7.py": "raise SystemExit(7)\n",
        "a b.py": "print(1)\n",
        "é": "print(1)\n",
        "script.sh": "#!/bin/sh\n",
        "empty": "",
        "hosts": "localhost slots=2\n# x\n",
        "good.ipynb": json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}),
        "bad.ipynb": "{",
        "nested.ipynb": "[" * 100_000,
    }.items():
        (folder / name).write_text(text)
    (folder / "binary").write_bytes(bytes(range(256)))
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.py")).write_text("")
    for name in ("fifo", "fifo.py"):
        os.mkfifo(folder / name)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    for name, target in {"loop": "loop", "loop.py": "loop.py", "dangling": "nowhere"}.items():
        (folder / name).symlink_to(target)
    (folder / "folder").mkdir()
    (folder / "package").mkdir()
    (folder / "package/__main__.py").write_text("")
    paint(folder / "images/train", each=2)
    paint(folder / "images/test", each=1)
    (folder / "odd-images/train/a").mkdir(parents=True)
    (folder / "odd-images/test/a").mkdir(parents=True)
    os.mkfifo(folder / "odd-images/train/a/x.png")
    (folder / "odd-images/test/a/x.png").write_bytes(b"\x89PNG")
    (folder / "runs").mkdir()


def environment_of(case: Case, folder: Path) -> dict[str, str]:
    """Return the whole environment of a case."""
    return {**clean_environment(), "HOME": str(folder / "home"), **case.environ}


def run_as_process(case: Case, limit_s: float = PROCESS_LIMIT_S) -> list[str]:
    """Run a case as a process in a folder of its own, and return what is wrong with it."""
    with tempfile.TemporaryDirectory(prefix="case-") as temporary:
        folder = Path(temporary, "folder")
        folder.mkdir()
        populate(folder)
        out, err = Path(temporary, "out"), Path(temporary, "err")
        with out.open("wb") as output, err.open("wb") as errors:
            process = subprocess.Popen(
                [os.fsencode(word) for word in (sys.executable, "-m", "entrypoint", *case.words)],
                cwd=folder,
                env={os.fsencode(name): os.fsencode(value) for name, value in environment_of(case, folder).items()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return [f"hangs: no end after {limit_s:.0f} s"]
        texts = [file.read_text(errors="backslashreplace") for file in (out, err)]
    return judge(case, code, *texts)


def judge(case: Case, code: int, out: str, err: str) -> list[str]:
    """Return what is wrong with how a case ended."""
    found = [f"{fault} in its output: {err[-1500:]}" for fault in FAULTS if fault in out + err]
    if code not in DOCUMENTED and not (case.launches and (code in (1, 7) or code >= 128)):
        found.append(f"exit code {code}: {err[-500:]}")
    lines = [line for line in err.splitlines() if not line.startswith(OTHERS_LINES)]
    found += [f"a line that is not printable: {line[:200]!r}" for line in lines if not line.isprintable()]
    if case.launches:
        return found
    found += [f"not a line of ours: {line[:200]!r}" for line in lines if not line.startswith("entrypoint: ")]
    reports = case.words[:1] in (("doctor",), ("verify",))
    elsewhere = case.environ.get("TORCHELASTIC_ERROR_FILE")
    has_error = any(line.startswith("entrypoint: error: ") for line in lines)
    if code not in (0, 130, 143) and not reports and not elsewhere and not has_error:
        found.append(f"exit code {code} and no error")
    return found
