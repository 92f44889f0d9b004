"""A step waits for no result: on a GPU that would stop the queue of kernels, and the CPU's twin counts the reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import Entrypoint
from tests.train.engine.learners import TwelveAtATime, X, Y, trainer
from train.data.feeds.batches import Batch
from train.engine.loop import StepCallbacks, train_epoch

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
    one.train_step(Batch(((X, Y),), 12))
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
    result = entrypoint("train", env=env)
    assert result.code == 0, result.err
    steps = entrypoint.summary("latest")["steps"]
    waits = result.err.count("called a synchronizing CUDA operation")
    assert waits < steps, "less than one a step, with evaluation and start"
