"""The book's pipeline in batches, against torchvision's transforms one image at a time."""

from __future__ import annotations

import pytest
import torch

from train.seeding import make_generator
from train.transforms.book import DEGREES, SIGMA, apply, eval_transform, sample_params

COUNT = 6


def random_images(height: int, width: int, channels: int = 3) -> torch.Tensor:
    return torch.randint(
        0, 256, (COUNT, height, width, channels), dtype=torch.uint8, generator=make_generator("images")
    )


@pytest.mark.parametrize(("height", "width", "channels"), [(32, 32, 3), (255, 255, 3), (300, 260, 3), (28, 40, 1)])
def test_book_transforms_equal_torchvision(height: int, width: int, channels: int) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2.functional")
    images = random_images(height, width, channels)
    rows = torch.tensor([4, 0, 5])
    drawn = sample_params(3, height, make_generator("drawn"))
    drawn[0, 0], drawn[1, 0] = 1, 0
    expected = []
    for row, (flip, degrees, sigma) in zip(rows.tolist(), drawn.tolist(), strict=True):
        image = images[row].permute(2, 0, 1).float()
        image = v2.center_crop(v2.resize(image, [255], antialias=True), [224, 224])
        image = v2.horizontal_flip(image) if flip else image
        expected.append(v2.gaussian_blur(v2.rotate(image, degrees), [3, 3], [sigma, sigma]))
    found = apply(images, rows, drawn).permute(0, 3, 1, 2)
    assert found.shape == (3, channels, 224, 224)
    # A pixel on the edge between two may fall to either of them.
    near = (found - torch.stack(expected)).abs() < 0.5
    assert near.float().mean() > 0.998
    plain = torch.stack([v2.center_crop(v2.resize(one.permute(2, 0, 1).float(), [255], antialias=True), [224, 224])
                         for one in images])  # fmt: skip
    assert torch.allclose(eval_transform(images).permute(0, 3, 1, 2), plain, atol=1e-3)


def test_book_parameters_are_in_range_and_fixed_by_the_key() -> None:
    flips, degrees, sigma = sample_params(1000, 32, make_generator("a")).T
    assert set(flips.tolist()) == {0.0, 1.0}
    assert 0.4 < float(flips.mean()) < 0.6
    assert float(degrees.min()) == pytest.approx(-DEGREES, abs=1)
    assert float(degrees.max()) == pytest.approx(DEGREES, abs=1)
    assert SIGMA[0] <= float(sigma.min()) < 0.2 < 1.9 < float(sigma.max()) <= SIGMA[1]
    assert torch.equal(sample_params(5, 32, make_generator("a")), sample_params(5, 32, make_generator("a")))
