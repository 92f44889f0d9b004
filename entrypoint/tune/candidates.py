"""The candidates of `entrypoint tune`: ranks, threads, OpenMP runtimes, wait policies, allocators, binding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from msgspec import Struct, field

from entrypoint.plan.cpu_budget import compute_cpu_budget
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.plan.runtime_libraries import AFFINITY_VARIABLES, ALLOCATOR_WORD, user_preload

RANKS, THREADS = "LAUNCH_NPROC_PER_NODE", "LAUNCH_THREADS"
OPENMP, ALLOCATOR, BIND = "LAUNCH_OPENMP", "LAUNCH_ALLOCATOR", "LAUNCH_CPU_BINDING"
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# By OpenMP runtime, what idle threads do: as planned, spin, or sleep at once.
WAIT_POLICIES: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "gnu": ({}, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "passive"}),
    "intel": ({}, {"KMP_BLOCKTIME": "200"}, {"KMP_BLOCKTIME": "0"}),
}


class Candidate(Struct, eq=False):
    """A plan by the variables in which it differs from the untuned plan, and its rates."""

    variables: Mapping[str, str] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return the median rate."""
        return median(self.rates)

    def __str__(self) -> str:
        """Return the variables: `LAUNCH_NPROC_PER_NODE=2 LAUNCH_THREADS=1`."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items()) or "as planned"


def rank_thread_layouts(inputs: PlanInputs, plan: Plan) -> list[dict[str, str]]:
    """Return the numbers of ranks and threads to try besides the plan's; none with GPUs, or if the user set them."""
    fixed = any(inputs.is_set_by_user(name) for name in ("nproc_per_node", "threads", "cpu_binding"))
    if plan.device == "cuda" or fixed:
        return []
    budget = compute_cpu_budget(inputs.machine, inputs.job, inputs.settings.values.core_type)
    layouts = set(even_layouts(len(budget.cores), budget.threads))
    # One rank may leave a core free, or half: where memory limits the speed.
    layouts |= {(1, count) for count in (len(budget.cores), budget.threads - 1, budget.threads // 2) if count}
    layouts.discard((plan.nodes.nproc_per_node, plan.ranks[0].threads))
    return [{RANKS: str(ranks), THREADS: str(threads)} for ranks, threads in sorted(layouts)]


def even_layouts(cores: int, threads: int) -> list[tuple[int, int]]:
    """Return (ranks, threads of each) that use all threads, few ranks first."""
    return [(ranks, threads // ranks) for ranks in range(1, min(cores, threads) + 1) if threads % ranks == 0]


def later_stages(inputs: PlanInputs, device: str) -> tuple[Sequence[Mapping[str, str]], ...]:
    """Return what is tried for the best layout, one stage after the other, as far as the user left it open.

    On a CPU these are OpenMP runtimes with each wait policy, allocators, and CPU bindings. Unbound ranks can be faster
    on a node that other processes use. Results stay bitwise identical.
    """
    allocators = available_choices(inputs, "allocator", ALLOCATOR, ("tcmalloc", "jemalloc", "system"), ALLOCATOR_WORD)
    if device == "cuda":
        return (allocators,)
    is_open = not any(inputs.environ.get(name) for name in WAIT_VARIABLES)
    runtimes = [
        {**runtime, **policy}
        for runtime in available_choices(inputs, "openmp", OPENMP, ("gnu", "intel"), "iomp5")
        for policy in (WAIT_POLICIES[runtime.get(OPENMP, "gnu")] if is_open else ({},))
    ]
    fixed = inputs.is_set_by_user("cpu_binding") or any(inputs.environ.get(name) for name in AFFINITY_VARIABLES)
    return runtimes, allocators, () if fixed else ({BIND: "none"}, {BIND: "threads"})


def available_choices(
    inputs: PlanInputs, field: str, variable: str, names: Iterable[str], word: str
) -> tuple[Mapping[str, str], ...]:
    """Return the values of a setting that are available here; one empty choice if the user has set it."""
    if inputs.is_set_by_user(field) or user_preload(inputs.environ.get("LD_PRELOAD", ""), word):
        return ({},)
    bundled = ("gnu", "system")  # with torch and with libc
    available = [name for name in names if name in bundled or inputs.machine.library(name).path]
    return tuple({variable: name} for name in available) if len(available) > 1 else ({},)
