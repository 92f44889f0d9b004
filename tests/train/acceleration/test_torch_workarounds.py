"""Workarounds for libraries: what they change, and that they change nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode

from entrypoint.plan.model import TrainerPlan
from tests.factories import make_machine, make_test_plan, train_settings
from train.acceleration.torch_workarounds import NEWTON_SCHULZ, orthogonalize_in_fp32
from train.distributed.process_group import ProcessGroup
from train.engine.builder import ModelBuilder
from train.optimization.optimizer import build_optimizer, set_lr

MUON = train_settings(optimizer="timm:muon", weight_decay=0.0)


@pytest.fixture(autouse=True)
def muon_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test does to timm's module."""
    muon = pytest.importorskip("timm.optim.muon", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    monkeypatch.setattr(muon, NEWTON_SCHULZ, getattr(muon, NEWTON_SCHULZ))


class Formats(TorchDispatchMode):
    """Collects the number formats of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if "mm" in str(func):
            self.seen |= {one.dtype for one in args if isinstance(one, Tensor)}
        return func(*args, **(kwargs or {}))


def update(optimizer: torch.optim.Optimizer, layer: nn.Linear) -> tuple[Tensor, set[torch.dtype]]:
    """Return what a step does to a layer's weights, and the formats of its matrix products."""
    before = layer.weight.detach().clone()
    set_lr(optimizer, 0.1)
    with Formats() as formats:
        optimizer.step()
    return layer.weight.detach() - before, formats.seen


def linear_with_gradient() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(48, 16)
    layer.weight.grad, layer.bias.grad = torch.randn(16, 48), torch.randn(16)
    return layer


def test_muon_in_fp32_steps_in_the_same_direction() -> None:
    layer = linear_with_gradient()
    in_bf16, formats = update(build_optimizer(MUON, layer), layer)
    assert formats == {torch.bfloat16}, "timm no longer iterates in bf16: remove the workaround"
    layer = linear_with_gradient()
    optimizer = build_optimizer(MUON, layer)
    orthogonalize_in_fp32(optimizer)
    orthogonalize_in_fp32(optimizer)  # a model may be built again
    in_fp32, formats = update(optimizer, layer)
    assert formats == {torch.float32}
    assert cosine_similarity(in_bf16.flatten(), in_fp32.flatten(), dim=0) > 0.999


@pytest.mark.parametrize(("precision", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_muon_computes_in_the_format_of_the_run(precision: str, wanted: torch.dtype) -> None:
    trainer = TrainerPlan(
        data_source="memory",
        num_workers=0,
        image_shape=(3, 32, 32),
        precision=precision,
        use_ipex=False,
        saves_checkpoints=False,
    )
    plan = replace(make_test_plan(make_machine(2)), trainer=trainer)
    settings = train_settings(optimizer="timm:muon", model="speednet-half")
    group = ProcessGroup(0, 1, 0, torch.device("cpu"))
    model, optimizer, _ = ModelBuilder(settings, plan, (3, 32, 32), tuple("ab"), group).build()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    with Formats() as formats:
        optimizer.step()
    assert formats.seen == {wanted}
