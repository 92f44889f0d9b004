"""The compiled step: what it computes, when auto compiles, what it says."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint
from tests.train.engine.learners import X, Y, trainer, weights
from train.data.feeds.batches import Batch
from train.engine.compile import compile_step, estimate_break_even
from train.models.cnn import CNN

pytestmark = [pytest.mark.launch, pytest.mark.versions]

SLEEP_S = 0.3


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def test_compiled_step_equals_eager_step_in_one_graph() -> None:
    eager, compiled = trainer(), trainer(compile="default", compile_backend="aot_eager")
    assert compile_step(compiled, 10, X) == "compiled by aot_eager, mode default"
    for one in (eager, compiled):
        for _ in range(3):
            one.train_step(Batch(((X, Y),), 12))
    assert torch.allclose(weights(eager), weights(compiled), atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_cnn_compiles_to_one_graph() -> None:
    assert torch._dynamo.explain(CNN((3, 32, 32), 10))(torch.zeros(2, 3, 32, 32)).graph_break_count == 0


def test_auto_compiles_only_if_the_rest_of_the_run_repays_it() -> None:
    one = trainer(compile="auto")
    reported = compile_step(one, 10, X)
    figures = r"[\d,]+ s of training remain, compiling takes about 19 s and saves about 5 %: it pays off from 375 s on"
    assert re.fullmatch(rf"not compiled: {figures}", reported), reported
    assert one.compiled_forward is one.ddp_model
    assert one.compiler is None


@torch._dynamo.register_backend
def slow(graph: Any, _: Any) -> Callable[..., Any]:
    """A backend whose code takes its time, so much that no busy machine hides it."""

    def run(*arguments: Any) -> Any:
        time.sleep(SLEEP_S)
        return graph(*arguments)

    return run


class Waits(torch.nn.Linear):
    """A layer that is slow in Python, and of which compiled code knows nothing."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(SLEEP_S)
        return super().forward(inputs)


@torch._dynamo.register_backend
def broken(graph: Any, _: Any) -> Callable[..., Any]:
    """A backend that cannot."""
    raise NotImplementedError("no such thing")


@pytest.mark.parametrize(
    ("backend", "layer", "compiled", "reported"),
    [
        (
            "slow",
            torch.nn.Linear(4, 3),
            False,
            r"not compiled: compiling took \d+ s, forward and backward take [\d.]+ times",
        ),
        ("eager", Waits(4, 3), True, r"compiled: compiling took \d+ s, forward and backward take 0\.[0-8]\d times"),
        ("broken", torch.nn.Linear(4, 3), False, r"not compiled: .*the step cannot be compiled \(.*no such thing"),
    ],
)
def test_auto_keeps_compiled_step_only_if_faster(
    backend: str, layer: torch.nn.Module, compiled: bool, reported: str
) -> None:
    one = trainer(compile="auto")
    one.settings = one.settings.with_values(compile_backend=backend)
    one.set_model(layer, one.state.optimizer)
    before = weights(one).clone()
    said = compile_step(one, 10**9, X)
    assert re.match(reported, said), said
    assert said.endswith("saves about 5 %: it pays off from 375 s on"), "the break-even is reported too"
    assert (one.compiled_forward is not one.ddp_model) is compiled
    assert torch.equal(weights(one), before)
    assert all(parameter.grad is None for parameter in one.state.model.parameters())


def test_compile_trial_leaves_statistics_and_rng_unchanged() -> None:
    one = trainer(compile="auto")
    one.set_model(
        torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 3)), one.state.optimizer
    )
    kept = {name: value.clone() for name, value in one.state.model.state_dict().items()}
    random = torch.get_rng_state()
    estimate_break_even(one, 10, X)
    assert all(torch.equal(value, kept[name]) for name, value in one.state.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in one.state.model.parameters())


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.launch
def test_inductor_trains_to_equal_accuracy_and_logs_first_step(entrypoint: Entrypoint) -> None:
    common = {"TRAIN_EPOCHS": "3"}
    eager = entrypoint.train(env=common)
    result = entrypoint.succeed("train", env=common | {"TRAIN_COMPILE": "default", "TRAIN_TENSORBOARD": "0"})
    assert "compiled by inductor, mode default" in result.out
    summary = entrypoint.summary()
    assert summary["test_loss"] == pytest.approx(eager["test_loss"], rel=1e-2)
    assert summary["first_step_seconds"] > 10 * summary["step_seconds"], "it holds the compilation"
    assert re.search(r"first step [\d,]+ ms, then [\d,.]+ ms$", result.out, re.M)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.launch
def test_failing_compiler_gives_one_line(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_COMPILE": "default", "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(entrypoint.folder / "cache")}
    assert "TRAIN_COMPILE_BACKEND=inductor: the step cannot be compiled" in entrypoint.error_line(
        "train", env=env, code=ExitCode.MACHINE
    )
