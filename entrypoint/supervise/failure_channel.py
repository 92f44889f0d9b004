"""Failure channel between rank monitors: broadcasts the first failure and detects unresponsive nodes.

Rank 0's monitor listens, and sends the rendezvous port to the others. Each monitor reports how its rank ended.
Messages are lines of JSON. An empty line is a heartbeat.
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
# The exit code of a first failure on a node that no longer responds.
NODE_LOST_CODE = -1


@dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first, its node, its exit code, and a description (`how`)."""

    rank: int
    node: str
    code: int
    how: str


@dataclass(frozen=True)
class RankEndpoint:
    """A rank, its node's name, rank 0's host, and the ports of which rank 0's monitor takes the first free one.

    `token` distinguishes the job from other jobs on those ports.
    """

    rank: int
    node: str
    host: str
    ports: tuple[int, ...]
    token: str


class FailureChannel:
    """Connects the monitors in background threads; `first_failure` is set when a rank fails or a node is lost.

    Rank 0 takes the first free one of `ports` for the rendezvous, and sends it to the others. Without `ports`, the
    launcher sets the rendezvous port.
    """

    def __init__(self, endpoint: RankEndpoint, timeout_s: float, ports: tuple[int, ...] = ()) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.ports = ports
        self.port = 0
        self.port_known = threading.Event()
        self.first_failure: FirstFailure | None = None
        self.lock = threading.Lock()
        self.peers: dict[socket.socket, RankEndpoint] = {}
        self.closed = threading.Event()

    def start(self) -> None:
        """Listen on rank 0, else connect to it; raises `UserError` if no rendezvous port is free."""
        if self.endpoint.rank:
            threading.Thread(target=self.connect_to_rank0, daemon=True).start()
            return
        if self.ports:
            self.port = first_free_port(self.ports)
        self.port_known.set()
        server = next(filter(None, map(try_listen, self.endpoint.ports)), None)
        if server:
            threading.Thread(target=self.accept_peers, args=(server,), daemon=True).start()
        elif self.ports:  # without `ports` the job runs without a failure channel
            raise UserError(ports_taken_message(self.endpoint.ports), ExitCode.RENDEZVOUS)

    def wait_for_port(self, timeout_s: float, log: Callable[[str], None]) -> int:
        """Return the port that rank 0 takes; raises `UserError` if rank 0 does not send it within `timeout_s`."""
        start = time.monotonic()
        where = f"rank 0 at {self.endpoint.host}, ports {self.endpoint.ports[0]} to {self.endpoint.ports[-1]}"
        while not self.port_known.wait(min(LOG_INTERVAL_S, timeout_s)):
            waited = time.monotonic() - start
            if waited >= timeout_s:
                raise UserError(
                    f"rank {self.endpoint.rank}: {where}, did not answer within {timeout_s:.0f} s. Check the output of"
                    " rank 0, or increase LAUNCH_RENDEZVOUS_TIMEOUT_S.",
                    ExitCode.RENDEZVOUS,
                )
            log(f"rank {self.endpoint.rank} waits for {where} ({waited:.0f} of {timeout_s:.0f} s)")
        return self.port

    def report_failure(self, failure: FirstFailure) -> None:
        """Record the first failure and send it to all peers."""
        with self.lock:
            if self.first_failure is not None:
                return
            self.first_failure = failure
            peers = list(self.peers)
        for peer in peers:
            send_message(peer, {"first_failure": asdict(failure)})

    def report_exit(self, code: int, how: str) -> None:
        """Report how this monitor's own rank ended; on rank 0 this closes the channel."""
        if code:
            self.report_failure(FirstFailure(self.endpoint.rank, self.endpoint.node, code, how))
        with self.lock:
            peers = list(self.peers)
            self.closed.set()  # set before sending "bye": a peer that disconnects after it is not lost
        for peer in peers:
            send_message(peer, {"bye": True})

    def accept_peers(self, server: socket.socket) -> None:
        """Accept the other monitors' connections, and serve each one in a thread."""
        with server:
            while not self.closed.is_set():
                peer, _ = server.accept()
                threading.Thread(target=self.serve_peer, args=(peer,), daemon=True).start()

    def serve_peer(self, peer: socket.socket) -> None:
        """Serve one monitor from its hello to its exit; a disconnect before it joins is not a loss."""
        endpoint = self.endpoint

        def handle(message: dict[str, object]) -> bool:
            nonlocal endpoint
            if "hello" in message:
                endpoint = RankEndpoint(**message["hello"])  # type: ignore[arg-type]
                if endpoint.token != self.endpoint.token:
                    return False
                send_message(peer, {"port": self.port})
            if "joined" in message:
                with self.lock:
                    self.peers[peer] = endpoint
                    failure = self.first_failure
                if failure:
                    send_message(peer, {"first_failure": asdict(failure)})
            return self.handle_message(message)

        self.remove_peer(peer, read_messages(peer, self.timeout_s, handle))

    def handle_message(self, message: dict[str, object]) -> bool:
        """Record a peer's first failure, and return whether more messages follow."""
        if "first_failure" in message:
            self.report_failure(FirstFailure(**message["first_failure"]))  # type: ignore[arg-type]
        return "bye" not in message

    def remove_peer(self, peer: socket.socket, lost: str) -> None:
        """Remove a monitor; if it had joined and `lost` gives a reason, report its node as lost."""
        with self.lock:
            endpoint = self.peers.pop(peer, None)
        if endpoint and lost and not self.closed.is_set():
            self.report_failure(FirstFailure(endpoint.rank, endpoint.node, NODE_LOST_CODE, f"its node is lost: {lost}"))

    def connect_to_rank0(self) -> None:
        """Connect to rank 0's monitor, retrying until it listens, and handle its messages."""
        for port in itertools.cycle(self.endpoint.ports):
            if self.closed.is_set():
                return
            try:
                peer = socket.create_connection((self.endpoint.host, port), timeout=CONNECT_TIMEOUT_S)
            except OSError:
                time.sleep(RETRY_INTERVAL_S)
                continue
            if self.handshake(peer):
                break
            peer.close()

        with self.lock:
            self.peers[peer] = replace(self.endpoint, rank=0, node=self.endpoint.host)
            message: dict[str, object] = {"joined": True}
            if self.first_failure:
                message["first_failure"] = asdict(self.first_failure)
            if self.closed.is_set():
                message["bye"] = True
        send_message(peer, message)
        self.port_known.set()
        self.remove_peer(peer, read_messages(peer, self.timeout_s, self.handle_message))

    def handshake(self, peer: socket.socket) -> bool:
        """Send a hello and read the rendezvous port; return False if another program or job answers."""
        send_message(peer, {"hello": asdict(self.endpoint)})
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
    """Return the first port that no program listens on here; raises `UserError` if there is none."""
    for port in ports:
        if server := try_listen(port):
            server.close()
            return port
    raise UserError(ports_taken_message(ports), ExitCode.RENDEZVOUS)


def ports_taken_message(ports: tuple[int, ...]) -> str:
    """Return the error message for a node without a free rendezvous port."""
    return (
        f"ports {ports[0]} to {ports[-1]}: no free rendezvous port on this node. Set MASTER_PORT to a free port on all"
        " nodes."
    )


def try_listen(port: int) -> socket.socket | None:
    """Return a socket that listens on a port, or None if the port is taken."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024)
    except OSError:
        return None


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
