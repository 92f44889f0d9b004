"""The curves of a run: loss, accuracy and throughput over the epochs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from train.setting_groups.data import SCORES


def lines_with(lines: list[dict[str, Any]], kind: str, *fields: str) -> list[dict[str, Any]]:
    """Return the lines of a kind that have a number in each field."""
    return [line for line in lines if line["kind"] == kind and all(is_drawable(line.get(field)) for field in fields)]


def is_drawable(value: object) -> bool:
    """Return whether a value is a number that fits a float; Python's integers may be of any size."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= MAX_INT)


MAX_INT = 2**63
Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Plot:
    """One drawing over the epochs: by label, the epochs and the values of each curve."""

    title: str
    curves: dict[str, Curve]
    from_zero: bool = False

    def draw(self, axes: Any) -> None:
        """Draw the curves with matplotlib."""
        for label, (epochs, values) in self.curves.items():
            axes.plot(epochs, values, "o-" if len(epochs) < 40 else "-", ms=3, lw=1, label=label)
        axes.set_title(self.title)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        if self.from_zero:
            axes.set_ylim(bottom=0)
        if len(self.curves) > 1:
            axes.legend(loc="upper right")  # loc="best" is slow


def curve_of(lines: list[dict[str, Any]], field: str) -> Curve:
    """Return the epochs of some lines, and the values of a field."""
    return [line["epoch"] for line in lines], [line[field] for line in lines]


def plots_of(lines: list[dict[str, Any]]) -> list[Plot]:
    """Return loss, accuracy and throughput by the lines of metrics.jsonl, nothing if a curve would be one point.

    Why nothing: drawing imports matplotlib, which takes long.
    """
    name = "val" if lines_with(lines, "epoch", "val_loss") else "test"
    scores = (score for score in SCORES.values() if lines_with(lines, "epoch", f"{name}_{score}"))
    score = next(scores, SCORES["classify"])
    steps = lines_with(lines, "step", "epoch", "loss", "images_per_second")
    epochs = lines_with(lines, "epoch", "epoch", f"{name}_loss", f"{name}_{score}")
    if max(len(steps), len(epochs)) < 2:
        return []
    return [
        Plot("loss", {"train": curve_of(steps, "loss"), name: curve_of(epochs, f"{name}_loss")}),
        Plot(f"{name} {score}, %", {name: curve_of(epochs, f"{name}_{score}")}),
        Plot("images/s", {"train": curve_of(steps, "images_per_second")}, from_zero=True),
    ]


@contextmanager
def without_messages() -> Iterator[None]:
    """Keep matplotlib from printing: that it lists the fonts, and which letters its font lacks."""
    logger = logging.getLogger("matplotlib.font_manager")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph", UserWarning)
            yield
    finally:
        logger.setLevel(before)
