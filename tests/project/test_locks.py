"""The locks of containers/: hashes for every supported Python and architecture, and versions that fit."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CONTAINERS = Path(__file__).resolve().parents[2] / "containers"
STACKS = ("cuda", "cpu-intel")
LOCKS = sorted(
    [CONTAINERS / f"{name}.txt" for name in ("dev", "notebook", "sbom", "uv")]
    + [CONTAINERS / stack / f"{name}.txt" for stack in STACKS for name in ("requirements", "torch-pypi")]
)
UV = shutil.which("uv") or str(CONTAINERS.parent / ".venv/tools/bin/uv")
UNREACHABLE = re.compile("Failed to fetch|error sending request|dns error|[Cc]onnect")


def requirements(file: Path) -> dict[str, str]:
    """Return the requirements of a lock by package: the text up to the next one, hashes included."""
    found = re.findall(r"^([a-z0-9][\w.-]*)==(.*(?:\n[ ]+.*)*)", file.read_text(), re.MULTILINE)
    assert len(found) == len({name for name, _ in found}), "one version a package"
    return dict(found)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: str(path.relative_to(CONTAINERS)))
def test_every_requirement_has_a_hash(lock: Path) -> None:
    assert [name for name, text in requirements(lock).items() if "--hash=sha256:" not in text] == []


@pytest.mark.launch
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("stack", "python"),
    [("cuda", "3.11"), ("cuda", "3.13"), ("cuda", "3.14"), ("cpu-intel", "3.11"), ("cpu-intel", "3.13")],
)
def test_hashes_are_those_of_wheels_for(stack: str, python: str, machine: str, tmp_path: Path) -> None:
    """uv takes no wheel whose hash is not in the lock, so a dry run reads the hashes of each."""
    if not Path(UV).exists():
        pytest.skip("needs uv: make .venv/installed")
    files = [CONTAINERS / stack / "requirements.txt", CONTAINERS / stack / "torch-pypi.txt", CONTAINERS / "dev.txt"]
    words = [UV, "pip", "install", "--dry-run", "--require-hashes", "--no-deps", "--only-binary=:all:"]
    words += [f"--target={tmp_path}", f"--python-version={python}", f"--python-platform={machine}-manylinux_2_28"]
    words += [word for file in files for word in ("-r", str(file))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("needs a package index")
    assert done.returncode == 0, done.stderr
    names = set(re.findall(r"^ \+ ([\w-]+)==", done.stderr, re.MULTILINE))
    assert {"torch", "numpy", "pillow", "pytest"} <= names
    of_intel = {"nni", "intel-extension-for-pytorch"}
    assert names & of_intel == (of_intel if (stack, machine) == ("cpu-intel", "x86_64") else set())


def test_stacks_agree_but_for_torchs_family() -> None:
    """Tests on one image's versions then say something of the other's."""
    versions = [
        {name: text.split()[0] for name, text in requirements(CONTAINERS / stack / "requirements.txt").items()}
        for stack in STACKS
    ]
    shared = set(versions[0]) & set(versions[1])
    assert len(shared) > 60
    assert {name: versions[0][name] for name in shared} == {name: versions[1][name] for name in shared}


def test_nothing_is_of_one_architecture_unless_it_says_so() -> None:
    """What Debian calls its folders differs by architecture, so patterns of paths name none."""
    patterns = (CONTAINERS / "dpkg.excludes").read_text() + (CONTAINERS / "wheels.excludes").read_text()
    assert not re.search("x86.64|amd64|aarch64|arm64", patterns)
