"""Where others keep too many CPUs busy to leave: how many ranks have a fair part of them."""

from __future__ import annotations

from entrypoint.budget import Budget, whole_cores
from entrypoint.machine import Machine
from entrypoint.question import Question
from entrypoint.runtime import THREAD_VARIABLES

ALONE = "one rank with all cores: one NUMA node"
# A rank of a small model takes 0.5 GB; the rest is for a larger one's.
RANK_BYTES = 2 << 30


def beyond_idle(question: Question, budget: Budget, busy: int) -> int:
    """Return how many of the ranks' cores others take who keep so many CPUs busy, cores without a rank first."""
    return max(0, busy - len(whole_cores(question.machine.cpus, siblings=False)) + len(budget.cores))


def ranks_beside(question: Question, budget: Budget) -> tuple[int, str]:
    """Return how many ranks one NUMA node's cores are for, and why: one, or several where others are too many to leave.

    Linux shares CPUs out by session (sched(7), autogroup), so that beside a process on each of N CPUs one rank of N
    threads has 1 part of N + 1, and N ranks, each a session, have half. A person's script stays one rank: only they
    know whether it can be several.
    """
    cores = len(budget.cores)
    settled = any(map(question.given, ("neighbours", "threads"))) or any(map(question.environ.get, THREAD_VARIABLES))
    if settled or question.settings.values.with_ == "direct" or budget.threads < cores:
        return 1, ALONE
    if question.before:
        ranks = question.before.nproc_per_node if question.before.crowd else 1
        return (ranks, "as the run had that this one goes on with") if 1 < ranks <= cores else (1, ALONE)
    if 2 * beyond_idle(question, budget, question.kept_busy) <= cores:
        return 1, ALONE
    beside = f"others keep {seen(question.machine)} busy"
    most = min(cores, question.most_ranks, question.machine.memory_bytes // RANK_BYTES)
    ranks = next((ranks for ranks in range(most, 1, -1) if cores % ranks == 0), 1)
    if ranks > 1:
        return ranks, f"{beside}, of which each rank has a part; LAUNCH_NPROC_PER_NODE=1 has one rank"
    if question.most_ranks == 1 < cores:
        return 1, f"{ALONE}; {beside}, of which each rank would have a part: LAUNCH_NPROC_PER_NODE={cores} if it can"
    return 1, ALONE


def seen(machine: Machine) -> str:
    """Say what others keep busy."""
    return f"{machine.kept_busy:.1f} of {len(machine.cpus)} CPUs"
