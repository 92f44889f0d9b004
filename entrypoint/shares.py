"""How one node's cores are shared among its ranks: pure arithmetic over the machine."""

from __future__ import annotations

from entrypoint.machine import Machine


def split(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` whole numbers that sum to `total` and differ by at most one, larger ones first."""
    base, extra = divmod(total, parts)
    return tuple(base + (part < extra) for part in range(parts))


def share_cpus(machine: Machine, nproc: int) -> tuple[tuple[int, ...], ...]:
    """Return for each local rank the CPUs it is bound to: one CPU a physical core, disjoint, equal to ±1.

    No rank crosses a NUMA node where its share fits into one, even if a core is left over for that: memory of
    the other node costs more than a core gives. Under a quota the whole mask is still dealt out, since the quota
    limits time, not places: pinning every container of a machine to its first cores would pile them on each
    other. With more ranks than cores all share all.
    """
    nodes = cores_by_node(machine)
    cores = [cpu for node in nodes for cpu in node]
    if nproc > len(cores):
        return (tuple(sorted(cores)),) * nproc
    if len(cores) // nproc > max(map(len, nodes)):
        return deal(cores, split(len(cores), nproc))
    sizes = sizes_within_nodes([len(node) for node in nodes], nproc)
    return tuple(share for node, within in zip(nodes, sizes, strict=True) for share in deal(node, within))


def cores_by_node(machine: Machine) -> list[list[int]]:
    """Return the physical cores' CPUs of each NUMA node that has any, nodes in order of socket and id."""
    nodes: dict[tuple[int, int], list[int]] = {}
    for cpu in machine.physical_cores:
        nodes.setdefault((cpu.socket, cpu.node), []).append(cpu.id)
    return [nodes[key] for key in sorted(nodes)]


def sizes_within_nodes(nodes: list[int], nproc: int) -> list[tuple[int, ...]]:
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


def deal(cpus: list[int], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Cut a list of CPUs into shares of the given sizes, from its start."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(tuple(sorted(cpus[start : start + size])) for start, size in zip(starts, sizes, strict=True))


def share_threads(machine: Machine, cpus: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return for each local rank how many OpenMP threads it may run, at least 1: its cores, within the quota."""
    granted = split(machine.budget_cores, len(cpus))
    return tuple(max(1, min(len(share), quota)) for share, quota in zip(cpus, granted, strict=True))
