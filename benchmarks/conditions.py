"""What a measurement depends on besides the program: machine, versions, commit, and the load of other processes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from entrypoint.core.package_version import PROJECT, package_version
from entrypoint.machine.cpu_load import STEAL_COLUMN, busy_cpus_between, read_cpu_ticks
from entrypoint.machine.detect import detect_machine

ROOT = Path(__file__).resolve().parents[1]
# A machine is busy if other processes use more than this share of the CPUs.
BUSY_SHARE = 0.1
# Long enough that a tick of 10 ms is a hundredth of a CPU.
SAMPLE_S = 1.0
PACKAGES = ("torch", "torchvision", "numpy", PROJECT)
# What no benchmark runs: records of others, and documents that are generated from them.
NOT_MEASURED = (":!benchmarks/results", ":!*.md")
# Words of a CPU's name that say nothing of its model.
NAME_NOISE = re.compile(r"\((r|tm)\)|@.*|\b(cpu|processor|\d+-core)\b", re.IGNORECASE)


class MachineFacts(msgspec.Struct):
    """The machine as the benchmark may use it; `flags` are its vector and matrix units, `gpus` the names."""

    cpu: str
    cpus: int
    cores: int
    quota_cpus: float | None
    flags: list[str]
    memory_gib: float
    gpus: list[str]
    driver: str

    @property
    def slug(self) -> str:
        """The CPU's model and their number for the name of a file."""
        words = re.findall(r"[a-z0-9]+", NAME_NOISE.sub(" ", self.cpu).lower())
        return "-".join([*words, f"{self.cpus}cpus" if self.cpus > 1 else "1cpu"])


class Load(msgspec.Struct):
    """The load at one time; `busy_cpus` are the CPUs that others use, None where the kernel does not count them.

    `averages` are those of 1, 5 and 15 minutes. `pressure` is the kernel's share of time in which a task waited for a
    CPU (PSI), in percent, over 10, 60 and 300 seconds. `stolen_s` is what the host has taken since the start.
    """

    averages: list[float]
    busy_cpus: float | None
    pressure: dict[str, float]
    stolen_s: float


class Source(msgspec.Struct):
    """The commit of the tree, empty outside a clone, and the files that differ from it."""

    commit: str = ""
    changed: list[str] = msgspec.field(default_factory=list)


def read_machine() -> MachineFacts:
    """Return this machine."""
    found = detect_machine(affinity=frozenset(os.sched_getaffinity(0)))
    return MachineFacts(
        cpu=found.cpu_model,
        cpus=len(found.cpus),
        cores=len({(cpu.socket, cpu.core) for cpu in found.cpus}),
        quota_cpus=found.quota_cpus,
        flags=list(found.cpu_flags),
        memory_gib=round(found.memory_bytes / 2**30, 1),
        gpus=[gpu.name for gpu in found.gpus],
        driver=found.driver.version,
    )


def read_versions() -> dict[str, str]:
    """Return the versions of what runs, the kernel's too."""
    versions = {"python": platform.python_version()}
    versions |= {name: found for name in PACKAGES if (found := package_version(name))}
    return {**versions, "kernel": platform.release()}


def read_source(root: Path = ROOT) -> Source:
    """Return the commit of a clone, and the files that differ from it; documents and records do not count."""
    try:
        commit = git(root, "rev-parse", "HEAD").strip()
        status = git(root, "status", "--porcelain", "-z", "--", ".", *NOT_MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return Source()
    return Source(commit, sorted(entry[3:] for entry in status.split("\0") if entry[2:3] == " "))


def git(root: Path, *words: str) -> str:
    """Return the output of git; raises OSError or CalledProcessError."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def read_load(proc: Path = Path("/proc"), wait: Callable[[float], None] = time.sleep) -> Load:
    """Return the load under `proc`; it takes a second, in which this process does nothing."""
    cpus = frozenset(os.sched_getaffinity(0))
    before, own, started = read_cpu_ticks(cpus, proc / "stat"), sum(os.times()[:2]), time.monotonic()
    wait(SAMPLE_S)
    after = read_cpu_ticks(cpus, proc / "stat")
    own_cpus = (sum(os.times()[:2]) - own) / max(time.monotonic() - started, SAMPLE_S)
    counted = any(whole > before.get(cpu, (0, whole))[1] for cpu, (_, whole) in after.items())
    used = max(0.0, busy_cpus_between(before, after) - own_cpus)
    return Load(
        read_averages(proc / "loadavg"),
        round(used, 2) if counted else None,
        read_pressure(proc / "pressure/cpu"),
        read_stolen_s(proc / "stat"),
    )


def read_averages(path: Path) -> list[float]:
    """Return the load averages of 1, 5 and 15 minutes, none if /proc is hidden."""
    with suppress(OSError, ValueError):
        return [float(word) for word in path.read_text().split()[:3]]
    return []


def read_pressure(path: Path) -> dict[str, float]:
    """Return the averages of the line `some` (kernel docs, accounting/psi.rst), none if the kernel has no PSI."""
    with suppress(OSError, ValueError):
        words = next((line.split() for line in path.read_text().splitlines() if line.startswith("some ")), [])
        pairs = (word.split("=") for word in words[1:])
        return {name: float(value) for name, value in pairs if name.startswith("avg")}
    return {}


def read_stolen_s(path: Path) -> float:
    """Return the seconds that the host took from all CPUs since the start, 0 if /proc is hidden."""
    with suppress(OSError, ValueError, IndexError):
        return int(path.read_text().split("\n", 1)[0].split()[1 + STEAL_COLUMN]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def is_busy(load: Load, cpus: int) -> bool:
    """Return whether other processes use more than BUSY_SHARE of the CPUs."""
    return load.busy_cpus is not None and load.busy_cpus > BUSY_SHARE * cpus
