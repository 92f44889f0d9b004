"""Random resized crops: torchvision's distribution, our own draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from train.transforms.image_part import Size
from train.transforms.imagenet import (
    DRAWS,
    TRIES,
    apply,
    eval_crop,
    eval_transform,
    random_crop,
    sample_params,
    train_views,
)


def crops(size: Size, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    params = sample_params(count, 0, torch.Generator().manual_seed(0))
    return np.array([random_crop(draws, 0.08, size) for draws in params.tolist()])


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
    assert random_crop([0.99, 0.99] * TRIES + [0.0, 0.0, 0.0], 0.08, (4000, 10)) == (1993, 0, 2006, 10)


def test_half_of_the_images_are_flipped() -> None:
    params = sample_params(2000, 0, torch.Generator().manual_seed(1))
    assert params.shape == (2000, DRAWS)
    views = train_views(params, (4, 4), 0.08, 0.5)
    flipped = [view for view in views if view.columns is not None]
    assert 900 < len(flipped) < 1100
    assert not any(view.columns is not None for view in train_views(params, (4, 4), 0.08, 0.0))
    assert flipped[0].columns is not None
    assert flipped[0].columns.tolist() == [3, 2, 1, 0]
    assert all(view.rows is None for view in views)


@pytest.mark.parametrize(
    ("size", "box"),
    [((256, 256), (16, 16, 240, 240)), ((512, 256), (144, 16, 368, 240)), ((256, 512), (16, 144, 240, 368))],
)
def test_evaluation_sees_seven_eighths_of_the_middle(size: Size, box: tuple[int, ...]) -> None:
    assert eval_crop((224, 224), 0.875)(size) == pytest.approx(box)


@pytest.mark.parametrize("size", [(32, 32), (40, 25)])
def test_crops_from_memory_equal_torchvisions(size: Size) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional", exc_type=(ImportError, RuntimeError))
    width, height = size
    images = torch.randint(0, 256, (6, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    rows, params = torch.tensor([5, 0, 3, 3]), sample_params(4, 0, torch.Generator().manual_seed(3))
    params[:, -1] = torch.tensor([0.1, 0.9, 0.1, 0.9])
    found = apply(images, rows, params, 0.08, 0.5)
    for index, (row, draws) in enumerate(zip(rows.tolist(), params.tolist(), strict=True)):
        left, top, right, bottom = (int(one) for one in random_crop(draws, 0.08, size))
        image = images[row].permute(2, 0, 1).float()
        wanted = functional.resized_crop(image, top, left, bottom - top, right - left, [height, width])
        if draws[-1] < 0.5:
            wanted = functional.horizontal_flip(wanted)
        assert torch.allclose(found[index].permute(2, 0, 1), wanted, atol=1e-3)


def test_evaluation_from_memory_equals_a_center_crop() -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional", exc_type=(ImportError, RuntimeError))
    images = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    cut = functional.center_crop(images.permute(0, 3, 1, 2).float(), [28, 28])
    wanted = functional.resize(cut, [32, 32])
    assert torch.allclose(eval_transform(images, 0.875).permute(0, 3, 1, 2), wanted, atol=1e-3)
    assert eval_transform(images, 1.0) is images
