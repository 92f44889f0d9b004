"""The plan as a user reads it, with the ranks on the cores as a small map."""

from __future__ import annotations

import re

import pytest

from entrypoint.machine.cpu_topology import Cpu
from entrypoint.machine.detect import Machine
from entrypoint.plan.display import Layout, core_map, plan_lines
from entrypoint.plan.model import RankPlan
from tests.factories import make_machine, make_test_plan


def test_plan_lines_show_each_decision_and_reason() -> None:
    made = make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": "2"})
    lines = plan_lines(made)
    assert lines[0] == "plan: node1: a CPU, 4 of 4 CPUs (4 physical cores), 8.0 GiB, no GPU"
    assert lines[1] == "  socket 0 node 0: 0011"
    rows = " ".join(" ".join(lines[2:]).split())
    for decision in made.decisions:
        assert f"{decision.key} " in rows
        assert " ".join(decision.text.split()) in rows


@pytest.mark.parametrize("environ", [
    {},
    {"LAUNCH_NPROC_PER_NODE": "64", "LAUNCH_MAX_RESTARTS": "3"},
    {"OMP_PROC_BIND": "x" * 70, "LD_PRELOAD": "/opt/" + "x" * 200 + "/libtcmalloc.so", "LAUNCH_THREADS": "9"},
])  # fmt: skip
@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_table_fits_the_columns_and_breaks_no_word(environ: dict[str, str], columns: int) -> None:
    made = make_test_plan(make_machine(64), environ)
    lines = [line for line in plan_lines(made, Layout(columns)) if not line.startswith("  socket ")]
    assert max(len(line) for line in lines if "x" * 70 not in line) <= columns
    words = set(" ".join(lines).split())
    assert {word for decision in made.decisions for word in decision.text.split()} <= words


def test_colors_change_no_text() -> None:
    made = make_test_plan(make_machine(2), {"LAUNCH_THREADS": "9"})
    colored = plan_lines(made, Layout(color=True))
    assert any("\033[33mwarning:\033[0m" in line for line in colored)
    assert [re.sub("\033\\[[0-9]*m", "", line) for line in colored] == plan_lines(made)


def test_long_values_are_cut_in_the_table_only() -> None:
    made = make_test_plan(make_machine(4), {"LAUNCH_ALLOCATOR": "system"})
    (line,) = [line for line in plan_lines(made) if "GLIBC_TUNABLES" in line]
    assert "glibc.malloc.mmap_max=0…" in line
    assert "glibc.malloc.trim_threshold" in made.environment.variables["GLIBC_TUNABLES"]


def test_plan_lines_show_command_if_nothing_starts() -> None:
    lines = plan_lines(make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": "2"}), command=True)
    assert lines[-1] == "  would run: python x.py"
    lines = plan_lines(
        make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_LAUNCHER": "torchrun"}), command=True
    )
    assert "entrypoint.launch.torchrun" in lines[-2]
    assert lines[-1] == "  each rank: python x.py"


def test_plan_lines_of_thousand_cores_are_short() -> None:
    made = make_test_plan(make_machine(1024), {"LAUNCH_NPROC_PER_NODE": "512"})
    assert max(map(len, plan_lines(made))) < 200


@pytest.mark.parametrize(("ranks", "more"), [("1", set()), ("2", {"cores", "backend", "launcher"})])
def test_short_plan_has_what_people_look_for_and_what_they_set(ranks: str, more: set[str]) -> None:
    made = make_test_plan(make_machine(4), {"LAUNCH_ALLOCATOR": "system", "LAUNCH_NPROC_PER_NODE": ranks})
    *lines, last = plan_lines(made, Layout(verbose=False))
    keys = [line.split()[0] for line in lines if line.startswith("  ") and line[2] not in " s"]
    assert set(keys) == {"device", "ranks", "threads", "allocator"} | more
    assert last == f"  --verbose shows {len(made.decisions) - len(keys)} more decisions"


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
