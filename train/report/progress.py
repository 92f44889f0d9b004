"""Show progress: a live bar on a terminal, otherwise one plain line per log interval."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from entrypoint.core.console import STDERR, STDOUT, replace_stream
from train.preemption import STOP_CONTROLLER
from train.settings import TrainSettings


@contextmanager
def guarded_stdout() -> Iterator[None]:
    """Guard prints in this block; if the output is closed, request a stop and discard further output.

    Why: a closed terminal, a broken pipe or a full disk would end a run during a step with a traceback. The run saves a
    checkpoint instead, and ends as if a signal had stopped it.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError:
        redirect_to_devnull()
        if STOP_CONTROLLER.number is None:
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
    settings: TrainSettings, total_steps: int, epochs: int, *, is_main: bool, relayed: bool = False
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
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

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
