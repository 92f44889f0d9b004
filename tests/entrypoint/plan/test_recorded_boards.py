"""The plan on GPU nodes that are not here, by what `nvidia-smi topo -m` printed of them in public issues (boards.json).

No such node ever ran it: a CPU plans for them.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec.structs import replace

from entrypoint.machine.container import ContainerInfo
from entrypoint.machine.cpu_topology import parse_cpu_list
from entrypoint.machine.detect import Machine, detect_machine
from entrypoint.machine.gpus import link_quality
from tests.factories import make_test_plan
from tests.machines import Core, RecordedNvml, Tree, gpu_nodes

BOARDS = {board["name"]: board for board in json.loads(Path(__file__).with_name("boards.json").read_text())}
COUNTS = [(name, count) for name, board in BOARDS.items() for count in sorted({1, 2, 4, len(board["nodes"])})]


def links_of(board: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the class of each link; those over a switch are the same everywhere."""
    count = len(board["nodes"])
    rows = board.get("links") or [" ".join("X" if a == b else "SYS" for b in range(count)) for a in range(count)]
    return tuple(tuple(row.split()) for row in rows)


def node_cores(node: str, text: str) -> list[Core]:
    """Return the cores of a NUMA node; a list of two equal ranges has the hyper-threads in the second one."""
    cpus = parse_cpu_list(text)
    half = len(cpus) // 2
    pairs = list(zip(cpus[:half], cpus[half:], strict=True)) if text.count("-") == 2 else [(cpu,) for cpu in cpus]
    return [Core(pair, socket=int(node), node=int(node), core_id=pair[0]) for pair in pairs]


@cache
def machine_of(name: str) -> Machine:
    board = BOARDS[name]
    cores = [core for node, text in board["cpus"].items() for core in node_cores(node, text)]
    tree = Tree(cores, files=gpu_nodes(tuple(board["nodes"])))
    mask = frozenset(parse_cpu_list(board["mask"])) if "mask" in board else tree.cpus
    nvml = RecordedNvml(links_of(board), switched=board.get("switched", 0), name="NVIDIA H100 80GB HBM3")
    with TemporaryDirectory() as folder:
        detected = detect_machine(tree.build(Path(folder)), mask, nvml)
    return replace(detected, container=ContainerInfo(shm_bytes=1 << 30))


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_ranks_have_the_best_links_and_cores_near_their_gpu(name: str, count: int) -> None:
    board = BOARDS[name]
    made = make_test_plan(machine_of(name), {"LAUNCH_NPROC_PER_NODE": str(count)})
    value = next((decision.value for decision in made.decisions if decision.key == "gpus"), "")
    gpus = [int(part) for part in value.split(",")] if value else list(range(len(board["nodes"])))
    assert len(gpus) == count == len(made.ranks)
    assert value == (board["chosen"].get(str(count), value) if count < len(board["nodes"]) else "")
    links = links_of(board)

    def worst(chosen: tuple[int, ...] | list[int]) -> int:
        return min((link_quality(links[a][b]) for a, b in combinations(chosen, 2)), default=0)

    assert worst(gpus) == max(worst(some) for some in combinations(range(len(links)), count))
    taken = [cpu for rank in made.ranks for cpu in rank.cpus]
    assert len(taken) == len(set(taken)), "no two ranks share a core"
    for gpu, rank in zip(gpus, made.ranks, strict=True):
        near = board["mask"] if "mask" in board else board["cpus"][str(board["nodes"][gpu])]
        assert set(rank.cpus) <= set(parse_cpu_list(near)), "which is where its memory comes from too"
    assert not [name for name in made.environment.variables if name.startswith("NCCL_")], "NCCL finds its paths itself"


def test_boards_differ_and_name_their_source() -> None:
    assert len(
        {json.dumps([board.get("links"), board["cpus"], board.get("mask")]) for board in BOARDS.values()}
    ) == len(BOARDS)
    assert all("#" in board["source"] for board in BOARDS.values())
