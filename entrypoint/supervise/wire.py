"""Messages of the failure channel: lines of JSON, each with a code that only monitors with the job's key can compute.

docs/architecture.md has the table of the protocol. With a key each line ends in a tab and a code:
HMAC-SHA-256 (RFC 2104) of the line's number and its text, cut to 16 bytes. Its key is derived from the job's key, both
nonces and the direction. So a line cannot be forged, repeated, moved or sent back.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
from typing import Any

Message = dict[str, Any]
PROTOCOL = "reference-training-1"
NONCE_BYTES, CODE_BYTES = 16, 16
CHUNK_BYTES = 65536
# The longest line.
MAX_LINE_BYTES = 65536
OTHER_KEY = "it has another key than this job's"
INVALID = "it sent an invalid message"


class WireError(Exception):
    """Why a connection is given up."""


class Session:
    """One side of a connection: signs what it sends, and checks what it receives.

    A session that is not proven yet may be closed for others. At most `max_output` bytes wait for a slow reader.
    """

    has_heartbeats, max_output = True, 1 << 20

    def __init__(self, key: bytes = b"", *, is_server: bool = False) -> None:
        self.key, self.is_server = key, is_server
        self.nonce = os.urandom(NONCE_BYTES).hex()
        self.send_key = self.receive_key = self.rest = b""
        self.sent = self.received = 0
        self.is_open = self.is_proven = False

    def greeting(self) -> bytes:
        """Return the first line."""
        return f"{PROTOCOL} {'key' if self.key else 'open'} {self.nonce}\n".encode()

    def encode(self, message: Message) -> bytes:
        """Return a message's line; the other side's greeting must have come."""
        text = json.dumps(message).encode()
        code = b"\t" + compute_code(self.send_key, self.sent, text) if self.key else b""
        self.sent += 1
        return text + code + b"\n"

    def decode(self, data: bytes) -> list[Message]:
        """Return the messages that the data completes, without heartbeats; raises `WireError`."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        messages = []
        if any(len(line) > MAX_LINE_BYTES for line in (*lines, self.rest)):
            raise WireError(f"it sent a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if not self.is_open:
                self.open(line)
            else:
                messages.append(self.read(line))
        return [message for message in messages if message]

    def open(self, line: bytes) -> None:
        """Take up the other side's greeting; raises `WireError` where it is another protocol's, or lacks a key."""
        words = line.decode("ascii", "replace").split(" ")
        if len(words) != 3 or words[0] != PROTOCOL or len(words[2]) != 2 * NONCE_BYTES:
            raise WireError(INVALID)
        if (words[1] == "key") != bool(self.key):
            asked = "it asks for the job's key, and this node has none"
            raise WireError("it has no key of this job" if self.key else asked)
        nonces = (words[2], self.nonce) if self.is_server else (self.nonce, words[2])
        keys = [
            hmac.digest(self.key, f"{PROTOCOL} {side} {' '.join(nonces)}".encode(), "sha256")
            for side in ("client", "server")
        ]
        self.receive_key, self.send_key = keys if self.is_server else reversed(keys)
        self.is_open = True

    def read(self, line: bytes) -> Message:
        """Return the message of a line; raises `WireError` unless the other side has the job's key."""
        text = line
        if self.key:
            text, _, code = line.rpartition(b"\t")
            if not hmac.compare_digest(code, compute_code(self.receive_key, self.received, text)):
                raise WireError(INVALID if self.is_proven else OTHER_KEY)
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise WireError(INVALID) from None
        if not isinstance(message, dict):
            raise WireError(INVALID)
        self.received += 1
        self.is_proven = True
        return message


class BytesSession:
    """The session of a connection that speaks torch's protocol; its bytes are passed on as they come."""

    is_proven, has_heartbeats, max_output = True, False, 256 << 20

    def greeting(self) -> bytes:
        """Return nothing: the client speaks first."""
        return b""

    def encode(self, _message: object) -> bytes:
        """Return nothing for a heartbeat, which torch's clients do not know."""
        return b""

    def decode(self, data: bytes) -> list[Any]:
        """Return the data."""
        return [data]


def compute_code(key: bytes, number: int, text: bytes) -> bytes:
    """Return the code of the line with this number in its direction."""
    return hmac.digest(key, number.to_bytes(8, "big") + text, "sha256")[:CODE_BYTES].hex().encode()


def shake_hands(
    peer: socket.socket, session: Session, hello: Message, limit_s: float, heartbeat_s: float = 0.0
) -> list[Message]:
    """Exchange the first lines, send a message, and return the answer with what follows it.

    Each heartbeat of the other side gives it `heartbeat_s` more. Raises `WireError`, and OSError after `limit_s`.
    """
    until = time.monotonic() + limit_s
    messages: list[Message] = []
    peer.sendall(session.greeting())
    while not session.is_open:
        messages += receive(peer, session, until)
    peer.sendall(session.encode(hello))
    while not messages:
        messages += receive(peer, session, until)
        until = max(until, time.monotonic() + heartbeat_s)
    return messages


def receive(peer: socket.socket, session: Session, until: float) -> list[Message]:
    """Return the messages of the next bytes; raises `WireError`, and OSError at the connection's end or too late."""
    peer.settimeout(max(0.001, until - time.monotonic()))
    data = peer.recv(CHUNK_BYTES)
    if not data:
        raise ConnectionError("closed")
    return session.decode(data)
