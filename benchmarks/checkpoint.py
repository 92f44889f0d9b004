"""What checkpoints cost: `make bench-checkpoint`.

Conditions: the book's CNN and ResNet-18 on 10,000 of CIFAR-10's pictures in memory, 6 epochs, by default with a
checkpoint after each (17 and 90 MB, whole and synced) and without; variants alternate, medians of five, the whole
command's seconds. The project's promise is under 2 % of the run.
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.book.experiments import Variant
from benchmarks.book.measure import alternate, pictures

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5


def main() -> None:
    """Print a line for each model: seconds with and without, the difference as a share, and the spread."""
    every = (Variant("none", {"TRAIN_CHECKPOINT_EVERY": "0"}), Variant("each epoch", {"TRAIN_CHECKPOINT_EVERY": "1"}))
    with pictures(1000) as data:
        for model in ("cnn", "resnet18"):
            seen = alternate(every, {**data, "TRAIN_MODEL": model, "TRAIN_EPOCHS": "6"}, ROUNDS)
            without, with_them = (sorted(seen[one.name].values("total_seconds")) for one in every)
            cost = statistics.median(with_them) / statistics.median(without) - 1
            print(
                f"{model:9} without {statistics.median(without):6.2f} s ({without[0]:.2f} to {without[-1]:.2f}),"
                f" with {statistics.median(with_them):6.2f} s ({with_them[0]:.2f} to {with_them[-1]:.2f}): {cost:+.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
