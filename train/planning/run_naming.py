"""What a run is called that nobody has named."""

from __future__ import annotations

import time
from pathlib import Path

from train.settings import TrainSettings


def fresh(output: Path, settings: TrainSettings) -> Path:
    """Return a folder name of the moment that nobody has yet."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.model}-{settings.dataset}"
    taken = (output / (name if count == 1 else f"{name}-{count}") for count in range(1, 10_000))
    return next(folder for folder in taken if not folder.exists())
