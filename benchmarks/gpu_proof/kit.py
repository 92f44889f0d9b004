"""What a bare GPU machine lacks, in one folder: `make gpu-proof-kit` packs it, `make gpu-proof` unpacks it there.

    wheels of WHEELS              for the machine's Python and platform
    include/                      libjpeg's headers, with which the JPEG kernel is compiled there
    cifar10-images.tar.xz         if CIFAR10_IMAGES names this archive
    airbench94.py, timm_train.py  if AIRBENCH94 and TIMM_TRAIN name these scripts, which are not part of this project

Imports nothing but the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "gpu-proof-kit"
LOCK = ROOT / "containers/cuda/requirements.txt"
# A package, and its version where the lock has none.
WHEELS = {"msgspec": "", "nvidia-ml-py": "", "torchao": "0.18.0"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
HEADERS = ("jpeglib.h", "jmorecfg.h", "jerror.h", "jconfig.h")
# What else travels: the variable that names a file, and its name in the kit.
FILES = {
    "CIFAR10_IMAGES": "cifar10-images.tar.xz",
    "AIRBENCH94": "airbench94.py",
    "TIMM_TRAIN": "timm_train.py",
}
MAX_MIB = 50


def locked_version(package: str, lock: str) -> str:
    """Return the version of a package in the text of a lock; raises ValueError if there is none."""
    found = re.search(rf"^{re.escape(package)}==([^\s\\;]+)", lock, re.MULTILINE)
    if not found:
        raise ValueError(f"{package}: not in {LOCK.name}")
    return found[1]


def pack(folder: Path, python: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Fill a folder for a machine with this version of Python; yield a line for each thing; needs a network."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "include").mkdir(parents=True)
    lock = LOCK.read_text()
    names = [f"{name}=={fixed or locked_version(name, lock)}" for name, fixed in WHEELS.items()]
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={python}"]
    words += ["--implementation=cp", *(f"--platform={name}" for name in PLATFORMS), f"--dest={folder}"]
    subprocess.run([sys.executable, "-m", "pip", *words, *names], check=True)
    yield f"wheels for Python {python}: {', '.join(names)}"
    headers = [path for name in HEADERS for path in sorted(Path("/usr/include").glob(f"**/{name}"))[:1]]
    for path in headers:
        shutil.copy(path, folder / "include")
    yield f"headers: {', '.join(path.name for path in headers) or 'none; Debian: apt install libjpeg-dev'}"
    for variable, name in FILES.items():
        path = Path(environ.get(variable, ""))
        if path.is_file():
            shutil.copy(path, folder / name)
        yield f"{variable}: {name if path.is_file() else 'names no file; stays out'}"


def size_mib(folder: Path) -> float:
    """Return the size of all files of a folder (MiB)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def unpack(folder: Path) -> Iterator[str]:
    """Install what this Python lacks of a kit, and name the rest to processes; yield what was done."""
    if not folder.is_dir():
        return
    if not Path(sys.prefix).is_relative_to(ROOT):  # this clone's own environment has all of it
        yield from install(folder)
    for name, value in variables(folder, os.environ).items():
        os.environ[name] = value
        yield f"{name}={value}"


def install(folder: Path) -> Iterator[str]:
    """Install the wheels that this Python lacks, and what containers/venv.sh adds to an environment.

    That is this folder on its path and the hook of the ranks, so isolated interpreters find them, which ignore
    PYTHONPATH.
    """
    wheels = [path for path in sorted(folder.glob("*.whl")) if not is_installed(path)]
    if wheels:
        words = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        done = subprocess.run([sys.executable, *words, *map(str, wheels)], check=False, capture_output=True, text=True)
        problem = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        yield f"wheels {', '.join(path.name for path in wheels)}: {problem if done.returncode else 'installed'}"
    libraries = Path(sysconfig.get_path("purelib"))
    hook = ROOT / "reference_training/reference_training.pth"
    if not (libraries / hook.name).exists() and os.access(libraries, os.W_OK):
        (libraries / "checkout_of_reference_training.pth").write_text(str(ROOT))
        shutil.copy(hook, libraries)
        yield f"{ROOT.name} is on the path of {sys.executable}"
    site.addsitedir(str(libraries))
    importlib.invalidate_caches()


def is_installed(wheel: Path) -> bool:
    """Return whether this Python has the package of a wheel, in any version."""
    try:
        version(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        return False
    return True


def variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name what a kit has; those that are set stay."""
    there = {name: folder / file for name, file in FILES.items()} | {"CPLUS_INCLUDE_PATH": folder / "include"}
    return {name: str(path) for name, path in there.items() if not environ.get(name) and path.exists()}


def main() -> None:
    """Pack the kit; end with 1 if it is too large."""
    parser = argparse.ArgumentParser(prog="make gpu-proof-kit")
    parser.add_argument("--python", default="3.12", help="the GPU machine's version of Python")
    parser.add_argument("--kit", type=Path, default=KIT)
    args = parser.parse_args()
    for line in pack(args.kit, args.python, os.environ):
        print(line, flush=True)
    size = size_mib(args.kit)
    print(f"{args.kit.name}: {size:.1f} MiB of {MAX_MIB}")
    if size > MAX_MIB:
        sys.exit(f"{args.kit.name}: too large. Leave the images out, or take fewer.")


if __name__ == "__main__":
    main()
