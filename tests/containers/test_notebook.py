"""The image for notebooks, and the one that mpirun reaches by ssh."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.conftest import Result
from tests.containers.conftest import REPOSITORY, Docker, run
from tests.net import free_port

COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
TOKEN = "a-token-of-the-test"
NOTEBOOK = {
    "cells": [
        {"cell_type": "code", "id": "one", "metadata": {}, "outputs": [], "execution_count": None,
         "source": "import os, torch\nprint(torch.zeros(2).sum().item(), os.getuid())"},
    ],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    "nbformat": 4, "nbformat_minor": 5,
}  # fmt: skip


def test_notebook_is_published_for_this_machine_with_a_token() -> None:
    service = COMPOSE["services"]["notebook"]
    assert service["ports"] == ["127.0.0.1:${NOTEBOOK_PORT:-8888}:8888"]
    assert service["profiles"] == ["notebook"]
    assert service["user"] == COMPOSE["services"]["cpu"]["user"]
    text = (REPOSITORY / "containers/notebook/Dockerfile").read_text()
    assert not re.search("token=|USER|allow-root", text)


def test_devcontainer_builds_the_notebook_image() -> None:
    path = REPOSITORY / ".devcontainer/devcontainer.json"
    settings = json.loads(path.read_text())
    assert (path.parent / settings["build"]["dockerfile"]).resolve() == REPOSITORY / "containers/notebook/Dockerfile"
    assert settings["build"]["args"]["IMAGE"] == COMPOSE["services"]["cpu"]["image"].replace("${CPU_IMAGE:-cpu}", "cpu")
    assert settings["workspaceFolder"] in settings["workspaceMount"]


class Lab:
    """The notebook service of compose.yaml as a project of its own."""

    def __init__(self, folder: Path) -> None:
        self.project, self.folder, self.port = f"lab{os.getpid()}", folder, free_port()

    def __call__(self, *words: str) -> Result:
        env = {
            "NOTEBOOKS": str(self.folder), "DATA": str(self.folder), "NOTEBOOK_PORT": str(self.port),
            "JUPYTER_TOKEN": TOKEN, "ENV_FILE": str(self.folder / "none"), "RUN_AS": "54321:54321",
        }  # fmt: skip
        return run("docker", "compose", "--project-name", self.project, "--profile", "notebook", *words, env=env)

    def get(self, path: str, **headers: str) -> str:
        """Return what the server answers to this machine."""
        with urlopen(Request(f"http://127.0.0.1:{self.port}{path}", headers=headers), timeout=5) as answer:
            return str(answer.read().decode())


@pytest.fixture
def lab(docker: Docker, bound: Path) -> Iterator[Lab]:
    docker.tag("cpu")
    (bound / "x.ipynb").write_text(json.dumps(NOTEBOOK))
    (bound / "x.ipynb").chmod(0o666)
    one = Lab(bound)
    built = one("build", "notebook")
    if built.code and re.search("NameResolutionError|Temporary failure|Network is unreachable", built.out + built.err):
        pytest.skip("needs a package index")
    assert built.code == 0, built.err
    assert one("up", "--detach", "--no-build", "notebook").code == 0
    limit = time.monotonic() + 60
    while "is running at" not in one("logs").out:
        assert time.monotonic() < limit, one("logs").out
        time.sleep(0.5)
    yield one
    one("down", "--volumes")


@pytest.mark.docker
def test_jupyterlab_runs_a_notebook_as_an_ordinary_user(lab: Lab) -> None:
    with pytest.raises(HTTPError, match="403"):
        lab.get("/api/contents")
    assert "x.ipynb" in lab.get("/api/contents", Authorization=f"token {TOKEN}")
    published = run("docker", "port", f"{lab.project}-notebook-1").out.split()
    assert published[-1] == f"127.0.0.1:{lab.port}"
    words = ("jupyter", "nbconvert", "--execute", "--to", "notebook", "--inplace", "x.ipynb")
    done = lab("exec", "--no-TTY", "--env", "HOME=/tmp/reference-training-54321", "notebook", *words)
    assert done.code == 0, done.err
    cell = json.loads((lab.folder / "x.ipynb").read_text())["cells"][0]
    assert cell["outputs"][0]["text"] == ["0.0 54321\n"]
    planned = lab("exec", "--no-TTY", "--env", "LAUNCH_QUIET=1", "notebook", "entrypoint", "run", "x.ipynb")
    assert planned.out == "0.0 54321\n", "the image has what a notebook needs as a script too"


@pytest.mark.docker
def test_browser_sees_jupyterlab(lab: Lab) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    page = f"http://127.0.0.1:{lab.port}/lab?token={TOKEN}"
    words = (chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom", page)
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False).stdout
    assert "<title>JupyterLab" in shown
    assert "jp-Launcher" in shown


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
        run(*compose, "up", "--exit-code-from=node0", env=env).succeeded()
        ranks = json.loads((runs / "two/ranks.json").read_text())
        assert [(rank["rank"], rank["local_rank"]) for rank in ranks] == [(0, 0), (1, 0)], "each on a node of its own"
        assert "for trainer" in run(*compose, "logs", "node1", env=env).out
    finally:
        run(*compose, "down", env=env)
