"""Write metrics, TensorBoard events, curves and the summary of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entrypoint.core.atomic_files import atomic_open, atomic_write_text
from train.checkpoint.single_file import write_error
from train.report.run_folder import as_json


@contextmanager
def disk_errors_as_user_errors(folder: Path) -> Iterator[None]:
    """Convert OSErrors into a `UserError` that names the run's folder."""
    try:
        yield
    except OSError as error:
        raise write_error(folder, error) from None


class MetricsWriter:
    """Rank 0's writer into the run folder.

    A resumed run is at step `resumed_step`. Later lines are of steps that were trained after the last checkpoint, and
    that are trained again: they are removed.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, resumed_step: int | None = None) -> None:
        self.folder = folder
        if resumed_step is not None:
            remove_later_lines(folder / "metrics.jsonl", resumed_step)
        self.metrics = os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = None if resumed_step is None else resumed_step + 1
            self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)  # type: ignore[no-untyped-call]

    def write(self, kind: str, step: int, values: dict[str, float | int]) -> None:
        """Append one line in a single write, so that readers never see a partial line; raises `UserError`."""
        text = json.dumps({"kind": kind, "step": step, **values}) + "\n"
        with disk_errors_as_user_errors(self.folder):
            os.write(self.metrics, text.encode())
            if self.events:
                for name, value in values.items():
                    self.events.add_scalar(f"{kind}/{name}", value, step)

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json."""
        atomic_write_text(self.folder / "summary.json", as_json(values))

    def close(self) -> None:
        """Flush everything and draw the curves."""
        if self.events:
            self.events.close()
        os.close(self.metrics)
        draw_curves(self.folder)


def remove_later_lines(path: Path, step: int) -> None:
    """Remove the lines of later steps from metrics.jsonl, and a last line that a killed run did not finish."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
        except (ValueError, KeyError, TypeError):
            continue
    atomic_write_text(path, "".join(kept))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; the last ones of a step that was repeated after a restart."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = {(line["kind"], line["step"]): line for line in lines}
    return sorted(last.values(), key=lambda line: int(line["step"]))


def draw_curves(folder: Path) -> None:
    """Draw curves.png: loss, accuracy and throughput over the epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(folder)
    steps = [line for line in lines if line["kind"] == "step"]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    figure = Figure(figsize=(12, 3.6))
    FigureCanvasAgg(figure)
    loss, accuracy, speed = figure.subplots(1, 3)
    loss.plot([line["epoch"] for line in steps], [line["loss"] for line in steps], label="train", lw=1)
    loss.plot([line["epoch"] for line in epochs], [line["test_loss"] for line in epochs], "o-", label="test", ms=3)
    accuracy.plot([line["epoch"] for line in epochs], [line["test_accuracy"] for line in epochs], "o-", ms=3)
    speed.plot([line["epoch"] for line in steps], [line["images_per_second"] for line in steps], lw=1)
    for axes, title in ((loss, "loss"), (accuracy, "test accuracy, %"), (speed, "images/s")):
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
    loss.legend(loc="upper right")  # loc="best" is slow
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.14, top=0.84, wspace=0.22)
    speed.set_ylim(bottom=0)
    figure.suptitle(folder.name, fontsize=9)
    with atomic_open(folder / "curves.png") as file:
        figure.savefig(file, format="png", dpi=110)
