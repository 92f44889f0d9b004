"""A model that no memory here can hold is refused before any rank allocates it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entrypoint.core.errors import ExitCode
from tests.conftest import refusal
from train.engine.model_probe import check_memory, check_state
from train.settings import ImageShape, read_train_settings

PLENTY: ImageShape = (3, 4096, 4096)  # 34 billion weights


@pytest.mark.parametrize(
    ("environ", "shape", "memory_gib", "refused"),
    [
        ({}, PLENTY, 64, True),
        ({}, PLENTY, 400, False),
        ({"TRAIN_OPTIMIZER": "adam"}, PLENTY, 400, True),
        ({"TRAIN_EMA_DECAY": "0.9"}, PLENTY, 400, True),
        ({"TRAIN_PARALLELISM": "fsdp", "TRAIN_OPTIMIZER": "adam"}, PLENTY, 200, False),
        ({"TRAIN_MODEL": "resnet18"}, PLENTY, 1, False),  # pools to one value a channel
        ({}, (1, 8, 8), 1, False),
        ({}, PLENTY, 0, False),  # unknown
    ],
)
def test_model_larger_than_memory_is_refused(
    environ: dict[str, str], shape: ImageShape, memory_gib: int, refused: bool
) -> None:
    settings = read_train_settings(environ, {}).values
    if not refused:
        check_memory(settings, shape, 10, memory_gib << 30)
        return
    refusal(
        check_memory,
        settings,
        shape,
        10,
        memory_gib << 30,
        match=r"^TRAIN_MODEL=\w+: has [\d,]+ weights for [\dx]+ images, which take",
        code=ExitCode.MACHINE,
    )


class Extra(nn.Linear):
    """A model with a dictionary in its state."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [(Extra(2, 2), "_extra_state of its state is dict"), (sparse(), "adjacency of its state is a tensor of layout")],
)
def test_state_that_no_checkpoint_holds_is_refused(model: nn.Module, said: str) -> None:
    refusal(
        check_state,
        read_train_settings({"TRAIN_MODEL": "mine:net"}, {}).values.network,
        model,
        match=f"^TRAIN_MODEL=mine:net: {said}",
    )
    check_state(read_train_settings({"TRAIN_MODEL": "mine:net"}, {}).values.network, nn.BatchNorm1d(2))
