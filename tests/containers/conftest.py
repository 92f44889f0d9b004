"""Real engines for the images' tests: Docker with the built images, Apptainer with the built SIFs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result, clean_environment

IMAGES = ("cpu", "cuda", "cpu-intel")
# Of the images only these become SIFs in CI: cpu's differs from cuda's by labels alone.
SIFS = ("cuda", "cpu-intel")
# The folder of each image's locks: cpu and cuda share one.
STACKS = {"cpu": "cuda", "cuda": "cuda", "cpu-intel": "cpu-intel"}
LIMIT_S = 240
REPOSITORY = Path(__file__).resolve().parents[2]
SITE = "/opt/venv/lib/python3.13/site-packages"
# Suites that run next to these do not disturb them.
ALONE = ("--env", "LAUNCH_RESERVE_CPUS=0")


def run(*words: str | Path, env: Mapping[str, str] | None = None, limit_s: int = LIMIT_S) -> Result:
    """Run a command to its end."""
    done = subprocess.run(
        list(map(str, words)),
        env={**clean_environment(), **(env or {})},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def locked_version(image: str, package: str) -> str:
    """Return the version of a package that an image's locks have."""
    files = sorted((REPOSITORY / "containers" / STACKS[image]).glob("*.txt"))
    found = re.search(rf"^{package}==([\w.]+)", "\n".join(file.read_text() for file in files), re.MULTILINE)
    assert found, f"{package} is in no lock of {image}"
    return found[1]


@dataclass
class Docker:
    """Runs containers of the built images, and leaves none behind."""

    left: list[str] = field(default_factory=list)

    def tag(self, image: str) -> str:
        """Return an image's tag; skips the test where it is not built."""
        tag = f"reference-training:{image}"
        if run("docker", "image", "inspect", tag).code:
            pytest.skip(f"needs the image {tag}: make images")
        return tag

    def run(self, image: str, *program: str | Path, options: tuple[str, ...] = (), limit_s: int = LIMIT_S) -> Result:
        """Run a container of an image to its end, as a user would."""
        return run("docker", "run", "--rm", *ALONE, *options, self.tag(image), *program, limit_s=limit_s)

    def start(self, image: str, *program: str, options: tuple[str, ...] = ()) -> str:
        """Start a container in the background and return its id."""
        result = run("docker", "run", "--detach", *ALONE, *options, self.tag(image), *program).succeeded()
        self.left.append(result.out.strip())
        return self.left[-1]

    def logs(self, container: str) -> str:
        """Return what a container has printed so far."""
        result = run("docker", "logs", container)
        return result.out + result.err

    def inspect(self, image: str) -> Any:
        """Return what the engine knows of an image."""
        return json.loads(run("docker", "image", "inspect", self.tag(image)).out)[0]


@pytest.fixture
def docker() -> Iterator[Docker]:
    if not shutil.which("docker") or run("docker", "info").code:
        pytest.skip("needs a Docker Engine: `docker info` does not answer")
    engine = Docker()
    yield engine
    for container in engine.left:
        run("docker", "rm", "--force", container)


@pytest.fixture
def bound(tmp_path: Path) -> Path:
    """A folder that any user may write to, to be bound into a container."""
    folder = tmp_path / "bound"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in folder.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    return folder


@dataclass(frozen=True)
class Apptainer:
    """Runs SIFs. APPTAINER is the command, APPTAINER_SIFS the folder of the SIFs as it sees it.

    APPTAINER_WORK is the same folder as the tests see it, where that differs: Apptainer may have a root of its own.
    """

    command: tuple[str, ...]
    sifs: str
    work: Path

    def sif(self, image: str) -> str:
        """Return an image's SIF; skips the test where it is not built."""
        if not (self.work / f"{image}.sif").exists():
            pytest.skip(f"needs {self.work / image}.sif: make sif-{image}")
        return f"{self.sifs}/{image}.sif"

    def __call__(self, verb: str, image: str, *program: str, options: tuple[str, ...] = (), **env: str) -> Result:
        """Run `apptainer VERB` on an image's SIF in the work folder."""
        return run(*self.command, "--quiet", verb, *options, self.sif(image), *program, env=env)


@pytest.fixture
def apptainer() -> Apptainer:
    command = tuple(shlex.split(os.environ.get("APPTAINER", "apptainer")))
    if not shutil.which(command[0]):
        pytest.skip(f"needs Apptainer: {command[0]} is not here; APPTAINER names another command")
    sifs = os.environ.get("APPTAINER_SIFS", str(REPOSITORY / "sif"))
    return Apptainer(command, sifs, Path(os.environ.get("APPTAINER_WORK", sifs)))


@pytest.fixture
def place(apptainer: Apptainer) -> Path:
    """A new folder below the work folder, as the tests see it; all may write to it."""
    folder = apptainer.work / f"test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def inside(apptainer: Apptainer, path: Path) -> str:
    """Return a path below the work folder as Apptainer sees it."""
    return f"{apptainer.sifs}/{path.relative_to(apptainer.work)}"
