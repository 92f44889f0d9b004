"""Winograd's convolution: torch's values and gradients up to rounding, and only where it is meant."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from entrypoint.core.errors import ExitCode
from tests.conftest import CORES, Entrypoint, refusal
from tests.train.given import SMALL, losses
from train.acceleration.winograd import (
    MIN_TILES,
    WinogradConv2d,
    convolve,
    is_faster,
    is_suited,
    use_winograd,
    winograd_kernel,
)

LAST = torch.channels_last
# Of a tensor's standard deviation.
TOLERANCE = 3e-4

HAS_AVX2 = "avx2" in Path("/proc/cpuinfo").read_text()
pytestmark = [
    pytest.mark.skipif(not winograd_kernel(), reason="needs the compiled convolution: make .venv/installed"),
    pytest.mark.skipif(not HAS_AVX2, reason="needs a CPU with AVX2"),
]


def random_images(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=LAST)


def random_filters(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, 3, 3) / (9 * inputs) ** 0.5


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TOLERANCE * expected.std().item())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=["channels last", "channels first"])
@pytest.mark.parametrize(
    ("images", "inputs", "outputs", "height", "width"),
    [
        (1, 8, 8, 1, 1),
        (2, 8, 16, 4, 4),
        (3, 24, 32, 31, 31),
        (5, 32, 24, 7, 7),
        (2, 40, 8, 2, 13),
        (4, 16, 56, 12, 5),
        (7, 128, 136, 3, 3),
        (9, 16, 16, 8, 9),
    ],
)
def test_winograd_equals_convolution(
    images: int, inputs: int, outputs: int, height: int, width: int, layout: torch.memory_format, threads: int
) -> None:
    torch.manual_seed(0)
    given = torch.randn(images, inputs, height, width).to(memory_format=layout).requires_grad_()
    filters = random_filters(outputs, inputs).to(memory_format=layout).requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (given, filters)]
    expected = conv2d(*exact, padding=1)
    change = torch.randn_like(expected)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = convolve(given, filters)
        gradients = torch.autograd.grad(found, (given, filters), change.float())
    finally:
        torch.set_num_threads(before)
    assert found.is_contiguous(memory_format=LAST)
    assert_near(found, expected)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, exact, change), strict=True):
        assert_near(mine, theirs)
    assert gradients[1].stride() == filters.stride()


@pytest.mark.parametrize(("of_images", "of_filters"), [(True, False), (False, True)])
def test_only_needed_gradients_are_computed(of_images: bool, of_filters: bool) -> None:
    torch.manual_seed(0)
    images = random_images(3, 16, 9, 9).requires_grad_(of_images)
    filters = random_filters(24, 16).requires_grad_(of_filters)
    wanted = images if of_images else filters
    change = torch.randn(3, 24, 9, 9)
    (found,) = torch.autograd.grad(convolve(images, filters), wanted, change)
    (expected,) = torch.autograd.grad(conv2d(images, filters, padding=1), wanted, change)
    assert_near(found, expected)


@pytest.mark.parametrize("layout", ["expanded", "with gaps", "transposed"])
def test_filters_of_any_strides_have_right_gradients(layout: str) -> None:
    torch.manual_seed(0)
    images = random_images(3, 16, 9, 9)
    filters = {
        "expanded": torch.randn(1, 16, 3, 3).expand(24, 16, 3, 3),
        "with gaps": random_filters(24, 40)[:, ::2][:, :16],
        "transposed": random_filters(16, 24).transpose(0, 1),
    }[layout].requires_grad_()
    change = torch.randn(3, 24, 9, 9)
    found, expected = convolve(images, filters), conv2d(images, filters, padding=1)
    assert_near(found, expected)
    assert_near(*(torch.autograd.grad(one, filters, change)[0] for one in (found, expected)))


def test_image_has_the_same_bits_in_any_batch_and_any_thread() -> None:
    images, filters = random_images(6, 16, 13, 11), random_filters(24, 16)
    whole = convolve(images, filters)
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        parts = torch.cat([convolve(part, filters) for part in images.split([1, 3, 2])])
        torch.set_num_threads(before)
        assert torch.equal(parts, whole)


def test_gradients_are_repeatable_to_the_bit() -> None:
    images, filters = random_images(6, 16, 13, 11).requires_grad_(), random_filters(24, 16).requires_grad_()
    change = torch.randn(6, 24, 13, 11)
    first, second = (torch.autograd.grad(convolve(images, filters), (images, filters), change) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=["channels last", "channels first"])
def test_gradients_have_gradients(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 16, 8, 8).to(memory_format=layout).requires_grad_()
    filters = random_filters(16, 16).requires_grad_()
    found, expected = (
        torch.autograd.grad(penalty(images, one), (images, filters))
        for one in (convolve(images, filters), conv2d(images, filters, padding=1))
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert_near(mine, theirs)


def penalty(images: Tensor, result: Tensor) -> Tensor:
    """Return the squared norm of a gradient, as WGAN-GP has it."""
    (gradient,) = torch.autograd.grad(result.tanh().sum(), images, create_graph=True)
    return gradient.square().sum()


def test_not_finite_pixels_are_not_hidden() -> None:
    images, filters = random_images(2, 16, 12, 12), random_filters(16, 16)
    images[1, 3, 5, 5] = torch.nan
    found = convolve(images, filters)
    assert found[1, :, 4:7, 4:7].isnan().all()
    assert found[0].isfinite().all()


def test_lack_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, images, filters = winograd_kernel(), random_images(1, 16, 8, 8), random_filters(16, 16)
    assert kernel
    monkeypatch.setattr("torch.get_num_threads", lambda: 10**9)
    with pytest.raises(MemoryError):
        kernel.run(kernel.compute_forward, images, filters, images.data_ptr())
    with pytest.raises(MemoryError):
        kernel.run(kernel.compute_backward, images, filters, images.data_ptr(), None, filters.data_ptr())


@pytest.mark.parametrize(
    ("options", "suits"),
    [
        ({}, True),
        ({"bias": False}, True),
        ({"in_channels": 16, "out_channels": 24}, True),
        ({"in_channels": 256, "out_channels": 256}, True),
        ({"in_channels": 512, "out_channels": 512}, False),
        ({"in_channels": 8}, False),
        ({"out_channels": 36}, False),
        ({"stride": 2}, False),
        ({"kernel_size": 5, "padding": 2}, False),
        ({"kernel_size": (3, 1), "padding": (1, 0)}, False),
        ({"padding": 0}, False),
        ({"padding": "same"}, False),
        ({"padding_mode": "reflect"}, False),
        ({"dilation": 2, "padding": 2}, False),
        ({"groups": 2}, False),
        ({"dtype": torch.float64}, False),
    ],
)
def test_winograd_replaces_only_suited_convolutions(options: dict[str, Any], suits: bool) -> None:
    module = nn.Conv2d(**{"in_channels": 32, "out_channels": 32, "kernel_size": 3, "padding": 1} | options)
    assert is_suited(module) is suits
    (kept,) = use_winograd(nn.Sequential(module)).children()
    assert kept is module
    assert isinstance(kept, WinogradConv2d) is suits


def test_subclass_of_a_convolution_stays() -> None:
    class Standardized(nn.Conv2d):
        """Computes something else."""

    assert not is_suited(Standardized(32, 32, 3, padding=1))


@pytest.mark.parametrize(
    ("shape", "faster"),
    [
        ((31, 31), True),
        ((7, 7), True),
        ((4, 4), True),
        ((6, 40), True),
        ((2, 40), True),
        ((9, 9), True),
        ((5, 5), False),
        ((1, 1), False),
        ((1, 64), False),
    ],
)
def test_images_with_mostly_empty_tiles_are_left_to_torch(shape: tuple[int, int], faster: bool) -> None:
    assert is_faster(torch.zeros(1, 1, *shape).expand(MIN_TILES * CORES, 16, *shape)) is faster


@pytest.mark.parametrize(
    ("threads", "images", "side", "faster"),
    [(1, 128, 4, True), (1, 127, 4, False), (3, 96, 8, True), (3, 95, 8, False), (3, 3, 48, True), (3, 2, 56, False)],
)
def test_threads_without_enough_tiles_leave_images_to_torch(
    threads: int, images: int, side: int, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert is_faster(torch.zeros(images, 16, side, side)) is faster


@pytest.mark.parametrize("bias", [True, False])
def test_module_equals_convolution_in_each_number_format(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(16, 24, 3, padding=1, bias=bias)
    (module,) = use_winograd(nn.Sequential(deepcopy(plain))).children()
    images = random_images(MIN_TILES * CORES // 9 + 1, 16, 12, 12)
    assert not torch.equal(module(images), plain(images)), "the kernel has computed it"
    assert_near(module(images), plain(images))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(images), plain(images))
    assert torch.equal(deepcopy(module).double()(images.double()), deepcopy(plain).double()(images.double()))
    assert torch.equal(deepcopy(module).bfloat16()(images.bfloat16()), deepcopy(plain).bfloat16()(images.bfloat16()))


def test_library_that_is_missing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.acceleration.winograd.winograd_kernel", lambda: None)
    refusal(
        use_winograd,
        nn.Sequential(),
        match=r"^TRAIN_WINOGRAD: the compiled kernel cannot be loaded, or torch has no OpenMP",
        code=ExitCode.MACHINE,
    )


TRAINING = SMALL | {
    "TRAIN_MODEL": "speednet-half", "TRAIN_SYNTHETIC_SHAPE": "3x32x32", "TRAIN_BATCH_SIZE": "32", "TRAIN_LR": "0.01",
    "TRAIN_EPOCHS": "2", "TRAIN_CHECKPOINT_EVERY": "1", "TRAIN_KEEP_CHECKPOINTS": "2", "TRAIN_WINOGRAD": "on",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.launch
def test_training_with_winograd_learns_the_same_and_resumes(entrypoint: Entrypoint) -> None:
    env = TRAINING | {"TRAIN_RUN_NAME": "whole"}
    whole = entrypoint.train(env=env | {"TRAIN_EXPORT": "onnx"})
    entrypoint.train(env=TRAINING | {"TRAIN_RUN_NAME": "without", "TRAIN_WINOGRAD": "off"})
    assert losses(entrypoint, "whole") != losses(entrypoint, "without")
    assert losses(entrypoint, "whole") == pytest.approx(losses(entrypoint, "without"), rel=2e-3)
    first, last = sorted((entrypoint.folder / "runs/whole/checkpoint").glob("step-*"))
    shutil.rmtree(last)
    again = entrypoint.succeed("train", env=env | {"TRAIN_RESUME": "auto"})
    assert f"resuming from runs/whole/checkpoint/{first.name}" in again.out
    assert entrypoint.summary("whole")["weights_sha256"] == whole["weights_sha256"]
