"""Recomputed activations: bitwise the same training, with less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.factories import train_settings
from train.acceleration.activation_checkpointing import checkpoint_activations
from train.models.registry import build_model

SHAPE = (3, 32, 32)
IMAGES = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(step)  # dropout
        optimizer.zero_grad()
        model(IMAGES).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def kept_bytes(model: nn.Module) -> int:
    """Return the memory that a forward pass keeps for the backward pass, besides parameters."""
    own = {one.data_ptr() for one in model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(IMAGES)
    return sum(found.values())


@pytest.mark.slow_except("speednet-half")
@pytest.mark.parametrize("name", ["cnn", "speednet-half", "resnet18", "densenet121", "convnext_tiny", "mobilenet_v2"])
def test_training_is_bitwise_identical(name: str) -> None:
    if name not in ("cnn", "speednet-half"):
        pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    plain = build_model(train_settings(model=name), SHAPE, 5)
    model = copy.deepcopy(plain)
    assert checkpoint_activations(model) > 0
    wanted, found = trained(plain), trained(model)
    assert all(torch.equal(found[key], one) for key, one in wanted.items())


@pytest.mark.slow
@pytest.mark.usefixtures("torchvision")
def test_less_memory_is_kept() -> None:
    plain = build_model(train_settings(model="resnet50"), SHAPE, 5)
    model = copy.deepcopy(plain)
    assert checkpoint_activations(model) == 16
    assert kept_bytes(model) < 0.4 * kept_bytes(plain)


def test_copy_of_the_model_recomputes_its_own_blocks() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))
    checkpoint_activations(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0][0].weight.zero_()  # type: ignore[index,union-attr,operator]
    values = torch.randn(3, 4)
    assert not torch.equal(model.eval()(values), other.eval()(values))
    assert model.state_dict().keys() == other.state_dict().keys()
