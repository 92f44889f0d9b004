"""Small images' convolutions as matrix products: the same values and gradients, and only where they are meant."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.acceleration.small_conv import SmallConv2d, use_matmul_for_small_inputs

LAST = torch.channels_last


def small(plain: nn.Conv2d) -> nn.Conv2d:
    """Return the same convolution as one that has seen an image of one pixel."""
    module = deepcopy(plain).float()
    module.zero_grad()
    (changed,) = use_matmul_for_small_inputs(nn.Sequential(module), (plain.in_channels, 1, 1)).children()
    assert isinstance(changed, SmallConv2d)
    assert changed is module
    return changed.to(plain.weight.dtype)


def worked_out(module: nn.Module, images: Tensor) -> list[Tensor]:
    """Return a convolution's output, and the gradients of images, filters and biases."""
    images = images.clone().to(memory_format=LAST).requires_grad_()
    out = module(images)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert images.grad is not None
    return [out, images.grad, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 2), (4, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 1, "stride": 2, "bias": False},
        {"kernel_size": 5, "padding": 2},
        {"kernel_size": (3, 1), "padding": (1, 0), "stride": (1, 2)},
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": 2, "bias": False},
        {"kernel_size": 1, "padding": 1},
        {"kernel_size": 4, "padding": 2, "stride": 3},
    ],
    ids=str,
)
def test_small_conv_equals_convolution(size: tuple[int, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(64, 65, **options).double()
    images = torch.randn(3, 64, *size, dtype=torch.float64)
    expected = worked_out(plain, images)
    for mine, theirs in zip(worked_out(small(plain), images), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_small_conv_computes_larger_images_as_usual() -> None:
    plain = nn.Conv2d(64, 64, 3, padding=1)
    images = torch.randn(2, 64, 3, 2)
    assert torch.equal(small(plain)(images), plain(images))


@pytest.mark.parametrize(
    ("options", "pixels", "chosen"),
    [
        ({}, 1, True),
        ({}, 2, True),
        ({}, 3, False),
        ({"groups": 64}, 1, False),
        ({"dilation": 2, "padding": 2}, 1, False),
        ({"padding": "same"}, 1, False),
        ({"padding_mode": "reflect"}, 2, False),
        ({"out_channels": 32}, 1, False),
    ],
)
def test_small_conv_replaces_only_eligible_convolutions(options: dict[str, Any], pixels: int, chosen: bool) -> None:
    module = nn.Conv2d(**{"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1} | options)
    model = use_matmul_for_small_inputs(nn.Sequential(module), (64, pixels, pixels))
    assert isinstance(model[0], SmallConv2d) is chosen  # type: ignore[index]


def test_shared_convolution_of_larger_images_stays() -> None:
    module = nn.Conv2d(64, 64, 3, padding=1)
    model = use_matmul_for_small_inputs(nn.Sequential(module, nn.MaxPool2d(2), module), (64, 4, 4))
    assert not any(isinstance(one, SmallConv2d) for one in model.modules())


@pytest.mark.parametrize("kernel", [3, 1])
def test_small_conv_gradients_have_filter_strides(kernel: int) -> None:
    module = small(nn.Conv2d(64, 64, kernel, padding=kernel // 2))
    worked_out(module, torch.randn(2, 64, 1, 1))
    assert module.weight.permute(2, 3, 0, 1).is_contiguous()
    assert module.weight.is_contiguous() is (kernel == 1)
    assert module.weight.grad is not None
    assert module.weight.grad.stride() == module.weight.stride()
