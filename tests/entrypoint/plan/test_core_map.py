"""The ranks on the cores as a small map."""

from __future__ import annotations

import pytest

from entrypoint.machine.cpu_topology import Cpu
from entrypoint.machine.detect import Machine
from entrypoint.plan.display import core_map
from entrypoint.plan.model import RankPlan


def node(cores: int, nodes: int = 1) -> Machine:
    cpus = tuple(Cpu(cpu, cpu, cpu * nodes // cores, cpu * nodes // cores) for cpu in range(cores))
    return Machine("m", "cpu", "vendor", cpus, cores, None, 1 << 33)


@pytest.mark.parametrize(
    ("machine", "ranks", "lines"),
    [
        (node(1), [(0,)], ()),
        (node(4), [(0, 1), (2, 3)], ("socket 0 node 0: 0011",)),
        (node(4), [(0,), (2,)], ("socket 0 node 0: 0.1.",)),
        (node(2), [(0, 1), (0, 1), (0, 1)], ("socket 0 node 0: **",)),
        (node(4, 2), [(0, 1), (2, 3)], ("socket 0 node 0: 00", "socket 1 node 1: 11")),
        (node(100), [tuple(range(100))], ("socket 0 node 0: 0 x100",)),
    ],
)
def test_core_map_shows_rank_of_each_core(
    machine: Machine, ranks: list[tuple[int, ...]], lines: tuple[str, ...]
) -> None:
    assert core_map(machine, [RankPlan(rank, cpus, 1) for rank, cpus in enumerate(ranks)]) == lines


def test_core_map_of_many_ranks_is_shortened() -> None:
    (line,) = core_map(node(512), [RankPlan(rank, (rank,), 1) for rank in range(512)])
    assert line.startswith("socket 0 node 0: 0 x1 1 x1 ")
    assert line.endswith(" … 511 x1")
