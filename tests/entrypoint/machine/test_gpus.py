"""Which GPUs CUDA_VISIBLE_DEVICES leaves visible, and how they are linked."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from entrypoint.machine.gpus import Driver, Gpu, best_connected, describe_links, filter_visible, link_quality, read_gpus
from tests.machines import LINKS_10_1, MACHINES, NVLINK_NODES, RecordedNvml, nvlink_node

FOUND = tuple(Gpu(index, f"GPU-{index}abc", "H200", 1 << 37, links=("X",) * 4) for index in range(4))


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0abc", "GPU-1abc", "GPU-2abc", "GPU-3abc"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-2abc", "GPU-0abc"]),
        ("GPU-3abc", ["GPU-3abc"]),
        ("GPU-1", ["GPU-1abc"]),
        ("1,9,2", ["GPU-1abc"]),
    ],
)
def test_filter_visible_follows_cuda_rule(visible: str | None, uuids: list[str]) -> None:
    chosen = filter_visible(FOUND, visible)
    assert [gpu.uuid for gpu in chosen] == uuids
    assert [gpu.index for gpu in chosen] == list(range(len(uuids)))


def test_read_gpus_without_driver_is_empty(tmp_path: Path) -> None:
    assert read_gpus(tmp_path) == ((), Driver())


def test_read_gpus_broken_driver_reports_problem(tmp_path: Path) -> None:
    gpus, driver = read_gpus(tmp_path, nvml=RecordedNvml((), problem="Driver/library version mismatch"))
    assert (gpus, driver.problem) == ((), "Driver/library version mismatch")


def test_read_gpus_nvlink_node_matches_table_10_1(tmp_path: Path) -> None:
    root = MACHINES["8-GPU NVLink node"]().build(tmp_path)
    gpus, driver = read_gpus(root, nvml=nvlink_node())
    assert tuple(gpu.links for gpu in gpus) == LINKS_10_1
    assert tuple(gpu.node for gpu in gpus) == NVLINK_NODES
    assert (driver.version, driver.cuda) == ("580.65.06", "13.0")
    assert gpus[0].memory_bytes == 32 << 30


def test_read_gpus_links_follow_visible_order(tmp_path: Path) -> None:
    root = MACHINES["8-GPU NVLink node"]().build(tmp_path)
    gpus, _ = read_gpus(root, "3,0,7", nvlink_node())
    assert [gpu.uuid for gpu in gpus] == ["GPU-00000003", "GPU-00000000", "GPU-00000007"]
    assert [gpu.links for gpu in gpus] == [("X", "NV2", "NV1"), ("NV2", "X", "SYS"), ("NV1", "SYS", "X")]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["MIG-00000000-0"]),
        ("MIG-00000000-2", ["MIG-00000000-2"]),
        ("MIG-00000000-1,MIG-00000000-2", ["MIG-00000000-1"]),
        ("1", ["GPU-00000001"]),
        ("0", ["MIG-00000000-0"]),
        ("GPU-00000001", ["GPU-00000001"]),
    ],
)
def test_mig_device_is_the_only_visible_gpu(
    tmp_path: Path, visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = RecordedNvml((("X", "NODE"), ("NODE", "X")), migs={0: 3}, name="NVIDIA A100-SXM4-80GB")
    gpus, _ = read_gpus(tmp_path, visible, nvml)
    assert [gpu.uuid for gpu in gpus] == uuids
    assert all(gpu.mig is gpu.uuid.startswith("MIG") for gpu in gpus)


@pytest.mark.cuda
def test_read_gpus_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    assert [gpu.name for gpu in read_gpus(Path("/"))[0]] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]


TREE = (
    ("X", "PIX", "NODE", "SYS"),
    ("PIX", "X", "NODE", "SYS"),
    ("NODE", "NODE", "X", "PHB"),
    ("SYS", "SYS", "PHB", "X"),
)


def test_link_quality_follows_nvidia_smi_order() -> None:
    order = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2", "NV18"]
    assert sorted(order, key=link_quality) == order


def test_gpu_subset_has_best_worst_link_then_best_sum() -> None:
    chosen = best_connected(LINKS_10_1, 4)
    assert describe_links(LINKS_10_1, chosen) == "NV1 to NV2"

    def worth(four: tuple[int, ...]) -> tuple[int, int]:
        ranks = [link_quality(LINKS_10_1[a][b]) for a, b in combinations(four, 2)]
        return min(ranks), sum(ranks)

    assert worth(chosen) == max(worth(four) for four in combinations(range(8), 4))
    assert chosen in ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("count", "chosen", "said"),
    [(1, (0,), "alone"), (2, (0, 1), "PIX"), (3, (0, 1, 2), "NODE to PIX"), (4, (0, 1, 2, 3), "SYS to PIX")],
)
def test_best_connected_without_nvlink_uses_nearest_pcie(count: int, chosen: tuple[int, ...], said: str) -> None:
    assert best_connected(TREE, count) == chosen
    assert describe_links(TREE, chosen) == said
