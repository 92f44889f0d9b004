"""One trial of `entrypoint tune`: runs the program with a candidate, collects its rates, and stops it."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from entrypoint.core.console import last_error_line
from entrypoint.core.errors import UserError, printable
from entrypoint.core.process import die_with_parent, own_command
from entrypoint.machine.procfs import read_lines
from entrypoint.supervise.store_door import NEVER_MET

# Seconds until a program has its first rate, and until it exits after SIGTERM.
STARTUP_TIMEOUT_S, STOP_TIMEOUT_S = 300, 20
# The number of first rates that are ignored as warm-up.
WARM_UP = 2
# Steps between two rates of the trainer: few enough for slow steps, many enough for fast ones.
LOG_EVERY = 5
# The trainer's settings in a trial: as the user set them, but endless, and without output files.
TRIAL_TRAIN_SETTINGS = {
    "TRAIN_EPOCHS": str(10**6),
    "TRAIN_STEPS": "",
    "TRAIN_RUN_NAME": "trial",
    "TRAIN_RESUME": "off",
    "TRAIN_CHECKPOINT_EVERY": "0",
    "TRAIN_LOG_INTERVAL": str(LOG_EVERY),
    "TRAIN_PROGRESS": "off",
    "TRAIN_TENSORBOARD": "0",
    "TRAIN_EXPORT": "off",
    "TRAIN_PROFILE": "0",
    "TRAIN_MAX_MINUTES": "",
}
# Ranks are in sessions of their own, so only their launcher can kill those that do not exit. It must do so well before
# it is killed itself.
TRIAL_LAUNCH_SETTINGS = {
    "LAUNCH_QUIET": "1",
    "LAUNCH_TUNING_STORE": "off",
    "LAUNCH_GRACE_PERIOD_S": str(STOP_TIMEOUT_S // 2),
}
# The current load of other processes must not change the plan of a candidate.
IGNORE_LOAD = {"LAUNCH_RESERVE_CPUS": "0"}


class TrialSpec(Struct, frozen=True):
    """How a trial runs: command line after `entrypoint`, variables, seconds to measure, and where rates are found.

    The trainer logs its rates. A script prints those that `metric` finds; without a pattern its run time is measured.
    """

    words: tuple[str, ...]
    environ: Mapping[str, str]
    seconds: float
    is_trainer: bool = False
    metric: re.Pattern[str] | None = None

    def read_rates(self, folder: Path, took_s: float | None) -> list[float]:
        """Return a trial's rates so far, from its folder, and its run time if it has exited."""
        if self.is_trainer:
            lines = map(json.loads, read_lines(folder / "trial/metrics.jsonl"))
            return [line["images_per_second"] for line in lines if line["kind"] == "step"]
        if self.metric:
            return printed_rates(self.metric, (folder / "out").read_text(errors="replace"))
        return [] if took_s is None else [1 / took_s]


def run_trial(spec: TrialSpec, variables: Mapping[str, str]) -> float | str:
    """Run the program with a plan's variables until it has been measured for long enough, or has exited.

    Returns its rate, of which more is better, or the reason why it has none.
    """
    with tempfile.TemporaryDirectory(prefix="entrypoint-tune-") as name:
        folder = Path(name)
        environ = {**IGNORE_LOAD, **spec.environ, **variables, **TRIAL_LAUNCH_SETTINGS}
        if spec.is_trainer:
            environ |= {**TRIAL_TRAIN_SETTINGS, "TRAIN_OUTPUT_DIR": name}
        with (folder / "out").open("wb") as output, (folder / "err").open("wb") as errors:
            process = subprocess.Popen(
                own_command(*spec.words),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            rates = collect_rates(process, spec, folder)
            ended = process.poll()
        finally:
            terminate_trial(process)
        said = (folder / "err").read_text(errors="replace")
        if NEVER_MET in said:
            return "its ranks open no process group, so each does all of the work"
        if rates:
            return statistics.median(rates)
        if ended is None:
            return f"no rate within {STARTUP_TIMEOUT_S} s"
        unmatched = "--metric matches nothing that it prints" if spec.metric else "it ended before it had a rate"
        return last_error_line(said, f"it ended with {ended}") if ended else unmatched


def collect_rates(process: subprocess.Popen[bytes], spec: TrialSpec, folder: Path) -> list[float]:
    """Return a trial's rates after its warm-up, when it has run for long enough or has exited; none if it failed."""
    started, is_warm = time.monotonic(), False
    deadline = started + STARTUP_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if not is_warm and len(spec.read_rates(folder, None)) > WARM_UP:
            is_warm, deadline = True, time.monotonic() + spec.seconds
    code = process.poll()
    rates = spec.read_rates(folder, None if code is None else time.monotonic() - started)
    if code:
        return []
    return rates[WARM_UP:] or (rates if code == 0 else [])


def terminate_trial(process: subprocess.Popen[bytes]) -> None:
    """Stop a trial and all processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def compile_metric(pattern: str) -> re.Pattern[str]:
    """Return the pattern that finds rates in a program's output: its only group in every match.

    Raises `UserError` for an invalid pattern, or one without exactly one group.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"TUNE_METRIC={printable(pattern)}: no pattern ({printable(error)}). Write one like '([0-9.]+) images/s'."
        ) from None
    if compiled.groups != 1:
        raise UserError(
            f"TUNE_METRIC={printable(pattern)}: needs one group. Put it around the number: '([0-9.]+) images/s'."
        )
    return compiled


def printed_rates(metric: re.Pattern[str], text: str) -> list[float]:
    """Return the rates in a program's output; raises `UserError` if the pattern finds what is no number."""
    try:
        return [float(word.replace(",", "")) for word in metric.findall(text)]
    except ValueError as error:
        raise UserError(
            f"TUNE_METRIC={printable(metric.pattern)}: finds no number ({printable(error)}). Put the group around one."
        ) from None
