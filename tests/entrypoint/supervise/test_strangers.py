"""Who is not part of a job can neither end, join nor slow its failure channel."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from msgspec.structs import asdict

from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import FirstFailure, RankEndpoint
from entrypoint.supervise.channel_server import port_address, relay_address
from entrypoint.supervise.failure_channel import FailureChannel
from entrypoint.supervise.wire import Session, WireError
from tests.conftest import PYTHON
from tests.entrypoint.supervise.channels import eventually, have_joined, open_channel, stranger
from tests.net import free_port
from tests.processes import killed_at_end, next_line

pytestmark = pytest.mark.launch

KEY, OTHER_KEY = b"the key of this job", b"the key of another job"
HELLO = {"hello": asdict(RankEndpoint(1, "evil", "127.0.0.1", 0, "x"))}
FORGED = {"first_failure": asdict(FirstFailure(3, "evil", 9, "forged"))}


def with_key(key: bytes = KEY) -> Access:
    return Access(lambda: key)


@pytest.fixture
def job() -> Iterator[tuple[int, FailureChannel, FailureChannel]]:
    """A job of three ranks, two of which have joined: the port, rank 0 and rank 1."""
    port = free_port()
    rank0, one = (open_channel(rank, port, access=with_key(), timeout_s=3) for rank in range(2))
    assert have_joined(rank0, 1)
    yield port, rank0, one
    assert rank0.first_failure is None
    late = open_channel(2, port, access=with_key(), timeout_s=3)
    assert have_joined(rank0, 2), "a rank that comes later"
    one.report_exit(7, "exit code 7")
    assert eventually(5, lambda: late.first_failure == rank0.first_failure is not None)
    assert rank0.first_failure == FirstFailure(1, "node1", 7, "exit code 7")


Job = tuple[int, FailureChannel, FailureChannel]


@pytest.mark.parametrize("message", [{"bye": 1}, HELLO | FORGED])
@pytest.mark.parametrize("key", [OTHER_KEY, b""])
def test_forged_message_has_no_effect(job: Job, message: dict[str, Any], key: bytes) -> None:
    session = Session(key)
    with socket.create_connection(("127.0.0.1", job[0]), timeout=10) as peer:
        peer.sendall(session.greeting())
        with suppress(WireError):  # the first line says that it has a key, or has none
            session.decode(peer.recv(4096))
        peer.sendall(session.encode(message) * 3)
        assert ended(peer)


def ended(peer: socket.socket) -> bool:
    """Return whether the other side closes the connection."""
    with suppress(ConnectionResetError):
        while peer.recv(65536):
            pass
    return True


def test_garbage_floods_and_endless_lines_are_cut(job: Job) -> None:
    for text in (b"\n" * 100_000, os.urandom(100_000), b"x" * 10_000_000, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", job[0]), timeout=10) as peer:
            with suppress(BrokenPipeError, ConnectionResetError):
                peer.sendall(text)
            assert ended(peer)


def test_idle_connections_are_closed(job: Job) -> None:
    # They say nothing, or send the first line in pieces.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", job[0]))) for _ in range(1000)]
        late = open_channel(2, job[0], access=with_key(), timeout_s=3)
        assert eventually(10, lambda: 2 in job[1].peers), "a rank joins meanwhile"
        until = time.monotonic() + 20
        while time.monotonic() < until and len(job[1].loop.connections) > 2:
            for peer in peers[:10]:
                with suppress(OSError):
                    peer.sendall(b"r")
            time.sleep(0.2)
        assert len(job[1].loop.connections) == 2
        late.report_exit(0, "")
        assert have_joined(job[1], 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


NO_FILES = """
import resource, socket, sys, time
from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import RankEndpoint
from entrypoint.supervise.failure_channel import FailureChannel
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
port = int(sys.argv[1])
channel = FailureChannel(RankEndpoint(0, "node0", "127.0.0.1", port, "x"), 3, access=Access(lambda: b"k" * 16))
channel.start()
print("listens", flush=True)
before = time.process_time()
while len(channel.peers) < 1:
    time.sleep(0.05)
print("joined", time.process_time() - before, channel.first_failure, flush=True)
time.sleep(60)
"""


def test_rank_joins_when_no_file_descriptor_is_left(port: int) -> None:
    with (
        killed_at_end([PYTHON, "-c", NO_FILES, str(port)], stdout=subprocess.PIPE, text=True) as rank0,
        ExitStack() as stack,
    ):
        assert next_line(rank0) == "listens\n"
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        start = time.monotonic()
        late = open_channel(1, port, access=with_key(b"k" * 16), timeout_s=3)
        word, seconds, failure = next_line(rank0).split()
        assert (word, failure) == ("joined", "None")
        assert float(seconds) < 0.5 * (time.monotonic() - start) + 0.5, "rank 0's monitor does not spin"
        late.report_exit(0, "")


def test_squatter_on_the_port_learns_nothing(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as squatter:
        one = open_channel(1, port, access=with_key(), rendezvous_port=1)
        peer, _ = squatter.accept()
        session = Session(OTHER_KEY, is_server=True)
        peer.sendall(session.greeting() + session.encode({"to": [1, 0], "welcome": True}))
        assert eventually(10, lambda: "another key" in one.obstacle)
        assert KEY not in peer.recv(65536)
        assert not one.connected.is_set()
        peer.close()
    rank0 = open_channel(0, port, access=with_key())
    assert have_joined(rank0, 1), "when the squatter has gone"
    one.report_exit(0, "")


def test_recorded_conversation_is_refused(job: Job) -> None:
    with stranger(job[0], KEY) as (peer, session):  # what a rank sends
        recorded = session.greeting() + session.encode({"hello": asdict(RankEndpoint(2, "n", "h", 0, "x"))})
        assert peer.fileno() >= 0
    with socket.create_connection(("127.0.0.1", job[0]), timeout=10) as peer:
        peer.sendall(recorded)
        assert ended(peer)
    assert 2 not in job[1].admission.admitted


OTHER_USER = """
import os, socket, sys
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.connect(bytes.fromhex(sys.argv[1]))
print(repr(peer.recv(100)))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")
def test_socket_of_a_node_refuses_other_users(port: int) -> None:
    rank0 = open_channel(0, port, shares_connection=True)
    address = relay_address(rank0.endpoint)
    done = subprocess.run(
        [PYTHON, "-c", OTHER_USER, address.encode().hex()], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "b''\n", done.stderr
    one = open_channel(1, port, shares_connection=True, local_rank=1, node="node0")
    assert have_joined(rank0, 1)
    one.report_exit(0, "")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")
def test_job_on_one_node_accepts_its_own_user_alone() -> None:
    port, own = free_port(), Access(own_user_only=True)
    rank0 = open_channel(0, port, access=own)
    words = (PYTHON, "-c", OTHER_USER, port_address(port).encode().hex())
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "b''\n", done.stderr
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    one = open_channel(1, port, access=own)
    assert have_joined(rank0, 1)
    one.report_exit(0, "")


OTHER_USERS_RANK_0 = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
os.setuid(65534)
server.bind(bytes.fromhex(sys.argv[1]))
server.listen()
print("listens", flush=True)
while True:
    peer, _ = server.accept()
    print(peer.recv(100), flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")
def test_another_users_rank_0_on_this_node_learns_nothing(port: int) -> None:
    words = (PYTHON, "-c", OTHER_USERS_RANK_0, port_address(port).encode().hex())
    with killed_at_end(words, stdout=subprocess.PIPE, text=True) as squatter:
        next_line(squatter)
        one = open_channel(1, port, access=Access(own_user_only=True), rendezvous_port=1)
        assert next_line(squatter) == "b''\n", "nothing is sent to it"
        assert not one.connected.is_set()
        one.report_exit(0, "")


def test_rank_waits_for_the_key_that_rank_0_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.supervise.access.KEY_WAIT_S", 5)
    port, keys = free_port(), [b""]
    with socket.create_server(("127.0.0.1", port)) as squatter:
        squatter.settimeout(1)
        one = open_channel(1, port, access=Access(lambda: keys[0], is_drawn=True))
        with pytest.raises(TimeoutError):
            squatter.accept()
    assert one.obstacle == "Rank 0 has not written the job's key yet"
    keys[0] = KEY
    rank0 = open_channel(0, port, access=with_key())
    assert have_joined(rank0, 1)
    one.report_exit(0, "")
