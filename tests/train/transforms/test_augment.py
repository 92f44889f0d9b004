"""TrivialAugment, RandAugment and AugMix: torchvision's operations with our own draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from train.transforms.augment import (
    augment_batch,
    augment_pixels,
    choose_operation,
    count_draws,
)

v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=(ImportError, RuntimeError))
POLICIES = ("trivial", "rand-9-2", "rand-15-3", "augmix")
IMAGES = torch.randint(0, 256, (40, 24, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_image_depends_on_its_own_draws_alone(policy: str) -> None:
    draws = torch.rand(len(IMAGES), count_draws(policy), generator=torch.Generator().manual_seed(1))
    whole = augment_batch(policy, IMAGES, draws)
    parts = torch.cat([augment_batch(policy, IMAGES[own], draws[own]) for own in (slice(0, 7), slice(7, None))])
    assert torch.equal(whole, parts)
    pixels = IMAGES[3].clone().numpy()
    augment_pixels(policy, pixels, draws[3].tolist())
    assert np.array_equal(pixels, whole[3].numpy())
    assert not torch.equal(whole, IMAGES)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (5, 9, 3)])
def test_gray_and_small_images_are_augmented(policy: str, shape: tuple[int, int, int]) -> None:
    images = torch.randint(0, 256, (30, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    found = augment_batch(
        policy, images, torch.rand(30, count_draws(policy), generator=torch.Generator().manual_seed(4))
    )
    assert found.shape == images.shape
    assert found.dtype == torch.uint8


def test_operations_are_equally_likely() -> None:
    draws = torch.rand(7000, count_draws("trivial"), generator=torch.Generator().manual_seed(5)).tolist()
    names = Counter(choose_operation("trivial", row, 32, 32)[0] for row in draws)
    assert len(names) == 14
    assert min(names.values()) > 380


def test_policies_need_so_many_draws() -> None:
    assert [count_draws(policy) for policy in ("none", "trivial", "rand-9-4", "augmix")] == [0, 3, 12, 34]
