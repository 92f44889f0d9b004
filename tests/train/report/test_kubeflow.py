"""The progress that a TrainJob of Kubeflow shows, sent to a real HTTPS server."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Entrypoint
from train.report import kubeflow
from train.report.kubeflow import CA_VAR, TOKEN_VAR, URL_VAR, TrainJobStatus, find_status_server, start_trainjob_status

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/pets/status"


@dataclass
class Controller:
    """Stands in for Kubeflow's status server, and keeps what it was sent."""

    environ: dict[str, str]
    answer: int = 200
    hold_s: float = 0.0
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)

    def statuses(self) -> list[dict[str, Any]]:
        return [body["trainerStatus"] for _, _, body in self.requests]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl, to make a certificate")
    key, certificate, token = tmp_path / "key.pem", tmp_path / "ca.crt", tmp_path / "token"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    token.write_text("first.token\n")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            it.requests.append((self.path, dict(self.headers), body))
            time.sleep(it.hold_s)
            self.send_response(it.answer)
            if it.answer == 307:
                self.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}{PATH}"
    it = Controller({URL_VAR: url, CA_VAR: str(certificate), TOKEN_VAR: str(token)})
    yield it
    server.shutdown()
    server.server_close()


def reporter(controller: Controller, lines: list[str]) -> TrainJobStatus:
    found = start_trainjob_status(controller.environ, 200, 0, lines.append)
    assert found
    return found


def test_status_has_the_form_of_the_controller(controller: Controller) -> None:
    lines: list[str] = []
    status = reporter(controller, lines)
    status.log("step", 90, {"loss": 0.51234567, "images_per_second": 1234.5, "epoch": 1})
    status.close("KILLED")
    ((path, headers, body),) = controller.requests
    assert path == PATH
    assert headers["Authorization"] == "Bearer first.token"
    sent = body["trainerStatus"]
    assert sent["progressPercentage"] == 45
    assert isinstance(sent["estimatedRemainingSeconds"], int)
    assert {"name": "step_loss", "value": "0.512346"} in sent["metrics"]
    assert sent["lastUpdatedTime"].endswith("Z")
    assert lines == []


def test_statuses_are_rare_and_the_last_one_is_sent(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow, "INTERVAL_S", 0.2)
    status = reporter(controller, [])
    began = time.monotonic()
    for step in range(1, 101):
        status.log("step", step, {"loss": float("nan")})
        time.sleep(0.005)
    status.log("epoch", 100, {"test_accuracy": 71.0})
    status.summary({"test_accuracy": 72.5, "name": "pets", "exact": True})
    status.close("FINISHED")
    assert len(controller.requests) <= (time.monotonic() - began) / 0.2 + 2
    last = controller.statuses()[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert last["metrics"] == [{"name": "test_accuracy", "value": "72.5"}]


def test_token_is_read_before_each_request(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow, "INTERVAL_S", 0.01)
    status = reporter(controller, [])
    for step, token in ((1, "first.token"), (2, "second.token")):
        Path(controller.environ[TOKEN_VAR]).write_text(token)
        status.log("step", step, {"loss": 1.0})
        while len(controller.requests) < step:
            time.sleep(0.01)
    status.close("FINISHED")
    assert [headers["Authorization"] for _, headers, _ in controller.requests][:2] == [
        "Bearer first.token",
        "Bearer second.token",
    ]


@pytest.mark.parametrize(
    ("answer", "said"), [(403, "HTTP 403"), (307, "HTTP 307"), (500, "HTTP 500"), (404, "HTTP 404")]
)
def test_refused_status_is_one_line(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, answer: int, said: str
) -> None:
    monkeypatch.setattr(kubeflow, "INTERVAL_S", 0.01)
    controller.answer, lines = answer, []
    status = reporter(controller, lines)
    for step in (1, 2, 3):
        status.log("step", step, {"loss": 1.0})
        time.sleep(0.1)
    status.close("FINISHED")
    assert lines == [f"train: {URL_VAR}: {said}; the TrainJob does not show this run's progress"]
    assert {path for path, _, _ in controller.requests} == {PATH}  # the token goes nowhere else


def test_server_that_does_not_answer_holds_up_nothing(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow, "TIMEOUT_S", 0.3)
    controller.hold_s, lines = 2.0, []
    began = time.monotonic()
    status = reporter(controller, lines)
    status.log("step", 1, {"loss": 1.0})
    status.close("FINISHED")
    assert time.monotonic() - began < 1.5
    assert "timed out" in lines[0]


def test_certificate_of_another_authority_is_refused(controller: Controller, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other")
    subprocess.run([*command, "-keyout", tmp_path / "k", "-out", other], check=True, capture_output=True)
    lines: list[str] = []
    status = start_trainjob_status({**controller.environ, CA_VAR: str(other)}, 200, 0, lines.append)
    assert status
    status.log("step", 1, {"loss": 1.0})
    status.close("FINISHED")
    assert "certificate verify failed" in lines[0]
    assert controller.requests == []


def test_other_places_than_a_trainjob_report_nothing() -> None:
    assert find_status_server({}) is None
    assert find_status_server({URL_VAR: "https://a/b", CA_VAR: "/ca"}) is None
    lines: list[str] = []
    plain = {URL_VAR: "http://a/b", CA_VAR: "/ca", TOKEN_VAR: "/token"}
    assert start_trainjob_status(plain, 1, 0, lines.append) is None
    assert lines == [
        f"train: {URL_VAR}=http://a/b: not an address of https; the TrainJob does not show this run's progress"
    ]


@pytest.mark.launch
def test_run_reports_its_accuracy(entrypoint: Entrypoint, controller: Controller) -> None:
    result = entrypoint("train", env={**controller.environ, "TRAIN_EPOCHS": "2", "TRAIN_RUN_NAME": "pets"})
    assert result.code == 0, result.err
    last = controller.statuses()[-1]
    metrics = {one["name"]: one["value"] for one in last["metrics"]}
    summary = json.loads((entrypoint.folder / "runs/pets/summary.json").read_text())
    assert last["progressPercentage"] == 100
    assert float(metrics["test_accuracy"]) == pytest.approx(summary["test_accuracy"], abs=1e-3)
    assert len(metrics) <= 256
