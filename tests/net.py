"""Ports for tests."""

from __future__ import annotations

import random
import socket


def free_port(count: int = 1) -> int:
    """Return the first of `count` free ports below the range that the kernel assigns by itself (32768 on)."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_768 - count)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def listen_on(port: int) -> socket.socket:
    return socket.create_server(("", port))
