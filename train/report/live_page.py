"""What a run shows while it trains: a batch as the network sees it, and the page with the curves so far."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from entrypoint.core.atomic_files import atomic_open
from train.report.metrics import MetricsWriter
from train.report.page import BATCH_FILE, REPORT_FILE, write_report

# So many images of the batch, so many a row; small ones are enlarged to this side.
SHOWN, ROW, LEAST_SIDE = 32, 8, 64
# Runs of less than a minute have their page at the end alone, and longer ones write it for 2 % of their time at most.
FIRST_S, MOST_SHARE = 60.0, 0.02


@dataclass
class LivePage:
    """The files of a run that trains, which rank 0 writes; a file that cannot be written is reported once."""

    folder: Path
    metrics: MetricsWriter
    due_s: float = field(default_factory=lambda: time.monotonic() + FIRST_S)

    def show_batch(self, pixels: Tensor) -> None:
        """Write batch.png: the first of (N, C, H, W) bytes, which gray and color images alone can be."""
        if pixels.shape[1] in (1, 3):
            with self.metrics.without_failing(BATCH_FILE), atomic_open(self.folder / BATCH_FILE) as file:
                mosaic(pixels).save(file, format="PNG")

    def show_epoch(self, so_far: Mapping[str, Any]) -> None:
        """Write the page with what is known after an epoch, if it is due."""
        began_s = time.monotonic()
        if began_s < self.due_s:
            return
        with self.metrics.without_failing(REPORT_FILE):
            write_report(self.folder, so_far)
        took_s = time.monotonic() - began_s
        self.due_s = began_s + took_s / MOST_SHARE


def mosaic(pixels: Tensor) -> Any:
    """Return one image of (N, C, H, W) bytes."""
    from PIL import Image
    from torchvision.utils import make_grid  # for rank 0 alone: the import looks up 1,000 files

    times = -(-LEAST_SIDE // max(pixels.shape[2:]))
    larger = pixels[:SHOWN].repeat_interleave(times, 2).repeat_interleave(times, 3)
    return Image.fromarray(make_grid(larger, nrow=ROW, padding=2).permute(1, 2, 0).numpy())
