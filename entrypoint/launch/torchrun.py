"""Run torchrun's agent, print the first failure in one line, and keep its exit code.

torchrun itself prints a page for every failure, sorts failures within one second by rank, and always exits with 1.
The entrypoint uses it for ranks of several nodes that may restart, or if the user selects it. `local` starts the other
ranks. Only this module imports torch in the entrypoint. It runs in the agent's process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec.structs import replace

from entrypoint.core.console import log, parse_error_record
from entrypoint.core.errors import NOT_RETRYABLE, ExitCode, UserError, count_text, first_line
from entrypoint.core.network import addresses_towards, retry_until, try_listen
from entrypoint.core.process import PREEMPTION, TERMINATING, fast_exit, gc_paused, not_ignored
from entrypoint.job.detect import detect_job
from entrypoint.job.job_key import JOB_KEY_VAR, KeySource, key_reader
from entrypoint.launch.failures import Failure, first_failure, print_final_message, repeat_warning, report_stop
from entrypoint.machine.cgroup import oom_message, read_memory
from entrypoint.machine.procfs import ROOT
from entrypoint.plan.model import PLAN_VAR, Plan
from entrypoint.rank.environment import RANKS_STORE_VAR
from entrypoint.rank.rendezvous import local_address, rendezvous_variables
from entrypoint.rank.under_monitor import master_problem
from entrypoint.supervise.access import Access, connect_to
from entrypoint.supervise.child import log_late
from entrypoint.supervise.event_loop import EventLoop
from entrypoint.supervise.store_door import AGENTS, OTHER_RESTARTS, StoreDoor, StoreRelay, listen_on_loopback


def main(argv: list[str]) -> int:
    """Run torchrun's agent with torchrun's arguments and return the job's exit code."""
    with gc_paused():
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

    plan, started = Plan.from_json(os.environ[PLAN_VAR]), time.time()
    ended_by_agent, memory = capture_agent_log(plan.grace_period_s), read_memory(ROOT)

    def first(failures: dict[int, Any]) -> tuple[str, int]:
        return first_failure(convert_failures(failures, ended_by_agent), oom_message(memory, read_memory(ROOT)))

    warned, codes = forward_user_signals(), list[int]()
    try:
        store = AgentStore(plan, os.environ)
    except UserError as error:
        return print_final_message(str(error), error.code)
    argv = [*store.arguments, *argv]
    install_restart_policy(plan, warned, codes, store, lambda failures: first(failures)[0])
    # torchrun installs handlers for them, and would end with the terminal under nohup (pytorch#67538).
    signal.pthread_sigmask(signal.SIG_BLOCK, set(TERMINATING) - set(not_ignored(TERMINATING)))
    with tempfile.TemporaryDirectory(prefix="entrypoint-") as folder:
        try:
            args = torchrun.parse_args([f"--log-dir={folder}", *argv])  # type: ignore[no-untyped-call]
            try:
                torchrun.run(args)  # type: ignore[no-untyped-call]
            finally:
                repeat_warning(plan)
        except ChildFailedError as error:
            return print_final_message(*first(error.failures))
        except SignalException as error:
            return report_stop(Path(args.log_dir), error.sigval, codes, started)
        except UserError as error:
            return print_final_message(str(error), error.code)
        except (RuntimeError, OSError, RendezvousError) as error:
            cause = first_line(error) if str(error) else f"not enough nodes came within {plan.rendezvous.timeout_s} s"
            return print_final_message(f"the ranks could not be brought together: {cause}", ExitCode.RENDEZVOUS)
    if store.ranks and plan.nodes.nproc_per_node > 1:
        store.ranks.warn_if_unused()
    return ExitCode.DONE


def convert_failures(failures: dict[int, Any], ended_by_agent: set[int]) -> list[Failure]:
    """Convert torch's failure records, by rank, to `Failure` objects."""
    return [
        Failure(
            rank=rank,
            local_rank=record.local_rank,
            pid=record.pid,
            exitcode=record.exitcode,
            when_ns=record.timestamp * 10**9,
            ended_by_agent=record.pid in ended_by_agent,
            error_file=parse_error_record(record.error_file_data),
        )
        for rank, record in failures.items()
    ]


def forward_user_signals() -> list[int]:
    """Forward SIGUSR1 (preemption warning) and SIGUSR2 (save request) to the ranks, and do not end the agent.

    Return the list that collects each warning.
    """
    warnings: list[int] = []

    def signal_ranks(number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            warnings.append(number)
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in children.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), number)

    for number in PREEMPTION:
        signal.signal(number, signal_ranks)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)  # deferred until here
    return warnings


def capture_agent_log(grace_period_s: float) -> set[int]:
    """Suppress the agent's log, and return the set that collects the ids of the processes that it stops.

    torch 2.13 counts these as failed. Those that it kills after the grace period are named.
    """
    pids: set[int] = set()

    def note_process(record: logging.LogRecord) -> bool:
        """Note that of `Sending process %s closing signal %s` and of `Unable to shutdown process %s …`."""
        if "process %s" in record.msg and isinstance(record.args, tuple) and isinstance(record.args[0], int):
            pids.add(record.args[0])
            if record.msg.startswith("Unable to shutdown"):
                log_late(f"process {record.args[0]}", grace_period_s)
        return False

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [logging.NullHandler()], False
    agent = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    agent.setLevel(logging.WARNING)
    agent.addFilter(note_process)
    return pids


def install_restart_policy(
    plan: Plan, warned: list[int], codes: list[int], store: AgentStore, describe: Callable[[dict[int, Any]], str]
) -> None:
    """Make torchrun's agent restart ranks only if a restart can help, and log the reason.

    It does not restart after a wrong setting, or after a preemption warning (`warned`), whose checkpoint is for the
    next job. If a node is lost or stopped, the others continue while at least `min_nodes` are left. `codes` gets those
    of the ranks that are stopped.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    elastic = plan.nodes.min_nodes < plan.nodes.nnodes

    class Agent(LocalElasticAgent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            if store.ranks:  # what ranks that have ended left in their store
                store.ranks.store.values.clear()
            if plan.uses_elastic_rendezvous:
                few = f"{count_text(plan.nodes.min_nodes, 'node')}{' or more' * elastic}"
                log(f"waiting for the agents of {few}, up to {plan.rendezvous.timeout_s} s")
            super()._rendezvous(worker_group)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *more: Any, **named: Any) -> None:
            if self._pcontext:  # torchrun's own timeout is 30 s
                self._pcontext.close(death_sig, timeout=plan.grace_period_s)
                handlers: Any = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
                codes.extend(handler.proc.returncode for handler in handlers.values())
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


CONNECT_S = 2.0


class AgentStore:
    """Serves the stores of this node's agent in a thread; `arguments` tell torchrun where its own one is.

    In one the agents meet, and on one node another one is for the ranks. torch's own listens on all addresses, and the
    agents unpickle what they find in it (dynamic_rendezvous.py). These let in this user's processes of this node, and
    agents of other nodes with the job's key.

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
            if meeting.port_is_derived and (error := master_problem(place, meeting.master_addr)):
                raise error
            interface = rendezvous_variables(there, meeting.timeout_s, place).get("GLOO_SOCKET_IFNAME", "")
            listening = try_listen(address[1], addresses_towards(address[0], interface))
            if not listening:
                raise UserError(
                    f"MASTER_PORT={address[1]}: is taken on this node. Set MASTER_PORT to a free port on all nodes.",
                    ExitCode.RENDEZVOUS,
                )
            door = StoreDoor(self.loop, AGENTS, lambda: log(f"warning: {OTHER_RESTARTS}"))
            for server in listening:
                self.loop.listen(server, partial(access.welcome, door))
            self.loop.listen(agents, door.welcome_program)
        else:
            wait_for_master_agent(plan)
            relay = StoreRelay(self.loop, access, meeting.timeout_s, partial(connect_to, address), end_agent, AGENTS)
            self.loop.listen(agents, relay.welcome)
        if address_here := local_address(there, meeting.timeout_s, place):
            self.arguments.append(f"--local-addr={address_here}")


def end_agent(why: str) -> None:
    """End this node's agent, whose ranks have not started: torch would wait for agents that do not come."""
    if why:
        os._exit(print_final_message(why, ExitCode.RENDEZVOUS))


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


if __name__ == "__main__":
    fast_exit(main(sys.argv[1:]))
