"""Draw the curves of a run: loss, accuracy and throughput over the epochs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrypoint.core.atomic_files import atomic_open


def lines_with(lines: list[dict[str, Any]], kind: str, *fields: str) -> list[dict[str, Any]]:
    """Return the lines of a kind that have a number in each field."""
    return [
        line
        for line in lines
        if line["kind"] == kind and all(isinstance(line.get(field), (int, float)) for field in fields)
    ]


@dataclass(frozen=True)
class CurvePoints:
    """The lines of metrics.jsonl that are points of curves, and whether evaluations are of `val` or `test`."""

    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    name: str

    @classmethod
    def of(cls, lines: list[dict[str, Any]]) -> CurvePoints | None:
        """Return the points, None if they make no line: drawing imports matplotlib, which takes long."""
        name = "val" if lines_with(lines, "epoch", "val_accuracy") else "test"
        steps = lines_with(lines, "step", "epoch", "loss", "images_per_second")
        epochs = lines_with(lines, "epoch", "epoch", f"{name}_loss", f"{name}_accuracy")
        return cls(steps, epochs, name) if max(len(steps), len(epochs)) > 1 else None


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


@without_messages()
def draw_curves(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Draw curves.png from the lines of metrics.jsonl; a single point is no curve. Raises OSError."""
    points = CurvePoints.of(lines)
    if points is None:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, epochs, name = points.steps, points.epochs, points.name
    figure = Figure(figsize=(12, 3.6))
    FigureCanvasAgg(figure)
    loss, accuracy, speed = figure.subplots(1, 3)
    loss.plot([line["epoch"] for line in steps], [line["loss"] for line in steps], label="train", lw=1)
    loss.plot([line["epoch"] for line in epochs], [line[f"{name}_loss"] for line in epochs], "o-", label=name, ms=3)
    accuracy.plot([line["epoch"] for line in epochs], [line[f"{name}_accuracy"] for line in epochs], "o-", ms=3)
    speed.plot([line["epoch"] for line in steps], [line["images_per_second"] for line in steps], lw=1)
    for axes, title in ((loss, "loss"), (accuracy, f"{name} accuracy, %"), (speed, "images/s")):
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
    loss.legend(loc="upper right")  # loc="best" is slow
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.14, top=0.84, wspace=0.22)
    speed.set_ylim(bottom=0)
    figure.suptitle(folder.name, fontsize=9, parse_math=False)
    with atomic_open(folder / "curves.png") as file:
        figure.savefig(file, format="png", dpi=110)
