"""The CPUs that the ranks of this node may use, in whole cores, and which of them each rank gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from entrypoint.core.errors import count_text
from entrypoint.job.detect import Job
from entrypoint.machine.cpu_topology import Cpu, format_cpu_list
from entrypoint.machine.detect import Machine


class Core(Struct, frozen=True):
    """A physical core: its NUMA node (as socket and node), those of its CPUs that ranks are bound to, its L3 cache."""

    numa_node: tuple[int, int]
    cpus: tuple[int, ...]
    cache: int = -1


class CpuBudget(Struct, frozen=True):
    """`cores` in order of socket, NUMA node, L3 cache and core; `limit_cpus` caps the threads, None where nothing does.

    `text` says in a few words what it is and what limits it.
    """

    cores: tuple[Core, ...]
    limit_cpus: float | None
    text: str

    @property
    def threads(self) -> int:
        """How many threads may run at once without waiting, at least 1."""
        cpus = sum(len(core.cpus) for core in self.cores)
        return cpus if self.limit_cpus is None else max(1, min(cpus, int(self.limit_cpus)))

    @property
    def is_limited(self) -> bool:
        """Tell whether the limit is lower than what the cores could run."""
        return self.limit_cpus is not None and self.limit_cpus < sum(len(core.cpus) for core in self.cores)


def compute_cpu_budget(machine: Machine, job: Job, kind: str, nproc: int = 1) -> CpuBudget:
    """Return the budget for `nproc` ranks under LAUNCH_CORE_TYPE=`kind`.

    `performance` leaves a hybrid CPU's efficiency cores out, since OpenMP's equal parts would wait for them;
    `auto` does so unless the ranks outnumber the others. `logical` takes siblings too.
    """
    physical = group_by_core(machine.cpus, siblings=kind == "logical")
    slow = {cpu.id for cpu in machine.cpus if cpu.efficiency}
    fast = tuple(core for core in physical if not slow.intersection(core.cpus))
    left_out = kind == "performance" or (kind == "auto" and nproc <= len(fast))
    cores = fast if left_out and fast else physical
    limits = [float(cpus) for cpus in (machine.quota_cpus, job.granted_cpus) if cpus is not None]
    return CpuBudget(cores, min(limits, default=None), budget_text(machine, job, cores, len(physical) - len(cores)))


def group_by_core(cpus: Iterable[Cpu], *, siblings: bool) -> tuple[Core, ...]:
    """Return the physical cores of the CPUs, each with its first CPU, or with all of them."""
    members: dict[tuple[int, int, int, int], list[int]] = {}
    for cpu in cpus:
        members.setdefault((cpu.socket, cpu.node, cpu.cache, cpu.core), []).append(cpu.id)
    return tuple(
        Core(key[:2], tuple(sorted(ids) if siblings else [min(ids)]), key[2]) for key, ids in sorted(members.items())
    )


def budget_text(machine: Machine, job: Job, cores: tuple[Core, ...], excluded: int) -> str:
    """Return what the budget is and what limits it."""
    count, cpus = len(cores), sum(len(core.cpus) for core in cores)
    quota, granted = machine.quota_cpus, job.granted_cpus
    mask = f" in the affinity mask ({format_cpu_list(tuple(cpu.id for cpu in machine.cpus))})"
    parts = {
        count_text(count, "physical core") + mask * (len(machine.cpus) < machine.online_cpus): True,
        f"{cpus} CPUs with hyper-threads": cpus > count,
        f"without {count_text(excluded, 'efficiency core')} (LAUNCH_CORE_TYPE=physical)": excluded,
        f"cgroup limit {quota or 0:g} CPUs": quota is not None and quota < cpus,
        f"{job.scheduler} grants {granted} CPUs": granted is not None and granted < len(machine.cpus),
    }
    return ", ".join(text for text, holds in parts.items() if holds)


Shares = tuple[tuple[Core, ...], ...]


def split(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` whole numbers that sum to `total` and differ by at most one, larger ones first."""
    base, extra = divmod(total, parts)
    return tuple(base + (part < extra) for part in range(parts))


def assign_cores(cores: Sequence[Core], nproc: int) -> Shares:
    """Return for each local rank the physical cores that it is bound to: disjoint, equal to ±1.

    No rank crosses a NUMA node if its share fits into one, even if a core stays unused: remote memory costs more.
    Under a CPU limit the whole mask is still assigned, because the limit is on time and not on cores. Pinning every
    container of a machine to its first cores would overload these. With more ranks than cores all share all.
    Within a node, no rank crosses an L3 cache if its share fits into one.
    """
    if nproc > len(cores):
        return (tuple(cores),) * nproc
    nodes = cores_by_node(cores)
    if len(cores) // nproc > max(map(len, nodes)):
        return partition(cores, split(len(cores), nproc))
    sizes = rank_sizes_per_node([len(node) for node in nodes], nproc)
    return tuple(share for node, within in zip(nodes, sizes, strict=True) for share in share_node(node, within))


def share_node(cores: Sequence[Core], sizes: tuple[int, ...]) -> Shares:
    """Cut a NUMA node's cores into shares, none across two L3 caches if all fit into one each.

    A thread in another core complex reads what it shares by the memory's way. Larger shares choose first.
    """
    free: dict[int, list[Core]] = {}
    for core in cores:
        free.setdefault(core.cache, []).append(core)
    shares: dict[int, tuple[Core, ...]] = {}
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        fitting = [cache for cache in free if len(free[cache]) >= sizes[place]]
        if not fitting:
            return partition(cores, sizes)
        cache = min(fitting, key=lambda cache: (len(free[cache]), cache))
        shares[place] = tuple(free[cache][: sizes[place]])
        free[cache] = free[cache][sizes[place] :]
    return tuple(shares[place] for place in range(len(sizes)))


def assign_near_gpus(cores: Sequence[Core], wanted: Sequence[int | None]) -> Shares | None:
    """Return for each rank cores of the NUMA node that it wants (its GPU's), disjoint, equal to ±1.

    None if a rank wants none, or a node has fewer cores than ranks that want it.
    """
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node[1], []).append(core)
    ranks = {node: [rank for rank, wish in enumerate(wanted) if wish == node] for node in wanted if node is not None}
    size = min((len(nodes.get(node, ())) // len(here) for node, here in ranks.items()), default=0)
    if not size or None in wanted:
        return None
    shares: dict[int, tuple[Core, ...]] = {}
    for node, here in ranks.items():
        extra = len(nodes[node]) - size * len(here)
        assigned = share_node(nodes[node], tuple(size + (place < extra) for place in range(len(here))))
        shares |= dict(zip(here, assigned, strict=True))
    return tuple(shares[rank] for rank in range(len(wanted)))


def cores_by_node(cores: Sequence[Core]) -> list[list[Core]]:
    """Return the cores of each NUMA node that has any, nodes in order of socket and id."""
    nodes: dict[tuple[int, int], list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).append(core)
    return [nodes[key] for key in sorted(nodes)]


def rank_sizes_per_node(nodes: list[int], nproc: int) -> list[tuple[int, ...]]:
    """Return for each node the sizes of the ranks placed on it, equal to ±1 over all, none across nodes.

    `nodes` are their numbers of cores, with at least `nproc` together. The smaller of the two sizes is the
    largest that `nproc` ranks can all have.
    """
    size = next(size for size in range(max(nodes), 0, -1) if sum(cores // size for cores in nodes) >= nproc)
    ranks = [0] * len(nodes)
    for _ in range(nproc):  # always where the most cores a rank are left, so that spare ones widen ranks
        open_nodes = [node for node in range(len(nodes)) if (ranks[node] + 1) * size <= nodes[node]]
        ranks[max(open_nodes, key=lambda node: (nodes[node] - ranks[node] * size, -node))] += 1
    return [
        tuple(size + (rank < min(count, cores - count * size)) for rank in range(count))
        for cores, count in zip(nodes, ranks, strict=True)
    ]


def partition(cores: Sequence[Core], sizes: tuple[int, ...]) -> Shares:
    """Cut a list of cores into shares of the given sizes, from its start."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(tuple(cores[start : start + size]) for start, size in zip(starts, sizes, strict=True))


def cpus_of(share: Sequence[Core]) -> tuple[int, ...]:
    """Return the CPUs of a share in order."""
    return tuple(sorted(cpu for core in share for cpu in core.cpus))


def assign_threads(limit: int, cpus: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return for each local rank how many OpenMP threads it may run, at least 1: its CPUs, within the limit."""
    granted = split(limit, len(cpus))
    return tuple(max(1, min(len(share), most)) for share, most in zip(cpus, granted, strict=True))
