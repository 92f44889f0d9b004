"""Hours in small: epoch after epoch, each with a checkpoint, memory and open files stay what they are.

60 epochs by default, SOAK_EPOCHS=200 for as many as the project promises. The memory of a streamed run is compared
1 and 4 minutes after its first checkpoint, because CI has no time for more; the promise is about SOAK_MINUTES=2,10.
Runs that are killed at random moments, over and over, end with the weights of an undisturbed one: 20 kills by default,
KILLS=100 for as many as the project promises.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest

from tests.conftest import CORES, LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, paint
from tests.processes import own_memory_mib, wait_until
from tests.train.given import SMALL, TWO_RANKS_WHERE_THEY_FIT, imagefolder
from tests.train.started import Started

pytestmark = pytest.mark.launch
EPOCHS = int(os.environ.get("SOAK_EPOCHS", "60"))
WARM, GROWTH = EPOCHS // 4, 0.03
EARLY_MINUTES, LATE_MINUTES = map(float, os.environ.get("SOAK_MINUTES", "1,4").split(","))
STREAM_GROWTH = 0.1
# A median of so many samples, a second apart: a checkpoint that is being written takes memory for a moment.
SAMPLES = 15
CLASSES, EACH = 10, 1000


@pytest.mark.slow
def test_memory_and_open_files_are_flat(entrypoint: Entrypoint) -> None:
    run = Started(entrypoint, {"TRAIN_DATASET": "digits", "TRAIN_EPOCHS": str(EPOCHS), "TRAIN_KEEP_CHECKPOINTS": "3"})
    process, resident_mb, files = Path(f"/proc/{run.process.pid}"), list[float](), list[int]()
    for epoch in range(1, EPOCHS):
        run.wait_for(f"epoch {epoch}/{EPOCHS}  train loss")
        found = re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())
        assert found
        resident_mb.append(int(found[1]) / 1024)
        files.append(len(list((process / "fd").iterdir())))
    run.ended_with(0)
    early, late = median(resident_mb[WARM : 2 * WARM]), median(resident_mb[-WARM:])
    print(f"{EPOCHS} epochs: {early:.1f} MB resident, then {late:.1f}; {min(files)} to {max(files)} open files")
    assert late < early * (1 + GROWTH)
    assert min(files[-WARM:]) <= min(files[:WARM])
    assert max(files) <= min(files) + 2  # while a checkpoint is written, which no look can be sure to miss
    assert len(list((entrypoint.folder / "runs/latest/checkpoint").glob("step-*"))) in (3, 4)  # the best is one more


def link_images(folder: Path, classes: int, each: int) -> Path:
    """Make many paths of few images: the memory of a run depends on the paths, not on what is in the files."""
    for split, count in (("train", each), ("test", 10)):
        paint(folder / split, classes=classes, each=1, size=(32, 32))
        for first in sorted((folder / split).glob("*/*.jpg")):
            for index in range(1, count):
                (first.parent / f"image-{index:06}.jpg").hardlink_to(first)
    return folder


@pytest.mark.slow
def test_memory_of_a_streamed_run_is_flat(entrypoint: Entrypoint, tmp_path: Path) -> None:
    folder = link_images(tmp_path / "images", CLASSES, EACH)
    settings = imagefolder(
        folder, TRAIN_DATA_SOURCE="stream", TRAIN_NUM_WORKERS="2", TRAIN_BATCH_SIZE="64", TRAIN_EPOCHS="100000",
        TRAIN_PROGRESS="off",
    )  # fmt: skip
    run = Started(entrypoint, settings | TWO_RANKS_WHERE_THEY_FIT)
    wait_until(lambda: any(entrypoint.folder.glob("runs/*/checkpoint/step-*")))
    began = time.monotonic()

    def memory_after(minutes: float) -> float:
        time.sleep(max(0.0, began + 60 * minutes - time.monotonic()))
        found = []
        for _ in range(SAMPLES):
            assert run.process.poll() is None, run.ended()
            found.append(own_memory_mib(run.process.pid))
            time.sleep(1)
        return median(found)

    early, late = memory_after(EARLY_MINUTES), memory_after(LATE_MINUTES)
    print(f"{early:.0f} MiB after {EARLY_MINUTES:g} minutes, {late:.0f} after {LATE_MINUTES:g}")
    run.preempted()
    assert late < early * (1 + STREAM_GROWTH)


KILLS = int(os.environ.get("KILLS", "20"))
# Kills of one run before it may go on to its end.
SERIES = 5
MARK = "KILLED_AT_RANDOM"
KINDS = [(1, "ddp"), (2, "ddp"), (2, "fsdp")] if CORES > 1 else [(1, "ddp")]
LONG = SMALL | {"TRAIN_EPOCHS": "40", "TRAIN_TENSORBOARD": "0", "TRAIN_EMA_DECAY": "0.9", "LAUNCH_QUIET": "1"}


def marked(mark: str) -> Iterator[tuple[int, bool]]:
    """Yield each process of a run, and whether it is a rank."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                environ = (folder / "environ").read_bytes().split(b"\0")
                if f"{MARK}={mark}".encode() in environ:
                    yield int(folder.name), any(one.startswith(b"RANK=") for one in environ)


def kill(victim: str, process: subprocess.Popen[str], mark: str, draw: random.Random) -> None:
    """Kill one process of the run, or all."""
    if victim == "launcher":
        process.kill()
        return
    found = list(marked(mark))
    ranks = [pid for pid, rank in found if rank]
    for pid in [draw.choice(ranks)] if victim == "rank" and ranks else [pid for pid, _ in found]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def disturb(entrypoint: Entrypoint, env: dict[str, str], draw: random.Random) -> str:
    """Start or go on with a run and kill it at a random moment; return who was killed, nothing if it had ended."""
    mark, victim = str(draw.random()), draw.choice(("rank", "launcher", "everything"))
    process = subprocess.Popen(
        [PYTHON, "-m", "entrypoint", "train"],
        cwd=entrypoint.folder,
        env={**clean_environment(), **env, "HOME": str(entrypoint.home), MARK: mark, "TRAIN_RESUME": "auto"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    if draw.random() < 0.8:  # else during its start
        process.stdout.readline()
    time.sleep(draw.uniform(0, 1.2))
    ended = process.poll() is not None
    kill(victim, process, mark, draw)
    process.communicate(timeout=LAUNCH_LIMIT_S)
    until = time.monotonic() + LAUNCH_LIMIT_S
    while any(marked(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not list(marked(mark)), "processes are left"
    return "" if ended else victim


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallelism"), KINDS)
def test_run_killed_repeatedly_ends_as_if_uninterrupted(entrypoint: Entrypoint, ranks: int, parallelism: str) -> None:
    env = LONG | {"LAUNCH_NPROC_PER_NODE": str(ranks), "TRAIN_PARALLELISM": parallelism}
    whole = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "whole", "TRAIN_CHECKPOINT_EVERY": "0"})
    draw, killed, amid_saving = random.Random(ranks), Counter[str](), 0
    for series in itertools.count():
        if killed.total() - killed[""] >= KILLS // len(KINDS):  # a kill that comes after the run's end is made up for
            break
        name = {"TRAIN_RUN_NAME": f"killed{series}"}
        for _ in range(SERIES):
            killed[disturb(entrypoint, env | name, draw)] += 1
            amid_saving += len(list((entrypoint.folder / f"runs/killed{series}/checkpoint").glob(".step-*")))
        ended = entrypoint.train(env=env | name | {"TRAIN_RESUME": "auto"})
        assert ended["weights_sha256"] == whole["weights_sha256"]
        assert ended["test_loss"] == whole["test_loss"]
        assert ended["steps"] == whole["steps"]
        assert not list((entrypoint.folder / f"runs/killed{series}/checkpoint").glob(".*"))
        assert killed[""] < max(2, KILLS // len(KINDS)), "most runs end before they can be killed"
    print(f"killed with {ranks} ranks, {parallelism}: {dict(killed)}, {amid_saving} while a checkpoint was written")
