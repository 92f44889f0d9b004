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
from collections.abc import Callable, Mapping
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


class CaseMaker:
    """Draws one case; equal numbers give equal cases."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.random = random.Random(number)
        self.environ: dict[str, str] = {}

    def make(self) -> Case:
        """Return the case."""
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3, 6))):
            name = self.variable_name()
            self.environ[name] = self.value_for(name)
        return Case(self.number, tuple(self.command()), self.environ)

    def chance(self, share: float) -> bool:
        """Return whether something happens that happens in this share of all cases."""
        return self.random.random() < share

    def command(self) -> list[str]:
        """Return a command line."""
        kinds: tuple[tuple[int, Callable[[], list[str]]], ...] = (
            (40, lambda: ["plan", *self.flags(train=True)]),
            (15, lambda: ["plan", *self.flags(), "run", *self.flags(), *self.program()]),
            (15, lambda: ["train", "--dry-run", *self.flags(train=True), *self.stray()]),
            (15, self.run),
            (5, self.tune),
            (2, self.doctor),
            (2, lambda: ["verify", *self.flags(), *self.several(("1", "0", "-1", "x", "99999999", "9" * 40, "١"))]),
            (1, lambda: ["stacks", *self.flags(), *self.several(("1", "-1", "x", "9" * 40, *PATHS))]),
            (1, lambda: ["selftest", self.random.choice(("--help", "stray", "--nope", "--help-all"))]),
            (2, lambda: [self.random.choice((*COMMANDS, "plan")), self.random.choice(("--help", "-h", "--help-all"))]),
            (1, lambda: [self.random.choice(("--help", "--version", "--help-all", "help", "-h"))]),
            (1, lambda: ["rank"]),
            (2, lambda: [self.random.choice((*ODD, *PATHS, "pln", "Train", "bash")), *self.flags()]),
        )
        words = self.random.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()
        if words == ["rank"] and self.chance(0.9):
            self.environ["ENTRYPOINT_PLAN"] = self.random.choice((*ODD, "{}", "[]", '{"ranks": []}', "[" * 90_000))
        return [word.replace("\0", "") for word in words]

    def run(self) -> list[str]:
        """Return `run` of a program that ends at once, or that is only shown."""
        if self.chance(0.5):
            return ["run", "--dry-run", *self.flags(), *self.program()]
        for name in [name for name in self.environ if self.starts_more(name)]:
            del self.environ[name]
        self.environ |= SHORT_WAITS
        return ["run", *self.flags(launched=True), *self.program()]

    def tune(self) -> list[str]:
        """Return `tune` of a program that ends at once, or one that is refused after its plan was made."""
        if self.chance(0.6):
            return ["tune", *self.flags(train=True, tune=True), "--tuning-store", "off"]
        for name in [name for name in self.environ if self.starts_more(name)]:
            del self.environ[name]
        short = ["--minutes", "0.001", "--seconds", "0.01"]
        return ["tune", *self.flags(launched=True, tune=True), *short, "run", *self.program()]

    def doctor(self) -> list[str]:
        """Return `doctor`, mostly with a setting that ends it before it imports every package."""
        return ["doctor", *self.flags(train=True), *([] if self.chance(0.3) else ["--nope"])]

    def program(self) -> list[str]:
        """Return the program of `run` with its own words."""
        first = ["-m"] if self.chance(0.1) else []
        name = self.random.choice(("ok.py", "ok.py", "package", *PATHS, "torchrun", "python", "mpirun", "env"))
        return [*first, name, *self.several(("--lr=3", "x", "--", "-m", *ODD))]

    def stray(self) -> list[str]:
        """Return words that a command does not expect."""
        return self.several((*PATHS, "run", "train")) if self.chance(0.1) else []

    def several(self, words: tuple[str, ...]) -> list[str]:
        """Return none to three of these words."""
        return self.random.choices(words, k=self.random.choice((0, 0, 1, 1, 2, 3)))

    def flags(self, *, train: bool = False, tune: bool = False, launched: bool = False) -> list[str]:
        """Return flags, most of them known to the command."""
        known = list(FIELDS[LaunchSettings])
        if launched:
            known = [one for one in known if one.name not in STARTS_MORE and not one.name.endswith("_s")]
        known += FIELDS[TrainSettings] if train else ()
        known += FIELDS[TuneSettings] if tune else ()
        words: list[str] = []
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3, 5))):
            about = self.random.choice(known)
            value = self.value_of(about)
            words += [f"{about.flag}={value}"] if self.chance(0.5) else [about.flag, value]
        if self.chance(0.05):
            words.append(self.random.choice(("--json", "--nope", "--thread=2", "-x", "--", "-", "--=", "--\udcff")))
        return words

    def value_of(self, about: SettingField) -> str:
        """Return a value of a setting, mostly one that it accepts or almost does."""
        if about.choices and self.chance(0.7):
            return self.random.choice(about.choices)
        if about.name in PATH_FIELDS and self.chance(0.7):
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

    @staticmethod
    def starts_more(name: str) -> bool:
        """Return whether a variable may make a launch wait for other ranks, or start them elsewhere."""
        about = VARIABLES.get(name)
        return about is not None and about.name in STARTS_MORE


FIELDS = {model: describe_settings(model) for model in (LaunchSettings, TrainSettings, TuneSettings)}
VARIABLES = {about.variable: about for fields in FIELDS.values() for about in fields}
PATH_FIELDS = frozenset({"hosts", "tuning_store", "data_dir", "cache_dir", "output_dir", "resume", "run_name"})


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
