"""Where the ranks of one node meet: a store that the launcher serves on loopback, to this user's processes alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct, field

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.network import hold_port
from entrypoint.job.node_group import parse_port
from entrypoint.plan.model import Plan
from entrypoint.rank.environment import AGENT_STORE_VAR, store_variables

if TYPE_CHECKING:
    from entrypoint.supervise.store_door import StoreDoor


class Meeting(Struct):
    """The variables by which ranks find each other, and their store if this process serves it, on a socket."""

    variables: Mapping[str, str] = field(default_factory=dict)
    held: socket.socket | None = None
    door: StoreDoor | None = None

    def serve(self) -> None:
        """Serve the store; after the forks, because a thread does it."""
        if self.held and self.door:
            self.door.loop.listen(self.held, self.door.welcome_program)


@contextmanager
def open_rendezvous(plan: Plan, environ: Mapping[str, str]) -> Iterator[Meeting]:
    """Yield where the ranks of this node meet while they run; those of several nodes have monitors.

    Raises `UserError` if the MASTER_PORT that the user set is taken.
    """
    if plan.nodes.nnodes > 1:
        yield Meeting()
        return
    wanted = environ.get("MASTER_PORT", "")
    port = parse_port(wanted) if wanted else 0
    alone = plan.nodes.nproc_per_node == 1
    door = None
    try:
        if alone:  # its program opens its own store
            held = hold_port(port)
        else:  # late imports: a rank that is alone needs no store
            from entrypoint.supervise.event_loop import EventLoop
            from entrypoint.supervise.store_door import StoreDoor, listen_on_loopback

            held = listen_on_loopback(port)
            door = StoreDoor(EventLoop(plan.collective_timeout_s, plan.nodes.nproc_per_node))
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"MASTER_PORT={port}: cannot listen on this port ({cause}). Set MASTER_PORT to a free port on all nodes.",
            ExitCode.RENDEZVOUS,
        ) from None
    variables = store_variables(held.getsockname()[1]) | ({AGENT_STORE_VAR: "False"} if alone else {})
    try:
        yield Meeting(variables, held, door)
    finally:
        if door:
            door.loop.stop()
        held.close()
