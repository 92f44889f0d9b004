"""Signals and deadlines that stop a run or request a checkpoint, applied after the same step on all ranks."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from entrypoint.core.console import write_stderr
from entrypoint.core.errors import ExitCode, UserError, first_line
from entrypoint.core.process import DUPLICATE_WINDOW_S, PREEMPTION, not_ignored, start_thread

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A closed terminal can send several of these; they do not count as a second stop request by the user.
OUTPUT_CLOSED = (signal.SIGHUP, signal.SIGPIPE)
# Sent by a scheduler ahead of the end (`sbatch --signal=USR1@120`); never stops the run at once.
PREEMPT_WARNING = signal.SIGUSR1
# Requests a checkpoint; training continues.
SAVE_REQUEST = signal.SIGUSR2
# A rank's request after a step; all ranks follow the maximum over the ranks.
CONTINUE, SAVE, STOP = 0, 1, 2
# The reason of a stop on a rank that got no request itself.
OF_ANOTHER_RANK = "another rank's signal"


class StopSignal(BaseException):
    """Raised when a signal stops the trainer."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def signal_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Send a stop signal again that arrived in a callback, out of which Python lets no exception."""
    if isinstance(unraisable.exc_value, StopSignal):
        # By then the callback has ended.
        threading.Timer(0.05, os.kill, (os.getpid(), unraisable.exc_value.number)).start()
    else:
        sys.__unraisablehook__(unraisable)


class Preempted(UserError):
    """Raised after a run has saved a checkpoint in response to a stop request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.PREEMPTED)


@dataclass(frozen=True)
class Deadline:
    """Time at which a run must stop, in terms of `time.monotonic()`, and the name of its source."""

    at: float
    name: str


def first_deadline(
    max_minutes: float | None, grace_s: float, started: float, environ: Mapping[str, str]
) -> Deadline | None:
    """Return the earlier of two deadlines, or None if neither is set.

    The first is TRAIN_MAX_MINUTES after `started` (Unix time, s). The second is the end of the Slurm job minus the
    grace period. Source of SLURM_JOB_END_TIME: sbatch(1). Older Slurm versions do not set it.
    """
    ends: list[tuple[float, str]] = []
    if max_minutes is not None:
        ends.append((started + 60 * max_minutes, f"TRAIN_MAX_MINUTES={max_minutes:g}"))
    job_end = environ.get("SLURM_JOB_END_TIME", "") if environ.get("SLURM_JOB_ID") else ""
    if job_end.isdecimal() and int(job_end) > started:  # else what a shell still has of a job that is over
        ends.append((int(job_end) - grace_s, "the end of the Slurm job"))
    if not ends:
        return None
    end, name = min(ends)
    return Deadline(time.monotonic() + end - time.time(), name)


class StopController:
    """Stop and save requests to this process; `number` is the stop signal, or None before one arrives."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.deadline: Deadline | None = None
        self.wants_save = False
        self.saved_at = -DUPLICATE_WINDOW_S
        self.deferring = False
        self.saves = True
        self.since = 0.0

    @property
    def stop_requested(self) -> bool:
        """Return whether the run must save and stop."""
        return self.number is not None or self.deadline_passed

    @property
    def deadline_passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline.at

    @property
    def stopped_at(self) -> float:
        """Return when a stop was requested (time.monotonic()), infinity before that."""
        return self.since or (self.deadline.at if self.deadline and self.deadline_passed else math.inf)

    @property
    def request(self) -> int:
        """Return this rank's request after the current step: CONTINUE, SAVE or STOP."""
        if self.stop_requested:
            return STOP
        return SAVE if self.wants_save else CONTINUE

    @property
    def reason(self) -> str:
        """Return the name of the signal or deadline; on a rank with neither, another rank got the request."""
        if self.number is not None:
            closed = " (the output is closed)" if self.number == signal.SIGPIPE else ""
            return signal.Signals(self.number).name + closed
        return self.deadline.name if self.deadline and self.deadline_passed else OF_ANOTHER_RANK

    def mark_saved(self) -> None:
        """Clear the save request of this rank; the same signal shortly afterwards does not repeat it."""
        self.wants_save = False
        self.saved_at = time.monotonic()

    def install(self) -> None:
        """Install the signal handlers, except for signals that are already ignored (nohup)."""
        for number in not_ignored(HANDLED):
            signal.signal(number, self.handle)
        sys.unraisablehook = signal_again
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)  # the entrypoint defers them until here

    def ignore(self) -> None:
        """Ignore all handled signals while the process exits, so that its exit code stays as set.

        A launcher signals all ranks as soon as the first one exits.
        """
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)

    def handle(self, number: int, _: FrameType | None) -> None:
        """Record the first signal while deferring; otherwise raise `StopSignal` at once.

        A preemption warning is recorded at any time if the run saves checkpoints. It does not count as the first of two
        signals.
        """
        now = time.monotonic()
        if number == SAVE_REQUEST:
            self.wants_save = now - self.saved_at >= DUPLICATE_WINDOW_S
            return
        if number == PREEMPT_WARNING:
            if self.saves and self.number is None:
                self.number, self.since = number, now
            return
        if self.number == PREEMPT_WARNING:
            self.number, self.since = None, 0.0
        if self.deferring and self.number is not None and number in OUTPUT_CLOSED:
            return
        if self.deferring and (self.number is None or now - self.since < DUPLICATE_WINDOW_S):
            self.number = self.number or number
            self.since = self.since or now
            return
        raise StopSignal(number)

    @contextmanager
    def defer(self, *, can_save: bool, deadline: Deadline | None = None) -> Iterator[None]:
        """Defer signals inside this block to the end of the step, if the run saves checkpoints."""
        self.deferring = self.saves = can_save
        self.deadline = deadline if can_save else None
        if not can_save and self.number == PREEMPT_WARNING:
            self.number = None
        try:
            yield
        finally:
            self.deferring, self.deadline = False, None


# One per process, because signals are per process.
STOP_CONTROLLER = StopController()


# EC2 gives two minutes, Google half a minute.
POLL_S, TIMEOUT_S = 3.0, 2.0
# Who made the machine, by the kernel's DMI tables; other clouds give notice by signals.
VENDOR = Path("/sys/class/dmi/id/sys_vendor")
VENDORS = {"Amazon EC2": "ec2", "Google": "gce"}


def watch_for_notice(chosen: str) -> None:
    """Stop the run, as its deadline does, once the cloud gives notice; `chosen` is TRAIN_PREEMPTION."""
    cloud = cloud_of_machine() if chosen == "auto" else chosen
    if cloud in VENDORS.values():
        start_thread(poll, cloud, chosen)


def cloud_of_machine() -> str:
    """Return the cloud whose machine this is, empty if it is none of the known ones."""
    try:
        return VENDORS.get(VENDOR.read_text().strip(), "")
    except OSError:
        return ""


def poll(cloud: str, chosen: str) -> None:
    """Ask until there is a notice; a server that does not answer is named once if the user chose the cloud."""
    silent = chosen == "auto"
    while True:
        try:
            if has_notice(cloud):
                STOP_CONTROLLER.deadline = Deadline(time.monotonic(), f"{cloud}'s notice of preemption")
                return
        except (OSError, HTTPException, ValueError) as error:
            if not silent:
                write_stderr(f"train: TRAIN_PREEMPTION={cloud}: no answer of its metadata server ({first_line(error)})")
            silent = True
        time.sleep(POLL_S)


def has_notice(cloud: str) -> bool:
    """Return whether the cloud is about to stop this machine; raises any error of urllib without an answer.

    Sources: EC2, "Spot Instance interruption notices" with IMDSv2; Compute Engine, "Spot VMs, handle preemption".
    The variables are those of the clouds' own libraries.
    """
    if cloud == "gce":
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        return read(f"http://{host}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
    server = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = read(f"{server}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    return bool(read(f"{server}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def read(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """Return what a metadata server answers, empty where it has nothing; no proxy is asked."""
    try:
        request = Request(url, headers=headers, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(1000), "utf-8", "replace").strip()
    except HTTPError as error:
        if error.code == 404:
            return ""
        raise
