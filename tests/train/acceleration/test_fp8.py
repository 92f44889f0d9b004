"""Linear layers in fp8: which are, that they learn, and that their state is that of plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="needs torchao: pip install torchao")

from tests.conftest import refusal
from train.acceleration.amp import autocast, use_fp8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 20), nn.Linear(20, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model if isinstance(module, nn.Linear)]


def test_layers_whose_sizes_fit_are_converted() -> None:
    model = use_fp8(make_model(), ("6",), emulate=True)
    assert kinds(model) == ["Float8Linear", "Float8Linear", "Linear", "Linear"]
    assert kinds(use_fp8(make_model(), ("1", "6"), emulate=True))[0] == "Linear", "the head"


def test_state_is_that_of_the_plain_model() -> None:
    plain, model = make_model(), use_fp8(make_model(), ("6",), emulate=True)
    ours = model.state_dict()
    assert list(ours) == list(plain.state_dict())
    assert all(ours[name].equal(tensor) for name, tensor in plain.state_dict().items())
    assert kinds(copy.deepcopy(model)) == kinds(model), "as EMA needs"


def test_model_learns_nearly_as_in_bf16() -> None:
    torch.manual_seed(1)
    images, labels = torch.randn(128, 64), torch.randint(10, (128,))
    losses = {}
    for precision in ("bf16", "fp8"):
        model = make_model()
        model = use_fp8(model, ("6",), emulate=True) if precision == "fp8" else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(60):
            with autocast(precision, torch.device("cpu")):
                loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[precision] = loss.item()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert losses["fp8"] < 1.0, "from ln(10)"
    assert losses["fp8"] == pytest.approx(losses["bf16"], abs=0.3)


def test_model_without_such_layers_is_refused() -> None:
    refusal(
        use_fp8,
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(20, 10)),
        (),
        emulate=True,
        match="no linear layer whose sizes are multiples of 16",
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_multiplication_in_fp8_is_near_bf16_on_a_gpu() -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of Hopper or later")
    plain = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 16)).to(device)
    converted = use_fp8(copy.deepcopy(plain), ("1",))
    images = torch.randn(64, 1024, device=device)
    with autocast("fp8", device):
        ours, theirs = converted(images), plain(images)
    assert (ours - theirs).norm() < 0.1 * theirs.norm()
