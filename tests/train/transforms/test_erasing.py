"""Random erasing: torchvision's distribution, our own draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from train.transforms.augmentations import ERASING_DRAWS, erase, erased_box


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


def test_an_image_depends_on_its_own_draws_alone() -> None:
    draws = torch.rand(20, ERASING_DRAWS, generator=torch.Generator().manual_seed(2))
    whole = erase(torch.ones(20, 3, 16, 16), draws, 0.5)
    assert torch.equal(whole[7:], erase(torch.ones(13, 3, 16, 16), draws[7:], 0.5))
