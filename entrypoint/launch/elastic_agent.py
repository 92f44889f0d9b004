"""Restart policy of torchrun's agents.

This module runs in the agent's process, like `torchrun`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from entrypoint.core.console import log
from entrypoint.core.errors import NOT_RETRYABLE, ExitCode, count_text
from entrypoint.core.network import LOG_INTERVAL_S
from entrypoint.launch.agent_store import AgentStore
from entrypoint.plan.model import Plan


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


def install_restart_policy(
    plan: Plan, warned: list[int], store: AgentStore, describe: Callable[[dict[int, Any]], str]
) -> None:
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
            store.forget_ranks()
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
