"""The wheel in environments of others: it brings one name, and each side's imports find its own modules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import clean_environment, launcher, needs_two_cores, script
from tests.wheel import ROOT, build_wheel

pytestmark = pytest.mark.launch
TWO = {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1", "LAUNCH_QUIET": "1"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel and msgspec alone; its path has a blank."""
    folder = tmp_path_factory.mktemp("an environment")
    wheel = build_wheel(folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    import msgspec

    (site,) = folder.glob("venv/lib/python3*/site-packages")
    shutil.copytree(Path(msgspec.__file__).parent, site / "msgspec")
    return folder / "venv"


def run(environment: Path, folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in clean_environment().items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return subprocess.run(
        [environment / "bin/entrypoint", *words],
        cwd=folder, env={**clean, "HOME": str(folder), "PATH": "/usr/bin:/bin", **TWO, **environ},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


WHO = "import os, sys; print(os.environ['RANK'], sys.executable, 'entrypoint' in sys.modules)"


@needs_two_cores
def test_launcher_alone_starts_ranks_and_names_what_it_lacks(environment: Path, tmp_path: Path) -> None:
    script(tmp_path, "x.py", WHO)
    python = environment / "bin/python"
    result = run(environment, tmp_path, "run", "x.py", LAUNCH_PYTHON=str(python))
    assert sorted(result.stdout.splitlines()) == [f"{rank} {python} False" for rank in (0, 1)], result.stderr
    for words in (["train"], ["plan"], ["report", "x"], ["predict", "a", "b"]):
        result = run(environment, tmp_path, *words)
        assert (result.returncode, result.stdout) == (3, "")
        assert "torch, which is not installed here. Run: pip install 'reference-training[train]'" in result.stderr
    result = run(environment, tmp_path, "selftest")
    assert (result.returncode, "`entrypoint doctor` checks this installation" in result.stderr) == (3, True)


@needs_two_cores
def test_script_runs_in_the_active_environment(environment: Path, tmp_path: Path) -> None:
    script(tmp_path, "x.py", "import torch\n" + WHO)
    active = {"VIRTUAL_ENV": sys.prefix}
    result = run(environment, tmp_path, "run", "x.py", **active)
    python = f"{sys.prefix}/bin/python"
    assert sorted(result.stdout.splitlines()) == [f"{rank} {python} False" for rank in (0, 1)], result.stderr
    planned = run(environment, tmp_path, "plan", "run", "x.py", **active)
    assert "the active environment" in planned.stdout
    assert "torch 2" in " ".join(planned.stdout.split())


OURS = ("entrypoint", "train", "json", "msgspec", "torch", "reference_training")
NOISY = "import os, sys\nopen(os.path.join(os.path.dirname(__file__), 'ran-' + __name__), 'a').write(sys.argv[0])\n"


@needs_two_cores
@pytest.mark.parametrize("on_path", [False, True])
def test_files_of_the_user_are_imported_by_their_script_alone(environment: Path, tmp_path: Path, on_path: bool) -> None:
    folder = tmp_path / "theirs" if on_path else tmp_path
    folder.mkdir(exist_ok=True)
    for name in OURS:
        (folder / f"{name}.py").write_text(NOISY)
    imports = ", ".join(name for name in OURS if name != "json")
    script(tmp_path, "x.py", f"import {imports}\nprint(entrypoint.__file__, train.__file__)")
    path = {"PYTHONPATH": str(folder)} if on_path else {}
    for words in (["plan", "run", "x.py"], ["doctor"], ["settings"], ["verify"]):
        run(environment, tmp_path, *words, **path)
        assert not list(folder.glob("ran-*")), words
    result = run(environment, tmp_path, "run", "x.py", LAUNCH_PYTHON=str(environment / "bin/python"), **path)
    assert result.stdout == f"{folder}/entrypoint.py {folder}/train.py\n" * 2, result.stderr
    assert {file.read_text() for file in folder.glob("ran-*")} == {"x.pyx.py"}
    assert os.access(environment / "bin/entrypoint", os.X_OK)


@needs_two_cores
def test_packages_of_our_names_stay_theirs(environment: Path, tmp_path: Path) -> None:
    """PyPI has an `entrypoint` and a `train`."""
    (site,) = environment.glob("lib/python3*/site-packages")
    for name in ("entrypoint", "train"):
        (site / name).mkdir()
        script(site / name, "__init__.py", f"WHOSE = 'PyPI {name}'")
    script(tmp_path, "x.py", "import entrypoint, train\nprint(entrypoint.WHOSE, train.WHOSE)")
    try:
        result = run(environment, tmp_path, "run", "x.py", LAUNCH_PYTHON=str(environment / "bin/python"))
        assert (result.returncode, result.stdout) == (0, "PyPI entrypoint PyPI train\n" * 2), result.stderr
        said = run(environment, tmp_path, "doctor").stdout
        assert [f"package {name}" in said for name in ("entrypoint", "train")] == [True, True], said
    finally:
        for name in ("entrypoint", "train"):
            shutil.rmtree(site / name)


@needs_two_cores
@pytest.mark.openmpi
def test_ranks_of_mpirun_start_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    mpirun = launcher("mpirun.openmpi", "mpirun", said="Open MPI")
    script(tmp_path, "x.py", WHO)
    words = [
        mpirun,
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        str(environment / "bin/entrypoint"),
        "run",
        "x.py",
    ]
    clean = clean_environment() | {"LAUNCH_QUIET": "1", "LAUNCH_PYTHON": str(environment / "bin/python")}
    result = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False, timeout=120)
    python = environment / "bin/python"
    assert sorted(result.stdout.splitlines()) == [f"{rank} {python} False" for rank in (0, 1)], result.stderr


@pytest.fixture(scope="module")
def with_torch(environment: Path) -> Path:
    """Return the environment's Python, with torch and the rest of the environment that runs the tests."""
    python = environment / "bin/python"
    (site,) = environment.glob("lib/python3*/site-packages")
    theirs = subprocess.run(
        [sys.executable, "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (site / "torch_of_the_tests.pth").write_text(f"{theirs}\n")
    return python


# Each kind of image gives the same answer, and a file of the user's keeps its name.
MORE = """
import numpy as np
from PIL import Image
kinds = ("cat.jpg", open("cat.jpg", "rb").read(), Image.open("cat.jpg").convert("RGB"))
first, *others = (model.predict([image]) for image in kinds)
print(first == others[0], len(others), model.training)
try:
    import train
except SystemExit as error:
    print("import train:", error)
"""
THEIRS = {"train.py": "raise SystemExit('theirs')", "entrypoint.py": "raise SystemExit('theirs')"}


def test_examples_of_the_page_run_from_the_wheel(with_torch: Path, tmp_path: Path) -> None:
    """docs/python.md, block by block in one process, as a notebook would."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", (ROOT / "docs/python.md").read_text(), re.MULTILINE)
    pixels = np.random.default_rng(0)
    for index in range(60):
        path = tmp_path / "photos" / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    for name in ("cat", "dog"):
        Image.open(path).save(tmp_path / f"{name}.jpg")
    for name, text in THEIRS.items():
        script(tmp_path, name, text)
    program = "\n".join([*(textwrap.dedent(block) for block in blocks), MORE])
    script(tmp_path, "x.py", "import sys; sys.path.append('.')\n" + program)
    clean = {**clean_environment(), "HOME": str(tmp_path), "LAUNCH_QUIET": "1"}
    done = subprocess.run([with_torch, "x.py"], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    said = done.stdout.splitlines()
    assert "('cat', 'dog')" in said
    assert any(line.startswith(f"{tmp_path}/runs/pets ") for line in said)
    assert said[-3].startswith("2 --batch-size=0: not a whole number from 1")
    assert said[-2:] == ["True 2 False", "import train: theirs"]
