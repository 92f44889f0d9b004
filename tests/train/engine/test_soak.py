"""Hours in small: epoch after epoch, each with a checkpoint, memory and open files stay what they are.

60 epochs by default, SOAK_EPOCHS=200 for as many as the project promises.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from statistics import median

import pytest

from tests.conftest import Entrypoint
from tests.train.started import Started

pytestmark = pytest.mark.launch
EPOCHS = int(os.environ.get("SOAK_EPOCHS", "60"))
WARM, GROWTH = EPOCHS // 4, 0.03


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
