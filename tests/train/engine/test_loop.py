"""One optimizer step and an epoch of them, and that no step waits for a result."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, refusal
from tests.train.engine.learners import TwelveAtATime, X, Y, trainer, weights
from train.data.feeds.batches import IGNORE_LABEL, Batch
from train.engine.loop import StepCallbacks, check_finite, timed_first_step, train_epoch
from train.engine.train_step import Trainer
from train.optimization.optimizer import make_ema
from train.preemption import STOP


def train_steps(one: Trainer, count: int, images: Tensor = X, labels: Tensor = Y) -> Tensor:
    """Train some steps with the same batch, and return the loss of the last one."""
    return [one.train_step(Batch(((images, labels),), 12)) for _ in range(count)][-1]


def test_micro_batches_equal_whole_batch() -> None:
    whole, parts = trainer(), trainer()
    loss = train_steps(whole, 1)
    cut = parts.train_step(Batch(((X[:1], Y[:1]), (X[1:8], Y[1:8]), (X[8:], Y[8:])), 12))
    assert cut.item() == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-7)


def test_loss_equals_torch_with_label_smoothing() -> None:
    one = trainer(label_smoothing=0.1)
    expected = nn.functional.cross_entropy(one.state.model(X), Y, label_smoothing=0.1)
    assert one.train_step(Batch(((X, Y),), 12)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_unreadable_image_has_no_gradient() -> None:
    some, none = trainer(), trainer()
    labels = torch.cat((Y[:11], torch.tensor([IGNORE_LABEL])))
    train_steps(some, 1, X, labels)
    train_steps(none, 1, X[:11], Y[:11])
    assert torch.allclose(weights(some), weights(none), atol=1e-7)


def test_max_grad_norm_clips_gradients() -> None:
    one = trainer(max_grad_norm=1e-3, momentum=0, weight_decay=0)
    before = weights(one)
    train_steps(one, 1)
    assert (weights(one) - before).norm() <= 1.01e-4
    assert float(one.grad_norm) > 0.01, "before it is clipped"


def test_train_epoch_reports_each_interval_and_the_rest() -> None:
    one, reports = trainer(), []
    assert train_epoch(one, TwelveAtATime(), 0, 3, StepCallbacks(lambda *report: reports.append(report)))
    assert [step for step, _, _ in reports] == [3, 6, 7]
    assert sum(one.state.losses) == pytest.approx(3 * reports[0][1] + 3 * reports[1][1] + reports[2][1])
    assert reports[2][1] < reports[0][1]
    assert one.state.step == 7
    assert one.state.seconds > 0


def test_look_at_the_first_batch_is_no_training() -> None:
    one = trainer()
    train_epoch(one, TwelveAtATime(), 0, 3, StepCallbacks(lambda *_: None, look=lambda _: time.sleep(1)))
    assert 0 < one.state.seconds < 1


def test_requested_stop_ends_after_the_step_and_resumes_there() -> None:
    one, reports = trainer(), []
    assert not train_epoch(
        one,
        TwelveAtATime(),
        0,
        3,
        StepCallbacks(lambda *report: reports.append(report), lambda: STOP * (one.state.step == 4)),
    )
    assert (one.state.step, len(one.state.losses)) == (5, 5)
    assert train_epoch(one, TwelveAtATime(), 0, 3, StepCallbacks(lambda *report: reports.append(report)))
    assert [step for step, _, _ in reports] == [3, 5, 7]
    straight = trainer()
    train_epoch(straight, TwelveAtATime(), 0, 3, StepCallbacks(lambda *_: None))
    assert one.state.losses == straight.state.losses


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_loss_is_named_by_its_step(bad: float) -> None:
    one = trainer()
    one.state.step = 13
    refusal(check_finite, one, [1.0, bad, bad], match="step 12: the loss is", code=ExitCode.RANK_FAILED)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    one, good = trainer(skip_nonfinite=1, ema_decay=0.5), trainer(ema_decay=0.5)
    for each in (one, good):
        each.set_model(
            nn.Sequential(nn.BatchNorm1d(4, affine=False), each.state.model), each.state.optimizer, each.state.ema_model
        )
        each.state.ema_model = make_ema(each.state.model, each.settings.network)
    for batch in (X, X * bad, X):
        train_steps(one, 1, batch)
    train_steps(good, 2)
    for kept, expected in zip(state_of(one), state_of(good), strict=True):
        assert torch.equal(kept, expected)
    assert one.state.step == 3


def state_of(one: Trainer) -> list[Tensor]:
    """Return all tensors that a step may change."""
    momenta = [value for state in one.state.optimizer.state.values() for value in state.values()]
    return [*one.state.model.state_dict().values(), *one.state.eval_model.state_dict().values(), *momenta]


def test_skipped_steps_are_counted_and_too_many_in_a_row_end(capsys: pytest.CaptureFixture[str]) -> None:
    one = trainer(skip_nonfinite=2)
    one.state.step = 5
    assert check_finite(one, [math.nan, 2.0, math.nan, math.inf, 1.0]) == [0.0, 2.0, 2.0, 2.0, 1.0]
    assert (one.state.skipped_steps, one.skipped) == (3, 0)
    assert "train: step 4 is skipped: its loss or gradients are not finite" in capsys.readouterr().err
    one.state.step = 8
    refusal(
        check_finite,
        one,
        [math.nan] * 3,
        match="step 8: the loss is nan, as those of the 2 steps before",
        code=ExitCode.RANK_FAILED,
    )


def test_ema_follows_the_weights_and_is_evaluated() -> None:
    one = trainer(ema_decay=0.5)
    assert one.state.ema_model is not None
    first = weights(one).clone()
    train_steps(one, 1)
    second = weights(one).clone()
    train_steps(one, 1)
    averaged = torch.cat([parameter.detach().flatten() for parameter in one.state.eval_model.parameters()])
    early = 2 / 11  # of the second update: (1 + 1) / (10 + 1)
    assert torch.allclose(averaged, early * second + (1 - early) * weights(one), atol=1e-6)
    assert not torch.equal(first, second)
    assert trainer().state.eval_model is not one.state.eval_model


def test_large_ema_decay_of_a_short_run_is_near_its_weights() -> None:
    one = trainer(ema_decay=0.9999)
    first = weights(one).clone()
    train_steps(one, 60)
    averaged = torch.cat([parameter.detach().flatten() for parameter in one.state.eval_model.parameters()])
    assert torch.dist(averaged, weights(one)) < 0.2 * torch.dist(first, weights(one))


def test_first_step_is_timed_separately() -> None:
    one = trainer()
    assert one.first_step_seconds == 0
    timed_first_step(one, Batch(((X, Y),), 12))
    seconds = one.first_step_seconds
    timed_first_step(one, Batch(((X, Y),), 12))
    assert one.first_step_seconds == seconds > 0


def test_dropout_is_the_same_after_resume_but_not_each_step() -> None:
    def dropping() -> Trainer:
        one = trainer()
        one.set_model(nn.Sequential(nn.Dropout(), one.state.model), one.state.optimizer)
        return one

    straight, first, second = dropping(), dropping(), dropping()
    train_steps(straight, 4)
    train_steps(first, 2)
    second.state.model.load_state_dict(first.state.model.state_dict())
    second.state.optimizer.load_state_dict(first.state.optimizer.state_dict())
    second.state.step = first.state.step
    torch.manual_seed(99)
    train_steps(second, 2)
    assert torch.equal(weights(straight), weights(second))
    seen: list[Tensor] = []
    straight.state.model.register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    for _ in range(2):
        straight.state.optimizer.zero_grad()
        straight.lr = lambda _: 0.0
        straight.train_step(Batch(((X, Y),), 12))
    assert not torch.equal(seen[0], seen[1]), "another mask at the next step"


# What reads a tensor's value: item(), bool(), float(), and shapes that depend on values.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")


class CountReads(TorchDispatchMode):
    """Counts the operations that would wait for a GPU; whole numbers are torch's own counters, on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call."""
        name = function.name()
        if name.startswith(READS) and args[0].is_floating_point():
            self.reads[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ema_decay": 0.9},
        {"max_grad_norm": 1.0},
        {"label_smoothing": 0.1, "optimizer": "adamw"},
        {"optimizer": "rmsprop", "ema_decay": 0.99, "max_grad_norm": 0.1},
    ],
)
def test_step_reads_no_value(settings: dict[str, Any]) -> None:
    one = trainer(**settings)
    one.train_step(Batch(((X, Y),), 12))  # the first one makes the optimizer's state
    with CountReads() as counted:
        one.train_step(Batch(((X[:5], Y[:5]), (X[5:], Y[5:])), 12))
    assert not counted.reads


def test_epoch_reads_losses_once_an_interval() -> None:
    one = trainer()
    train_steps(one, 1)
    one.first_step_seconds, one.state.step = 0.1, 0
    with CountReads() as counted:
        assert train_epoch(one, TwelveAtATime(), 0, 3, StepCallbacks(lambda *_: None))
    assert sum(counted.reads.values()) <= 3, "7 steps are three intervals"


@pytest.mark.cuda
@pytest.mark.launch
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_epoch_on_a_gpu_waits_once_an_interval(entrypoint: Entrypoint) -> None:
    """A site module sets torch's debug mode in the rank; never run on a GPU so far."""
    (entrypoint.folder / "watched.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def net(num_classes):\n    torch.cuda.set_sync_debug_mode('warn')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    env = {
        "TRAIN_DATASET": "digits", "TRAIN_MODEL": "watched:net", "TRAIN_MODEL_PATH": str(entrypoint.folder),
        "TRAIN_EPOCHS": "3", "TRAIN_LOG_INTERVAL": "22", "TRAIN_TENSORBOARD": "0", "PYTHONWARNINGS": "always",
    }  # fmt: skip
    result = entrypoint.succeed("train", env=env)
    steps = entrypoint.summary("latest")["steps"]
    waits = result.err.count("called a synchronizing CUDA operation")
    assert waits < steps, "less than one a step, with evaluation and start"
