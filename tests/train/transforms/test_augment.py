"""TrivialAugment, RandAugment and AugMix: torchvision's operations with our own draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from train.transforms import augment
from train.transforms.augment import (
    CHAINS,
    DEPTH,
    OPERATION_DRAWS,
    augment_batch,
    augment_pixels,
    choose_operation,
    count_draws,
    sample_draws,
)

v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=(ImportError, RuntimeError))
POLICIES = ("trivial", "rand-9-2", "rand-15-3", "augmix")
IMAGES = torch.randint(0, 256, (40, 24, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Scripted:
    """Answers torchvision's questions to the generator with the numbers of a row, in the order of its questions."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = list(numbers)

    def randint(self, *bounds: Any, **named: int) -> torch.Tensor:
        low, high = (named["low"], named["high"]) if named else (0, bounds[0])
        return torch.tensor(low + int(self.numbers.pop(0) * (high - low)))

    def rand(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.tensor(self.numbers.pop(0))


def script_for(policy: str, row: list[float]) -> list[float]:
    """Return the row's numbers that torchvision asks for: none for a magnitude or a sign that an operation lacks."""
    owner = augment.torchvision_policy(policy)
    space = owner._AUGMENTATION_SPACE
    found: list[float] = []
    for start in range(0, len(row), OPERATION_DRAWS):
        which, magnitude, sign = row[start : start + OPERATION_DRAWS]
        make, is_signed = space[list(space)[int(which * len(space))]]
        has_magnitude = make(10, 24, 20) is not None
        found.append(which)
        if has_magnitude and not policy.startswith("rand"):
            found.append(magnitude)
        if has_magnitude and is_signed:
            found.append(sign)
    return found


@pytest.mark.parametrize("policy", ["trivial", "rand-9-2", "rand-15-3"])
def test_augmentation_equals_torchvisions_draw_by_draw(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = sample_draws(policy, len(IMAGES), torch.Generator().manual_seed(1))
    found = augment_batch(policy, IMAGES, draws)
    for image, row, ours in zip(IMAGES, draws.tolist(), found, strict=True):
        script = Scripted(script_for(policy, row))
        monkeypatch.setattr(torch, "randint", script.randint)
        monkeypatch.setattr(torch, "rand", script.rand)
        wanted = augment.torchvision_policy(policy)(image.permute(2, 0, 1))
        monkeypatch.undo()
        assert not script.numbers
        assert torch.equal(ours.permute(2, 0, 1), wanted)


def test_augmix_equals_torchvisions_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = sample_draws("augmix", 12, torch.Generator().manual_seed(2))
    found = augment_batch("augmix", IMAGES[:12], draws)
    for image, row, ours in zip(IMAGES, draws.tolist(), found, strict=False):
        exponentials = -torch.log(1 - torch.tensor(row[:CHAINS], dtype=torch.float64))
        answers = [
            torch.tensor([[row[CHAINS], 1 - row[CHAINS]]]),
            (exponentials / exponentials.sum()).float()[None],
        ]
        script: list[float] = []
        for chain in range(CHAINS):
            start = CHAINS + 1 + chain * (1 + DEPTH * OPERATION_DRAWS)
            depth = 1 + int(row[start] * DEPTH)
            operations = row[start + 1 : start + 1 + depth * OPERATION_DRAWS]
            script += [row[start], *script_for("augmix", operations)]
        scripted = Scripted(script)
        owner = augment.torchvision_policy("augmix")
        monkeypatch.setattr(owner, "_sample_dirichlet", lambda _, answers=answers: answers.pop(0))
        monkeypatch.setattr(torch, "randint", scripted.randint)
        monkeypatch.setattr(torch, "rand", scripted.rand)
        wanted = owner(image.permute(2, 0, 1))
        monkeypatch.undo()
        assert (ours.permute(2, 0, 1).int() - wanted.int()).abs().max() <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_an_image_depends_on_its_own_draws_alone(policy: str) -> None:
    draws = sample_draws(policy, len(IMAGES), torch.Generator().manual_seed(1))
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
    found = augment_batch(policy, images, sample_draws(policy, 30, torch.Generator().manual_seed(4)))
    assert found.shape == images.shape
    assert found.dtype == torch.uint8


def test_operations_are_equally_likely() -> None:
    draws = sample_draws("trivial", 7000, torch.Generator().manual_seed(5)).tolist()
    names = Counter(choose_operation("trivial", row, 32, 32).name for row in draws)
    assert len(names) == 14
    assert min(names.values()) > 380


def test_policies_need_so_many_draws() -> None:
    assert [count_draws(policy) for policy in ("none", "trivial", "rand-9-4", "augmix")] == [0, 3, 12, 34]
