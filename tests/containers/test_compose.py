"""compose.yaml for real: two nodes train as one does, and what happens when one of them is gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Result
from tests.containers.conftest import REPOSITORY, Docker, run

COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
# What compose itself reads, besides passing it on.
FOR_COMPOSE = ("TRAIN_RUN_NAME", "TRAIN_RESUME", "TENSORBOARD_PORT")


class Nodes:
    """The two nodes of compose.yaml as a project of its own; settings reach them by a file."""

    def __init__(self, folder: Path) -> None:
        self.project = f"test{os.getpid()}"
        self.runs = folder
        self.settings_file = folder.parent / "settings.env"
        self.base = {"LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0"}

    def __call__(self, *words: str, **settings: str) -> Result:
        lines = [f"{name}={value}" for name, value in (self.base | settings).items()]
        self.settings_file.write_text("\n".join(lines) + "\n")
        env = {"ENV_FILE": str(self.settings_file), "RUNS": str(self.runs), "DATA": str(self.runs)}
        env |= {name: settings[name] for name in FOR_COMPOSE if name in settings}
        return run("docker", "compose", "--project-name", self.project, "--profile", "nodes", *words, env=env)

    def name(self, number: int) -> str:
        return f"{self.project}-node{number}-1"

    def log(self) -> str:
        return re.sub(r"\x1b\[[\d;]*m", "", self("logs", "--no-log-prefix").out)

    def codes(self) -> list[int]:
        """Wait until both have ended and return their exit codes."""
        return [int(run("docker", "wait", self.name(number)).out) for number in (0, 1)]

    def start(self, until: str, **env: str) -> None:
        """Start both and wait until one has printed something."""
        started = self("up", "--detach", "--no-build", "--force-recreate", "node0", "node1", **env)
        assert started.code == 0, started.err
        limit = time.monotonic() + 90
        while until not in (log := self.log()):
            assert time.monotonic() < limit, log
            time.sleep(0.2)

    def summary(self, name: str) -> Any:
        return json.loads((self.runs / name / "summary.json").read_text())


@pytest.fixture
def nodes(docker: Docker, bound: Path) -> Iterator[Nodes]:
    docker.tag("cpu")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs 2 cores")
    two = Nodes(bound)
    yield two
    two("down", "--volumes")


def test_compose_privileges_are_only_in_gpu_override() -> None:
    for service in COMPOSE["services"].values():
        assert not {"privileged", "ulimits", "deploy", "gpus", "cap_add"} & set(service)
    override = yaml.safe_load((REPOSITORY / "compose.gpu.yaml").read_text())["services"]["cuda"]
    assert {"deploy", "ulimits"} <= set(override)


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_compose_files_are_valid() -> None:
    files = ("-f", "compose.yaml", "-f", "compose.gpu.yaml")
    result = run("docker", "compose", *files, "--profile", "cuda", "config", "--format", "json").succeeded()
    assert json.loads(result.out)["services"]["cuda"]["ulimits"] == {"memlock": -1}


@pytest.fixture
def fresh_clone(docker: Docker, bound: Path) -> Iterator[Path]:
    """What git keeps of this repository, as user 1000's; compose calls its project by the folder's name."""
    docker.tag("cpu")
    clone = bound / f"clone{os.getpid()}"
    for name in run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", "compose.yaml", "runs", "data"
    ).out.split():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, clone / name)
    if os.getuid() == 0:
        for path in (clone, *clone.rglob("*")):
            os.chown(path, 1000, 1000)
    yield clone
    compose(clone, "down")


def compose(clone: Path, *words: str, **env: str) -> Result:
    return run("docker", "compose", "--project-name", clone.name, f"--project-directory={clone}",
               f"--file={clone / 'compose.yaml'}", *words, env=env)  # fmt: skip


@pytest.mark.docker
def test_compose_up_in_a_fresh_clone_leaves_nothing_of_root(fresh_clone: Path) -> None:
    me = fresh_clone.stat().st_uid
    user = {} if me == 1000 else {"RUN_AS": f"{me}:{os.getgid()}"}
    (fresh_clone / ".env").write_text("TRAIN_EPOCHS=1\nTRAIN_RUN_NAME=first\nLAUNCH_RESERVE_CPUS=0\n")
    up = compose(fresh_clone, "up", "--no-build", "--exit-code-from", "cpu", "cpu", **user).succeeded()
    assert (fresh_clone / "runs/first/summary.json").exists()
    assert "warning" not in up.out
    (fresh_clone / ".env").unlink()
    assert {path.lstat().st_uid for path in fresh_clone.rglob("*")} == {me}


@pytest.mark.docker
def test_compose_without_the_run_folder_makes_none_as_root(fresh_clone: Path) -> None:
    shutil.rmtree(fresh_clone / "runs")
    up = compose(fresh_clone, "up", "--no-build", "cpu")
    assert up.code != 0
    assert f"{fresh_clone}/runs" in up.err
    assert not (fresh_clone / "runs").exists()


def test_settings_come_from_an_optional_file() -> None:
    for name in ("cpu", "node0", "node1", "cuda"):
        assert COMPOSE["services"][name]["env_file"] == [{"path": "${ENV_FILE:-.env}", "required": False}]


@pytest.mark.docker
def test_compose_two_nodes_match_one_node(nodes: Nodes) -> None:
    one = nodes("run", "--rm", "--no-TTY", "cpu", TRAIN_RUN_NAME="one")
    assert one.code == 0, one.err
    nodes.start("test accuracy  ", TRAIN_RUN_NAME="two")
    assert nodes.codes() == [0, 0]
    one_summary, two_summary = nodes.summary("one"), nodes.summary("two")
    assert two_summary["world_size"] == 2
    assert two_summary["test_accuracy"] == pytest.approx(one_summary["test_accuracy"], abs=0.5)
    ranks = json.loads((nodes.runs / "two/ranks.json").read_text())
    assert [rank["cpus"] for rank in ranks] == [[0], [1]], "each on its own CPU set"
    assert "warning" not in nodes.log()


# How soon both must have ended: those that are killed or stopped well before an exchange between ranks may stall.
FAULTS = {
    "node 1 is killed": (("kill", 1), [5, 137], r"rank 0: lost rank 1 on node1 \(", 40),
    "node 0 is killed": (("kill", 0), [137, 5], r"rank 1: lost rank 0 on node0 \(", 40),
    "node 1 is cut off": (("cut", 1), [5, 5], r"rank 0: lost rank 1 on node1 \(.*(Timed out|timeout)", 40),
    "node 1 is stopped": (("stop", 1), [75, 75], r"preempted: stopped by SIGTERM: step \d+ is saved", 40),
}


@pytest.mark.docker
@pytest.mark.parametrize("fault", FAULTS)
def test_lost_node_is_named_and_the_restarted_job_resumes(nodes: Nodes, fault: str) -> None:
    (how, number), codes, said, limit_s = FAULTS[fault]
    env = {"TRAIN_EPOCHS": "150", "LAUNCH_COLLECTIVE_TIMEOUT_S": "10" if how == "cut" else "90"}
    nodes.start("epoch 3/", **env)
    started = time.monotonic()
    if how == "cut":
        assert run("docker", "network", "disconnect", f"{nodes.project}_nodes", nodes.name(number)).code == 0
    else:
        assert run("docker", how, nodes.name(number)).code == 0
    assert nodes.codes() == codes, nodes.log()[-4000:]
    assert time.monotonic() - started < limit_s
    assert re.search(said, nodes.log()), nodes.log()[-2000:]
    assert sorted((nodes.runs / "nodes/checkpoint").glob("step-*"))
    nodes.start("resuming from runs/nodes/checkpoint/step-", **env)
    nodes("kill")


@pytest.mark.docker
def test_tensorboard_serves_the_runs(nodes: Nodes) -> None:
    from urllib.request import urlopen

    env = {"TENSORBOARD_PORT": "16006"}
    one = nodes("run", "--rm", "--no-TTY", "cpu", TRAIN_RUN_NAME="one", TRAIN_EPOCHS="1", TRAIN_TENSORBOARD="1")
    assert one.code == 0, one.err
    assert (nodes.runs / "latest").is_symlink()
    assert nodes("--profile", "tensorboard", "up", "--detach", "--no-build", "tensorboard", **env).code == 0
    limit = time.monotonic() + 60
    while True:
        try:
            with urlopen("http://127.0.0.1:16006/data/runs", timeout=5) as answer:
                if runs := json.load(answer):
                    break
        except (OSError, ValueError):
            pass
        assert time.monotonic() < limit
        time.sleep(0.5)
    assert "one/tensorboard" in runs
    published = run("docker", "port", f"{nodes.project}-tensorboard-1").out.split()
    assert published[-1] == "127.0.0.1:16006", "it asks for no password"
    nodes("--profile", "tensorboard", "down")
