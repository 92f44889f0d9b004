"""Settings that the trainer's tests share, and what they read of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import CORES, Entrypoint
from train.data.dataset_info import DatasetInfo

SMALL_DATASET = DatasetInfo(60_000, (3, 32, 32))
TWO_RANKS = {"LAUNCH_NPROC_PER_NODE": "2"}
SMALL = {"TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_IMAGES": "640", "TRAIN_SYNTHETIC_SHAPE": "1x8x8"}
TWO_RANKS_WHERE_THEY_FIT = TWO_RANKS if CORES > 1 else {}


def imagefolder(image_folder: Path, **more: str) -> dict[str, str]:
    """Return what trains on a folder of images for two epochs."""
    return {
        "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(image_folder), "TRAIN_BATCH_SIZE": "8",
        "TRAIN_EPOCHS": "2", **more,
    }  # fmt: skip


def epochs_of(entrypoint: Entrypoint, run: str = "latest") -> list[dict[str, Any]]:
    """Return what the log of a run says about each epoch."""
    lines = (entrypoint.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "epoch"]


def losses(entrypoint: Entrypoint, run: str = "latest") -> list[float]:
    """Return the training loss of each epoch of a run."""
    return [line["train_loss"] for line in epochs_of(entrypoint, run)]
