"""Versions reported by files."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from entrypoint.machine.interpreter import Packages, read_packages, torch_cuda_version
from tests.machines import write

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
