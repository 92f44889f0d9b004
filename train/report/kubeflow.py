"""Report the progress of a TrainJob to Kubeflow Trainer 2, where it asks for it.

Its KEP-2779 (feature gate TrainJobStatus) sets the variables below in every pod, and names the request's form: a POST
whose body replaces the whole status, with at most 256 metrics and names and values of at most 64 characters. Requests
are sent by a thread of their own, at most one in five seconds, and no failure of them ends or holds up a run.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from entrypoint.core.errors import first_line, printable

URL_VAR = "KUBEFLOW_TRAINER_SERVER_URL"
# Both name files. The token is renewed by the cluster, hence read before each request.
CA_VAR = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_VAR = "KUBEFLOW_TRAINER_SERVER_TOKEN"
INTERVAL_S = 5.0
TIMEOUT_S = 5.0
MAX_METRICS, MAX_NAME = 256, 64


class NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, which would hand the token to another server."""

    def redirect_request(self, *args: Any) -> None:
        """Return no request."""


@dataclass(frozen=True)
class StatusServer:
    """The server that takes a TrainJob's status, with the files of its certificate and of the token."""

    url: str
    ca_file: str
    token_file: str

    def send(self, status: Mapping[str, Any]) -> None:
        """Send one status; raises OSError, also for an answer that is no success, and ValueError."""
        token = Path(self.token_file).read_text().strip()
        body = json.dumps({"trainerStatus": status}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        context = ssl.create_default_context(cafile=self.ca_file)
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context), NoRedirects())
        with opener.open(Request(self.url, body, headers, method="POST"), timeout=TIMEOUT_S):
            return


def find_status_server(environ: Mapping[str, str]) -> StatusServer | None:
    """Return the server of this TrainJob, None where the variables are not those of one.

    Raises ValueError for an address that is not HTTPS: it would show the token to the network.
    """
    url, ca_file, token_file = (environ.get(name, "") for name in (URL_VAR, CA_VAR, TOKEN_VAR))
    if not (url and ca_file and token_file):
        return None
    if not url.startswith("https://"):
        raise ValueError(f"{URL_VAR}={printable(url)}: not an address of https")
    return StatusServer(url, ca_file, token_file)


class TrainJobStatus:
    """Keeps a TrainJob's status up to date: per cent of the steps, seconds left, and the newest numbers.

    It has the methods of a tracker. `first_step` is where a resumed run starts, which the estimate leaves out.
    """

    run_id = ""

    def __init__(self, server: StatusServer, total_steps: int, first_step: int, warn: Callable[[str], None]) -> None:
        self.server, self.total_steps, self.first_step, self.warn = server, max(1, total_steps), first_step, warn
        self.started, self.metrics = time.monotonic(), dict[str, str]()
        self.status: dict[str, Any] | None = None
        self.changed, self.ends = threading.Condition(), False
        self.thread = threading.Thread(target=self.work, name="trainjob-status", daemon=True)
        self.thread.start()

    def log(self, kind: str, step: int, values: Mapping[str, float | int]) -> None:
        """Take the numbers of a step or of an epoch."""
        done = step - self.first_step
        left = (time.monotonic() - self.started) / done * (self.total_steps - step) if done > 0 else None
        prefix = "" if kind == "epoch" else f"{kind}_"
        self.publish(min(100, 100 * step // self.total_steps), left, prefix, values)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Take the run's summary: nothing is left to do."""
        self.publish(100, 0, "", values)

    def close(self, status: str) -> None:
        """Send what is not sent yet, for a few seconds at most."""
        del status
        with self.changed:
            self.ends = True
            self.changed.notify()
        self.thread.join(2 * TIMEOUT_S)

    def publish(self, percent: int, left: float | None, prefix: str, values: Mapping[str, Any]) -> None:
        """Hand the newest status to the thread."""
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                self.metrics[f"{prefix}{name}"[:MAX_NAME]] = f"{value:.6g}"
        status: dict[str, Any] = {"progressPercentage": percent}
        if left is not None:
            status["estimatedRemainingSeconds"] = max(0, round(left))
        status["metrics"] = [{"name": name, "value": text} for name, text in self.metrics.items()][:MAX_METRICS]
        status["lastUpdatedTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with self.changed:
            self.status = status
            self.changed.notify()

    def work(self) -> None:
        """Send each newest status, with a pause between two; print a line at the first failure."""
        warned = False
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.status or self.ends)
                status, self.status = self.status, None
            if status is None:
                return
            try:
                self.server.send(status)
            except (OSError, ValueError) as error:
                if not warned:
                    cause = f"HTTP {error.code}" if isinstance(error, HTTPError) else first_line(error)
                    self.warn(f"train: {URL_VAR}: {printable(cause)}; the TrainJob does not show this run's progress")
                warned = True
            with self.changed:
                self.changed.wait_for(lambda: self.ends, timeout=INTERVAL_S)


def start_trainjob_status(
    environ: Mapping[str, str], total_steps: int, first_step: int, warn: Callable[[str], None]
) -> TrainJobStatus | None:
    """Return the reporter of this TrainJob, None outside of one."""
    try:
        server = find_status_server(environ)
    except ValueError as error:
        warn(f"train: {error}; the TrainJob does not show this run's progress")
        return None
    return TrainJobStatus(server, total_steps, first_step, warn) if server else None
