"""The store in which ranks meet: what torch's own clients get from it, and who is let in."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Queue

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from entrypoint.supervise.access import Access, connect_to
from entrypoint.supervise.event_loop import EventLoop
from entrypoint.supervise.store_commands import MAGIC
from entrypoint.supervise.store_door import AGENTS, OTHER_RESTARTS, StoreDoor, StoreRelay, listen_on_loopback

pytestmark = [pytest.mark.launch, pytest.mark.versions]
KEY = b"0123456789abcdef0123456789abcdef"
Ports = tuple[int, int]


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Collects processes that serve: some of torch's calls hold Python's lock while they wait for an answer."""
    started: list[int] = []
    yield started
    for child in started:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def serve_in_child(children: list[int], open_doors: Callable[[EventLoop], None]) -> None:
    child = os.fork()
    if child:
        children.append(child)
        return
    loop = EventLoop(30, 2)
    open_doors(loop)
    signal.pause()


@pytest.fixture
def ports(children: list[int]) -> Ports:
    """Return the port of a store for programs, and the one for monitors with the key."""
    programs, monitors = listen_on_loopback(), listen_on_loopback()

    def open_doors(loop: EventLoop) -> None:
        door = StoreDoor(loop)
        loop.listen(programs, door.welcome_program)
        loop.listen(monitors, partial(Access(lambda: KEY).welcome, door))

    serve_in_child(children, open_doors)
    return programs.getsockname()[1], monitors.getsockname()[1]


def relay_to(children: list[int], port: int, key: bytes) -> int:
    """Return the port of another node's monitor with this key, which reaches the store at `port`."""
    programs = listen_on_loopback()

    def open_doors(loop: EventLoop) -> None:
        relay = StoreRelay(loop, Access(lambda: key), 1, lambda: connect_to(("127.0.0.1", port)))
        loop.listen(programs, relay.welcome)

    serve_in_child(children, open_doors)
    return int(programs.getsockname()[1])


def test_ranks_and_agents_do_not_meet() -> None:
    monitors, programs, loop = listen_on_loopback(), listen_on_loopback(), EventLoop(30, 2)
    came, reasons = threading.Event(), Queue[str]()
    loop.listen(monitors, partial(Access(lambda: KEY).welcome, StoreDoor(loop, AGENTS, came.set)))
    relay = StoreRelay(loop, Access(lambda: KEY), 9, lambda: connect_to(monitors.getsockname()), reasons.put)
    loop.listen(programs, relay.welcome)
    with socket.create_connection(programs.getsockname()):
        assert reasons.get(timeout=9) == OTHER_RESTARTS
    assert came.wait(9)
    loop.stop()


def client_of(port: int, timeout_s: float = 10) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=timeout_s), False)


@pytest.mark.parametrize("relayed", [False, True])
def test_torchs_clients_get_what_torchs_server_gives(children: list[int], ports: Ports, relayed: bool) -> None:
    served = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    first, other = client_of(ports[0]), client_of(relay_to(children, ports[1], KEY) if relayed else ports[0])
    for store, second in ((served, client_of(served.port)), (first, other)):
        store.set("a", "1")
        assert second.get("a") == b"1"
        assert (store.add("n", 5), second.add("n", -2)) == (5, 3)
        assert second.compare_set("c", "", "new") == b"new"
        assert store.compare_set("c", "old", "newer") == b"new"
        assert store.compare_set("c", "new", "newer") == b"newer"
        assert store.compare_set("absent", "x", "y") == b"x"
        store.append("a", "23")
        second.multi_set(["x", "y"], ["7", b"\0" * 200_000])
        assert store.multi_get(["a", "x", "y"]) == [b"123", b"7", b"\0" * 200_000]
        assert (store.check(["a", "n"]), store.check(["a", "never"])) == (True, False)
        assert (store.num_keys(), store.delete_key("x"), second.delete_key("x"), store.num_keys()) == (
            5,
            True,
            False,
            4,
        )
        PrefixStore("group", second).set("a", "of the group")
        assert store.get("group/a") == b"of the group"
        with pytest.raises(RuntimeError):
            second.wait(["never"], timedelta(milliseconds=200))
        late = threading.Timer(0.3, store.set, ("late", "1"))
        late.start()
        second.wait(["late", "a"], timedelta(seconds=10))
        store.queue_push("q", b"first")
        store.queue_push("q", b"second")
        assert (second.queue_len("q"), second.queue_pop("q"), second.queue_len("q")) == (2, b"first", 1)
        if hasattr(store, "list_keys"):
            assert set(second.list_keys()) >= {"a", "c", "late", "group/a"}
        if hasattr(store, "barrier"):
            with pytest.raises(RuntimeError):
                second.barrier("all", 2, timedelta(milliseconds=200))
            second.barrier("all", 2, timedelta(seconds=10))


@pytest.mark.parametrize("key", [b"", b"another key that is long enough"])
def test_monitor_without_the_key_does_not_reach_the_store(children: list[int], ports: Ports, key: bytes) -> None:
    with pytest.raises(RuntimeError):
        client_of(relay_to(children, ports[1], key), timeout_s=2)


def test_client_of_torch_gets_nothing_from_a_keyed_port(ports: Ports) -> None:
    with pytest.raises(RuntimeError):
        client_of(ports[1], timeout_s=2)


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process can be started by root alone")
@pytest.mark.parametrize(("uid", "answer"), [(0, struct.pack("<I", 7)), (65534, b"")])
def test_another_users_process_on_this_node_gets_nothing(ports: Ports, uid: int, answer: bytes) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(uid)
        with suppress(ConnectionError), socket.socket() as store:
            store.connect((b"127.0.0.1", ports[0]))  # a name would need a codec, which others may not read
            store.sendall(struct.pack("<BIBI", 0, MAGIC, 13, 7))
            os.write(write, store.recv(4))
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 4) == answer
