"""The lines of a finished run's summary on the screen."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

from entrypoint.core.errors import count_text, one_line
from train.report.cost import cost_text
from train.report.page import REPORT_FILE, SKIPPED_FILE
from train.report.stragglers import cpu_wait_text, stragglers_text

# Scores besides the task's own: of several labels in percent, of numbers in the targets' own unit.
OTHER_SCORES = ("f1_micro", "f1_macro", "threshold", "rmse", "mae")
# With fewer test images a difference of some points says little.
FEW_IMAGES = 500


def interval_text(accuracy: float, images: int) -> str:
    """Return between which values the accuracy of so few images lies with 95 % confidence (Wilson's interval)."""
    if images >= FEW_IMAGES:
        return ""
    share, z = accuracy / 100, NormalDist().inv_cdf(0.975)
    middle = (share + z * z / (2 * images)) / (1 + z * z / images)
    half = z * math.sqrt(share * (1 - share) / images + (z / (2 * images)) ** 2) / (1 + z * z / images)
    return (
        f"{100 * (middle - half):.0f} to {100 * (middle + half):.0f} % with 95 % confidence, by {images:,} test images"
    )


def summary_lines(
    summary: dict[str, Any], folder: Path, loading: str, own_model: str = "", own_data: str = ""
) -> list[str]:
    """Return the summary in a few lines; `loading` is what loading cost, empty if little.

    `own_model` and `own_data` are flags that name the user's code, which no file may choose.
    """
    top5 = f" (top 5: {summary['test_top5_accuracy']:.2f} %)" if "test_top5_accuracy" in summary else ""
    name = summary["score"]
    others = [f"{key} {summary[f'test_{key}']:.4g}" for key in OTHER_SCORES if f"test_{key}" in summary]
    more = f"; {', '.join(others)}" if others else ""
    lines = [
        f"{f'test {name}':14} {summary[f'test_{name}']:.2f} %{top5}{more} of {summary['test_images']:,} images"
        f" after {count_text(summary['epochs'], 'epoch')}, {summary['steps']:,} steps"
    ]
    if summary[f"best_{name}"] is not None:
        hint = "" if summary["best_chosen_on"] == "val" else "; TRAIN_VAL_SPLIT=0.1 sets other images apart for that"
        epoch = f" after epoch {summary['best_epoch']}, whose weights these are" if summary["best_epoch"] else ""
        best = f"{summary[f'best_{name}']:.2f} %{epoch}, chosen on the {summary['best_chosen_on']} images{hint}"
        lines.append(f"best           {best}")
    frozen = summary["all_parameters"] - summary["parameters"]
    parameters = f"{summary['parameters']:,} parameters" + (f" trained, {frozen:,} frozen" if frozen else "")
    operations = f", {summary['multiply_adds']:,} multiply-adds an image" if "multiply_adds" in summary else ""
    then = f", then {1000 * summary['step_seconds']:,.1f} ms" if summary["step_seconds"] else ""
    resumed = summary["train_seconds"] > summary["total_seconds"]
    lines += [
        f"training       {summary['train_seconds']:.1f} s{' over all starts' if resumed else ''},"
        f" {summary['images_per_second']:,.0f} images/s, {'this' if resumed else 'the whole'} command"
        f" {summary['total_seconds']:.1f} s",
        f"model          {summary['model']}, {parameters}{operations}",
        f"computed in    {summary['precision']} on {summary['world_size']} x {summary['device']} with"
        f" {summary['threads']} threads, first step {1000 * summary['first_step_seconds']:,.0f} ms{then}",
    ]
    among = " among those that this run read" if summary["feed"] == "stream" else ""
    skipped, steps, reserved = summary["images_skipped"], summary["skipped_steps"], summary["reserved_cpus"]
    command = "entrypoint" if shutil.which("entrypoint") else one_line(Path(sys.prefix, "bin/entrypoint"))
    notes = {
        "few images": interval_text(summary[f"test_{name}"], summary["test_images"]) if name == "accuracy" else "",
        "warning": " ".join(summary["doubts"]),
        "skipped": f"{count_text(steps, 'step')} whose loss or gradients were not finite" if steps else "",
        "left out": f"{count_text(skipped, 'unreadable image')}{among}: {SKIPPED_FILE}" if skipped else "",
        "cores": f"{reserved} left to other processes; LAUNCH_RESERVE_CPUS=0 uses all" if reserved else "",
        "waiting": cpu_wait_text(summary["cpu_wait_share"]),
        "stragglers": stragglers_text(summary.get("stragglers")),
        "loading": loading,
        "hardware": (
            f"{100 * summary['peak_share']:.0f} % of the operations a second that large products and convolutions reach"
            if summary.get("peak_share")
            else ""
        ),
        "cost": cost_text(summary),
        "run folder": one_line(folder),
        "look at it": f"{one_line(folder)}/{REPORT_FILE}",
        "use it": f"{command} predict {one_line(shlex.quote(str(folder)))}{one_line(own_model)} IMAGE",
        "test it": f"{command} evaluate {one_line(shlex.quote(str(folder)))}{one_line(own_model + own_data)}",
    }
    return [*lines, *(f"{name:14} {text}" for name, text in notes.items() if text)]
