"""What a rank's monitor knows of its job: the server, the client and the relay of a node change it under one lock."""

from __future__ import annotations

import threading

from msgspec.structs import asdict, replace

from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import Admission, FirstFailure, RankEndpoint
from entrypoint.supervise.event_loop import Connection, EventLoop

# The exit code of a first failure on a node that no longer responds.
NODE_LOST_CODE = -1
# The longest description in characters: a message is one line of the wire.
MAX_HOW = 4000


class ChannelState:
    """The state of a failure channel; `lock` guards it, and `first_failure` is set when a rank fails or a node is lost.

    `peers` are the ranks that have joined rank 0, or rank 0 itself; `node_peers` those that this monitor speaks for.
    `obstacle` is a sentence about what answers at rank 0's port in place of rank 0.
    """

    def __init__(self, endpoint: RankEndpoint, timeout_s: float, access: Access | None = None) -> None:
        self.endpoint = endpoint
        self.access = access or Access()
        self.loop = EventLoop(timeout_s, endpoint.world_size)
        self.lock = self.loop.lock
        self.admission = Admission(endpoint)
        self.peers: dict[int, RankEndpoint] = {}
        self.node_peers: set[int] = set()
        self.first_failure: FirstFailure | None = None
        self.obstacle = ""
        self.connected = threading.Event()
        self.closed = threading.Event()

    def report_failure(self, failure: FirstFailure, source: Connection | None = None) -> None:
        """Record the first failure, and send it to all that have joined but its `source`."""
        failure = replace(failure, how=failure.how[:MAX_HOW], lost_collective=failure.lost_collective[:MAX_HOW])
        with self.lock:
            if self.first_failure is not None:
                return
            self.first_failure = failure
            for connection in list(self.loop.connections):
                if connection.joined and connection is not source:
                    self.loop.send(connection, {"first_failure": asdict(failure)})

    def report_lost(self, endpoint: RankEndpoint, reason: str) -> None:
        """Report that a rank's node no longer responds."""
        self.report_failure(FirstFailure(endpoint.rank, endpoint.node, NODE_LOST_CODE, f"its node is lost: {reason}"))
