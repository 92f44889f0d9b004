"""Show progress: a live bar on a terminal, otherwise one plain line per log interval.

Files show the rest: a batch as the network sees it, and the page with the curves so far.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from entrypoint.core.console import STDERR, STDOUT, replace_stream, write_stderr
from entrypoint.core.files import atomic_open
from train.preemption import STOP_CONTROLLER
from train.report.metrics import MetricsWriter
from train.report.page import BATCH_FILE, REPORT_FILE, write_report
from train.setting_groups.run import RunSettings


@contextmanager
def guarded_stdout() -> Iterator[None]:
    """Guard prints in this block; if the output is closed, request a stop and discard further output.

    Why: a closed terminal or a broken pipe would end a run during a step with a traceback. The run saves a checkpoint
    instead, and ends as if a signal had stopped it. Where a full disk takes no more lines, it goes on without them.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        redirect_to_devnull()
        if error.errno not in (errno.EPIPE, errno.EIO):
            write_stderr(
                f"train: standard output: cannot be written ({error.strerror}); the training goes on without it"
            )
        elif STOP_CONTROLLER.number is None:
            STOP_CONTROLLER.handle(signal.SIGPIPE, None)


def redirect_to_devnull() -> None:
    """Redirect standard output to /dev/null, and standard error too if it is the same file, pipe or terminal."""
    gone = os.fstat(STDOUT)
    for number in (STDERR, STDOUT):
        if os.path.samestat(os.fstat(number), gone):
            replace_stream(number)


class ProgressReporter:
    """Progress display of a run, which shows nothing; steps count from 0 over the whole run."""

    def update(self, epoch: int, step: int, loss: float, images_per_second: float, left_s: float) -> None:
        """Show a log interval: the mean loss and throughput since the previous one."""

    def print(self, line: str) -> None:
        """Print a permanent line."""

    def close(self) -> None:
        """Restore the terminal."""


def build_progress(
    settings: RunSettings, total_steps: int, epochs: int, *, is_main: bool, relayed: bool = False
) -> ProgressReporter:
    """Return the progress display by the settings; only rank 0 shows one.

    Output relayed by a launcher is not a terminal, although Open MPI gives each rank a pseudo-terminal.
    """
    kind = settings.progress
    if not is_main or kind == "off":
        return ProgressReporter()
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() and not relayed else "plain"
    return BarProgress(epochs, total_steps) if kind == "bar" else LineProgress(epochs, total_steps)


class LineProgress(ProgressReporter):
    """One line per log interval, for pipes and batch logs."""

    def __init__(self, epochs: int, total_steps: int) -> None:
        self.epochs, self.total_steps = epochs, total_steps

    def update(self, epoch: int, step: int, loss: float, images_per_second: float, left_s: float) -> None:
        """Print one line."""
        self.print(
            f"epoch {epoch + 1}/{self.epochs}  step {step}/{self.total_steps}  loss {loss:.4f}"
            f"  {images_per_second:,.0f} images/s  left {timedelta(seconds=round(left_s))}"
        )

    def print(self, line: str) -> None:
        """Print one line without buffering."""
        with guarded_stdout():
            print(line)


class BarProgress(ProgressReporter):
    """A live bar."""

    def __init__(self, epochs: int, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress as RichProgress, TextColumn

        class Screen(Console):
            def on_broken_pipe(self) -> None:
                """Raise the error; rich would exit the program."""
                raise

        text = "epoch {task.fields[epoch]}/" + str(epochs) + "  step {task.completed}/{task.total}"
        self.bar: Any = RichProgress(
            TextColumn(text),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} images/s  left {task.fields[left]}"),
            console=Screen(),
            auto_refresh=False,  # its thread could not handle a closed terminal
        )
        self.task = self.bar.add_task("", total=total_steps, epoch=1, loss="-", speed="-", left="-")
        with guarded_stdout():
            self.bar.start()

    def update(self, epoch: int, step: int, loss: float, images_per_second: float, left_s: float) -> None:
        """Move the bar."""
        with guarded_stdout():
            self.bar.update(
                self.task,
                refresh=True,
                completed=step,
                epoch=epoch + 1,
                loss=f"{loss:.4f}",
                speed=f"{images_per_second:,.0f}",
                left=str(timedelta(seconds=round(left_s))),
            )

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        with guarded_stdout():
            self.bar.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        """Stop the bar and keep its last state on the screen."""
        with guarded_stdout():
            self.bar.stop()


# So many images of the batch, so many a row with such a frame; small ones are enlarged to this side.
SHOWN, ROW, LEAST_SIDE, FRAME = 32, 8, 64, 2
# Runs of less than a minute have their page at the end alone, and longer ones write it for 2 % of their time at most.
FIRST_S, MOST_SHARE = 60.0, 0.02


@dataclass
class LivePage:
    """The files of a run that trains, which rank 0 writes; a file that cannot be written is reported once."""

    folder: Path
    metrics: MetricsWriter
    due_s: float = field(default_factory=lambda: time.monotonic() + FIRST_S)

    def show_batch(self, images: Tensor, undo: Callable[[Tensor], Tensor] = lambda pixels: pixels) -> None:
        """Write batch.png: the first (N, C, H, W) images as the network saw them, if they are gray or color.

        `undo` makes bytes of normalized ones.
        """
        if images.shape[1] in (1, 3):
            with self.metrics.without_failing(BATCH_FILE), atomic_open(self.folder / BATCH_FILE) as file:
                mosaic(undo(images[:SHOWN])).save(file, format="PNG")

    def show_epoch(self, so_far: Mapping[str, Any]) -> None:
        """Write the page with what is known after an epoch, if it is due."""
        if (began_s := time.monotonic()) >= self.due_s:
            with self.metrics.without_failing(REPORT_FILE):
                write_report(self.folder, so_far)
            self.due_s = began_s + (time.monotonic() - began_s) / MOST_SHARE


def mosaic(pixels: Tensor) -> Any:
    """Return one image of (N, C, H, W) bytes; the import of torchvision, which has a grid, takes too long."""
    from PIL import Image

    height, width = (side * -(-LEAST_SIDE // max(pixels.shape[2:])) for side in pixels.shape[2:])
    shown = pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    size = min(ROW, len(shown)) * (width + FRAME) + FRAME, -(-len(shown) // ROW) * (height + FRAME) + FRAME
    sheet = Image.new("RGB", size)
    for number, image in enumerate(shown):
        tile = Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST)
        sheet.paste(tile, (FRAME + number % ROW * (width + FRAME), FRAME + number // ROW * (height + FRAME)))
    return sheet
