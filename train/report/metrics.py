"""Write metrics, TensorBoard events, curves and the summary of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EINVAL, ENOSPC
from pathlib import Path
from stat import S_ISREG
from typing import Any

from entrypoint.core.atomic_files import atomic_open, atomic_write_text
from entrypoint.core.console import write_stderr
from entrypoint.core.errors import first_line, printable
from train.checkpoint.metadata import read_bytes, write_error
from train.report.run_folder import as_json
from train.report.trackers import Tracker


@contextmanager
def disk_errors_as_user_errors(folder: Path) -> Iterator[None]:
    """Convert OSErrors into a `UserError` that names the run's folder."""
    try:
        yield
    except OSError as error:
        raise write_error(folder, error) from None


class MetricsWriter:
    """Rank 0's writer into the run folder; its files are for people, so no failure of them ends a run.

    A resumed run is at step `resumed_step`. Later lines are of steps that were trained after the last checkpoint, and
    that are trained again: they are removed. `warn` prints one line for each file that cannot be written. `job_status`
    takes the same numbers and raises nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        track: Callable[[], Tracker | None] = lambda: None,
        job_status: Tracker | None = None,
        resumed_step: int | None = None,
        warn: Callable[[str], None] = write_stderr,
    ) -> None:
        self.folder, self.warn, self.warned = folder, warn, set[str]()
        self.metrics: int | None = None
        self.line_is_open = False
        self.events: Any = None
        self.tracker: Tracker | None = None
        self.job_status = job_status
        with self.without_failing("metrics.jsonl"):
            if resumed_step is not None:
                remove_later_lines(folder / "metrics.jsonl", resumed_step)
            self.metrics = open_to_append(folder / "metrics.jsonl")
        with self.without_failing("tensorboard"):
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                purge_step = None if resumed_step is None else resumed_step + 1
                self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)  # type: ignore[no-untyped-call]

        with self.tracking():
            self.tracker = track()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Give the tracker up at its first error: a server that does not answer would hold up each step."""
        try:
            yield
        except Exception as error:
            self.tracker = None
            self.warn(f"train: TRAIN_TRACK: {printable(first_line(error))}; the training goes on without the tracker")

    @contextmanager
    def without_failing(self, name: str) -> Iterator[None]:
        """Turn an error of a file into a line, printed once for the file."""
        try:
            yield
        except Exception as error:  # TensorBoard's and matplotlib's writers raise many types
            if name not in self.warned:
                self.warned.add(name)
                cause = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
                self.warn(f"train: {self.folder / name} cannot be written ({cause}); the training goes on without it")

    def write(self, kind: str, step: int, values: dict[str, float | int]) -> None:
        """Append one line in a single write, so that readers never see a partial line, and events of TensorBoard."""
        text = json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n"
        with self.without_failing("metrics.jsonl"):
            self.append(text.encode())
        with self.without_failing("tensorboard"):
            if self.events:
                for name, value in values.items():
                    self.events.add_scalar(f"{kind}/{name}", value, step)
        with self.tracking():
            if self.tracker:
                self.tracker.log(kind, step, values)
        if self.job_status:
            self.job_status.log(kind, step, values)

    def append(self, line: bytes) -> None:
        """Append a line to metrics.jsonl, after the end of one that a full disk cut; raises OSError."""
        if self.metrics is None:
            return
        if self.line_is_open:
            line = b"\n" + line
        written = os.write(self.metrics, line)
        self.line_is_open = self.line_is_open if not written else written < len(line)
        if written < len(line):
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json; raises OSError."""
        atomic_write_text(self.folder / "summary.json", as_json(values))
        with self.tracking():
            if self.tracker:
                self.tracker.summary(values)
        if self.job_status:
            self.job_status.summary(values)

    def end_tracker(self, status: str) -> None:
        """End the tracker's run, after the summary if there is one; `status` is one of `train.report.trackers`."""
        with self.tracking():
            if self.tracker:
                self.tracker.close(status)
        if self.job_status:
            self.job_status.close(status)
        self.tracker = self.job_status = None

    def close(self) -> None:
        """Flush everything and draw the curves."""
        with self.without_failing("tensorboard"):
            if self.events:
                self.events.close()
        if self.metrics is None:
            return
        os.close(self.metrics)
        with self.without_failing("curves.png"):
            draw_curves(self.folder)


def open_to_append(path: Path) -> int:
    """Return the descriptor of a regular file to append to; raises OSError for another kind.

    A FIFO would block until somebody reads it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(EINVAL, "not a regular file")
    return descriptor


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without what is none: a full disk or a killed run may cut a line.

    Raises OSError, and ValueError for what is no regular file.
    """
    found = []
    for text in read_bytes(path).splitlines():
        try:
            line = json.loads(text)
            found.append({**line, "kind": str(line["kind"]), "step": int(line["step"])})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return found


def remove_later_lines(path: Path, step: int) -> None:
    """Remove the lines of later steps from metrics.jsonl, and what is no line; raises OSError."""
    if not path.exists():
        return
    kept = [json.dumps(line) for line in read_lines(path) if line["step"] <= step]
    atomic_write_text(path, "".join(f"{line}\n" for line in kept))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; the last ones of a step that was repeated after a restart."""
    last = {(line["kind"], line["step"]): line for line in read_lines(folder / "metrics.jsonl")}
    return sorted(last.values(), key=lambda line: int(line["step"]))


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


def draw_curves(folder: Path) -> None:
    """Draw curves.png: loss, accuracy and throughput over the epochs; a single point is no curve."""
    points = CurvePoints.of(read_metrics(folder))
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
    figure.suptitle(folder.name, fontsize=9)
    with atomic_open(folder / "curves.png") as file:
        figure.savefig(file, format="png", dpi=110)
