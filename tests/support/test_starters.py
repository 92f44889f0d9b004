"""The programs that start nodes, Slurm, Grid Engine, Docker and Apptainer for tests: they work, and leave nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STARTERS = ("nodes", "slurm", "grid_engine", "engine", "base-image", "apptainer")
LACKS_SOMETHING = 3
LIMIT_S = 300


@dataclass
class Starters:
    """Runs the programs with a name and folders of their own."""

    name: str
    folder: Path
    more: dict[str, str] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        own = {
            "CI_NODES_PREFIX": self.name,
            "CI_NODES_DIR": f"{self.folder}/nodes",
            "CI_SLURM_DIR": f"{self.folder}/slurm",
            "CI_GRID_ENGINE_DIR": f"{self.folder}/grid-engine",
        }
        return {**os.environ, **own, **self.more}

    def run(self, starter: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, whatever its exit code; skip the test where it says that something is missing."""
        log = self.folder / "log"
        with log.open("w") as out:  # daemons keep it open: a pipe would never end
            command = [HERE / starter, *words]
            done = subprocess.run(command, env=self.environ(), stdout=out, stderr=out, timeout=LIMIT_S, check=False)
        text = log.read_text()
        if done.returncode == LACKS_SOMETHING:
            pytest.skip(text.strip().splitlines()[-1])
        return subprocess.CompletedProcess(done.args, done.returncode, text, "")

    def do(self, starter: str, *words: str | Path) -> str:
        """Run a program, which must succeed; return what it printed."""
        done = self.run(starter, *words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def reaches(self, node: str, other: str) -> bool:
        ssh = ("ssh", "-F", self.folder / "nodes/ssh/config", "-o", "ConnectTimeout=2")
        return self.run("nodes", "exec", node, *ssh, other, "hostname").stdout.strip() == other

    def leftovers(self) -> list[str]:
        """Return the network namespaces, mounts and processes that are left."""
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        found = [line for line in spaces.splitlines() if line.startswith(f"{self.name}-")]
        mounts = Path("/proc/mounts").read_text().splitlines()
        found += [line for line in mounts if str(self.folder) in line or f"/{self.name}-" in line]
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environ = path.read_bytes()
            except OSError:  # ended
                continue
            if str(self.folder).encode() in environ:
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@pytest.fixture
def starters() -> Iterator[Starters]:
    """A folder with a short path, since that of a socket has 107 characters at most."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces and mounts")
    folder = Path(tempfile.mkdtemp(prefix="st", dir="/var/tmp"))
    made = Starters(folder.name.replace("_", "0"), folder)
    try:
        yield made
    finally:
        for starter in ("slurm", "grid_engine", "nodes"):
            subprocess.run([HERE / starter, "down"], env=made.environ(), check=False)
        shutil.rmtree(folder)


@pytest.fixture
def nodes(starters: Starters) -> Starters:
    """Two nodes that are up."""
    if not os.environ.get("CLUSTER_NODES"):
        pytest.skip("starts several nodes, where CLUSTER_NODES names a program for that")
    starters.do("nodes", "up", "2")
    return starters


@pytest.mark.parametrize("starter", STARTERS)
def test_help_begins_with_the_name(starter: str) -> None:
    done = subprocess.run([HERE / starter, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(starter)
    assert "\n\n" in done.stdout


@pytest.mark.parametrize("command", ["nodes fly", "slurm up none", "grid_engine exec", "engine", "base-image bookworm"])
def test_wrong_command_is_one_line_and_exit_code_2(command: str) -> None:
    starter, *words = command.split()
    done = subprocess.run([HERE / starter, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{starter}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.cluster
def test_nodes_down_leaves_nothing(nodes: Starters) -> None:
    nodes.do("nodes", "exec", "node1", "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &")
    assert any("sleep 1000" in line for line in nodes.leftovers())
    nodes.do("nodes", "down")
    assert nodes.leftovers() == []
    assert not (nodes.folder / "nodes").exists()


@pytest.mark.cluster
@pytest.mark.slurm
@pytest.mark.parametrize("suite", ["", pytest.param("trixie", marks=pytest.mark.slow)], ids=["own", "trixie"])
def test_slurm_runs_tasks_on_all_nodes_and_leaves_nothing(nodes: Starters, suite: str) -> None:
    if not os.environ.get("CLUSTER_SLURM"):
        pytest.skip("starts Slurm, where CLUSTER_SLURM names a program for that")
    nodes.more["CI_SLURM_SUITE"] = suite
    nodes.do("slurm", "up", "2")
    for mpi, variable in (("none", "SLURM_PROCID"), ("pmi2", "PMI_RANK"), ("pmix", "PMIX_RANK")):
        tasks = ("srun", "-N2", "-n2", f"--mpi={mpi}", "sh", "-c", f"echo $(hostname) ${variable}")
        assert sorted(nodes.do("slurm", "exec", *tasks).splitlines()) == ["node1 0", "node2 1"], mpi
    nodes.do("slurm", "down")
    nodes.do("slurm", "up", "2")
    nodes.do("slurm", "down")
    nodes.do("nodes", "down")
    assert nodes.leftovers() == []


@pytest.mark.cluster
def test_grid_engine_runs_a_job_on_all_nodes_and_leaves_nothing(nodes: Starters) -> None:
    if not os.environ.get("CLUSTER_GRID_ENGINE"):
        pytest.skip("starts Grid Engine, where CLUSTER_GRID_ENGINE names a program for that")
    nodes.do("grid_engine", "up", "2")
    remote = "while read host rest; do qrsh -inherit $host hostname </dev/null; done <$PE_HOSTFILE"
    job = nodes.folder / "job.sh"
    job.write_text(f"#!/bin/bash\n{remote}\n")
    out = nodes.folder / "out"
    nodes.do("grid_engine", "exec", "qsub", "-sync", "y", "-pe", "mpi", "2", "-V", "-j", "y", "-o", out, job)
    assert sorted(out.read_text().split()) == ["node1", "node2"]
    nodes.do("grid_engine", "down")
    nodes.do("grid_engine", "up", "2")
    nodes.do("grid_engine", "down")
    nodes.do("nodes", "down")
    assert nodes.leftovers() == []
