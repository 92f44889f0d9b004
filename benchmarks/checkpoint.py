"""What checkpoints cost: `make bench-checkpoint`.

Conditions: the book's CNN and ResNet-18 on 10,000 of CIFAR-10's pictures in memory, 6 epochs, by default with a
checkpoint after each (17 and 90 MB, whole and synced) and without; variants alternate, medians of five, the whole
command's seconds. The project's promise is under 2 % of the run.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.book.experiments import Variant
from benchmarks.book.measure import alternate, pictures


def main() -> None:
    """Print a line for each model: seconds with and without, the difference as a share, and the spread."""
    parser = argparse.ArgumentParser(prog="make bench-checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default="cnn,resnet18", help="with commas")
    asked = parser.parse_args()
    every = (Variant("none", {"TRAIN_CHECKPOINT_EVERY": "0"}), Variant("each epoch", {"TRAIN_CHECKPOINT_EVERY": "1"}))
    with pictures(1000) as data:
        for model in asked.models.split(","):
            seen = alternate(every, {**data, "TRAIN_MODEL": model, "TRAIN_EPOCHS": "6"}, asked.rounds)
            without, with_them = (sorted(seen[one.name].values("total_seconds")) for one in every)
            cost = statistics.median(with_them) / statistics.median(without) - 1
            print(
                f"{model:9} without {statistics.median(without):6.2f} s ({without[0]:.2f} to {without[-1]:.2f}),"
                f" with {statistics.median(with_them):6.2f} s ({with_them[0]:.2f} to {with_them[-1]:.2f}): {cost:+.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
