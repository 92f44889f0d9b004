"""Messages of the failure channel: lines of JSON; an empty line is a heartbeat."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable

HEARTBEAT_INTERVAL_S = 0.5


def send_message(peer: socket.socket, message: dict[str, object]) -> None:
    """Send a message, or a heartbeat if it is empty; the reading thread detects a lost peer."""
    text = json.dumps(message) if message else ""
    with contextlib.suppress(OSError):
        peer.sendall(f"{text}\n".encode())


def read_messages(peer: socket.socket, timeout_s: float, handle: Callable[[dict[str, object]], bool]) -> str:
    """Read messages and send heartbeats until `handle` returns False.

    Return why the peer is lost, or an empty string.
    """
    last_received, rest = time.monotonic(), b""
    interval_s, due = min(HEARTBEAT_INTERVAL_S, timeout_s / 4), last_received
    with peer:
        while True:
            now = time.monotonic()
            if now >= due:  # on a timer: answering each heartbeat would loop without end
                send_message(peer, {})
                due = now + interval_s
            try:
                peer.settimeout(due - now)
                data = peer.recv(65536)
            except TimeoutError:
                if time.monotonic() - last_received > timeout_s:
                    return f"silent for {timeout_s:.0f} s"
                continue
            except OSError as error:
                return error.strerror or "connection lost"
            if not data:
                return "its monitor exited"
            last_received = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                try:
                    if not handle(json.loads(line)):
                        return ""
                except (ValueError, TypeError, AttributeError):  # a port scanner, for example
                    return "it sent an invalid message"
