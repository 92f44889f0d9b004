"""Flips and shifts of a batch against the plain way, one image at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from train.seeding import make_generator
from train.transforms import flip_crop


def one_at_a_time(image: torch.Tensor, down: int, right: int, flip: int, most: int) -> torch.Tensor:
    """Pad by mirroring, crop, flip: the textbook's way."""
    height, width, _ = image.shape
    padded = pad(image.permute(2, 0, 1).float()[None], (most,) * 4, mode="reflect")[0].permute(1, 2, 0)
    crop = padded[most + down : most + down + height, most + right : most + right + width]
    return (crop.flip(1) if flip else crop).to(torch.uint8)


def test_flip_crop_equals_pad_crop_flip() -> None:
    images = torch.randint(0, 256, (50, 32, 24, 3), dtype=torch.uint8, generator=make_generator("images"))
    rows = torch.randperm(50, generator=make_generator("rows"))[:20]
    drawn = flip_crop.sample_params(20, 32, make_generator("drawn"))
    batch = flip_crop.apply(images, rows, drawn)
    for place, row in enumerate(rows.tolist()):
        down, right, flip = drawn[place].tolist()
        assert torch.equal(batch[place], one_at_a_time(images[row], down, right, flip, 2))


def test_shifts_are_symmetric_and_half_are_flipped() -> None:
    drawn = flip_crop.sample_params(20_000, 32, make_generator("many")).float()
    assert drawn[:, :2].abs().max() == 2
    assert drawn[:, :2].mean().abs() < 0.05
    assert abs(drawn[:, 2].mean() - 0.5) < 0.02
    assert not flip_crop.sample_params(200, 32, make_generator("many"), 0.0)[:, 2].any()
