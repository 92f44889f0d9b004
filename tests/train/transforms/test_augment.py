"""Augmentation of single images and erased boxes: torchvision's operations with our own draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from train.transforms import augment as module
from train.transforms.augment import augment, augment_batch, augment_pixels, count_draws, flip_chance
from train.transforms.augmentations import ERASING_DRAWS, erase, erased_box

v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=(ImportError, RuntimeError))
POLICIES = ("trivial", "rand-9-2", "rand-15-3,vflip-0.5", "auto", "3augment", "jitter-0.4,gray-0.5,blur-0.5")
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


def test_operations_are_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.rand(7000, count_draws("trivial"), generator=torch.Generator().manual_seed(5)).tolist()
    monkeypatch.setattr(module, "apply_by_name", lambda *arguments: arguments[2])
    names = Counter(str(augment("trivial", IMAGES[0], row)) for row in draws)
    assert len(names) == 14
    assert min(names.values()) > 380


def test_policies_need_so_many_draws() -> None:
    policies = ("none", "trivial", "rand-9-4", "auto,jitter-0.4", "hflip-0")
    assert [count_draws(policy) for policy in policies] == [0, 3, 12, 11, 0]


def test_auto_augment_does_what_torchvisions_does(monkeypatch: pytest.MonkeyPatch) -> None:
    image, policy = IMAGES[0].permute(2, 0, 1), v2.AutoAugment()
    for row in torch.rand(60, count_draws("auto"), generator=torch.Generator().manual_seed(6)).tolist():
        pair = policy._policies[int(row[0] * len(policy._policies))]
        turns: list[float] = []  # torchvision draws a sign only for an operation that happens and has one
        for (name, chance, _), turn, sign in zip(pair, row[1:3], row[3:], strict=True):
            turns += [turn] + [sign] * (turn <= chance and policy._AUGMENTATION_SPACE[name][1])
        drawn = iter(turns)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randint", lambda many, _, first=row[0]: int(first * many))
            patched.setattr(torch, "rand", lambda _, drawn=drawn: torch.tensor(next(drawn)))
            expected = policy(image)
        assert torch.equal(augment("auto", image, row), expected)


@pytest.mark.parametrize(
    ("policy", "draws", "expected"),
    [
        ("vflip-0.5", [0.4], lambda image: image.flip(1)),
        ("vflip-0.5", [0.6], lambda image: image),
        ("gray-0.1", [0.05], lambda image: v2.functional.rgb_to_grayscale(image, 3)),
        ("gray-0.1", [0.1], lambda image: image),
        ("blur-1", [0.0, 0.5], lambda image: v2.functional.gaussian_blur(image, [7, 7], [1.05, 1.05])),
        ("3augment", [0.5, 0.0], lambda image: v2.functional.solarize(image, 128)),
        ("3augment", [0.0, 0.0], lambda image: v2.functional.rgb_to_grayscale(image, 3)),
        ("3augment", [0.9, 0.0], lambda image: v2.functional.gaussian_blur(image, [3, 3], [0.1, 0.1])),
        (
            "jitter-0.4",
            [0.0, 1.0, 0.5, 0.9, 0.1, 0.5],
            lambda image: v2.functional.adjust_brightness(v2.functional.adjust_contrast(image, 1.4), 0.6),
        ),
    ],
)
def test_operation_is_torchvisions(
    policy: str, draws: list[float], expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    image = IMAGES[0].permute(2, 0, 1)
    assert torch.equal(augment(policy, image, draws), expected(image))


def test_flips_have_the_chance_that_is_named() -> None:
    assert [flip_chance(policy) for policy in ("none", "trivial,hflip-0", "hflip-0.25")] == [0.5, 0.0, 0.25]


def boxes(size: tuple[int, int], count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    draws = torch.rand(count, ERASING_DRAWS, generator=torch.Generator().manual_seed(0)).tolist()
    found = [erased_box(row, 1.0, *size) for row in draws]
    return np.array([one for one in found if one], float)


@pytest.mark.parametrize("size", [(32, 32), (64, 40)])
def test_boxes_have_the_distribution_of_torchvision(size: tuple[int, int]) -> None:
    transforms = pytest.importorskip("torchvision.transforms", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    image = torch.empty(3, *size)
    get_params = transforms.RandomErasing.get_params
    theirs = np.array([get_params(image, (0.02, 0.33), (0.3, 3.3), [0])[:4] for _ in range(4000)], float)
    top, left, height, width = theirs.T
    ours = boxes(size, 4000).T
    for one, other in zip(ours, (top, top + height, left, left + width), strict=True):
        deviation = max(one.std(), 1.0)
        assert abs(one.mean() - other.mean()) < 4 * deviation * (2 / 4000) ** 0.5
        assert np.abs(np.quantile(one, [0.1, 0.5, 0.9]) - np.quantile(other, [0.1, 0.5, 0.9])).max() < 2


def test_so_many_images_lose_one_box() -> None:
    images = torch.ones(2000, 3, 16, 12)
    erased = erase(images, torch.rand(2000, ERASING_DRAWS, generator=torch.Generator().manual_seed(1)), 0.25)
    holes = (erased == 0).all(1).flatten(1).sum(1)
    assert 430 < int((holes > 0).sum()) < 570
    assert int(holes.max()) <= 0.36 * 16 * 12
    assert ((erased == 0).all(1) == (erased == 0).any(1)).all(), "all channels are erased together"


def test_box_depends_on_the_images_own_draws_alone() -> None:
    draws = torch.rand(20, ERASING_DRAWS, generator=torch.Generator().manual_seed(2))
    whole = erase(torch.ones(20, 3, 16, 16), draws, 0.5)
    assert torch.equal(whole[7:], erase(torch.ones(13, 3, 16, 16), draws[7:], 0.5))
