"""Program of the trainer, which the entrypoint starts in each rank."""

from __future__ import annotations

import os
import signal
import sys
import time

from entrypoint.core.console import report_error, write_stderr
from entrypoint.core.errors import ExitCode, UserError, first_line, one_line
from entrypoint.core.process import fast_exit, gc_paused, own_command
from entrypoint.plan.model import PLAN_VAR, Plan
from train.preemption import STOP_CONTROLLER, Preempted, StopSignal
from train.settings import read_train_settings


def main() -> int:
    """Train by the TRAIN_* settings and the plan; return the exit code."""
    STOP_CONTROLLER.install()
    try:
        try:
            return run()
        except (UserError, RuntimeError, MemoryError) as caught:
            error = caught if isinstance(caught, UserError) else out_of_memory_error(caught)
            if error is None or find_stop_signal(caught):
                raise
            # A preemption is printed once per node, unless an agent selects.
            first = "TORCHELASTIC_ERROR_FILE" in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
            return report_error(error) if first or not isinstance(error, Preempted) else int(error.code)
    except BaseException as error:
        STOP_CONTROLLER.ignore()  # a second signal would interrupt what is said about the first
        stopped = find_stop_signal(error)
        if stopped is None:
            raise
        return report_stop(stopped)
    finally:
        STOP_CONTROLLER.ignore()


def out_of_memory_error(error: RuntimeError | MemoryError) -> UserError | None:
    """Return the error of one line for memory that PyTorch or Python cannot allocate, None for another error."""
    line = first_line(error)
    if not isinstance(error, MemoryError) and "can't allocate memory" not in line and "out of memory" not in line:
        return None
    return UserError(
        f"out of memory ({one_line(line)}); lower TRAIN_BATCH_SIZE or TRAIN_IMAGE_SIZE, or take a smaller model",
        ExitCode.RANK_FAILED,
    )


def find_stop_signal(error: BaseException | None) -> StopSignal | None:
    """Return the signal behind an error, or None; an interrupted library may raise an error of its own."""
    while error is not None and not isinstance(error, StopSignal):
        error = error.__context__
    return error


def report_stop(stopped: StopSignal) -> int:
    """Print on rank 0 which signal stopped the run, and return the exit code."""
    name = signal.Signals(stopped.number).name
    if int(os.environ.get("RANK", "0")) == 0:
        write_stderr(f"train: stopped by {name}; the checkpoints saved so far are kept")
    return ExitCode.INTERRUPTED if stopped.number == signal.SIGINT else ExitCode.TERMINATED


def run() -> int:
    """Read the plan and the settings, and train; raises `UserError`."""
    text = os.environ.get(PLAN_VAR)
    if not text:
        os.execv(sys.executable, own_command("train"))  # which makes the plan that is missing
    plan = Plan.from_json(text)
    parsed = read_train_settings(os.environ, {})
    with gc_paused():
        from train.engine.trainer import train

    train(parsed, plan, float(os.environ.get("ENTRYPOINT_STARTED", time.time())))
    return ExitCode.DONE


if __name__ == "__main__":
    fast_exit(main())
