"""Checkpoints and run folders of version 0.1, which hold the old names of settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from entrypoint.core.errors import UserError
from train.checkpoint import single_file
from train.checkpoint.single_file import Checkpoint, load, save, with_current_names
from train.planning.run_lookup import previous_run
from train.settings import TrainSettings

OLD = {"feed": "stream", "accumulate": 2, "shard": "off", "epochs": 3, "ema": 0.9, "keep": 5}
NOW = {"data_source": "memory", "grad_accum_steps": 2, "parallelism": "ddp", "epochs": 3, "ema_decay": 0.9}


def old_checkpoint(folder: Path) -> Path:
    saved = Checkpoint(1, 7, 2.5, {"w": torch.ones(3)}, {"state": {}}, OLD)
    return save(folder, saved, keep=1)


def test_checkpoint_file_names_equal_0_1() -> None:
    names = (single_file.SUFFIX, single_file.SHARDED_SUFFIX, single_file.METADATA_FILE)
    assert names == (".pt", ".sharded", "told.pt")  # codespell:ignore


def test_old_names_are_read_as_current_ones() -> None:
    assert with_current_names(OLD) == NOW | {"data_source": "stream", "keep_checkpoints": 5}


def test_checkpoint_of_0_1_resumes(tmp_path: Path) -> None:
    assert load(old_checkpoint(tmp_path), NOW).step == 7


def test_changed_setting_is_named_by_its_current_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TRAIN_GRAD_ACCUM_STEPS was 2, is 4"):
        load(old_checkpoint(tmp_path), NOW | {"grad_accum_steps": 4})


def test_plan_of_0_1_gives_the_threads_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    ranks = [{"local_rank": 0, "cpus": [0, 1], "threads": 1, "gpu": None, "memory_nodes": []}]
    (tmp_path / "mine/plan.json").write_text(json.dumps({"ranks": ranks, "neighbours": 1}))  # codespell:ignore
    found = previous_run(TrainSettings(output_dir=tmp_path, run_name="mine", resume="auto"))
    assert found is not None
    assert ([rank.threads for rank in found.ranks], found.reserved_cpus) == ([1], 1)
