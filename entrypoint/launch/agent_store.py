"""The stores of torchrun's agents: one in which the agents meet, and on one node another one for the ranks.

torch's own listens on all addresses, and the agents unpickle what they find in it (dynamic_rendezvous.py). This one
lets in this user's processes of this node, and agents of other nodes with the job's key.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.network import addresses_towards, retry_until, try_listen
from entrypoint.job.detect import detect_job
from entrypoint.job.job_key import JOB_KEY_VAR, KeySource, key_reader
from entrypoint.plan.model import Plan
from entrypoint.rank.environment import RANKS_STORE_VAR
from entrypoint.rank.rendezvous import local_address, rendezvous_variables
from entrypoint.supervise.access import Access, connect_to
from entrypoint.supervise.event_loop import EventLoop
from entrypoint.supervise.store_door import StoreDoor, StoreRelay, listen_on_loopback

CONNECT_S = 2.0


class AgentStore:
    """Serves the stores of this node's agent in a thread; `arguments` tell torchrun where its own one is.

    Raises `UserError` if the master is not found, or its port is taken.
    """

    def __init__(self, plan: Plan, environ: Mapping[str, str]) -> None:
        self.plan, self.environ = plan, environ
        self.loop = EventLoop(plan.collective_timeout_s, plan.nodes.nnodes)
        agents = listen_on_loopback()
        self.arguments = [f"--rdzv-endpoint=127.0.0.1:{agents.getsockname()[1]}"]
        self.ranks: StoreDoor | None = None
        if plan.uses_elastic_rendezvous:
            self.meet_other_agents(agents)
            return
        self.loop.listen(agents, StoreDoor(self.loop).welcome_program)
        if plan.nodes.nnodes == 1:  # else the ranks' monitors have one
            self.ranks, ranks = StoreDoor(self.loop), listen_on_loopback()
            self.loop.listen(ranks, self.ranks.welcome_program)
            os.environ[RANKS_STORE_VAR] = str(ranks.getsockname()[1])

    def forget_ranks(self) -> None:
        """Drop what ranks that have ended left in their store, before others start."""
        if self.ranks:
            self.ranks.store.values.clear()

    def meet_other_agents(self, agents: socket.socket) -> None:
        """Serve the store on node 0, and connect to it from the others."""
        plan, meeting = self.plan, self.plan.rendezvous
        there = {**self.environ, "MASTER_ADDR": meeting.master_addr}
        place = replace(detect_job(self.environ), rank=plan.nodes.node_rank)
        # The monitors of the ranks draw a key of their own, on whichever node rank 0 is.
        path = f"{meeting.key_file}-agents" if meeting.key_source == "drawn" else meeting.key_file
        source = KeySource("variable" if self.environ.get(JOB_KEY_VAR) else meeting.key_source, path)
        key = key_reader(source, self.environ, draws=plan.nodes.node_rank == 0)
        access = Access(key, is_drawn=source.kind == "drawn")
        address = (meeting.master_addr, int(meeting.master_port))
        if plan.nodes.node_rank == 0:
            interface = rendezvous_variables(there, meeting.timeout_s, place).get("GLOO_SOCKET_IFNAME", "")
            listening = try_listen(address[1], addresses_towards(address[0], interface))
            if not listening:
                raise UserError(
                    f"MASTER_PORT={address[1]}: is taken on this node. Set MASTER_PORT to a free port on all nodes.",
                    ExitCode.RENDEZVOUS,
                )
            door = StoreDoor(self.loop)
            for server in listening:
                self.loop.listen(server, partial(access.welcome, door))
            self.loop.listen(agents, door.welcome_program)
        else:
            wait_for_master_agent(plan)
            relay = StoreRelay(self.loop, access, meeting.timeout_s, partial(connect_to, address))
            self.loop.listen(agents, relay.welcome)
        if address_here := local_address(there, meeting.timeout_s, place):
            self.arguments.append(f"--local-addr={address_here}")


def wait_for_master_agent(plan: Plan) -> None:
    """Wait and log until the agent of node 0 listens; raises `UserError` after the plan's timeout."""
    where = f"{plan.rendezvous.master_addr}:{plan.rendezvous.master_port}"
    timeout_s = plan.rendezvous.timeout_s

    def connect() -> None:
        socket.create_connection(
            (plan.rendezvous.master_addr, int(plan.rendezvous.master_port)), timeout=CONNECT_S
        ).close()

    def make_error(cause: str) -> str:
        late = f"node 0 at {where} did not come within {timeout_s} s ({cause})"
        return f"{late}. Check the output of node 0, or increase LAUNCH_RENDEZVOUS_TIMEOUT_S."

    retry_until(connect, f"node 0 at {where}", timeout_s, make_error)
