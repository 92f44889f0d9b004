"""Assigns the cores of a node to its ranks: pure arithmetic over physical cores."""

from __future__ import annotations

from collections.abc import Sequence

from entrypoint.plan.cpu_budget import Core

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
