"""What the peers get wrong, each a test of ours, named after it (design, section 3)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from entrypoint.job.detect import Job, LauncherBinding
from entrypoint.machine.shared_libraries import read_libraries
from tests.conftest import (
    LAUNCH_LIMIT_S,
    PYTHON,
    Entrypoint,
    clean_environment,
    intel_openmp,
    needs_two_cores,
    paint,
    script,
)
from tests.factories import elf_header, make_machine, make_test_plan

TELL = """
    import json, os, sys
    reported = {name: os.environ.get(name) for name in sys.argv[1:]}
    open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(reported))
"""


def reported(entrypoint: Entrypoint, rank: int = 0) -> dict[str, str]:
    found: dict[str, str] = json.loads((entrypoint.folder / f"rank{rank}.json").read_text())
    return found


def test_run_cpu_finds_only_libtcmalloc_so_outside_multiarch(tmp_path: Path) -> None:
    file = tmp_path / "usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4.5.9"
    file.parent.mkdir(parents=True)
    file.write_bytes(elf_header(62))
    (found, *_) = read_libraries(tmp_path, tmp_path / "venv", "x86_64")
    assert found.path == str(file)


@pytest.mark.launch
def test_run_cpu_only_warns_of_a_preload_that_is_not_there(entrypoint: Entrypoint) -> None:
    result = entrypoint("run", "-m", "this", env={"LD_PRELOAD": "/no/such/libtcmalloc.so"})
    assert result.code == 3
    file = "/no/such/libtcmalloc.so"
    cause = f"LD_PRELOAD={file}: {file} cannot be read (No such file or directory). Correct or unset it."
    assert result.error_lines == [f"entrypoint: error: {cause}"]


@pytest.mark.launch
def test_run_cpu_without_activated_env_misses_intel_openmp(entrypoint: Entrypoint) -> None:
    library = intel_openmp()
    bare = ("env", "-i", f"HOME={entrypoint.home}", PYTHON, "-m", "entrypoint")
    made = json.loads(entrypoint("plan", "--json", "--openmp=intel", command=bare).out)
    assert made["environment"]["preload"][0] == str(library)


@pytest.mark.launch
def test_torchrun_ignores_cgroup_cpu_limit(
    entrypoint: Entrypoint, under_quota: Callable[[float], tuple[str, ...]]
) -> None:
    made = json.loads(entrypoint("plan", "--json", command=(*under_quota(1), PYTHON, "-m", "entrypoint")).out)
    assert sum(rank["threads"] for rank in made["ranks"]) == 1


@pytest.mark.launch
@pytest.mark.parametrize("openmp", ["intel", "gnu"])
def test_accelerate_overwrites_the_kmp_affinity_of_the_user(entrypoint: Entrypoint, openmp: str) -> None:
    """And sets it without the runtime that would read it."""
    if openmp == "intel":
        intel_openmp()
    script(entrypoint.folder, "x.py", TELL)
    result = entrypoint("run", "--openmp", openmp, "x.py", "KMP_AFFINITY", env={"KMP_AFFINITY": "scatter"})
    assert reported(entrypoint) == {"KMP_AFFINITY": "scatter"}
    assert "(set by you) KMP_AFFINITY=scatter" in result.err
    assert ("only Intel's OpenMP runtime reads it" in " ".join(result.err.split())) is (openmp == "gnu")
    entrypoint("run", "--openmp", openmp, "--cpu-binding=threads", "x.py", "KMP_AFFINITY", "OMP_PLACES")
    ours = reported(entrypoint)
    assert (ours["KMP_AFFINITY"] is not None, ours["OMP_PLACES"] is not None) == (openmp == "intel", openmp == "gnu")


def test_srun_gives_a_rank_one_cpu_without_warning() -> None:
    job = Job("srun", 0, 1, 0, 1, cpu_binding=LauncherBinding.USER, granted_cpus=8, node_cpus=8)
    (warning,) = make_test_plan(make_machine(1, online=8), job=job).warnings
    assert "srun gave this rank 1 of the 8 CPUs" in warning
    assert "srun --cpus-per-task=8" in warning


def cpus_of_loaders(process: int) -> set[str]:
    """Return the CPU lists of a rank's threads that decode."""
    found = set()
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        if int(lines["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1:  # they alone block the signals that end a run
            found.add(lines["Cpus_allowed_list"])
    return found


def ranks_below(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the rank and process id of every process of a job in this folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            items = (path / "environ").read_text(errors="replace").split("\0")
            environ = dict(item.split("=", 1) for item in items if "=" in item)
            if "RANK" in environ and (path / "cwd").resolve() == folder.resolve():
                yield int(environ["RANK"]), int(path.name)
        except OSError:
            continue


def wait_for_loaders(folder: Path) -> dict[int, set[str]]:
    """Return for each of two ranks the CPU lists of its threads that decode."""
    deadline = time.monotonic() + LAUNCH_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ProcessLookupError):  # one has ended between two looks
            found = {rank: cpus_of_loaders(process) for rank, process in ranks_below(folder)}
            if len(found) == 2 and all(found.values()):
                return found
    raise AssertionError("two ranks with a loader each were never seen at once")


@pytest.mark.slow
@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize("bind", ["ranks", "threads"])
def test_loader_threads_stay_on_the_cores_of_their_rank(entrypoint: Entrypoint, tmp_path: Path, bind: str) -> None:
    """Two ranks on two cores, read from /proc while they train: what a rank decodes with is on the rank's own core."""
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    for split in ("train", "test"):
        paint(tmp_path / "images" / split, each=100)
    env = {
        "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(tmp_path / "images"), "TRAIN_DATA_SOURCE": "stream",
        "TRAIN_NUM_WORKERS": "1", "TRAIN_BATCH_SIZE": "4", "TRAIN_EPOCHS": "10000", "TRAIN_TENSORBOARD": "0",
        "LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_QUIET": "1", "LAUNCH_CPU_BINDING": bind,
    }  # fmt: skip
    mask = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    job = subprocess.Popen(
        ["taskset", "-c", mask, PYTHON, "-m", "entrypoint", "train"],
        cwd=entrypoint.folder,
        env={**clean_environment(), "HOME": str(entrypoint.home), **env},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert any(line.startswith("epoch 1/") for line in job.stdout), "trains"
        seen = wait_for_loaders(entrypoint.folder)
    finally:
        job.terminate()
        job.communicate(timeout=LAUNCH_LIMIT_S)
    assert all(len(cpus) == 1 for cpus in seen.values()), seen
    assert {cpus for one in seen.values() for cpus in one} == set(mask.split(","))
