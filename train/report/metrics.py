"""Write metrics, TensorBoard events and the summary of a run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any

from entrypoint.core.console import write_stderr
from entrypoint.core.errors import SECRET_IN_URL, first_line, printable
from entrypoint.core.files import atomic_write_text, is_file, open_regular
from entrypoint.core.packages import missing_module
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
    that are trained again: they are removed. `warn` prints one line for each file that cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        track: Callable[[], Tracker | None] = lambda: None,
        resumed_step: int | None = None,
        warn: Callable[[str], None] = write_stderr,
    ) -> None:
        self.folder, self.warn, self.warned = folder, warn, set[str]()
        self.metrics: int | None = None
        self.events: Any = None
        self.tracker: Tracker | None = None
        with self.without_failing("metrics.jsonl"):
            if resumed_step is not None:
                remove_later_lines(folder / "metrics.jsonl", resumed_step)
            (folder / "metrics.jsonl").touch()
            self.metrics = open_regular(folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND)
        with self.without_failing("tensorboard"):
            if tensorboard and not missing_module("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                threading.excepthook = without_tensorboards_thread(threading.excepthook)
                purge_step = None if resumed_step is None else resumed_step + 1
                self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)

        with self.tracking():
            self.tracker = track()

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Give the tracker up at its first error: a server that does not answer would hold up each step."""
        try:
            yield
        except Exception as error:
            self.tracker = None
            said = printable(SECRET_IN_URL.sub("(hidden)@", first_line(error)))  # MLflow's quotes its server's URL
            self.warn(f"train: TRAIN_TRACK: {said}; the training goes on without the tracker")

    @contextmanager
    def without_failing(self, name: str) -> Iterator[None]:
        """Turn an error of a file into a line, printed once for the file."""
        try:
            yield
        except Exception as error:  # TensorBoard's writer and a page's drawings raise many types
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

    def append(self, line: bytes) -> None:
        """Append a line to metrics.jsonl; raises OSError, also for a line that a full disk cut."""
        if self.metrics is not None and os.write(self.metrics, line) < len(line):
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def summary(self, values: dict[str, Any]) -> None:
        """Write summary.json; raises OSError."""
        atomic_write_text(self.folder / "summary.json", as_json(values))
        with self.tracking():
            if self.tracker:
                self.tracker.summary(values)

    def end_tracker(self, status: str) -> None:
        """End the tracker's run, after the summary if there is one; `status` is one of `train.report.trackers`."""
        with self.tracking():
            if self.tracker:
                self.tracker.close(status)
        self.tracker = None

    def close(self) -> None:
        """Flush everything."""
        with self.without_failing("tensorboard"):
            if self.events:
                self.events.close()
        if self.metrics is not None:
            os.close(self.metrics)


def without_tensorboards_thread(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return the hook for errors of threads, without those of TensorBoard's writer: the next event reports them."""

    def handle(error: Any) -> None:
        if not type(error.thread).__module__.startswith("tensorboard"):
            hook(error)

    return handle


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
    """Return the lines of metrics.jsonl, none without it; the last ones of a step that was repeated after a restart."""
    path = folder / "metrics.jsonl"
    last = {(line["kind"], line["step"]): line for line in (read_lines(path) if is_file(path) else ())}
    return sorted(last.values(), key=lambda line: int(line["step"]))
