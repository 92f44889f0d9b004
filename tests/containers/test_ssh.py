"""mpirun between two Docker containers, as cluster/docker has it: an ordinary user's sshd, and a mounted key."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.containers.conftest import REPOSITORY, Docker, run

FOLDER = REPOSITORY / "cluster/docker"


def test_no_key_is_in_the_image_and_no_port_is_published() -> None:
    for service in yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"].values():
        assert not {"ports", "privileged", "cap_add"} & set(service)
        assert service["read_only"]
    text = (FOLDER / "Dockerfile").read_text()
    assert "ssh-keygen" not in text
    assert "/etc/ssh/ssh_host_*" in text, "Debian's package makes keys when it is installed"
    assert text.rstrip().endswith("USER 1000:1000")


@pytest.mark.docker
def test_mpirun_starts_ranks_in_two_containers(docker: Docker, bound: Path) -> None:
    docker.tag("cpu")
    if len(os.sched_getaffinity(0)) < 2 or not shutil.which("ssh-keygen"):
        pytest.skip("needs 2 cores and ssh-keygen")
    built = run("docker", "build", "--tag=reference-training:ssh", FOLDER, env={"DOCKER_BUILDKIT": "1"})
    if built.code and re.search("Temporary failure|Network is unreachable|Could not connect", built.err):
        pytest.skip("needs Debian's mirror")
    assert built.code == 0, built.err
    keys, runs = bound / "keys", bound / "runs"
    for folder in (keys, runs):
        folder.mkdir()
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "key")), check=True)
    if os.getuid() == 0:
        for path in (keys, *keys.iterdir(), runs):
            os.chown(path, 1000, 1000)
    settings = bound / "settings"
    settings.write_text("TRAIN_RUN_NAME=two\nTRAIN_EPOCHS=1\nLAUNCH_RESERVE_CPUS=0\nLAUNCH_THREADS=1\n")
    env = {"ENV_FILE": str(settings), "KEYS": str(keys), "RUNS": str(runs)}
    compose = ("docker", "compose", f"--project-name=ssh{os.getpid()}", f"--file={FOLDER / 'compose.yaml'}")
    try:
        up = run(*compose, "up", "--exit-code-from=node0", env=env)
        assert up.code == 0, up.out + up.err
        ranks = json.loads((runs / "two/ranks.json").read_text())
        assert [(rank["rank"], rank["local_rank"]) for rank in ranks] == [(0, 0), (1, 0)], "each on a node of its own"
        assert "for trainer" in run(*compose, "logs", "node1", env=env).out
    finally:
        run(*compose, "down", env=env)
