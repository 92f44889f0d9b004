"""What `entrypoint tune` tries: other ranks, threads, OpenMP runtimes, waiting, allocators, binding and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from entrypoint.plan.cpu_budget import compute_cpu_budget
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.plan.runtime_libraries import AFFINITY_VARIABLES, ALLOCATOR_WORD, user_preload

RANKS, THREADS, CORES = "LAUNCH_NPROC_PER_NODE", "LAUNCH_THREADS", "LAUNCH_CORE_TYPE"
OPENMP, ALLOCATOR, BIND, WORKERS = "LAUNCH_OPENMP", "LAUNCH_ALLOCATOR", "LAUNCH_CPU_BINDING", "TRAIN_NUM_WORKERS"
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# More numbers of ranks than these are hardly worth their time: the smallest and largest, and powers of two between.
MAX_LAYOUTS = 10


@dataclass(frozen=True)
class Candidate:
    """A plan by the variables that make it differ from the one without any, in order of name."""

    variables: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(variables: Mapping[str, str]) -> Candidate:
        """Return the candidate of these variables."""
        return Candidate(tuple(sorted(variables.items())))

    def also(self, variables: Mapping[str, str]) -> Candidate:
        """Return the candidate with these variables too."""
        return Candidate.of(dict(self.variables) | dict(variables))

    def __str__(self) -> str:
        """Say it in a few words: `2 ranks x 1 thread, OMP_WAIT_POLICY=passive`."""
        values = dict(self.variables)
        ranks, threads, workers = (values.pop(name, "") for name in (RANKS, THREADS, WORKERS))
        words = [f"{ranks} rank{'s' * (ranks != '1')} x {threads} thread{'s' * (threads != '1')}"] if ranks else []
        words += [f"{name}={value}" for name, value in values.items()]
        words += [f"workers {workers}"] if workers else []
        return ", ".join(words) or "as planned"


BASELINE = Candidate()


def rank_thread_layouts(inputs: PlanInputs, device: str) -> tuple[Candidate, ...]:
    """Return the ways to share the cores among ranks, the untuned plan first; a GPU each is the only one there.

    What a user has set stays as it is.
    """
    if device == "cuda" or any(inputs.is_set_by_user(field) for field in ("nproc_per_node", "threads", "cpu_binding")):
        return (BASELINE,)
    values = inputs.settings.values
    budget = compute_cpu_budget(inputs.machine, inputs.job, values.core_type)
    found = dict.fromkeys(
        Candidate.of({RANKS: str(ranks), THREADS: str(threads)})
        for ranks, threads in (*even_layouts(len(budget.cores), budget.threads), *reduced_layouts(budget.threads))
    )
    siblings = compute_cpu_budget(inputs.machine, inputs.job, "logical")
    if values.core_type == "auto" and siblings.threads > budget.threads:
        found |= dict.fromkeys(
            Candidate.of({RANKS: str(ranks), THREADS: str(threads), CORES: "logical"})
            for ranks, threads in even_layouts(len(siblings.cores), siblings.threads)
        )
    return (BASELINE, *found)


def even_layouts(cores: int, threads: int) -> Iterator[tuple[int, int]]:
    """Yield (ranks, threads of each) that use the threads up, few ranks first; with one rank also a thread a core."""
    even = [ranks for ranks in range(1, min(cores, threads) + 1) if threads % ranks == 0]
    if len(even) > MAX_LAYOUTS:
        even = [ranks for ranks in even if ranks in (1, even[-1]) or ranks & (ranks - 1) == 0]
    for ranks in even:
        yield ranks, threads // ranks
    if cores > threads:
        yield 1, cores


def reduced_layouts(threads: int) -> Iterator[tuple[int, int]]:
    """Yield (1, threads) that leave a core to another process, or half: more are no use where memory is what limits."""
    for fewer in (threads - 1, threads // 2):
        if fewer:
            yield 1, fewer


def runtime_candidates(inputs: PlanInputs, device: str) -> tuple[Mapping[str, str], ...]:
    """Return every combination of runtime, wait policy and allocator that can be had and that a user left open."""
    allocators = available_choices(inputs, "allocator", ALLOCATOR, ("tcmalloc", "jemalloc", "system"), ALLOCATOR_WORD)
    if device == "cuda":
        return allocators
    runtimes: list[Mapping[str, str]] = []
    for runtime in available_choices(inputs, "openmp", OPENMP, ("gnu", "intel"), "iomp5"):
        runtimes += ({**runtime, **waiting} for waiting in wait_policies(inputs, runtime.get(OPENMP, "gnu")))
    return tuple({**runtime, **allocator} for runtime, allocator in product(runtimes, allocators))


def available_choices(
    inputs: PlanInputs, field: str, variable: str, names: Iterable[str], word: str
) -> tuple[Mapping[str, str], ...]:
    """Return the values of a setting that can be had here; one empty choice where a user has chosen already."""
    if inputs.is_set_by_user(field) or user_preload(inputs.environ.get("LD_PRELOAD", ""), word):
        return ({},)
    brought = ("gnu", "system")  # by torch and by libc
    return tuple({variable: name} for name in names if name in brought or inputs.machine.library(name).path)


def wait_policies(inputs: PlanInputs, runtime: str) -> tuple[Mapping[str, str], ...]:
    """Return what idle threads may do: what the plan says, spin, or sleep at once."""
    if any(inputs.environ.get(name) for name in WAITING):
        return ({},)
    if runtime == "intel":
        return ({}, {"KMP_BLOCKTIME": "200"}, {"KMP_BLOCKTIME": "0"})
    return ({}, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "passive"})


def binding_candidates(inputs: PlanInputs, device: str) -> tuple[Mapping[str, str], ...]:
    """Return the other ways to bind, where a user left that open.

    Ranks that float help each other's threads out where others run too: 1.16 times as fast with a busy process on
    every core (two ranks of the book's CNN by Gloo), 1.12 with one. Results stay the same to the bit.
    """
    taken = inputs.is_set_by_user("cpu_binding") or any(inputs.environ.get(name) for name in AFFINITY_VARIABLES)
    return () if device == "cuda" or taken else ({BIND: "none"}, {BIND: "threads"})


def worker_candidates(inputs: PlanInputs, plan: Plan) -> tuple[Mapping[str, str], ...]:
    """Return numbers of loader workers around the plan's, where it streams and a user left it open."""
    planned = plan.trainer.num_workers if plan.trainer else 0
    if not planned or inputs.environ.get(WORKERS):
        return ()
    return tuple({WORKERS: str(count)} for count in sorted({max(1, planned // 2), planned * 2} - {planned}))
