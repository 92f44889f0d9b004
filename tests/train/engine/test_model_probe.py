"""A model that no memory here can hold is refused before any rank allocates it."""

from __future__ import annotations

import pytest

from entrypoint.core.errors import ExitCode, UserError
from train.engine.model_probe import check_memory
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
    with pytest.raises(UserError, match=r"^TRAIN_MODEL=\w+: has [\d,]+ weights for [\dx]+ images, which take") as error:
        check_memory(settings, shape, 10, memory_gib << 30)
    assert error.value.code == ExitCode.MACHINE
