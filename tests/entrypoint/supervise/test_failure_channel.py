"""Monitors share the first failure of a job's ranks, and detect a node that no longer responds."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.supervise.admission import FirstFailure
from entrypoint.supervise.channel_server import NODE_LOST_CODE
from entrypoint.supervise.failure_channel import FailureChannel
from tests.conftest import refusal
from tests.entrypoint.supervise.channels import eventually, have_joined, open_channel, open_channels, stranger
from tests.net import free_port, listen_on

pytestmark = pytest.mark.launch


def test_failure_channel_two_failures_all_keep_first() -> None:
    rank0, one, two = open_channels(3)
    assert have_joined(rank0, 2)
    one.report_exit(9, "killed by SIGKILL")
    failed = FirstFailure(1, "node1", 9, "killed by SIGKILL")
    assert eventually(5, lambda: rank0.first_failure == two.first_failure == failed)
    two.report_exit(5, "exit code 5")
    rank0.report_exit(5, "exit code 5")
    assert rank0.first_failure == failed


def test_failure_channel_disconnect_after_bye_is_no_loss() -> None:
    for _ in range(10):
        rank0, one = open_channels(2)
        assert have_joined(rank0, 1)
        one.report_exit(0, "exit code 0")
        assert eventually(5, lambda rank0=rank0: not rank0.peers)
        assert eventually(5, lambda one=one: not one.peers)
        assert (rank0.first_failure, one.first_failure) == (None, None)
        rank0.report_exit(0, "exit code 0")


def test_failure_channel_late_rank_gets_first_failure(port: int) -> None:
    rank0 = open_channel(0, port)
    rank0.report_failure(FirstFailure(0, "node0", 3, "exit code 3"))
    late = open_channel(1, port)
    assert eventually(10, lambda: late.first_failure is not None)


def test_failure_channel_idle_uses_little_cpu() -> None:
    channels = open_channels(5)
    assert have_joined(channels[0], 4)
    began, used = time.monotonic(), time.process_time()
    time.sleep(3)
    share = (time.process_time() - used) / (time.monotonic() - began)
    assert share < 0.05, "share of one core, for all five channels"
    channels[0].report_exit(0, "exit code 0")


def test_failure_channel_silent_node_is_lost(port: int) -> None:
    rank0 = open_channel(0, port, timeout_s=1.0)
    assert eventually(10, lambda: port_answers(port))
    with stranger(port) as (peer, session):
        hello = {"rank": 1, "node": "node1", "host": "", "port": 0, "token": "x"}
        peer.sendall(session.encode({"hello": hello}) + session.encode({"joined": 1}))
        assert eventually(10, lambda: rank0.first_failure is not None)
    assert rank0.first_failure == FirstFailure(1, "node1", NODE_LOST_CODE, "its node is lost: silent for 1 s")


def port_answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_failure_channel_other_token_is_ignored() -> None:
    rank0, stranger = open_channels(2, tokens=("job 7", "job 8"))
    assert not joined_within_a_second(rank0)
    stranger.report_exit(5, "exit code 5")
    assert not eventually(1, lambda: rank0.first_failure is not None)


def joined_within_a_second(rank0: FailureChannel) -> bool:
    return eventually(1, lambda: bool(rank0.peers))


def test_failure_channel_invalid_messages_are_ignored(capfd: pytest.CaptureFixture[str], port: int) -> None:
    rank0 = open_channel(0, port, timeout_s=1)
    assert eventually(10, lambda: port_answers(port))
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"hello": 7}\n', b'{"hello": {"rank": 1}}\n'):
        with stranger(port) as (peer, _):
            peer.sendall(text)
            with suppress(ConnectionResetError):
                while peer.recv(4096):
                    pass
    assert rank0.first_failure is None
    assert "Traceback" not in capfd.readouterr().err


def test_wait_for_rank0_silent_logs_then_raises(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr("entrypoint.supervise.failure_channel.LOG_INTERVAL_S", 0.2)
    lines: list[str] = []
    refusal(
        open_channel(1, port, rendezvous_port=1).wait_for_rank0,
        1,
        lines.append,
        match=f"rank 1: rank 0 at 127.0.0.1, port {port}, did not answer",
        code=ExitCode.RENDEZVOUS,
    )
    assert lines[0] == f"rank 1 waits for rank 0 at 127.0.0.1, port {port} (0 of 1 s)"


@pytest.mark.parametrize("which", ["channel", "ranks"])
def test_failure_channel_taken_port_names_master_port(which: str) -> None:
    free, taken = free_port(), free_port()
    port, rendezvous_port = (taken, free) if which == "channel" else (free, taken)
    said = f"MASTER_PORT={rendezvous_port}, from the job's id: port {taken} is taken on this node. Set MASTER_PORT"
    with listen_on(taken):
        refusal(open_channel, 0, port, rendezvous_port=rendezvous_port, match=said, code=ExitCode.RENDEZVOUS)


def test_missing_channel_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], port: int
) -> None:
    monkeypatch.setattr("entrypoint.supervise.channel_client.WARN_AFTER_S", 0.1)
    with listen_on(port):
        open_channel(0, port)
        assert f"warning: no failure channel: port {port} is taken on this node" in capfd.readouterr().err
        one = open_channel(1, port)
        said = ""

        def is_named() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "warning" in said

        assert eventually(20, is_named)
    assert f"rank 1 has no failure channel: rank 0 at 127.0.0.1, port {port}, did not answer." in said
    one.report_exit(0, "")
