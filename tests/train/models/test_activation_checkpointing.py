"""Recomputed activations: bitwise the same training, with less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import refusal
from tests.factories import train_settings
from train.engine.model_probe import report_on
from train.models.registry import build_model, recompute_activations
from train.planning.model_report import ModelQuestion, needs_report
from train.settings import read_train_settings

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


def small_vit() -> nn.Module:
    pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    arguments = "img_size=32 patch_size=8 embed_dim=48 depth=4 num_heads=2 drop_path_rate=0.2"
    return build_model(train_settings(model="timm:vit_tiny_patch16_224", model_args=arguments), SHAPE, 5)


def test_training_is_bitwise_identical_with_less_memory() -> None:
    plain = small_vit()
    model = copy.deepcopy(plain)
    recompute_activations(model, "vit")
    assert kept_bytes(model) < 0.5 * kept_bytes(plain)
    wanted, found = trained(plain), trained(model)
    assert all(torch.equal(found[key], one) for key, one in wanted.items())


@pytest.mark.parametrize("name", ["cnn", "speednet-half", "timm:resnet18", "vit_b_32"])
def test_model_that_cannot_is_refused_by_the_plan(name: str) -> None:
    if name not in ("cnn", "speednet-half"):
        pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    variables = {"TRAIN_MODEL": name, "TRAIN_ACTIVATION_CHECKPOINTING": "1"}
    assert needs_report(read_train_settings(variables, {}), SHAPE)
    shape = (3, 224, 224) if name == "vit_b_32" else SHAPE
    refusal(
        report_on,
        ModelQuestion(variables=variables, shape=shape, classes=tuple("abcde")),
        match=f"^TRAIN_ACTIVATION_CHECKPOINTING=1: {name} cannot. Take a model of timm without BatchNorm",
    )
