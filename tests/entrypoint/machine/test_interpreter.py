"""Which Python runs a user's script, and what its packages are by their files."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.machine import interpreter
from entrypoint.machine.interpreter import Packages, find_interpreter, read_packages, torch_cuda_version
from tests.conftest import refusal
from tests.machines import write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two environments, one of them with torch, and a Python of the system."""
    for name in ("bare", "full", "system"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").symlink_to(sys.executable)  # in a container nothing in /tmp may be executed
    (tmp_path / "full/lib/python3.11/site-packages/torch").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "environ", "has_torch", "chosen"),
    [
        ("bare/bin/python", {"VIRTUAL_ENV": "full"}, True, "bare"),
        ("", {"VIRTUAL_ENV": "bare", "CONDA_PREFIX": "full"}, True, "bare"),
        ("", {"CONDA_PREFIX": "bare", "CONDA_DEFAULT_ENV": "mine"}, True, "bare"),
        ("", {"CONDA_PREFIX": "bare", "CONDA_DEFAULT_ENV": "base"}, True, ""),
        ("", {"CONDA_PREFIX": "full", "CONDA_DEFAULT_ENV": "base"}, True, "full"),
        ("", {"CONDA_PREFIX": "bare", "CONDA_DEFAULT_ENV": "base"}, False, "bare"),
        ("", {"VIRTUAL_ENV": "gone"}, True, ""),
        ("", {}, True, ""),
        ("", {}, False, "system"),
    ],
)
def test_first_of_these_runs_the_script(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    environ: dict[str, str],
    has_torch: bool,
    chosen: str,
) -> None:
    monkeypatch.setattr(interpreter, "find_spec", lambda _: object() if has_torch else None)
    environ = {
        name: str(folder / value) if name in interpreter.ACTIVE_VARS else value for name, value in environ.items()
    }
    python = find_interpreter(
        str(folder / wanted) if wanted else "", "LAUNCH_PYTHON", {"PATH": f"{folder}/system/bin", **environ}
    )
    assert python.path == (f"{folder}/{chosen}/bin/python" if chosen else sys.executable)
    assert python.prefix == (folder / chosen if chosen else Path(sys.prefix))


def test_own_environment_is_no_other_one() -> None:
    assert find_interpreter("", "", {"VIRTUAL_ENV": sys.prefix}).path == sys.executable


def test_python_that_is_not_there_is_named() -> None:
    refusal(
        find_interpreter,
        "x",
        "LAUNCH_PYTHON=x",
        {"PATH": "/usr/bin"},
        match="LAUNCH_PYTHON=x: no such program",
        code=ExitCode.MACHINE,
    )


SITE = "lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'\ngit_version = 'x'", "12.8"),
        ("cuda: str | None = None", ""),
        ("cuda = None", ""),
    ],
)
def test_torch_cuda_version_reads_version_file(tmp_path: Path, text: str, cuda: str) -> None:
    write(tmp_path, {"version.py": text})
    assert torch_cuda_version(tmp_path / "version.py") == cuda
    assert torch_cuda_version(tmp_path / "nowhere.py") is None


def test_read_packages_reads_metadata_folders(tmp_path: Path) -> None:
    write(
        tmp_path, {f"{SITE}/torch-2.13.0+cpu.dist-info/METADATA": "", f"{SITE}/torchmetrics-1.0.dist-info/METADATA": ""}
    )
    assert read_packages(tmp_path) == Packages({"torch": "2.13.0+cpu"}, None)


def test_read_packages_matches_importlib_metadata() -> None:
    found = read_packages(Path(sys.prefix)).versions
    for name in ("torch", "torchvision"):
        try:
            assert found[name] == version(name)
        except PackageNotFoundError:
            assert name not in found


@pytest.mark.parametrize(
    ("line", "required"),
    [
        ("Requires-Dist: torch (==2.8.0)", "2.8.0"),
        ("Requires-Dist: torch==2.15.0", "2.15.0"),
        ("Requires-Dist: torch >=2.4", ""),
        ("Requires-Dist: torchgen==1.0", ""),
        ("", ""),
    ],
)
def test_read_packages_reads_the_torch_that_torchvision_needs(tmp_path: Path, line: str, required: str) -> None:
    write(tmp_path, {f"{SITE}/torchvision-0.29.2.dist-info/METADATA": f"Requires-Dist: numpy\n{line}\n"})
    assert dict(read_packages(tmp_path).needs_torch) == ({"torchvision": required} if required else {})
