"""The variants that `make bench-techniques` compares compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.techniques import build_step, indexed, one_after_another
from train.kernels.library import find_kernel
from train.transforms import flip_crop


def test_crops_give_the_same_pixels() -> None:
    random = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8, generator=random)
    rows = torch.randperm(64, generator=random)[:40]
    params = flip_crop.sample_params(40, 32, random)
    ours = flip_crop.apply(images, rows, params)
    assert torch.equal(indexed(images, rows, params), ours)
    assert torch.equal(one_after_another(images, rows, params), ours)


def test_step_trains_the_model() -> None:
    step = build_step("cnn", batch=4)
    losses = [step().item() for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(find_kernel("winograd") is None, reason="needs a C++ compiler at the set-up")
def test_winograd_can_be_measured_where_auto_leaves_it_off() -> None:
    with_it, without = (build_step("cnn", batch=16, winograd=on) for on in (True, False))
    losses = [(with_it().item(), without().item()) for _ in range(4)]
    assert losses[3][0] == pytest.approx(losses[3][1], rel=1e-4)
    assert any(one != other for one, other in losses), "additions in another order round otherwise"
