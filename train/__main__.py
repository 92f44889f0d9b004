"""The trainer as a program: each rank runs it, started by the entrypoint's rank stage."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

from entrypoint.core.console import put, report
from entrypoint.core.errors import Exit, Refused
from entrypoint.core.process import leave, uncollected
from entrypoint.plan.model import VARIABLE, Plan
from train.data.workers import end_workers
from train.preemption import STOPPING, Preempted, Stopped
from train.settings import read_train_settings


def main() -> int:
    """Train as TRAIN_* and the plan say; return the exit code."""
    STOPPING.listen()
    try:
        try:
            return run()
        except Refused as error:
            if stopped_by(error):
                raise
            return report(error) if is_told(error) else int(error.code)
    except BaseException as error:
        stopped = stopped_by(error)
        if stopped is None:
            raise
        return tell(stopped)
    finally:
        STOPPING.ignore()
        end_workers()


def stopped_by(error: BaseException | None) -> Stopped | None:
    """Return the signal behind an error: a library that it interrupts may answer with an error of its own."""
    while error is not None and not isinstance(error, Stopped):
        error = error.__context__
    return error


def is_told(error: Refused) -> bool:
    """Tell whether this rank is to say it: what all ranks agreed on is said once a node, unless an agent sorts that."""
    agent = "TORCHELASTIC_ERROR_FILE" in os.environ
    return agent or not isinstance(error, Preempted) or os.environ.get("LOCAL_RANK", "0") == "0"


def tell(stopped: Stopped) -> int:
    """Say once for all ranks what has stopped the run, and return the exit code."""
    name = signal.Signals(stopped.number).name
    if int(os.environ.get("RANK", "0")) == 0:
        put(f"train: stopped by {name}; the checkpoints up to here are kept")
    return Exit.INTERRUPTED if stopped.number == signal.SIGINT else Exit.TERMINATED


def run() -> int:
    """Read the plan and the settings, and train; raises `Refused`."""
    text = os.environ.get(VARIABLE)
    if not text:
        become_planned()
    plan = Plan.from_variable(text)
    given = read_train_settings(os.environ, {})
    with uncollected():
        from train.engine.trainer import train

    train(given, plan, float(os.environ.get("ENTRYPOINT_STARTED", time.time())))
    return Exit.DONE


def become_planned() -> NoReturn:
    """Started by hand or by a launcher without a plan: go through the entrypoint, which makes one."""
    os.execv(sys.executable, (sys.executable, "-I", "-m", "entrypoint", "train"))


if __name__ == "__main__":
    leave(main())
