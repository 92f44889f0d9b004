"""Failure channel between rank monitors: broadcasts the first failure and detects unresponsive nodes.

Rank 0's monitor listens, and sends the rendezvous port to the others. Each monitor reports how its rank ended.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.network import LOG_INTERVAL_S, RETRY_INTERVAL_S, hold_port, try_listen
from entrypoint.supervise.admission import Admission, FirstFailure, RankEndpoint
from entrypoint.supervise.child import POLL_INTERVAL_S
from entrypoint.supervise.wire import read_messages, send_message

CONNECT_TIMEOUT_S = 2.0
MAX_HELLO_BYTES = 4096
# After this time with only another run's rank 0 at the ports, a rank says that its node disagrees with that one.
OTHER_RUN_WAIT_S = 10.0
# The exit code of a first failure on a node that no longer responds.
NODE_LOST_CODE = -1


class FailureChannel:
    """Connects the monitors in background threads; `first_failure` is set when a rank fails or a node is lost.

    Rank 0 takes the first free one of `ports` for the rendezvous, and sends it to the others. Without `ports`, the
    launcher sets the rendezvous port. Rank 0 expects `others` to connect.
    """

    def __init__(self, endpoint: RankEndpoint, timeout_s: float, ports: tuple[int, ...] = (), others: int = 0) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.ports = ports
        self.others = others
        self.listens = endpoint.rank == 0
        self.port = 0
        self.held_port: socket.socket | None = None
        self.port_known = threading.Event()
        self.first_failure: FirstFailure | None = None
        self.lock = threading.Lock()
        self.peers: dict[socket.socket, RankEndpoint] = {}
        self.admission = Admission(endpoint)
        self.other_run, self.other_run_since = "", 0.0
        self.closed = threading.Event()

    def start(self) -> None:
        """Listen on rank 0, else connect to it; raises `UserError` if no rendezvous port is free."""
        if not self.listens:
            threading.Thread(target=self.connect_to_rank0, daemon=True).start()
            return
        server = self.take_ports()
        if server:
            threading.Thread(target=self.accept_peers, args=(server,), daemon=True).start()
        elif self.ports:  # without `ports` the job runs without a failure channel
            raise UserError(ports_taken_message(self.ports), ExitCode.RENDEZVOUS)
        self.port_known.set()

    def take_ports(self) -> socket.socket | None:
        """Listen on the first free port whose rendezvous port is free too, which stays held; None if there is none."""
        for server, port in zip(map(try_listen, self.endpoint.ports), self.ports or self.endpoint.ports, strict=False):
            if server is None:
                continue
            if not self.ports:
                return server
            try:
                self.held_port, self.port = hold_port(port), port
            except OSError:
                server.close()
                continue
            return server
        return None

    def wait_for_port(
        self, timeout_s: float, log: Callable[[str], None], is_over: Callable[[], bool] = lambda: False
    ) -> int:
        """Return the port that rank 0 takes, 0 when `is_over`; raises `UserError` after `timeout_s` without it."""
        start = last_log = time.monotonic()
        where = f"rank 0 at {self.endpoint.host}, ports {self.endpoint.ports[0]} to {self.endpoint.ports[-1]}"
        while not self.port_known.wait(POLL_INTERVAL_S):
            if is_over():
                return 0
            now = time.monotonic()
            other = f" Another run answers there: {printable(self.other_run)}." if self.other_run else ""
            if now - start >= timeout_s:
                raise UserError(
                    f"rank {self.endpoint.rank}: {where}, did not answer within {timeout_s:.0f} s.{other} Check the"
                    " output of rank 0, or increase LAUNCH_RENDEZVOUS_TIMEOUT_S.",
                    ExitCode.RENDEZVOUS,
                )
            if now - last_log >= LOG_INTERVAL_S:
                last_log = now
                waited = f"{now - start:.0f} of {timeout_s:.0f} s"
                log(f"rank {self.endpoint.rank} waits for {where} ({waited}){other and '.'}{other}")
        return self.port

    def wait_for_others(self, limit_s: float, is_over: Callable[[], bool], log: Callable[[str], None]) -> bool:
        """Wait until all others know how this rank ended, and return whether they do.

        After a success rank 0 also waits for their own ends, because one may fail. Another rank waits for rank 0.
        """
        start = last_log = time.monotonic()
        while not is_over():
            now = time.monotonic()
            with self.lock:
                missing, running = self.others - len(self.admission.arrived), bool(self.peers)
            came = missing <= 0 if self.listens else self.port_known.is_set()
            if came and (self.first_failure or not running or not self.listens):
                return True
            if not came and now - start >= limit_s:
                return False
            if not came and now - last_log >= LOG_INTERVAL_S:
                last_log = now
                who = "rank 0" if not self.listens else f"{missing} other rank{'s' * (missing > 1)}"
                log(f"rank {self.endpoint.rank} has ended, and waits for {who} ({now - start:.0f} of {limit_s:.0f} s)")
            time.sleep(POLL_INTERVAL_S)
        return False

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
        endpoint: RankEndpoint | None = None

        def handle(message: dict[str, object]) -> bool:
            nonlocal endpoint
            if "hello" in message:
                endpoint = RankEndpoint(**message["hello"])  # type: ignore[arg-type]
                answer = self.admit(endpoint)
                send_message(peer, answer)
                if "port" not in answer:
                    return False
            if "joined" in message and endpoint:
                with self.lock:
                    self.peers[peer] = endpoint
                    self.admission.arrived.add(endpoint.rank)
                    failure = self.first_failure
                if failure:
                    send_message(peer, {"first_failure": asdict(failure)})
            return self.handle_message(message)

        lost = read_messages(peer, self.timeout_s, handle)
        if endpoint:
            with self.lock:
                self.admission.release(endpoint)
        self.remove_peer(peer, lost)

    def admit(self, endpoint: RankEndpoint) -> dict[str, object]:
        """Return the answer to a hello: the rendezvous port, the first failure, or what runs here instead."""
        with self.lock:
            refusal, failure = self.admission.admit(endpoint)
        if refusal:
            return {"other_run": refusal}
        if failure:
            self.report_failure(failure)
        if self.first_failure and endpoint.world_size:
            with self.lock:
                self.admission.arrived.add(endpoint.rank)
            return {"first_failure": asdict(self.first_failure)}
        return {"port": self.port}

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
        while not (peer := self.find_rank0()):
            if self.closed.is_set():
                return
            time.sleep(RETRY_INTERVAL_S)

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

    def find_rank0(self) -> socket.socket | None:
        """Return a connection to the monitor of this run's rank 0, None if none of its ports is that monitor's."""
        for port in self.endpoint.ports:
            try:
                peer = socket.create_connection((self.endpoint.host, port), timeout=CONNECT_TIMEOUT_S)
            except OSError:
                continue
            if self.handshake(peer):
                return peer
            peer.close()
        return None

    def handshake(self, peer: socket.socket) -> bool:
        """Send a hello and read the rendezvous port or the first failure; return False if another run answers."""
        waited = time.monotonic() - self.other_run_since
        insists = bool(self.other_run) and waited > OTHER_RUN_WAIT_S and not self.endpoint.is_unique
        send_message(peer, {"hello": asdict(replace(self.endpoint, insists=insists))})
        text = b""
        try:
            while b"}" not in text or not text.endswith(b"\n"):
                data = peer.recv(65536)
                if not data or len(text) > MAX_HELLO_BYTES:
                    return False
                text += data
            answer = json.loads(text)
            if "other_run" in answer:
                self.other_run_since = self.other_run_since or time.monotonic()
                self.other_run = str(answer["other_run"])
                return False
            if "first_failure" in answer:
                self.report_failure(FirstFailure(**answer["first_failure"]))
            else:
                self.port = int(answer["port"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True


def ports_taken_message(ports: tuple[int, ...]) -> str:
    """Return the error message for a node without a free rendezvous port."""
    return (
        f"ports {ports[0]} to {ports[-1]}: no free rendezvous port on this node. Set MASTER_PORT to a free port on all"
        " nodes."
    )
