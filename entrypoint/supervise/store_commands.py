"""The store in which a job's ranks meet, in the protocol of torch's TCPStore clients.

The protocol is torch's own and has no version (torch/csrc/distributed/c10d/TCPStoreBackend.hpp and
TCPStoreLibUvBackend.cpp; the same from torch 2.8 to 2.15, tested against each stack). torch's server listens for
everybody; this one answers connections that have been checked, and needs no torch.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

from entrypoint.supervise.event_loop import Connection, EventLoop
from entrypoint.supervise.wire import INVALID, BytesSession, WireError

MAGIC = 0x3C85F7CE
# What torch's server accepts at most: characters of a key, bytes of a value, keys of a command.
MAX_KEY, MAX_VALUE, MAX_KEYS = 8192, 8 << 20, 128 << 10
READY, NOT_READY, STOP_WAITING, WAIT_CANCELED = b"\0", b"\1", b"\0", b"\1"
# Methods of `JobStore` by torch's number, with what follows the number: k a key, v a value, q a signed number,
# I a number of four bytes, K keys, P keys with values.
COMMANDS = (
    ("validate", "I"),
    ("set", "kv"),
    ("compare_set", "kvv"),
    ("get", "k"),
    ("add", "kq"),
    ("check", "K"),
    ("wait", "K"),
    ("count", ""),
    ("delete", "k"),
    ("append", "kv"),
    ("multi_get", "K"),
    ("multi_set", "P"),
    ("cancel_wait", ""),
    ("ping", "I"),
    ("queue_push", "kv"),
    ("queue_pop", "k"),
    ("queue_len", "k"),
    ("list_keys", ""),  # from torch 2.13 on
    ("barrier", "kq"),
)


class Incomplete(Exception):
    """The rest of a command has not come yet."""


class StoreSession(BytesSession):
    """The store's side of a connection: splits what a client sends into commands."""

    def __init__(self) -> None:
        self.rest = bytearray()
        self.at = 0

    def decode(self, data: bytes) -> list[Any]:
        """Return the commands that the data completes, each a method's name and arguments; raises `WireError`."""
        self.rest += data
        commands, end = [], 0
        try:
            self.at = 0
            while self.at < len(self.rest):
                commands.append(self.read_command())
                end = self.at
        except Incomplete:
            pass  # it is read again with the next data
        del self.rest[:end]
        return commands

    def read_command(self) -> tuple[Any, ...]:
        """Return the next command; raises `Incomplete` or `WireError`."""
        (number,) = self.take("B")
        if number >= len(COMMANDS):
            raise WireError(f"it sent command {number}, which no known torch has")
        name, fields = COMMANDS[number]
        return name, *(self.read_field(field) for field in fields)

    def read_field(self, field: str) -> Any:
        """Return the next part of a command."""
        if field in "kv":
            return self.read_bytes(MAX_KEY if field == "k" else MAX_VALUE)
        if field in "KP":
            (count,) = self.take("Q")
            if count > MAX_KEYS:
                raise WireError(INVALID)
            parts = "k" if field == "K" else "kv"
            return [tuple(self.read_field(part) for part in parts) for _ in range(count)]
        return self.take(field)[0]

    def read_bytes(self, limit: int) -> bytes:
        """Return bytes after their length."""
        (length,) = self.take("Q")
        if length > limit:
            raise WireError(INVALID)
        return bytes(self.take(f"{length}s")[0])

    def take(self, layout: str) -> tuple[Any, ...]:
        """Return the next numbers or bytes."""
        size = struct.calcsize(f"<{layout}")
        if self.at + size > len(self.rest):
            raise Incomplete
        self.at += size
        return struct.unpack_from(f"<{layout}", self.rest, self.at - size)


def with_length(value: bytes) -> bytes:
    """Return bytes after their length."""
    return struct.pack("<Q", len(value)) + value


class JobStore:
    """Keys and values, queues, and the connections that wait for keys. Each method answers a command."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.waiting: dict[bytes, list[Connection]] = {}
        self.missing: dict[Connection, int] = {}
        self.client: Connection  # whose command is answered
        self.was_used = False

    def handle(self, connection: Connection, message: tuple[Any, ...]) -> bool:
        """Answer a command."""
        name, *fields = message
        self.client = connection
        if answer := getattr(self, name)(*fields):
            self.loop.write(connection, answer)
        return True

    def lose(self, connection: Connection, _reason: str) -> None:
        """Forget what a lost connection waited for."""
        if self.missing.pop(connection, 0):
            for peers in self.waiting.values():
                while connection in peers:
                    peers.remove(connection)

    def validate(self, number: int) -> None:
        """Check that a client of torch speaks; raises ValueError."""
        self.was_used = True
        if number != MAGIC:
            raise ValueError(number)

    def ping(self, number: int) -> bytes:
        """Return the number."""
        return struct.pack("<I", number)

    def set(self, key: bytes, value: bytes) -> None:
        """Set a value, and wake those that wait for it."""
        self.values[key] = value
        for peer in self.waiting.pop(key, ()):
            self.wake(peer)

    def wake(self, connection: Connection) -> bool:
        """Count one key less for a waiting connection, and return whether it has all."""
        self.missing[connection] = self.missing.get(connection, 1) - 1
        if self.missing[connection]:
            return False
        del self.missing[connection]
        self.loop.write(connection, STOP_WAITING)
        return True

    def compare_set(self, key: bytes, expected: bytes, wanted: bytes) -> bytes:
        """Set a value if it is the expected one; return the value, or what was expected of a missing key."""
        if self.values.get(key, b"") == expected:
            self.set(key, wanted)
        return with_length(self.values.get(key, expected))

    def get(self, key: bytes) -> bytes:
        """Return a value, empty if there is none: clients wait for a key first."""
        return with_length(self.values.get(key, b""))

    def add(self, key: bytes, number: int) -> bytes:
        """Add to a number in decimal digits, and return the sum."""
        total = int(self.values.get(key, b"0")) + number
        self.set(key, str(total).encode())
        return struct.pack("<q", total)

    def is_there(self, key: bytes) -> bool:
        """Return whether a key has a value or a filled queue."""
        return key in self.values or bool(self.queues.get(key))

    def check(self, keys: list[tuple[bytes]]) -> bytes:
        """Return whether all keys are there."""
        return READY if all(self.is_there(key) for (key,) in keys) else NOT_READY

    def wait(self, keys: list[tuple[bytes]]) -> bytes:
        """Answer when all keys are there."""
        absent = {key for (key,) in keys if not self.is_there(key)}
        if not absent:
            return STOP_WAITING
        self.missing[self.client] = len(absent)
        for key in absent:
            self.waiting.setdefault(key, []).append(self.client)
        return b""

    def cancel_wait(self) -> bytes:
        """Stop waiting."""
        self.lose(self.client, "")
        return WAIT_CANCELED

    def count(self) -> bytes:
        """Return the number of keys."""
        return struct.pack("<q", len(self.values))

    def delete(self, key: bytes) -> bytes:
        """Delete a key, and return how many were deleted."""
        return struct.pack("<q", int(self.values.pop(key, None) is not None))

    def append(self, key: bytes, value: bytes) -> None:
        """Append to a value."""
        self.set(key, self.values.get(key, b"") + value)

    def multi_get(self, keys: list[tuple[bytes]]) -> bytes:
        """Return several values."""
        return b"".join(self.get(key) for (key,) in keys)

    def multi_set(self, pairs: list[tuple[bytes, bytes]]) -> None:
        """Set several values."""
        for key, value in pairs:
            self.set(key, value)

    def queue_push(self, key: bytes, value: bytes) -> None:
        """Append to a queue, and wake one that waits for it."""
        self.queues.setdefault(key, deque()).append(value)
        waiting = self.waiting.get(key, [])
        while waiting and not self.wake(waiting.pop(0)):
            pass

    def queue_pop(self, key: bytes) -> bytes:
        """Return the length of a queue, and its first value if there is one."""
        queue = self.queues.get(key, deque())
        length = struct.pack("<q", len(queue))
        return length + with_length(queue.popleft()) if queue else length

    def queue_len(self, key: bytes) -> bytes:
        """Return the length of a queue."""
        return struct.pack("<q", len(self.queues.get(key, ())))

    def barrier(self, key: bytes, ranks: int) -> bytes:
        """Answer when so many have come."""
        self.add(key, 1)
        # Keys of torch's clients begin with a slash.
        waiting = self.waiting.setdefault(b"barrier " + key, [])
        if int(self.values[key]) < ranks:
            self.missing[self.client] = 1
            waiting.append(self.client)
            return b""
        while waiting:
            self.wake(waiting.pop())
        return STOP_WAITING

    def list_keys(self) -> bytes:
        """Return all keys."""
        return struct.pack("<Q", len(self.values)) + b"".join(map(with_length, self.values))
