"""Find the shared libraries that can be preloaded, and check that they match this machine."""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from msgspec import Struct

from entrypoint.core.files import open_regular

# Debian's libtcmalloc-minimal4 has no unversioned file name without its -dev package. Therefore
# torch.backends.xeon.run_cpu, which needs exactly libtcmalloc.so, does not find it.
LIBRARY_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "tcmalloc": ("libtcmalloc_minimal.so*", "libtcmalloc.so*"),
    "jemalloc": ("libjemalloc.so*",),
    "intel": ("libiomp5.so",),
}
INSTALL_HINTS: Mapping[str, str] = {
    "tcmalloc": "Debian's libtcmalloc-minimal4",
    "jemalloc": "Debian's libjemalloc2",
    "intel": "the Python package intel-openmp",
}
# How the names of all these files begin: the libraries' folders have thousands of others.
NAME_STARTS = tuple({pattern.partition(".so")[0] for patterns in LIBRARY_PATTERNS.values() for pattern in patterns})
# ELF e_machine (System V ABI) by what uname(2) calls the architecture.
ELF_MACHINES: Mapping[str, int] = {"x86_64": 62, "aarch64": 183, "ppc64le": 21, "riscv64": 243}


class Library(Struct, frozen=True):
    """A library: `path` is None if no file fits, and `why` gives the searched folders or the problem."""

    name: str
    path: str | None
    why: str


def read_libraries(root: Path, prefix: Path, architecture: str | None = None) -> tuple[Library, ...]:
    """Find every library of LIBRARY_PATTERNS in `prefix` (the virtual environment) and in the folders under `root`."""
    architecture = architecture or platform.machine()
    folders = library_folders(root, prefix, architecture)
    names = {folder: list_names(folder) for folder in folders}
    return tuple(find(name, names, architecture) for name in LIBRARY_PATTERNS)


def library_folders(root: Path, prefix: Path, architecture: str) -> tuple[Path, ...]:
    """Return the folders to search: the environment's own first, then local, multiarch and plain system ones."""
    system = ("usr/local/lib", f"usr/lib/{architecture}-linux-gnu", "usr/lib64", "usr/lib")
    folders = (prefix / "lib", *(root / name for name in system))
    return tuple(folder for folder in folders if folder.is_dir())


def list_names(folder: Path) -> list[str]:
    """Return the names of a folder's files that may be one of the libraries, in order; none if it cannot be read."""
    try:
        return sorted(name for name in os.listdir(folder) if name.startswith(NAME_STARTS))
    except OSError:
        return []


def find(name: str, names: Mapping[Path, list[str]], architecture: str) -> Library:
    """Return the first file that fits, in the order of patterns and folders."""
    wrong: list[str] = []
    for pattern in LIBRARY_PATTERNS[name]:
        for folder, files in names.items():
            for file in files:
                if not fnmatch(file, pattern) or "debug" in file:
                    continue
                problem = find_preload_problem(folder / file, architecture)
                if not problem:
                    return Library(name, str(folder / file), f"found in {folder}")
                wrong.append(f"{folder / file} {problem}")
    missing = f"not in {', '.join(map(str, names)) or 'any library folder'}; {INSTALL_HINTS[name]} has it"
    return Library(name, None, "; ".join(wrong) or missing)


def find_preload_problem(path: Path, architecture: str) -> str:
    """Return why a file cannot be preloaded on this architecture, or an empty string."""
    if split_ld_preload(str(path)) != [str(path)]:
        return "has a blank or colon in its path, which LD_PRELOAD cannot hold"
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            head = file.read(20)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(head) < 20 or not head.startswith(b"\x7fELF"):
        return "is not a shared library"
    machine = struct.unpack("<H" if head[5] == 1 else ">H", head[18:20])[0]
    wanted = ELF_MACHINES.get(architecture)
    return f"is not for {architecture}" if wanted and machine != wanted else ""


def split_ld_preload(own_preload: str) -> list[str]:
    """Return the files of an LD_PRELOAD, which colons or spaces separate (ld.so(8))."""
    return own_preload.replace(":", " ").split()


def find_broken_preloads(own_preload: str) -> dict[str, str]:
    """Return the files of an LD_PRELOAD that the loader cannot load, each with its problem.

    A name without a slash, or with one of the loader's own tokens, is searched by the loader itself (ld.so(8)).
    """
    paths = [file for file in split_ld_preload(own_preload) if "/" in file and "$" not in file]
    problems = {file: find_preload_problem(Path(file), platform.machine()) for file in paths}
    return {file: problem for file, problem in problems.items() if problem}
