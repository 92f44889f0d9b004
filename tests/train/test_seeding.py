"""The order of examples: decided by seed and epoch, cut without loss."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from hypothesis import given, strategies as st

from train.seeding import derive_seed, epoch_permutation, make_generator, seed_everything, shard_slice


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shard_slices_cover_everything_once(total: int, parts: int) -> None:
    slices = [shard_slice(total, part, parts) for part in range(parts)]
    assert slices[0].start == 0
    assert slices[-1].stop == total
    assert all(left.stop == right.start for left, right in itertools.pairwise(slices))
    sizes = [piece.stop - piece.start for piece in slices]
    assert max(sizes) - min(sizes) <= 1


def test_epoch_order_is_a_permutation_of_seed_and_epoch() -> None:
    order = epoch_permutation(1000, 7, 3)
    assert sorted(order.tolist()) == list(range(1000))
    assert torch.equal(order, epoch_permutation(1000, 7, 3))
    assert not torch.equal(order, epoch_permutation(1000, 7, 4))
    assert not torch.equal(order, epoch_permutation(1000, 8, 3))


def test_generators_of_different_purpose_are_independent() -> None:
    draws = {
        tuple(torch.rand(4, generator=make_generator(*key)).tolist()) for key in [(0, "a"), (0, "b"), (1, "a"), (0,)]
    }
    assert len(draws) == 4


def test_seed_everything_equals_manual_seed() -> None:
    torch.manual_seed(derive_seed(7, "step", 3))
    whole = torch.rand(5)
    seed_everything(derive_seed(7, "step", 3), torch.device("cpu"))
    assert torch.equal(torch.rand(5), whole)


def test_seed_everything_seeds_python_and_numpy() -> None:
    def drawn() -> tuple[float, float]:
        seed_everything(derive_seed(7, "step", 3), torch.device("cpu"))
        return random.random(), float(np.random.rand())  # what users' models draw from

    assert drawn() == drawn()
