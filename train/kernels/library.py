"""Where the compiled kernels are, and how they are loaded: the set-up compiles them, else their first use does."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

from entrypoint.core.console import log
from entrypoint.core.user_dirs import user_cache_dir

Name = Literal["jpeg", "winograd"]
# The package that each kernel was compiled for. Its library is next to that.
PACKAGES: dict[Name, str] = {"jpeg": "PIL", "winograd": "torch"}
Functions = TypeVar("Functions")
HERE = Path(__file__).resolve().parent
COMPILE_LIMIT_S = 120


def find_kernel(name: Name) -> Path | None:
    """Return the library of a kernel, compiled now if the set-up has not; None where it cannot be."""
    package = find_spec(PACKAGES[name])
    if package is None or package.origin is None:
        return None
    site = Path(package.origin).parents[1]
    file = f"reference_training_{name}.so"
    if (site / file).exists():
        return site / file
    cache = user_cache_dir(os.environ)
    path = compile_once(name, cache / "kernels" / identity(name, site) / file) if cache else None
    return path if path and path.exists() else None


def identity(name: Name, site: Path) -> str:
    """Return what a compiled kernel is for: its source, this interpreter, and the libraries of its package."""
    libraries = sorted(path.name for path in site.glob("pillow.libs/*")) if name == "jpeg" else []
    text = "\0".join((str(site), sys.version, *libraries)).encode("utf-8", "surrogateescape")
    return hashlib.sha256((HERE / f"{name}.cpp").read_bytes() + text).hexdigest()[:32]


def compile_once(name: Name, path: Path) -> Path | None:
    """Compile a kernel into the user's cache, unless somebody has tried before; other processes wait meanwhile."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (path.parent / "log").open("a+") as tried:
            fcntl.flock(tried, fcntl.LOCK_EX)
            if tried.tell():
                return path
            words = ["bash", str(HERE / "kernels.sh"), sys.executable, str(HERE.parents[1]), str(path.parent), name]
            done = subprocess.run(words, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
            text = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2] or "compiled"
            tried.write(f"{text}\n")
            log(f"the {name} kernel was compiled once, into {path.parent}" if path.exists() else text)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path


def load_kernel(name: Name, load: Callable[[Path], Functions]) -> Functions | None:
    """Return what `load` makes of a kernel's library, None where there is none that can be used."""
    path = find_kernel(name)
    try:
        return load(path) if path else None
    except (OSError, AttributeError):
        return None
