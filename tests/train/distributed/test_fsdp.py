"""Models spread over ranks: they learn what one rank learns, each rank holds its part, and runs go on from parts."""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path

import pytest
from torch import nn

from tests.conftest import PYTHON, Entrypoint, needs_two_cores
from tests.factories import HostilePickle
from tests.train.given import SMALL, TWO_RANKS, losses
from tests.train.started import Started
from train.checkpoint.folder import newest
from train.checkpoint.metadata import CHECKSUM_FILE, METADATA_FILE
from train.distributed.fsdp import MIN_UNIT_PARAMETERS, iter_fsdp_units

pytestmark = [pytest.mark.launch, needs_two_cores]
SPREAD = SMALL | TWO_RANKS | {"TRAIN_PARALLELISM": "fsdp", "TRAIN_TENSORBOARD": "0"}


@pytest.mark.versions
def test_fsdp_units_are_large_sequence_elements_inner_first() -> None:
    side = int(MIN_UNIT_PARAMETERS**0.5) + 1
    block = nn.Sequential(nn.Linear(side, side), nn.ReLU())
    attention = nn.MultiheadAttention(side, 1)  # its output projection's weights are used without a call
    kept = nn.ModuleDict({"inner": nn.Linear(side, side)})  # FSDP2 takes none, whether it can be called or not
    body = nn.Sequential(block, nn.Linear(4, 4), attention, kept)
    model = nn.ModuleDict({"body": body, "head": nn.Linear(side, side)})
    assert list(iter_fsdp_units(model)) == [block[0], block, attention]


@pytest.mark.versions
@pytest.mark.parametrize(
    "more",
    [
        {"TRAIN_EMA_DECAY": "0.9", "TRAIN_GRAD_ACCUM_STEPS": "2", "TRAIN_MAX_GRAD_NORM": "1"},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_fsdp_equals_one_rank_and_saves_shards(entrypoint: Entrypoint, more: dict[str, str]) -> None:
    common = SMALL | more | {"TRAIN_EPOCHS": "2", "TRAIN_LR": "0.01", "TRAIN_EVAL_BATCH_SIZE": "63"}  # 64 images a rank
    whole = entrypoint.train(env=common | {"TRAIN_RUN_NAME": "whole"})
    spread = entrypoint.train(env=common | SPREAD | {"TRAIN_RUN_NAME": "spread"})
    assert losses(entrypoint, "spread") == pytest.approx(losses(entrypoint, "whole"), rel=1e-3)
    for name in ("parameters", "multiply_adds", "test_images"):
        assert spread[name] == whole[name]
    assert spread["test_accuracy"] == pytest.approx(whole["test_accuracy"], abs=1)
    checkpoint = newest(entrypoint.folder / "runs/spread/checkpoint")
    assert checkpoint is not None
    one, other = (part.stat().st_size for part in sorted(checkpoint.glob("rank-*.safetensors")))
    assert 0.8 < one / other < 1.25
    kept = 2 + ("TRAIN_EMA_DECAY" in more)  # weights and momentum
    assert one + other == pytest.approx(4 * kept * whole["parameters"], rel=0.1)


def stopped(entrypoint: Entrypoint, env: dict[str, str]) -> Path:
    """Stop a run during its second epoch; return the checkpoint that it leaves."""
    run = Started(entrypoint, env | {"TRAIN_RUN_NAME": "stopped"})
    run.wait_for("epoch 2/")
    run.preempted()
    found = newest(entrypoint.folder / "runs/stopped/checkpoint")
    assert found is not None
    assert len(list(found.glob("rank-*.safetensors"))) == 2
    return found


@pytest.mark.slow
@pytest.mark.versions
def test_fsdp_resume_is_bitwise_identical(entrypoint: Entrypoint) -> None:
    env = SPREAD | {
        "TRAIN_EPOCHS": "30",
        "TRAIN_LOG_INTERVAL": "1",
        "TRAIN_EMA_DECAY": "0.9",
        "TRAIN_KEEP_CHECKPOINTS": "50",
    }
    straight = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "straight"})
    saved = stopped(entrypoint, env)
    alone = entrypoint.train(
        env=env | {"TRAIN_RUN_NAME": "alone", "TRAIN_RESUME": str(saved), "LAUNCH_NPROC_PER_NODE": "1"}
    )
    again = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "stopped", "TRAIN_RESUME": "auto"})
    assert again["weights_sha256"] == straight["weights_sha256"]
    assert again["test_loss"] == straight["test_loss"]
    assert alone["steps"] == straight["steps"]
    assert alone["test_loss"] == pytest.approx(straight["test_loss"], rel=0.02)


@pytest.mark.slow
@pytest.mark.versions
def test_fsdp_hostile_checkpoint_raises_and_runs_nothing(entrypoint: Entrypoint) -> None:
    env = SPREAD | {"TRAIN_EPOCHS": "1"}
    entrypoint.train(env=env | {"TRAIN_RUN_NAME": "run"})
    saved = newest(entrypoint.folder / "runs/run/checkpoint")
    assert saved is not None
    part = sorted(saved.glob("rank-*.safetensors"))[1]
    contents = {name: (saved / name).read_bytes() for name in (CHECKSUM_FILE, METADATA_FILE, part.name)}
    spoilt = [(name, content[: len(content) // 2]) for name, content in contents.items()]
    spoilt += [(part.name, pickle.dumps(HostilePickle()))]
    for name, content in spoilt:
        (saved / name).write_bytes(content)
        for ranks in ({}, {"LAUNCH_NPROC_PER_NODE": "1"}):
            assert "cannot be read as a checkpoint (" in entrypoint.error_line(
                "train", env=env | ranks | {"TRAIN_RESUME": str(saved), "LAUNCH_QUIET": "1"}
            )
        (saved / name).write_bytes(contents[name])
    assert not (entrypoint.folder / "hostile-was-here").exists()


@pytest.mark.slow
def test_fsdp_full_disk_keeps_previous_checkpoint(entrypoint: Entrypoint) -> None:
    env = SPREAD | {"TRAIN_EPOCHS": "3", "TRAIN_RUN_NAME": "run", "TRAIN_PROGRESS": "off"}
    entrypoint.train(env=env | {"TRAIN_RUN_NAME": "other", "TRAIN_EPOCHS": "1"})
    size = max(path.stat().st_size for path in (entrypoint.folder / "runs/other/checkpoint").glob("*/*"))
    command = ("bash", "-c", f"trap '' XFSZ; ulimit -f {size // 2048}; exec {shlex.quote(PYTHON)} -m entrypoint train")
    line = entrypoint.error_line(command=command, env=env | {"LAUNCH_QUIET": "1"}, code=3)
    assert "checkpoint: cannot be written (File too large). Free disk space" in line
    assert "earlier checkpoints are kept" in line
    assert not list((entrypoint.folder / "runs/run/checkpoint").glob("step-*"))
