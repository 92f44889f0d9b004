"""A cloud's notice of preemption: a stand-in of its metadata server, and real runs that save before it goes."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import BadStatusLine, InvalidURL
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.conftest import Entrypoint
from tests.train.given import SMALL, TWO_RANKS_WHERE_THEY_FIT
from tests.train.started import Started
from train import preemption
from train.preemption import STOP_CONTROLLER, cloud_of_machine, has_notice, poll

EC2 = "/latest/meta-data/spot/instance-action"
GCE = "/computeMetadata/v1/instance/preempted"


class Metadata(ThreadingHTTPServer):
    """What EC2's and Google's servers answer; `taken` once they take the machine."""

    taken = False

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, "token") if headers.get("x-aws-ec2-metadata-token-ttl-seconds") else (400, "")
        if path == EC2 and headers.get("x-aws-ec2-metadata-token") == "token":
            return (200, '{"action": "terminate", "time": "2026-11-29T10:00:00Z"}') if self.taken else (404, "no such")
        if path == GCE and headers.get("metadata-flavor") == "Google":
            return 200, "TRUE" if self.taken else "FALSE"
        return 401, ""


class Handler(BaseHTTPRequestHandler):
    """Answers as `Metadata` says."""

    server: Metadata

    def do_GET(self) -> None:
        """Answer a request."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        code, text = self.server.answer(self.command, self.path, headers)
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    do_PUT = do_GET  # noqa: N815  # the name that the library calls

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    """Return a running stand-in."""
    server = Metadata(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def variables(server: Metadata) -> dict[str, str]:
    host = f"127.0.0.1:{server.server_port}"
    return {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{host}/", "GCE_METADATA_HOST": host,
        "http_proxy": "http://127.0.0.1:1",
    }  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize("cloud", ["ec2", "gce"])
def test_notice_is_what_the_cloud_says(metadata: Metadata, cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(metadata).items():
        monkeypatch.setenv(name, value)
    assert not has_notice(cloud)
    metadata.taken = True
    assert has_notice(cloud)


@pytest.mark.parametrize(("vendor", "cloud"), [("Amazon EC2\n", "ec2"), ("Google\n", "gce"), ("QEMU", ""), (None, "")])
def test_cloud_is_found_by_the_vendor(
    tmp_path: Path, vendor: str | None, cloud: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vendor is not None:
        (tmp_path / "sys_vendor").write_text(vendor)
    monkeypatch.setattr(preemption, "VENDOR", tmp_path / "sys_vendor")
    assert cloud_of_machine() == cloud


@pytest.mark.launch
@pytest.mark.slow_except("ec2")
@pytest.mark.parametrize(("cloud", "ranks"), [("ec2", TWO_RANKS_WHERE_THEY_FIT), ("gce", {})])
def test_run_saves_on_notice(entrypoint: Entrypoint, metadata: Metadata, cloud: str, ranks: dict[str, str]) -> None:
    env = SMALL | ranks | variables(metadata) | {"TRAIN_EPOCHS": "100000", "TRAIN_PREEMPTION": cloud}
    run = Started(entrypoint, env | {"TRAIN_TENSORBOARD": "0"})
    run.wait_for("epoch 2/")
    metadata.taken = True
    _, err = run.ended_with(75)
    assert f"preempted: stopped by {cloud}'s notice of preemption: step " in err
    assert list((entrypoint.folder / "runs/latest/checkpoint").glob("step-*"))


@pytest.mark.parametrize(
    "error", [OSError("down"), BadStatusLine("x"), ValueError("unknown url type"), InvalidURL("x")]
)
def test_bad_answer_does_not_end_the_watch(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Exception | bool] = [error, error, True]

    def answer(_: str) -> bool:
        now = answers.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    monkeypatch.setattr(preemption, "has_notice", answer)
    monkeypatch.setattr(preemption, "POLL_S", 0)
    monkeypatch.setattr(STOP_CONTROLLER, "deadline", None)
    poll("ec2", "ec2")
    assert STOP_CONTROLLER.deadline
    assert capsys.readouterr().err.count("no answer") == 1
