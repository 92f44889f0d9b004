"""Compare the links between GPUs, and select the best connected GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

# `nvidia-smi topo -m`, from the worst: across sockets, across host bridges of a node, over a host bridge, over
# several PCIe switches, over one. NV# is that many NVLinks, better than any of these; X is the GPU itself.
CLASSES = ("SYS", "NODE", "PHB", "PXB", "PIX")
SELF = "X"


def link_quality(link: str) -> int:
    """Return how good a link is: 0 for SYS up to 4 for PIX, more for NV1 and up."""
    return len(CLASSES) - 1 + int(link[2:]) if link.startswith("NV") else CLASSES.index(link)


def best_connected(links: Sequence[Sequence[str]], count: int) -> tuple[int, ...]:
    """Return the `count` GPUs with the best worst link, then the best sum, then the lowest indices.

    `links[a][b]` is the class of the link between GPUs a and b.
    """

    def score(chosen: tuple[int, ...]) -> tuple[int, int]:
        ranks = [link_quality(links[a][b]) for a, b in combinations(chosen, 2)]
        return min(ranks, default=0), sum(ranks)

    return max(combinations(range(len(links)), count), key=score)


def describe_links(links: Sequence[Sequence[str]], chosen: Sequence[int]) -> str:
    """Return the worst and the best link among the chosen GPUs: `NV2` or `NV1 to NV2`."""
    found = sorted({links[a][b] for a, b in combinations(chosen, 2)}, key=link_quality)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if found else "alone"
