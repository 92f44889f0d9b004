"""Random resized crops: torchvision's distribution, our own draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from train.transforms.image_part import Size
from train.transforms.imagenet import DRAWS, TRIES, eval_crop, random_crop, sample_params, train_views


def crops(size: Size, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    params = sample_params(count, 0, torch.Generator().manual_seed(0))
    return np.array([random_crop(draws, size) for draws in params.tolist()])


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (64, 64), (1000, 200)])
def test_crops_have_the_distribution_of_torchvision(size: Size) -> None:
    transforms = pytest.importorskip("torchvision.transforms", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    image = torch.empty(3, size[1], size[0])
    theirs = np.array(
        [transforms.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(4000)], float
    )
    top, left, height, width = theirs.T
    ours = crops(size, 4000).T
    for one, other in zip(ours, (left, top, left + width, top + height), strict=True):
        deviation = max(one.std(), 1.0)
        assert abs(one.mean() - other.mean()) < 4 * deviation * (2 / 4000) ** 0.5
        assert (
            np.abs(np.quantile(one, [0.1, 0.5, 0.9]) - np.quantile(other, [0.1, 0.5, 0.9])).max() < 0.12 * deviation + 1
        )


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 400), (5000, 7), (500, 375)])
def test_crops_are_inside_the_image(size: Size) -> None:
    left, top, right, bottom = crops(size, 500).T
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= size[0]
    assert bottom.max() <= size[1]
    assert (right - left).min() >= 1
    assert (bottom - top).min() >= 1


def test_crop_that_never_fits_is_in_the_middle() -> None:
    assert random_crop([0.99, 0.99] * TRIES + [0.0, 0.0, 0.0], (4000, 10)) == (1993, 0, 2006, 10)


def test_half_of_the_images_are_flipped() -> None:
    params = sample_params(2000, 0, torch.Generator().manual_seed(1))
    assert params.shape == (2000, DRAWS)
    views = train_views(params, (4, 4))
    flipped = [view for view in views if view.columns is not None]
    assert 900 < len(flipped) < 1100
    assert flipped[0].columns is not None
    assert flipped[0].columns.tolist() == [3, 2, 1, 0]
    assert all(view.rows is None for view in views)


@pytest.mark.parametrize(
    ("size", "box"),
    [((256, 256), (16, 16, 240, 240)), ((512, 256), (144, 16, 368, 240)), ((256, 512), (16, 144, 240, 368))],
)
def test_evaluation_sees_seven_eighths_of_the_middle(size: Size, box: tuple[int, ...]) -> None:
    assert eval_crop((224, 224))(size) == pytest.approx(box)
