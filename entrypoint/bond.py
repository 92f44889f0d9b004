"""The bond between the guards of a job's ranks: who failed first is known to all, and a node that falls silent is lost.

Rank 0's guard listens, the others connect; each says how its rank ended. Lines of JSON; an empty line is a heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

BEAT_S = 0.5
CONNECT_S = 2.0
# The code of a verdict on a rank whose node does not answer any more.
NODE_LOST = -1


@dataclass(frozen=True)
class Verdict:
    """Which rank on which node failed first, with what exit code, and how that is told."""

    rank: int
    node: str
    code: int
    how: str


@dataclass(frozen=True)
class Place:
    """A rank, its node's name, and where rank 0's guard is; `token` tells the job from others on that port."""

    rank: int
    node: str
    host: str
    port: int
    token: str


class Bond:
    """Runs in threads of the guard; `verdict` is set as soon as any rank has failed or a node is lost."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.place = place
        self.timeout_s = timeout_s
        self.verdict: Verdict | None = None
        self.lock = threading.Lock()
        self.peers: dict[socket.socket, Place] = {}
        self.over = threading.Event()
        threading.Thread(target=self.listen if place.rank == 0 else self.connect, daemon=True).start()

    def fail(self, verdict: Verdict) -> None:
        """Keep the first failure and tell it to all."""
        with self.lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
            peers = list(self.peers)
        for peer in peers:
            send(peer, {"verdict": asdict(verdict)})

    def ended(self, code: int, how: str) -> None:
        """Tell how this guard's own rank ended; on rank 0 this is the end of the bond."""
        if code:
            self.fail(Verdict(self.place.rank, self.place.node, code, how))
        with self.lock:
            peers = list(self.peers)
        for peer in peers:
            send(peer, {"bye": True})
        self.over.set()

    def listen(self) -> None:
        """Take the other guards' connections, a thread each; without the port there is no bond."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            server = socket.create_server(
                ("", self.place.port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
            )
        except OSError:
            return
        with server:
            while not self.over.is_set():
                peer, _ = server.accept()
                threading.Thread(target=self.attend, args=(peer,), daemon=True).start()

    def attend(self, peer: socket.socket) -> None:
        """Follow one guard from its greeting to its end."""
        who: Place | None = None

        def take(message: dict[str, object]) -> bool:
            nonlocal who
            if "hello" in message:
                greeting = Place(**message["hello"])  # type: ignore[arg-type]
                if greeting.token != self.place.token:
                    return False
                who = greeting
                with self.lock:
                    self.peers[peer] = who
                    known = self.verdict
                send(peer, {"verdict": asdict(known)} if known else {})
            if "verdict" in message:
                self.fail(Verdict(**message["verdict"]))  # type: ignore[arg-type]
            return "bye" not in message

        lost = follow(peer, self.timeout_s, take)
        with self.lock:
            self.peers.pop(peer, None)
        if who and lost and not self.over.is_set():
            self.fail(Verdict(who.rank, who.node, NODE_LOST, f"its node is lost: {lost}"))

    def connect(self) -> None:
        """Reach rank 0's guard, which may come later, and follow it."""
        while not self.over.is_set():
            try:
                peer = socket.create_connection((self.place.host, self.place.port), timeout=CONNECT_S)
                break
            except OSError:
                time.sleep(BEAT_S)
        else:
            return

        def take(message: dict[str, object]) -> bool:
            if "verdict" in message:
                self.fail(Verdict(**message["verdict"]))  # type: ignore[arg-type]
            return "bye" not in message

        with self.lock:
            self.peers[peer] = self.place
        send(peer, {"hello": asdict(self.place)})
        lost = follow(peer, self.timeout_s, take)
        with self.lock:
            self.peers.pop(peer, None)
        if lost and not self.over.is_set():
            self.fail(Verdict(0, self.place.host, NODE_LOST, f"its node is lost: {lost}"))


def send(peer: socket.socket, message: dict[str, object]) -> None:
    """Send a message, or a heartbeat where it is empty; a peer that is gone is noticed by who reads from it."""
    text = json.dumps(message) if message else ""
    with contextlib.suppress(OSError):
        peer.sendall(f"{text}\n".encode())


def follow(peer: socket.socket, timeout_s: float, take: Callable[[dict[str, object]], bool]) -> str:
    """Read messages until `take` says no, heartbeats going out meanwhile; return why the peer is lost, or nothing."""
    heard, rest = time.monotonic(), b""
    with peer:
        peer.settimeout(min(BEAT_S, timeout_s / 4))
        while True:
            send(peer, {})
            try:
                data = peer.recv(65536)
            except TimeoutError:
                if time.monotonic() - heard > timeout_s:
                    return f"silent for {timeout_s:.0f} s"
                continue
            except OSError as error:
                return error.strerror or "connection lost"
            if not data:
                return "its guard is gone"
            heard = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                if not take(json.loads(line)):
                    return ""
