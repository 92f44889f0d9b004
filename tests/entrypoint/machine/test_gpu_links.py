"""Which GPUs belong together."""

from __future__ import annotations

from itertools import combinations

import pytest

from entrypoint.machine.gpus import best_connected, describe_links, link_quality
from tests.machines import LINKS_10_1

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
