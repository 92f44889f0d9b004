"""Questions to the process that builds the model: any text of an environment reaches it."""

from __future__ import annotations

import os

import pytest

from tests.conftest import Entrypoint
from tests.train.given import SMALL
from train.planning.model_report import original, portable


@pytest.mark.parametrize("text", ["", "a.pth", "ä/模型.pth", os.fsdecode(b"\xff\x80/a.pth"), "\n\x1b"])
def test_any_text_comes_back(text: str) -> None:
    portable(text).encode("utf-8")
    assert original(portable(text)) == text


@pytest.mark.launch
def test_weights_with_a_name_of_other_bytes_are_loaded(entrypoint: Entrypoint) -> None:
    entrypoint.train(env=SMALL | {"TRAIN_RUN_NAME": "first", "TRAIN_STEPS": "1"})
    name = os.fsdecode(b"\xff-weights.safetensors")
    (entrypoint.folder / "runs/first/model.safetensors").rename(entrypoint.folder / name)
    result = entrypoint("train", env=SMALL | {"TRAIN_WEIGHTS": name, "TRAIN_STEPS": "1", "TRAIN_RUN_NAME": "second"})
    assert result.code == 0, result.err
    assert "all weights" in result.err or "weights " in result.err
