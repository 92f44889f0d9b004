"""The cost of checkpoints in a run: `make bench-checkpoint`.

Models: the book's CNN and ResNet-18. Data: 5,000 of CIFAR-10's images, in memory.
A run of 40 epochs saves a checkpoint after every other epoch (17 and 90 MB, complete and synced to disk).
So epochs with and without a concurrent checkpoint alternate in one process.
An epoch's seconds are those between the ends of two epochs. Results are medians and quartiles.
The project's limit is 2 % of a run with a checkpoint per epoch.
The benchmark prints the share for CIFAR-10's 50,000 images, and the shortest epoch that stays within the limit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import tempfile
from collections.abc import Mapping

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.book.measure import ENTRYPOINT, QUIET, cifar10_settings
from benchmarks.record import parse_options, recording
from benchmarks.tables import Table

EACH, CLASSES, ALL_IMAGES = 500, 10, 50_000
# The number of first epochs that are ignored as warm-up.
WARM_UP_EPOCHS = 2
MAX_SHARE = 0.02
WITHOUT, WITH = "without a checkpoint", "with a checkpoint"


def epoch_end_times(settings: Mapping[str, str]) -> list[float]:
    """Train, and return the time at which each epoch ended, in seconds."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        own = {"TRAIN_OUTPUT_DIR": folder, "TRAIN_RUN_NAME": "run", "TRAIN_TENSORBOARD": "1"}
        environ = {**os.environ, **QUIET, **settings, **own}
        subprocess.run(ENTRYPOINT, env=environ, stdout=subprocess.DEVNULL, check=True)
        events = EventAccumulator(f"{folder}/run/tensorboard").Reload()
        return [event.wall_time for event in events.Scalars("epoch/test_accuracy")]


def text(table: Table, variant: str) -> str:
    """Return the median and the quartiles."""
    low, middle, high = table.quartiles(variant)
    return f"{middle:.3f} s ({low:.3f} to {high:.3f})"


def main() -> None:
    """Print for each model the seconds of an epoch without and with a checkpoint, and the share of a run."""
    parser = argparse.ArgumentParser(prog="make bench-checkpoint")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--models", default="cnn,resnet18", help="with commas")
    args = parse_options(parser)
    with cifar10_settings(EACH) as data, recording("checkpoint", args, args.epochs) as record:
        for model in args.models.split(","):
            own = {"TRAIN_MODEL": model, "TRAIN_EPOCHS": str(args.epochs), "TRAIN_CHECKPOINT_EVERY": "2"}
            ends = epoch_end_times({**data, **own})
            took = [after - before for before, after in itertools.pairwise(ends)][WARM_UP_EPOCHS:]
            # The first of these epochs starts at the end of an odd epoch.
            seconds = record.table(f"{model}, an epoch", "s", WITHOUT)
            seconds.add(WITHOUT, *took[0::2])
            seconds.add(WITH, *took[1::2])
            cost = seconds.over(WITH) or 0.0
            whole = seconds.median(WITHOUT) * ALL_IMAGES / (EACH * CLASSES)
            print(
                f"{model:9} an epoch {text(seconds, WITHOUT)}, with a checkpoint {text(seconds, WITH)}:"
                f" {cost * 1000:.0f} ms each, {cost / whole:.2%} of an epoch of {ALL_IMAGES:,}; under"
                f" {MAX_SHARE:.0%} from {max(0.0, cost) / MAX_SHARE:.1f} s an epoch on",
                flush=True,
            )


if __name__ == "__main__":
    main()
