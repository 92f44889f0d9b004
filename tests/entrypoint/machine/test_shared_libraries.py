"""Libraries to preload, in built folders with real ELF headers."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from entrypoint.machine.shared_libraries import ELF_MACHINES, Library, find_broken_preloads, read_libraries
from tests.conftest import intel_openmp
from tests.factories import elf_header

X86, ARM = elf_header(62), elf_header(183)
ARM_OR_X86 = {62: 183, 183: 62}
MULTIARCH = "usr/lib/x86_64-linux-gnu"


def look(root: Path, files: dict[str, bytes], architecture: str = "x86_64") -> dict[str, Library]:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return {library.name: library for library in read_libraries(root, root / "venv", architecture)}


@pytest.mark.parametrize(
    ("files", "name", "found"),
    [
        ({f"{MULTIARCH}/libtcmalloc_minimal.so.4": X86}, "tcmalloc", f"{MULTIARCH}/libtcmalloc_minimal.so.4"),
        ({f"{MULTIARCH}/libtcmalloc.so.4.5.9": X86}, "tcmalloc", f"{MULTIARCH}/libtcmalloc.so.4.5.9"),
        ({"usr/lib64/libjemalloc.so.2": X86}, "jemalloc", "usr/lib64/libjemalloc.so.2"),
        ({"venv/lib/libiomp5.so": X86, "usr/lib/libiomp5.so": X86}, "intel", "venv/lib/libiomp5.so"),
        (
            {"usr/local/lib/libtcmalloc_minimal.so.4": ARM, f"{MULTIARCH}/libtcmalloc_minimal.so.4": X86},
            "tcmalloc",
            f"{MULTIARCH}/libtcmalloc_minimal.so.4",
        ),
    ],
)
def test_tcmalloc_is_found_under_any_library_name(
    tmp_path: Path, files: dict[str, bytes], name: str, found: str
) -> None:
    assert look(tmp_path, files)[name].path == str(tmp_path / found)


@pytest.mark.parametrize(
    ("content", "said"),
    [(ARM, "is not for x86_64"), (b"GROUP ( libc.so.6 )", "is not a shared library"), (b"", "is not a shared library")],
)
def test_unusable_library_file_is_reported(tmp_path: Path, content: bytes, said: str) -> None:
    library = look(tmp_path, {f"{MULTIARCH}/libtcmalloc.so.4": content})["tcmalloc"]
    assert library.path is None
    assert said in library.why


@pytest.mark.parametrize("name", ["a blank", "a:colon"])
def test_path_that_ld_preload_would_split_is_reported(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    library = look(folder, {f"{MULTIARCH}/libtcmalloc.so.4": X86})["tcmalloc"]
    assert library.path is None
    assert f"{folder / MULTIARCH}/libtcmalloc.so.4 has a blank or colon in its path" in library.why


def test_absent_library_reports_searched_paths_and_package(tmp_path: Path) -> None:
    library = look(tmp_path, {f"{MULTIARCH}/libtcmalloc_minimal_debug.so.4": X86})["tcmalloc"]
    assert library.path is None
    assert str(tmp_path / MULTIARCH) in library.why
    assert "libtcmalloc-minimal4" in library.why


def test_intel_openmp_is_found_without_activated_environment() -> None:
    library = intel_openmp()
    found = {library.name: library for library in read_libraries(Path("/"), Path(sys.prefix))}
    assert found["intel"].path == str(library)


def test_find_broken_preloads_reports_unloadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = ELF_MACHINES[platform.machine()]
    for name, content in {
        "good.so": elf_header(here),
        "other.so": elf_header(ARM_OR_X86[here]),
        "text.so": b"text",
    }.items():
        Path(name).write_bytes(content)
    assert find_broken_preloads(f"libfound.so:{tmp_path}/good.so ./good.so /usr/$LIB/x.so") == {}
    assert find_broken_preloads(f"{tmp_path}/other.so:./text.so:/no/such.so") == {
        f"{tmp_path}/other.so": f"is not for {platform.machine()}",
        "./text.so": "is not a shared library",
        "/no/such.so": "cannot be read (No such file or directory)",
    }


def test_preload_that_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.so")
    assert find_broken_preloads(f"{tmp_path}/fifo.so:/dev/zero") == {
        f"{tmp_path}/fifo.so": "cannot be read (Not a regular file)",
        "/dev/zero": "cannot be read (Not a regular file)",
    }
