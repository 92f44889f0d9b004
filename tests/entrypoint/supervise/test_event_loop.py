"""What a monitor sends before it ends arrives, whatever the other side does meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from entrypoint.supervise.event_loop import Connection, EventLoop, unconfirmed_bytes
from entrypoint.supervise.wire import Message, Session


class Silent:
    """A role that handles nothing."""

    def handle(self, _: Connection, __: Message) -> bool:
        return True

    def lose(self, _: Connection, __: str) -> None:
        pass


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection, the second with room for little."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            yield one, other


def read_all(end: socket.socket, size: int) -> bytes:
    """Read so many bytes."""
    data = b""
    while len(data) < size:
        data += end.recv(65536)
    return data


@pytest.mark.seconds
def test_drain_waits_until_the_other_side_has_everything(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    loop, connection = EventLoop(30, 2), Connection(one, Session(), Silent())
    loop.add(connection)
    with loop.lock:
        loop.write(connection, bytes(40_000))
    assert not connection.output, "this kernel has all of it"
    began = time.monotonic()
    loop.drain(0.5)
    assert time.monotonic() - began >= 0.5
    assert unconfirmed_bytes(one) > 0, "the other side's kernel has not"
    reader = threading.Thread(target=read_all, args=(other, 40_000))
    reader.start()
    loop.drain(20)
    assert unconfirmed_bytes(one) == 0
    reader.join(20)
    assert not reader.is_alive()
