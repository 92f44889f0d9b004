"""What a wheel of this project contains, and which interpreter its environment is made by."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from entrypoint.core.packages import PROJECT, package_version
from tests.conftest import script
from tests.wheel import build_wheel

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "containers/venv.sh"
KERNELS = ROOT / "train/kernels/kernels.sh"


@pytest.mark.launch
def test_wheel_contains_every_package(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for name in ("entrypoint", "train") for path in (ROOT / name).rglob("*.py")}
    modules |= {"entrypoint/py.typed", "train/py.typed", "train/data/digits.csv.gz", "train/data/digits_license.txt"}
    modules.add("train/report/report.html.jinja")
    modules |= {f"train/kernels/{name}" for name in ("winograd.cpp", "jpeg.cpp", "kernels.sh")}
    modules |= {f"train/recipes/{path.name}" for path in (ROOT / "train/recipes").iterdir()}
    assert {f"reference_training/_own/{name}" for name in modules} <= names
    tops = {name.split("/")[0] for name in names} - {name for name in names if ".dist-info" in name}
    assert {top for top in tops if "-" not in top} == {"reference_training", "reference_training.pth"}
    assert wheel.stat().st_size < 3 << 20
    assert any(name.endswith(".dist-info/licenses/train/data/digits_license.txt") for name in names)


def test_version_is_one() -> None:
    assert f'version = "{package_version(PROJECT)}"' in (ROOT / "pyproject.toml").read_text()


def test_no_package_is_hidden_by_gitignore() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs git and a clone")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = set(listed.stdout.splitlines())
    folders = [ROOT / name for name in ("entrypoint", "train", "tests", "benchmarks", "tools")]
    there = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py")}
    assert there == {file for file in files if file.split("/")[0] in {folder.name for folder in folders}}


def test_no_large_file_is_tracked() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs git and a clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    large = [path for path in files if path.is_file() and path.stat().st_size > 100_000]
    locks_and_data = ("containers/*.txt", "containers/*/*.txt", "train/data/*.gz", "tests/**/*.json")
    assert [path for path in large if not any(path.relative_to(ROOT).match(each) for each in locks_and_data)] == []


def interpreter(folder: Path, name: str, version: str, *, venv: bool = True) -> None:
    """Write a program that answers like a Python of that version."""
    folder.mkdir(exist_ok=True)
    answer = f'case "$2" in *version_info*) echo {version};; *ensurepip*) exit {0 if venv else 1};; esac'
    (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
    (folder / name).chmod(0o755)


def run_venv(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run venv.sh where PATH has the interpreters of a folder and what every system has, but no other Python."""
    tools = folder.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "dirname", "cat", "env", "uname"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name) or name)
    path = {"PATH": f"{folder}:{tools}"}
    return subprocess.run(
        ["bash", str(VENV), *words], env={**path, **env}, cwd=folder.parent, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("there", "machine", "stack", "chosen"),
    [
        ({"python3.11": "3.11"}, "x86_64", "", "python3.11, cuda"),
        ({"python3.11": "3.11", "python3.12": "3.12"}, "x86_64", "", "python3.12, cuda"),
        ({"python3": "3.14", "python3.12": "3.12"}, "x86_64", "", "python3, cuda"),
        ({"python": "3.12"}, "x86_64", "cuda", "python, cuda"),
        ({"python3.13": "3.13"}, "aarch64", "", "python3.13, cuda"),
        ({"python3": "3.13", "python3.11": "3.11"}, "x86_64", "cpu-intel", "python3, cpu-intel"),
        ({"python3": "3.14", "python3.12": "3.12"}, "x86_64", "cpu-intel", "python3.12, cpu-intel"),
    ],
)
def test_newest_supported_python_is_used(
    tmp_path: Path, there: dict[str, str], machine: str, stack: str, chosen: str
) -> None:
    for name, version in there.items():
        interpreter(tmp_path / "bin", name, version)
    script(tmp_path / "bin", "uname", f"#!/bin/sh\necho {machine}\n").chmod(0o755)
    found = run_venv(tmp_path / "bin", "--python", STACK=stack)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{chosen}\n", "")


@pytest.mark.parametrize(
    ("there", "env", "said"),
    [
        ({}, {}, "no Python 3.11 to 3.14 on PATH. Install one"),
        ({"python3": "3.9"}, {}, "no Python 3.11 to 3.14 on PATH. Install one"),
        ({"python3": "3.12"}, {"PYTHON": "python3.99"}, "PYTHON=python3.99: no such interpreter. Set PYTHON"),
        ({"python3": "3.10"}, {"PYTHON": "python3"}, "PYTHON=python3: is Python 3.10. Set PYTHON"),
        ({"python3": "3.14"}, {"STACK": "cpu-intel"}, "no Python 3.11 to 3.13 on PATH. Install one"),
        (
            {"python3": "3.14"},
            {"STACK": "cpu-intel", "PYTHON": "python3"},
            "PYTHON=python3: is Python 3.14. Set PYTHON to Python 3.11 to 3.13.",
        ),
        (
            {"python3": "3.12"},
            {"STACK": "cpu"},
            "STACK=cpu: no such stack. Use cuda, which is current torch, or cpu-intel",
        ),
    ],
)
def test_missing_python_is_one_line(tmp_path: Path, there: dict[str, str], env: dict[str, str], said: str) -> None:
    (tmp_path / "bin").mkdir()
    for name, version in there.items():
        interpreter(tmp_path / "bin", name, version)
    result = run_venv(tmp_path / "bin", ".venv", **env)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert said in result.stderr


def test_python_without_venv_is_one_line(tmp_path: Path) -> None:
    interpreter(tmp_path / "bin", "python3.12", "3.12", venv=False)
    result = run_venv(tmp_path / "bin", ".venv")
    assert result.returncode == 2
    assert result.stderr == (
        "venv.sh: python3.12 has no venv module. Install it (Debian: apt install python3.12-venv).\n"
    )


@pytest.mark.launch
def test_clone_in_a_path_with_a_blank_works(tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    shutil.copytree(
        ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache"), symlinks=True
    )
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/entrypoint").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m entrypoint "$@"\n')
    (clone / ".venv/bin/entrypoint").chmod(0o755)
    (clone / ".venv/installed").touch()
    environ = {**os.environ, "PYTHONPATH": str(clone)}
    done = subprocess.run(["make", "plan"], cwd=clone, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan: " in done.stdout


NO_JPEG, NO_WINOGRAD = "no JPEG kernel, Pillow decodes", "no Winograd kernel, torch computes convolutions"


@pytest.mark.parametrize(
    ("compiler", "missing"),
    [
        (
            "no-such-compiler",
            (
                f"{NO_JPEG}: no no-such-compiler (Debian: apt install g++ libjpeg-dev)",
                f"{NO_WINOGRAD}: no no-such-compiler (Debian: apt install g++)",
            ),
        ),
        ("true", (f"{NO_JPEG}: the installed Pillow brings no libjpeg", f"{NO_WINOGRAD}: true failed")),
    ],
)
def test_missing_compiler_is_one_line_a_kernel(tmp_path: Path, compiler: str, missing: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    command = ["bash", KERNELS, tmp_path / "venv/bin/python", ROOT]
    env = {**os.environ, "CXX": compiler}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines() == [f"kernels.sh: {line}" for line in missing]
