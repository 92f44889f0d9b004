"""What torchrun's agent is told on each node: to be alone with its ranks, or to number them together with the others.

Agents that meet can start all ranks anew when one fails or a node is lost. Those that need not, do not: what they share
they can lose.
"""

from __future__ import annotations

from entrypoint.core.errors import UserError
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, Plan

AUTO_RESTARTS = 3
# How long agents wait for more nodes when enough are there; how soon one that is silent is lost (measured: torch's
# own defaults resume 44 s after a loss, such ones after 8 s).
ELASTIC_RENDEZVOUS_CONF = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=20"


def decide_restarts(question: PlanInputs) -> tuple[int, tuple[Decision, ...]]:
    """Return how often ranks that fail are started again; raises `Refused` where nothing here could do that."""
    values, nodes = question.settings.values, question.nodes
    varying = nodes.fewest is not None
    asked = values.max_restarts
    count = (AUTO_RESTARTS if varying else 0) if asked == "auto" else asked
    if not count:
        return 0, ()
    said = question.settings.sources.get("max_restarts", nodes.source)
    if question.job.launcher:
        raise UserError(
            f"{said}: {question.job.launcher} started the ranks and starts none again; have an agent do it: start one"
            " process on each node, with LAUNCH_LAUNCHER=torchrun"
        )
    if question.starter and question.starter.mpi:
        raise UserError(f"{said}: {question.starter.path} starts no ranks again; drop one of the two")
    if values.launcher in ("direct", "local"):
        raise UserError(
            f"{said} and {question.settings.sources['launcher']} contradict each other: torchrun's agent restarts"
        )
    enough = f", on {nodes.fewest} to {nodes.count} nodes" if varying else ""
    why = question.why("max_restarts", "as many as the nodes that may be lost call for")
    return count, (Decision("restarts", str(count), f"{why}; all ranks start again when one fails{enough}"),)


def agent_command(plan: Plan, question: PlanInputs) -> tuple[str, ...]:
    """Return the command of this node's agent, which starts our rank stage in each rank.

    Agents that meet do so at the master, where the agent of node 0 has to be (torchrun's manual, c10d rendezvous).
    """
    if plan.uses_elastic_rendezvous:
        together: tuple[str, ...] = (
            *(f"--nnodes={plan.min_nodes}:{plan.nnodes}", f"--nproc-per-node={plan.nproc_per_node}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={plan.master_addr}:{plan.master_port}"),
            f"--rdzv-id={question.job.id or 'by-hand'}",
            f"--rdzv-conf=is_host={int(plan.node_rank == 0)},join_timeout={plan.rendezvous_timeout_s},{ELASTIC_RENDEZVOUS_CONF}",
        )
    else:
        together = ("--nnodes=1", f"--nproc-per-node={plan.nproc_per_node}", "--standalone", "--local-addr=127.0.0.1")
    # -I keeps the user's folder and PYTHONPATH out of the launcher; the program itself starts as it asks to.
    return (
        *(question.python, "-I", "-m", "entrypoint.launch.torchrun"),
        *(*together, f"--max-restarts={plan.max_restarts}", "--no-python"),
        *(question.python, "-I", "-m", "entrypoint", "rank"),
    )
