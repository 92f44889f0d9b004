"""What a measurement depends on besides the program: machine, versions, commit, and the load of other processes."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import time
from pathlib import Path

import msgspec

from entrypoint.core.packages import PROJECT, package_version
from entrypoint.machine.cpu_load import busy_cpus_between, read_cpu_ticks
from entrypoint.machine.detect import detect_machine
from train.kernels.library import find_kernel
from train.planning.compute import why_auto_leaves_winograd

ROOT = Path(__file__).resolve().parents[1]
# A machine is busy if other processes use more than this share of the CPUs.
BUSY_SHARE = 0.1
# Long enough that a tick of 10 ms is a hundredth of a CPU.
SAMPLE_S = 1.0
PACKAGES = ("torch", "torchvision", "numpy", PROJECT)
# What no benchmark runs: records of others, and documents.
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


def plans_winograd() -> bool:
    """Return whether a run in fp32 on these CPUs uses Winograd's algorithm, as its plan has it."""
    flags = detect_machine(affinity=frozenset(os.sched_getaffinity(0))).cpu_flags
    return not why_auto_leaves_winograd(flags, has_kernel=find_kernel("winograd") is not None)


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


class Others:
    """Counts the CPUs that other processes use, from its creation on.

    The host's share of a virtual machine counts as theirs. Children of this process count as its own once they ended.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self.stat, self.cpus = proc / "stat", frozenset(os.sched_getaffinity(0))
        self.ticks, self.own_s, self.clock_s = read_cpu_ticks(self.cpus, self.stat), own_seconds(), time.monotonic()

    def busy_cpus(self) -> float | None:
        """Return how many CPUs they used on average, None where the kernel does not count it."""
        ticks = read_cpu_ticks(self.cpus, self.stat)
        if not any(whole > self.ticks.get(cpu, (0, whole))[1] for cpu, (_, whole) in ticks.items()):
            return None
        own = (own_seconds() - self.own_s) / max(time.monotonic() - self.clock_s, 1e-3)
        return round(max(0.0, busy_cpus_between(self.ticks, ticks) - own), 2)


def own_seconds() -> float:
    """Return the CPU time of this process and its children that ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def busy_cpus_now() -> float | None:
    """Return how many CPUs others use during the next second."""
    others = Others()
    time.sleep(SAMPLE_S)
    return others.busy_cpus()


def is_busy(busy_cpus: float | None, cpus: int) -> bool:
    """Return whether other processes use more than BUSY_SHARE of the CPUs."""
    return busy_cpus is not None and busy_cpus > BUSY_SHARE * cpus
