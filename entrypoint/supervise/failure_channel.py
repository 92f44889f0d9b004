"""The bond between the guards of a job's ranks: who failed first is known to all, and a node that falls silent is lost.

Rank 0's guard listens and tells the others the port that ranks meet on; each says how its rank ended. Lines of JSON; an
empty line is a heartbeat.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.network import LOG_INTERVAL_S, RETRY_INTERVAL_S

HEARTBEAT_INTERVAL_S = 0.5
CONNECT_TIMEOUT_S = 2.0
MAX_HELLO_BYTES = 4096
# The code of a verdict on a rank whose node does not answer any more.
NODE_LOST_CODE = -1


@dataclass(frozen=True)
class FirstFailure:
    """Which rank on which node failed first, with what exit code, and how that is told."""

    rank: int
    node: str
    code: int
    how: str


@dataclass(frozen=True)
class RankEndpoint:
    """A rank, its node's name, and the ports on the first of which rank 0's guard is that is free there.

    `token` tells the job from others on those ports.
    """

    rank: int
    node: str
    host: str
    ports: tuple[int, ...]
    token: str


class FailureChannel:
    """Runs in threads of the guard; `verdict` is set as soon as any rank has failed or a node is lost.

    Of `ports` rank 0 takes the first that is free for the ranks to meet on, and tells the others; without any, their
    launcher has said where they meet.
    """

    def __init__(self, place: RankEndpoint, timeout_s: float, ports: tuple[int, ...] = ()) -> None:
        self.place = place
        self.timeout_s = timeout_s
        self.ports = ports
        self.port = 0
        self.settled = threading.Event()
        self.verdict: FirstFailure | None = None
        self.lock = threading.Lock()
        self.peers: dict[socket.socket, RankEndpoint] = {}
        self.over = threading.Event()

    def start(self) -> None:
        """Listen on rank 0, else connect to it; raises `UserError` where no port is free for the ranks to meet on."""
        if self.place.rank:
            threading.Thread(target=self.connect, daemon=True).start()
            return
        if self.ports:
            self.port = first_free_port(self.ports)
        self.settled.set()
        server = next(filter(None, map(try_listen, self.place.ports)), None)
        if server:
            threading.Thread(target=self.listen, args=(server,), daemon=True).start()
        elif self.ports:  # else there is just no bond
            raise UserError(ports_taken_message(self.place.ports), ExitCode.RENDEZVOUS)

    def wait_for_port(self, timeout_s: float, say: Callable[[str], None]) -> int:
        """Return the port that rank 0 has taken; raises `UserError` where it does not say so within `timeout_s`."""
        began = time.monotonic()
        where = f"rank 0 at {self.place.host}, ports {self.place.ports[0]} to {self.place.ports[-1]}"
        while not self.settled.wait(min(LOG_INTERVAL_S, timeout_s)):
            waited = time.monotonic() - began
            if waited >= timeout_s:
                raise UserError(
                    f"rank {self.place.rank}: {where}, did not answer within {timeout_s:.0f} s; see why there, or raise"
                    " LAUNCH_RENDEZVOUS_TIMEOUT_S",
                    ExitCode.RENDEZVOUS,
                )
            say(f"rank {self.place.rank} waits for {where} ({waited:.0f} of {timeout_s:.0f} s)")
        return self.port

    def fail(self, verdict: FirstFailure) -> None:
        """Keep the first failure and tell it to all."""
        with self.lock:
            if self.verdict is not None:
                return
            self.verdict = verdict
            peers = list(self.peers)
        for peer in peers:
            send_message(peer, {"verdict": asdict(verdict)})

    def ended(self, code: int, how: str) -> None:
        """Tell how this guard's own rank ended; on rank 0 this is the end of the bond."""
        if code:
            self.fail(FirstFailure(self.place.rank, self.place.node, code, how))
        with self.lock:
            peers = list(self.peers)
            self.over.set()  # ahead of the farewell: who hears it hangs up, which is no loss any more
        for peer in peers:
            send_message(peer, {"bye": True})

    def listen(self, server: socket.socket) -> None:
        """Take the other guards' connections, a thread each."""
        with server:
            while not self.over.is_set():
                peer, _ = server.accept()
                threading.Thread(target=self.attend, args=(peer,), daemon=True).start()

    def attend(self, peer: socket.socket) -> None:
        """Follow one guard from its greeting to its end; before it has joined, its going away is no loss."""
        greeting = self.place

        def take(message: dict[str, object]) -> bool:
            nonlocal greeting
            if "hello" in message:
                greeting = RankEndpoint(**message["hello"])  # type: ignore[arg-type]
                if greeting.token != self.place.token:
                    return False
                send_message(peer, {"port": self.port})
            if "joined" in message:
                with self.lock:
                    self.peers[peer] = greeting
                    known = self.verdict
                if known:
                    send_message(peer, {"verdict": asdict(known)})
            return self.heed(message)

        self.part(peer, read_messages(peer, self.timeout_s, take))

    def heed(self, message: dict[str, object]) -> bool:
        """Take another's verdict as this bond's, and return whether more is to come."""
        if "verdict" in message:
            self.fail(FirstFailure(**message["verdict"]))  # type: ignore[arg-type]
        return "bye" not in message

    def part(self, peer: socket.socket, lost: str) -> None:
        """Forget a guard; the node of one that had joined and went without a farewell (`lost` says how) is lost."""
        with self.lock:
            who = self.peers.pop(peer, None)
        if who and lost and not self.over.is_set():
            self.fail(FirstFailure(who.rank, who.node, NODE_LOST_CODE, f"its node is lost: {lost}"))

    def connect(self) -> None:
        """Reach rank 0's guard, which may come later, and follow it."""
        for port in itertools.cycle(self.place.ports):
            if self.over.is_set():
                return
            try:
                peer = socket.create_connection((self.place.host, port), timeout=CONNECT_TIMEOUT_S)
            except OSError:
                time.sleep(RETRY_INTERVAL_S)
                continue
            if self.is_ours(peer):
                break
            peer.close()

        with self.lock:
            self.peers[peer] = replace(self.place, rank=0, node=self.place.host)
            message: dict[str, object] = {"joined": True}
            if self.verdict:
                message["verdict"] = asdict(self.verdict)
            if self.over.is_set():
                message["bye"] = True
        send_message(peer, message)
        self.settled.set()
        self.part(peer, read_messages(peer, self.timeout_s, self.heed))

    def is_ours(self, peer: socket.socket) -> bool:
        """Greet who listens there, and learn the ranks' port from it; not so where it is another program."""
        send_message(peer, {"hello": asdict(self.place)})
        answer = b""
        try:
            while b"}" not in answer or not answer.endswith(b"\n"):
                data = peer.recv(65536)
                if not data or len(answer) > MAX_HELLO_BYTES:
                    return False
                answer += data
            self.port = int(json.loads(answer)["port"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True


def first_free_port(ports: tuple[int, ...]) -> int:
    """Return the first port that nobody listens on here; raises `UserError` where there is none."""
    for port in ports:
        if server := try_listen(port):
            server.close()
            return port
    raise UserError(ports_taken_message(ports), ExitCode.RENDEZVOUS)


def ports_taken_message(ports: tuple[int, ...]) -> str:
    """Say that ranks find no port to meet on."""
    return (
        f"ports {ports[0]} to {ports[-1]} are all taken here, and ranks need one to meet on; set MASTER_PORT to a free"
        " one on all nodes"
    )


def try_listen(port: int) -> socket.socket | None:
    """Return a socket that listens on a port, None where another program does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024)
    except OSError:
        return None


def send_message(peer: socket.socket, message: dict[str, object]) -> None:
    """Send a message, or a heartbeat where it is empty; a peer that is gone is noticed by who reads from it."""
    text = json.dumps(message) if message else ""
    with contextlib.suppress(OSError):
        peer.sendall(f"{text}\n".encode())


def read_messages(peer: socket.socket, timeout_s: float, take: Callable[[dict[str, object]], bool]) -> str:
    """Read messages until `take` says no, heartbeats going out meanwhile; return why the peer is lost, or nothing."""
    heard, rest = time.monotonic(), b""
    beat_s, due = min(HEARTBEAT_INTERVAL_S, timeout_s / 4), heard
    with peer:
        while True:
            now = time.monotonic()
            if now >= due:  # by the clock, never in answer to the other's: the two would keep each other busy
                send_message(peer, {})
                due = now + beat_s
            try:
                peer.settimeout(due - now)
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
                try:
                    if not take(json.loads(line)):
                        return ""
                except (ValueError, TypeError, AttributeError):  # whoever looks for open ports, say
                    return "speaks another language"
