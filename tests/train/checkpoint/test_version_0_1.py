"""Checkpoints of version 0.1 are converted by one command, and by nothing else; their runs resume bitwise equal."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from entrypoint.core.atomic_files import checksum_trailer, sha256_of
from entrypoint.core.errors import UserError
from tests.conftest import Entrypoint
from tests.factories import HostilePickle, train_settings
from tests.train.given import SMALL
from train.checkpoint.compare import with_current_names
from train.checkpoint.metadata import EMA, MODEL, OPTIMIZER
from train.checkpoint.tensor_files import CheckpointReader
from train.checkpoint.version_0_1 import METADATA_FILE, MetadataUnpickler
from train.engine.convert import convert
from train.engine.optimizer import build_optimizer, parameter_names
from train.models.registry import build_model
from train.planning.run_lookup import previous_run
from train.settings import TrainSettings

OLD = {"feed": "stream", "accumulate": 2, "shard": "off", "epochs": 3, "ema": 0.9, "keep": 5}
NOW = {
    "data_source": "stream", "grad_accum_steps": 2, "parallelism": "ddp", "epochs": 3, "ema_decay": 0.9,
    "keep_checkpoints": 5,
}  # fmt: skip


def old_values(path: Path) -> dict[str, Any]:
    """Return what version 0.1 pickled, from a checkpoint of today's format."""
    reader = CheckpointReader(path)
    found = reader.metadata
    old_names = {new: old for old, new in TrainSettings.RENAMED.items()}
    return {
        "epoch": found.epoch, "step": found.step, "seconds": found.seconds, "losses": found.losses, "best": found.best,
        "settings": {old_names.get(name, name): value for name, value in found.settings.items()},
        "plan": json.dumps({"training": {"shape": found.plan["trainer"]["image_shape"]}}), "parts": {}, "scaler": {},
    }  # fmt: skip


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    """Write a pickle with its checksum at its end, as version 0.1 did."""
    torch.save(values, path)
    content = path.read_bytes()
    path.write_bytes(content + checksum_trailer(content))


def as_old_file(path: Path) -> Path:
    """Replace a checkpoint by one file of version 0.1; return its path."""
    reader, values = CheckpointReader(path), old_values(path)
    whole = reader.whole()
    settings = train_settings(reader.metadata.settings)
    shape = reader.metadata.plan["trainer"]["image_shape"]
    model = build_model(settings, tuple(shape), len(reader.metadata.data.classes))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, name in enumerate(parameter_names(build_optimizer(settings, model), model)):
        named = {key: one for key, one in whole[OPTIMIZER].items() if key.rpartition(".")[0] == name}
        state[index] = {key.rpartition(".")[2]: one for key, one in named.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1}]}
    shutil.rmtree(path)
    old = path.with_suffix(".pt")
    ordered = {name: whole[MODEL][name] for name in model.state_dict()}
    write_sealed(old, values | {"model": ordered, "optimizer": optimizer, "average": whole[EMA]})
    return old


def as_old_folder(path: Path) -> Path:
    """Replace a checkpoint by a sharded one of version 0.1; return its path."""
    reader, values = CheckpointReader(path), old_values(path)
    prefixes = {MODEL: "model.", OPTIMIZER: "optimizer.state.", EMA: "average."}
    tensors = {
        prefixes[section] + name: one for section, named in reader.whole().items() for name, one in named.items()
    }
    old = path.with_suffix(".sharded")
    save_shards(tensors, storage_writer=FileSystemWriter(old), no_dist=True)
    parts = {file.name: sha256_of(file) for file in sorted(old.iterdir())}
    write_sealed(old / METADATA_FILE, values | {"model": {}, "optimizer": {}, "average": {}, "parts": parts})
    shutil.rmtree(path)
    return old


SPEEDNET = {"TRAIN_MODEL": "speednet", "TRAIN_SYNTHETIC_SHAPE": "3x32x32", "TRAIN_SYNTHETIC_IMAGES": "128"}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (as_old_file, {"TRAIN_EMA_DECAY": "0.9"}),
        pytest.param(as_old_file, {"TRAIN_OPTIMIZER": "adamw"}, marks=pytest.mark.slow),
        pytest.param(as_old_file, SPEEDNET, marks=pytest.mark.slow),
        pytest.param(as_old_folder, {"TRAIN_PARALLELISM": "fsdp", "TRAIN_EMA_DECAY": "0.9"}, marks=pytest.mark.slow),
    ],
)
def test_converted_run_resumes_bitwise_equal(entrypoint: Entrypoint, make: Any, more: dict[str, str]) -> None:
    env = SMALL | {"TRAIN_EPOCHS": "2", "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"} | more
    whole = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "whole"})
    entrypoint.train(env=env | {"TRAIN_RUN_NAME": "old"})
    first, second = sorted((entrypoint.folder / "runs/old/checkpoint").glob("step-*"))
    shutil.rmtree(second)
    old = make(first)
    again = env | {"TRAIN_RUN_NAME": "old", "TRAIN_RESUME": "auto"}
    for command in ("plan", "train"):
        refused = entrypoint(command, env=again)
        assert refused.code == 2
        assert "version 0.1. Reading it can run code. If you trust it, convert it by" in refused.error_lines[0]
    result = entrypoint("convert-checkpoint", str(old))
    assert result.code == 0, result.err
    assert result.out.strip() == str(first)
    assert result.err.strip() == f"converting {old}: trusting it, because reading it can run code"
    assert entrypoint.train(env=again)["weights_sha256"] == whole["weights_sha256"]
    assert (
        entrypoint("convert-checkpoint", str(old))
        .error_lines[-1]
        .endswith(f"{first}: is there already. Remove it to convert {old.name} again.")
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "convert-checkpoint: needs one path"),
        (("a", "b"), "convert-checkpoint: needs one path"),
        (("nowhere.pt",), "nowhere.pt: no such checkpoint"),
        (("x" * 300,), "no such checkpoint"),
    ],
)
def test_convert_needs_a_checkpoint(entrypoint: Entrypoint, words: tuple[str, ...], said: str) -> None:
    result = entrypoint("convert-checkpoint", *words)
    assert result.code == 2
    assert len(result.error_lines) == 1
    assert said in result.err


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"PK\x03\x04 cut short", b"x" * 200, pickle.dumps(HostilePickle())]
)
def test_foreign_file_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step-000000007.pt").write_bytes(content + checksum_trailer(content))
    with pytest.raises(UserError) as error:
        convert(tmp_path / "step-000000007.pt")
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "hostile-was-here").exists()


def test_metadata_unpickler_rejects_other_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickle").write_bytes(pickle.dumps(HostilePickle()))
    with (tmp_path / "pickle").open("rb") as file, pytest.raises(pickle.UnpicklingError, match=r"it names \w+\.system"):
        MetadataUnpickler(file).load()
    assert not (tmp_path / "hostile-was-here").exists()


def test_old_names_are_read_as_current_ones() -> None:
    assert with_current_names(OLD) == NOW


def test_plan_of_0_1_gives_the_threads_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    ranks = [{"local_rank": 0, "cpus": [0, 1], "threads": 1, "gpu": None, "memory_nodes": []}]
    (tmp_path / "mine/plan.json").write_text(json.dumps({"ranks": ranks, "neighbours": 1}))  # codespell:ignore
    found = previous_run(TrainSettings(output_dir=tmp_path, run_name="mine", resume="auto"))
    assert found is not None
    assert ([rank.threads for rank in found.ranks], found.reserved_cpus) == ([1], 1)
