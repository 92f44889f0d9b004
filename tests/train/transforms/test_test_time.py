"""Test-time augmentation: means over copies of an image, compared with a mean written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from train.transforms.normalize import averaged_logits


def model(images: Tensor) -> Tensor:
    """Return what depends on the place of each pixel, and not linearly."""
    weights = torch.arange(images[0].numel() * 3, dtype=torch.float32).sin().view(-1, 3)
    return (images.flatten(1) @ weights).tanh()


def shift(images: Tensor, down: int, right: int) -> Tensor:
    border = max(abs(down), abs(right))
    height, width = images.shape[-2:]
    padded = pad(images, (border,) * 4, mode="reflect")
    top, left = border - down, border - right
    return padded[..., top : top + height, left : left + width]


@pytest.mark.parametrize(("size", "pixels"), [((8, 8), 1), ((64, 96), 2), ((33, 16), 1)])
def test_flip_shift_weighs_six_copies(size: tuple[int, int], pixels: int) -> None:
    images = torch.randn(4, 2, *size)
    wanted = torch.zeros(4, 3)
    for copy, weight in (
        (images, 0.25),
        (shift(images, pixels, pixels), 0.125),
        (shift(images, -pixels, -pixels), 0.125),
    ):
        wanted += weight * (model(copy) + model(copy.flip(-1)))
    torch.testing.assert_close(averaged_logits(model, images, "flip-shift"), wanted)


def test_image_of_one_row_is_shifted_too() -> None:
    assert averaged_logits(model, torch.randn(2, 1, 1, 8), "flip-shift").shape == (2, 3)


def test_flip_is_the_mean_of_both_mirror_images() -> None:
    images = torch.randn(4, 2, 6, 8)
    found = averaged_logits(model, images, "flip")
    torch.testing.assert_close(found, (model(images) + model(images.flip(-1))) / 2)
    torch.testing.assert_close(found, averaged_logits(model, images.flip(-1), "flip"))


def test_off_is_the_model_in_fp32() -> None:
    images = torch.randn(4, 2, 6, 8)
    found = averaged_logits(lambda one: model(one).bfloat16(), images, "off")
    assert found.dtype == torch.float32
    assert torch.equal(found, model(images).bfloat16().float())


def test_copies_keep_the_memory_format() -> None:
    seen: list[bool] = []

    def look(images: Tensor) -> Tensor:
        seen.append(images.is_contiguous(memory_format=torch.channels_last))
        return model(images)

    averaged_logits(look, torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last), "flip-shift")
    assert seen == [True] * 6
