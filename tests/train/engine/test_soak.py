"""Hours in small: epoch after epoch, each with a checkpoint, memory and open files stay what they are.

60 epochs by default, SOAK_EPOCHS=200 for as many as the project promises. The memory of a streamed run is compared
1 and 4 minutes after its first checkpoint, because CI has no time for more; the promise is about SOAK_MINUTES=2,10.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from statistics import median

import pytest

from tests.conftest import Entrypoint, paint
from tests.processes import own_memory_mib, wait_until
from tests.train.given import TWO_RANKS_WHERE_THEY_FIT, imagefolder
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
    assert run.ended()[0] == 0
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
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == 75
    assert late < early * (1 + STREAM_GROWTH)
