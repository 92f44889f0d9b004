"""BatchNorm over all ranks: two ranks compute what one does, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import Entrypoint, needs_two_cores, script
from train.distributed.process_group import ProcessGroup
from train.distributed.sync_batchnorm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
)

ALONE = ProcessGroup(0, 1, 0, torch.device("cpu"))
# Each of two ranks takes its part of one batch of 7 through the layer, and writes down what it computes.
RANKS = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from train.distributed.process_group import ProcessGroup
    from train.distributed.sync_batchnorm import convert_sync_batchnorm
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, wanted = torch.randn(7, 3, 5, 5), torch.randn(7, 3, 5, 5)
    group = ProcessGroup(dist.get_rank(), 2, 0, torch.device("cpu"))
    layer = convert_sync_batchnorm(nn.BatchNorm2d(3), group)
    mine = slice(0, 4) if dist.get_rank() == 0 else slice(4, 7)
    part = images[mine].clone().requires_grad_()
    output = layer(part)
    ((output - wanted[mine]) ** 2).sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    torch.save({"output": output.detach(), "images": part.grad, "grads": grads,
                "state": layer.state_dict()}, f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
"""


@pytest.mark.versions
@pytest.mark.launch
@needs_two_cores
def test_sync_batchnorm_equals_the_whole_batch(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "ranks.py", RANKS)
    entrypoint.succeed("run", "--nproc-per-node=2", file)
    seen = [torch.load(entrypoint.folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]

    torch.manual_seed(0)
    images, wanted = torch.randn(7, 3, 5, 5), torch.randn(7, 3, 5, 5)
    layer = nn.BatchNorm2d(3)
    images.requires_grad_()
    output = layer(images)
    ((output - wanted) ** 2).sum().backward()
    assert torch.allclose(torch.cat([one["output"] for one in seen]), output, atol=1e-5)
    assert torch.allclose(torch.cat([one["images"] for one in seen]), images.grad, atol=1e-4)  # type: ignore[arg-type]
    for one in seen:
        for grad, parameter in zip(one["grads"], layer.parameters(), strict=True):
            assert torch.allclose(grad, parameter.grad, atol=1e-4)  # type: ignore[arg-type]
        for name, value in layer.state_dict().items():
            assert torch.allclose(one["state"][name], value, atol=1e-5), name


COMPILED = """
    import torch, torch.distributed as dist
    from torch import nn
    from train.distributed.process_group import ProcessGroup
    from train.distributed.sync_batchnorm import convert_sync_batchnorm
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    images = torch.randn(4, 3, 5, 5)
    computed = []
    for change in (nn.Identity(), torch.compile):
        layers = [layer for _ in range(3) for layer in (nn.BatchNorm2d(3), nn.ReLU())]
        group = ProcessGroup(rank, 2, rank, torch.device("cpu"))
        model = convert_sync_batchnorm(nn.Sequential(*layers), group, compiled=True)
        part = images.clone().requires_grad_()
        output = change(model)(part)
        (output ** 2).sum().backward()
        computed.append({"output": output.detach(), "images": part.grad, **model.state_dict(),
                         **{name: parameter.grad for name, parameter in model.named_parameters()}})
    for name, value in computed[0].items():
        torch.testing.assert_close(computed[1][name], value, atol=1e-4, rtol=1e-4, msg=lambda text: f"{name}: {text}")
    dist.destroy_process_group()
    print("alike")
"""


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.launch
@needs_two_cores
def test_compiled_sync_batchnorm_equal_layers_are_correct(entrypoint: Entrypoint) -> None:
    result = entrypoint.succeed("run", "--nproc-per-node=2", script(entrypoint.folder, "compiled.py", COMPILED))
    assert result.out.count("alike") == 2


def test_sync_batchnorm_replaces_all_and_keeps_names_and_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.BatchNorm2d(4, affine=False)
    )
    model(torch.randn(8, 3, 6, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.eval()(torch.ones(2, 3, 6, 6))
    model = convert_sync_batchnorm(model.train(), ALONE)  # type: ignore[assignment]
    assert sum(isinstance(module, SyncBatchNorm) for module in model.modules()) == 2
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
    assert torch.equal(model.eval()(torch.ones(2, 3, 6, 6)), expected)


def test_sync_batchnorm_keeps_hooks_and_shared_layers() -> None:
    model, seen = nn.ModuleDict({"one": nn.BatchNorm2d(4)}), list[str]()
    norm = model["two"] = model["one"]
    norm.register_forward_hook(lambda *_: seen.append("hook"))
    norm.gain = 2.0
    convert_sync_batchnorm(model, ALONE)
    assert model["one"] is model["two"] is norm
    assert isinstance(norm, SyncBatchNorm)
    assert norm.gain == 2.0
    norm.eval()(torch.randn(2, 4, 3, 3))
    assert seen == ["hook"]
