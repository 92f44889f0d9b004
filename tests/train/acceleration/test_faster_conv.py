"""Models whose convolutions people have changed: faster convolutions compute the same, or leave them to torch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from torch.nn.utils import parametrize, prune, spectral_norm
from torch.utils.flop_counter import FlopCounterMode

from train.acceleration.amp import set_memory_format
from train.acceleration.faster_conv import FasterConv2d, original_convolutions
from train.acceleration.small_conv import use_matmul_for_small_inputs
from train.acceleration.winograd import MIN_TILES, TILE, use_winograd, winograd_kernel
from train.models.inspection import count_multiply_adds, count_training_flops
from train.models.registry import build_model
from train.setting_groups.network import NetworkSettings
from train.settings import ImageShape

TOLERANCE = 1e-3
CHANNELS = 64

needs_kernel = pytest.mark.skipif(not winograd_kernel(), reason="needs the compiled convolution: make .venv/installed")


class Net(nn.Module):
    """A convolution that a user has changed, between other operations."""

    def __init__(self, change: Callable[[nn.Conv2d], object], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.c = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.call = call
        change(self.c)

    def forward(self, images: Tensor) -> Tensor:
        """Return the convolution of positive and negative values."""
        return self.call(self.c, images.sin()).tanh()


def as_it_is(module: nn.Module, images: Tensor) -> Tensor:
    result: Tensor = module(images)
    return result


def converted(kind: str, model: nn.Module, shape: ImageShape = (CHANNELS, 2, 2)) -> nn.Module:
    """Return the model for images of a shape with the faster convolutions of this kind."""
    return use_winograd(model) if kind == "winograd" else use_matmul_for_small_inputs(model, shape)


def images_of(kind: str) -> Tensor:
    """Return images that this kind computes itself."""
    side = 2 if kind == "small" else 4 * TILE
    count = -(-MIN_TILES // 16) * torch.get_num_threads()
    return torch.randn(count, CHANNELS, side, side).to(memory_format=torch.channels_last)


KINDS = pytest.mark.parametrize("kind", [pytest.param("winograd", marks=needs_kernel), "small"])


def worked_out(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of images and parameters."""
    torch.manual_seed(0)  # spectral normalization draws
    images = images.clone().requires_grad_()
    out = model(images)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    gradients = [images.grad, *(parameter.grad for parameter in model.parameters())]
    return [out, *(gradient for gradient in gradients if gradient is not None)]


def assert_same(make: Callable[[], nn.Module], kind: str) -> None:
    """Assert that a converted model computes what the model does."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    images, changed = images_of(kind), converted(kind, models[0])
    for mine, theirs in zip(worked_out(changed, images), worked_out(models[1], images), strict=True):
        assert (mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def standardize(module: nn.Conv2d) -> None:
    def forward(self: nn.Conv2d, images: Tensor) -> Tensor:
        return conv2d(images, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias, padding=1)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def with_weight_of_its_own(module: nn.Conv2d) -> None:
    module.own = nn.Parameter(module.weight.detach().clone())
    del module.weight


def call_with_own_weight(module: nn.Module, images: Tensor) -> Tensor:
    module.weight = module.own * 1.0
    result: Tensor = module(images)
    return result


def with_filters(count: int, taps: int) -> Callable[[nn.Conv2d], object]:
    def change(module: nn.Conv2d) -> None:
        assert module.bias is not None
        module.weight = nn.Parameter(torch.randn(count, CHANNELS, taps, taps) / 24)
        module.bias = nn.Parameter(torch.randn(count))

    return change


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return half of a weight."""
        return weight / 2


def halve(module: nn.Conv2d) -> None:
    parametrize.register_parametrization(module, "weight", Halved())


def nothing(_: nn.Conv2d) -> None:
    """Leave a convolution as it is."""


@KINDS
@pytest.mark.parametrize(
    ("change", "call"),
    [
        pytest.param(lambda c: c.register_forward_hook(lambda _m, _i, out: out * 3 + 1), as_it_is, id="forward hook"),
        pytest.param(lambda c: c.register_forward_pre_hook(lambda _m, given: given[0] / 2), as_it_is, id="pre-hook"),
        pytest.param(
            lambda c: c.register_full_backward_hook(lambda _m, given, _o: (given[0] * 2,)), as_it_is, id="backward hook"
        ),
        pytest.param(standardize, as_it_is, id="forward of its own"),
        pytest.param(lambda c: setattr(c, "gain", 0.5), lambda c, x: c(x) * c.gain, id="attribute"),
        pytest.param(
            lambda c: c.register_buffer("mask", torch.ones(CHANNELS, 1, 1) / 3), lambda c, x: c(x) * c.mask, id="buffer"
        ),
        pytest.param(spectral_norm, as_it_is, id="spectral norm"),
        pytest.param(lambda c: prune.l1_unstructured(c, "weight", 0.3), as_it_is, id="pruned"),
        pytest.param(halve, as_it_is, id="parametrized"),
        pytest.param(with_weight_of_its_own, call_with_own_weight, id="weight of its own"),
        pytest.param(with_filters(20, 3), as_it_is, id="other number of filters"),
        pytest.param(with_filters(CHANNELS, 1), as_it_is, id="other size of filters"),
        pytest.param(nothing, lambda c, x: torch.stack([c(one) for one in x]), id="one image without a batch"),
        pytest.param(nothing, lambda c, x: c(input=x), id="named argument"),
        pytest.param(nothing, lambda c, x: c(x[:, :, ::2]), id="every other row"),
        pytest.param(nothing, lambda c, x: c(c(x).relu()), id="used twice"),
        pytest.param(nothing, lambda c, x: c(torch._neg_view(x)), id="negative view"),
        pytest.param(nothing, lambda c, x: c(x + penalty(c, x)), id="gradient penalty"),
        pytest.param(
            nothing, lambda c, x: torch.vmap(c)(x[:, None])[:, 0], id="vmap"
        ),
        pytest.param(
            nothing, lambda c, x: c(x) + torch.func.grad(lambda one: c(one).square().mean())(x), id="func.grad"
        ),
    ],
)  # fmt: skip
def test_changed_convolution_computes_the_same(
    kind: str, change: Callable[[nn.Conv2d], object], call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    assert_same(lambda: Net(change, call), kind)


def penalty(module: nn.Module, images: Tensor) -> Tensor:
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(module(images).tanh().sum(), images, create_graph=True)
    return gradient.square().mean()


@KINDS
def test_changed_convolution_is_the_same_object(kind: str) -> None:
    net = Net(lambda c: c.register_state_dict_post_hook(lambda *_: seen.append("state")), as_it_is)
    seen: list[str] = []
    plain, parameters = net.c, dict(net.named_parameters())
    changed = converted(kind, net)
    assert changed is net
    assert net.c is plain
    assert isinstance(net.c, FasterConv2d)
    assert {name: id(one) for name, one in net.named_parameters()} == {n: id(one) for n, one in parameters.items()}
    net.state_dict()
    assert seen == ["state"]
    with original_convolutions(net):
        assert type(net.c) is nn.Conv2d
    assert isinstance(net.c, FasterConv2d)


@KINDS
@pytest.mark.parametrize("channels", [CHANNELS - 24, CHANNELS + 8])
def test_images_with_other_channels_are_torchs_error(kind: str, channels: int) -> None:
    images = images_of(kind)[:, :1].expand(-1, channels, -1, -1)
    with pytest.raises(RuntimeError, match=f"to have {CHANNELS} channels, but got {channels}"):
        converted(kind, Net(nothing, as_it_is))(images)


@KINDS
@pytest.mark.parametrize(
    "later",
    [{"stride": (2, 2)}, {"stride": 2}, {"padding": 0}, {"padding": "same"}, {"padding": (2, 2), "dilation": (2, 2)}],
    ids=str,
)
def test_settings_may_change_later(kind: str, later: dict[str, Any]) -> None:
    plain, images = Net(nothing, as_it_is), images_of(kind)
    changed = converted(kind, deepcopy(plain))
    if kind == "small" and later == {"padding": 0}:
        images = torch.randn(2, CHANNELS, 3, 3)
    for model in (plain, changed):
        vars(model.c).update(later)  # type: ignore[arg-type]
    torch.testing.assert_close(changed(images), plain(images), rtol=0, atol=TOLERANCE)


@KINDS
def test_bias_of_another_type_is_torchs_error(kind: str) -> None:
    changed = converted(kind, Net(nothing, as_it_is))
    changed.c.bias = nn.Parameter(torch.zeros(CHANNELS, dtype=torch.float64))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError):
        changed(images_of(kind))


@KINDS
def test_saved_tensors_may_come_back_with_other_strides(kind: str) -> None:
    class Stored(Net):
        def forward(self, images: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda one: one.detach().numpy().copy(order="C"), torch.from_numpy
            ):
                return super().forward(images)

    assert_same(lambda: Stored(nothing, as_it_is), kind)


@KINDS
def test_tools_see_torchs_own_convolution(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain, images = Net(nothing, as_it_is), images_of(kind)
    changed = converted(kind, deepcopy(plain))
    counts = []
    for model in (plain, changed):
        with FlopCounterMode(display=False) as counter:
            model(images)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert changed(mode.from_tensor(images)).shape == images.shape
    for tool in (lambda one: torch.jit.trace(one, images), torch.fx.symbolic_trace):
        assert torch.equal(tool(changed)(images), plain(images))


@pytest.mark.seconds
@KINDS
@pytest.mark.usefixtures("torchvision")
def test_resnet_is_the_same_network(kind: str) -> None:
    torch.manual_seed(0)
    shape = (3, 32, 32)
    plain = set_memory_format(build_model(NetworkSettings(model="resnet18"), shape, 10), channels_last=True)
    changed = converted(kind, deepcopy(plain), shape)
    with original_convolutions(changed):
        counted = [count_multiply_adds(model, shape, torch.device("cpu")) for model in (changed, plain)]
        trained = [count_training_flops(model, shape) for model in (changed, plain)]
    assert counted[0] == counted[1]
    assert trained[0] == trained[1] == pytest.approx(6 * counted[0], rel=0.05), "the input needs no gradient"
    assert all(parameter.grad is None for parameter in changed.parameters())
    head = deepcopy(plain).requires_grad_(requires_grad=False)
    head.fc.requires_grad_()
    assert count_training_flops(head, shape) == 2 * counted[0] + 2 * head.fc.weight.numel()
    replaced, side = {"winograd": (10, 128), "small": (8, 32)}[kind]
    assert sum(isinstance(module, FasterConv2d) for module in changed.modules()) == replaced
    for (name, mine), (_, theirs) in zip(changed.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(mine, theirs), name
    images = torch.randn(16, 3, side, side).to(memory_format=torch.channels_last)
    torch.testing.assert_close(changed(images), plain(images), rtol=0, atol=TOLERANCE)
