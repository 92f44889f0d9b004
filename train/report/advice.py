"""What to change about a run, by its own numbers: one sentence with the setting for each finding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train.report.curves import lines_with

# Shares of the training time from which on something is worth a sentence.
WAITING, LOADING = 0.1, 0.1
# A test loss that rises by this factor over its best one is a sign of overfitting.
OVERFITTING = 1.2


def advise(summary: Mapping[str, Any], plan: Mapping[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """Return what to change, the most effective first."""
    found = []
    if summary.get("cpu_wait_share", 0) > WAITING:
        found.append(
            f"Threads waited {100 * summary['cpu_wait_share']:.0f} % of the time for a CPU. Run on an idle node, or"
            " `entrypoint tune`."
        )
    if summary.get("data_share", 0) > LOADING:
        found.append(
            f"Training waited {100 * summary['data_share']:.0f} % of the time for data; the slow part is"
            f" {summary.get('data_slow_part', 'loading')}. Raise TRAIN_NUM_WORKERS, or use a faster disk."
        )
    if summary.get("best_chosen_on") == "test" and summary.get("epochs", 0) > 1:
        found.append(
            "The best checkpoint was chosen on the test images, so its accuracy is too optimistic. TRAIN_VAL_SPLIT=0.1"
            " sets other images apart."
        )
    name = "val" if lines_with(lines, "epoch", "val_loss") else "test"
    losses = [line[f"{name}_loss"] for line in lines_with(lines, "epoch", f"{name}_loss")]
    if len(losses) > 2 and min(losses) > 0 and losses[-1] > OVERFITTING * min(losses):
        epoch = losses.index(min(losses)) + 1
        found.append(
            f"The {name} loss was lowest after epoch {epoch} and rose since. Try TRAIN_AUGMENT, TRAIN_WEIGHT_DECAY or"
            " TRAIN_EARLY_STOPPING."
        )
    if summary.get("images_skipped"):
        found.append(f"{summary['images_skipped']:,} images could not be read and were left out.")
    if (plan.get("trainer") or {}).get("auto_selects_bf16"):
        found.append("This machine computes in bf16: TRAIN_PRECISION=auto is faster here.")
    return found
