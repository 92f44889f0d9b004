"""Restart policy of torchrun's agents, and their rendezvous across nodes.

This module runs in the agent's process, like `torchrun`.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from entrypoint.core.console import log
from entrypoint.core.errors import NOT_RETRYABLE, ExitCode, count_text
from entrypoint.core.network import LOG_INTERVAL_S, retry_until
from entrypoint.job.detect import detect_job
from entrypoint.plan.model import Plan
from entrypoint.rank.rendezvous import check_port_free, local_address

CONNECT_S = 2.0


def agent_address_args(plan: Plan, environ: Mapping[str, str]) -> list[str]:
    """Wait for the master's agent, and return torchrun's arguments that depend on this node.

    The list is empty without an elastic rendezvous. Raises `UserError` if the master is not found or its port is taken.
    """
    if not plan.uses_elastic_rendezvous:
        return []
    there = {**environ, "MASTER_ADDR": plan.rendezvous.master_addr}
    place = replace(detect_job(environ), rank=plan.nodes.node_rank)
    address = local_address(there, plan.rendezvous.timeout_s, place)
    if plan.nodes.node_rank == 0:
        check_port_free(int(plan.rendezvous.master_port))
    else:
        wait_for_master_agent(plan)
    return [f"--local-addr={address}"] if address else []


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


@contextmanager
def log_while_waiting(what: str, timeout_s: int) -> Iterator[None]:
    """Print a line every LOG_INTERVAL_S seconds while the block runs."""
    done, start = threading.Event(), time.monotonic()

    def log_progress() -> None:
        while not done.wait(LOG_INTERVAL_S):
            log(f"{what} ({time.monotonic() - start:.0f} of {timeout_s} s)")

    threading.Thread(target=log_progress, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def bind_store_to_loopback() -> None:
    """Have the store of an agent on one node listen on loopback; torch's listens on all interfaces."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    def open_store(host: str, port: int, *, is_master: bool = False, **named: Any) -> Any:
        if is_master and host in LOOPBACK_NAMES:
            listening = socket.create_server(("127.0.0.1", port), backlog=1024)
            port, named["master_listen_fd"] = listening.getsockname()[1], listening.detach()
        return TCPStore(host, port, is_master=is_master, **named)

    setattr(c10d_rendezvous_backend, "TCPStore", open_store)  # noqa: B010 - mypy knows no such attribute


LOOPBACK_NAMES = ("localhost", "127.0.0.1")


def install_restart_policy(plan: Plan, warned: list[int], describe: Callable[[dict[int, Any]], str]) -> None:
    """Make torchrun's agent restart ranks only if a restart can help, and log the reason.

    It does not restart after a wrong setting, or after a preemption warning (`warned`), whose checkpoint is for the
    next job. If a node is lost or stopped, the others continue while at least `min_nodes` are left.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    elastic = plan.nodes.min_nodes < plan.nodes.nnodes

    class Agent(LocalElasticAgent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            few = plan.nodes.min_nodes if elastic else plan.nodes.nnodes
            wanted = f"{count_text(few, 'node')} at {plan.rendezvous.master_addr}:{plan.rendezvous.master_port}"
            with log_while_waiting(f"waiting for the agents of {wanted}", plan.rendezvous.timeout_s):
                super()._rendezvous(worker_group)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **named: Any) -> None:
            if self._pcontext:  # torchrun's own timeout is 30 s
                self._pcontext.close(death_sig, timeout=plan.grace_period_s)
            super()._shutdown(death_sig, *more, **named)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state != WorkerState.FAILED or not self._remaining_restarts:
                return result
            codes = {failure.exitcode for failure in result.failures.values()}
            elsewhere = codes == {int(ExitCode.PREEMPTED)} and elastic and not warned
            if codes & set(NOT_RETRYABLE) and not elsewhere:
                self._remaining_restarts = 0
            else:
                count = plan.nodes.max_restarts - self._remaining_restarts + 1
                why = "another node's ranks were asked to end" if elsewhere else describe(result.failures)
                log(f"restart {count} of {plan.nodes.max_restarts}: {why}")
            return result

    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
