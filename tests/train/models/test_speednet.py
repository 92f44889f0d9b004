"""The network of the speedrun recipe: its shape, and what its first layer makes of images."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import refusal
from train.models.cnn import WIDTHS
from train.models.inspection import count_parameters
from train.models.registry import build_model
from train.setting_groups.network import NetworkSettings


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 9, 9), (3, 64, 48)])
def test_speednet_accepts_images_from_9x9(name: str, shape: tuple[int, int, int]) -> None:
    model = build_model(NetworkSettings(model=name), shape, 7)
    assert model(torch.randn(4, *shape)).shape == (4, 7)


def test_speednet_small_images_raise() -> None:
    refusal(
        build_model,
        NetworkSettings(model="speednet"),
        (3, 8, 8),
        10,
        match="TRAIN_MODEL=speednet: cannot take 3x8x8 images",
    )


def test_speednet_half_has_a_quarter_of_the_weights() -> None:
    full, half = (count_parameters(build_model(NetworkSettings(model=name), (3, 32, 32), 10)) for name in WIDTHS)
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    assert full == convolutions + 24 + 2 * (64 + 256 + 256) + 2560
    assert 3.5 < full / half < 4.5


def test_first_layer_outputs_are_uncorrelated_with_unit_variance() -> None:
    torch.manual_seed(0)
    smooth = torch.nn.functional.avg_pool2d(torch.randn(400, 3, 34, 34), 3, stride=1)  # adjacent pixels are alike
    model = build_model(NetworkSettings(model="speednet"), (3, 32, 32), 10)
    model.init_whitening(smooth)  # type: ignore[operator]
    with torch.no_grad():
        out = torch.nn.functional.conv2d(smooth, model.whiten.weight)  # type: ignore[union-attr, arg-type]
    own, negative = out[:, :12], out[:, 12:]
    assert torch.equal(own, -negative)
    values = own.permute(0, 2, 3, 1).reshape(-1, 12)
    assert torch.allclose(values.T @ values / len(values), torch.eye(12), atol=0.05)


@pytest.mark.parametrize("name", WIDTHS)
def test_speednet_only_batchnorm_biases_have_multiplier(name: str) -> None:
    model = build_model(NetworkSettings(model=name), (3, 32, 32), 10)
    trained = (key for key, one in model.named_parameters() if one.requires_grad)
    biases = {key for key in trained if key.endswith(".bias") and key != "whiten.bias"}
    assert set(model.lr_multipliers) == biases  # type: ignore[arg-type]
    assert len(biases) == 6
