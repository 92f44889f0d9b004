"""One trial of `entrypoint tune`: runs the program with a candidate, collects its rates, and stops it."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from entrypoint.core.console import last_error_line
from entrypoint.core.errors import UserError, printable
from entrypoint.tune.candidates import Candidate

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


class TrialResult(Struct, frozen=True):
    """A trial's rate (more is better) and the seconds until its first rate, or the reason why there is none."""

    rate: float | None
    error: str = ""
    startup_s: float = 0.0


# Returns the rates so far, from the trial's folder, its output, and its run time if it has exited.
RateReader = Callable[[Path, str, float | None], list[float]]


class TrialSpec(Struct, frozen=True):
    """How a trial runs: command line after `entrypoint`, variables, seconds to measure, and how rates are found."""

    words: tuple[str, ...]
    environ: Mapping[str, str]
    seconds: float
    read_rates: RateReader
    is_trainer: bool = False
    mean: Callable[[list[float]], float] = statistics.median


def run_trial(spec: TrialSpec, candidate: Candidate) -> TrialResult:
    """Run the program with a candidate until it has been measured for long enough, or has exited."""
    with tempfile.TemporaryDirectory(prefix="entrypoint-tune-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        environ = {**IGNORE_LOAD, **spec.environ, **dict(candidate.variables), **TRIAL_LAUNCH_SETTINGS}
        if spec.is_trainer:
            environ |= {**TRIAL_TRAIN_SETTINGS, "TRAIN_OUTPUT_DIR": folder}
        with out.open("wb") as to, err.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "entrypoint", *spec.words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=errors,
                start_new_session=True,
            )
        try:
            rates, startup_s = collect_rates(
                process, lambda took: spec.read_rates(Path(folder), out.read_text(errors="replace"), took), spec.seconds
            )
        finally:
            terminate_trial(process)
        if rates:
            return TrialResult(spec.mean(rates), startup_s=startup_s)
        last = last_error_line(err.read_text(errors="replace"), f"it ended with {process.returncode}")
        return TrialResult(None, last if process.returncode else f"no rate within {STARTUP_TIMEOUT_S} s")


def collect_rates(
    process: subprocess.Popen[bytes], read_rates: Callable[[float | None], list[float]], seconds: float
) -> tuple[list[float], float]:
    """Return a trial's rates after its warm-up, when it has run for long enough or has exited.

    Also returns the seconds until the first rate. A program that fails has no rates.
    """
    started, first = time.monotonic(), 0.0
    while True:
        ended = process.poll() is not None
        now = time.monotonic() - started
        rates = read_rates(now if ended else None)
        if len(rates) > WARM_UP and not first:
            first = now
        if ended:
            return ([] if process.returncode else rates[WARM_UP:] or rates), first or now
        if first and now - first >= seconds and len(rates) > WARM_UP + 1:
            return rates[WARM_UP:], first
        if not first and now > STARTUP_TIMEOUT_S:
            return [], now
        if first and now - first > seconds + STARTUP_TIMEOUT_S:  # it prints no more rates, and does not end
            return rates[WARM_UP:], first
        time.sleep(0.05)


def terminate_trial(process: subprocess.Popen[bytes]) -> None:
    """Stop a trial and all processes that it started."""
    for number, seconds in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
        if process.poll() is not None:
            break
        os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def trainer_rates(folder: Path, _: str, __: float | None) -> list[float]:
    """Return the images/s of each interval that the trainer has logged."""
    try:
        lines = (folder / "trial/metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [line["images_per_second"] for line in map(json.loads, lines) if line["kind"] == "step"]


def mean_rate(rates: list[float]) -> float:
    """Return the mean rate of intervals with equal numbers of images."""
    return statistics.harmonic_mean(rates)


def metric_rates(pattern: str, *, lower: bool) -> RateReader:
    """Return a function that finds rates in a program's output: the group of a pattern, in every match.

    Raises `UserError` for an invalid pattern, or one without exactly one group.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"TUNE_METRIC={printable(pattern)}: no pattern ({printable(error)}); write one like '([0-9.]+) images/s'"
        ) from None
    if compiled.groups != 1:
        raise UserError(f"TUNE_METRIC={printable(pattern)}: needs one group, around the number: '([0-9.]+) images/s'")

    def read_rates(_: Path, text: str, __: float | None) -> list[float]:
        words = compiled.findall(text)
        try:
            found = [float(word.replace(",", "")) for word in words]
        except ValueError as error:
            raise UserError(f"TUNE_METRIC={printable(pattern)}: finds no number ({printable(error)})") from None
        return [1 / value for value in found if value] if lower else found

    return read_rates


def wall_time_rate(_: Path, __: str, took_s: float | None) -> list[float]:
    """Return the program's rate in runs per second, when it has exited."""
    return [] if took_s is None else [1 / took_s]
