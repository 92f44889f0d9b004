"""`entrypoint average`: the mean of a run's best checkpoints, with BatchNorm's statistics of the training images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import Entrypoint
from train.checkpoint.folder import best_first, list_newest_first
from train.models.state_dict_file import read_state_dict

pytestmark = pytest.mark.launch
RUN = {
    "TRAIN_DATASET": "synthetic",
    "TRAIN_SYNTHETIC_SHAPE": "3x32x32",
    "TRAIN_SYNTHETIC_IMAGES": "320",
    "TRAIN_MODEL": "speednet-half",
    "TRAIN_EPOCHS": "5",
    "TRAIN_VAL_SPLIT": "0.1",
    "TRAIN_KEEP_BEST": "3",
    "TRAIN_KEEP_CHECKPOINTS": "1",
    "TRAIN_TENSORBOARD": "0",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Entrypoint:
    """Return a folder with a run that has kept its best checkpoints, and one that has not."""
    entrypoint = Entrypoint(tmp_path_factory.mktemp("average"))
    entrypoint.train(env=RUN | {"TRAIN_RUN_NAME": "kept"})
    entrypoint.train(env=RUN | {"TRAIN_RUN_NAME": "plain", "TRAIN_EPOCHS": "1", "TRAIN_KEEP_BEST": "1"})
    return entrypoint


def test_run_keeps_the_best_by_their_score(trained: Entrypoint) -> None:
    run = trained.folder / "runs/kept"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["val_accuracy"] for line in lines if "val_accuracy" in line}
    kept = [int(path.name[5:]) for path in best_first(run / "checkpoint")]
    wanted = sorted(scores, key=lambda step: (scores[step], step), reverse=True)
    assert len(scores) == 5
    assert kept[:3] == wanted[:3]
    assert len(list_newest_first(run / "checkpoint")) == 3 + (max(scores) not in wanted[:3])


def test_average_is_the_mean_with_statistics_of_its_own(trained: Entrypoint) -> None:
    run = trained.folder / "runs/kept"
    done = trained.succeed("average", "runs/kept")
    averaged = read_state_dict(run / "average.safetensors")
    states = [read_state_dict(path / "model.safetensors") for path in best_first(run / "checkpoint")[:3]]
    for name, value in averaged.items():
        mean = torch.stack([state[name].double() for state in states]).mean(0)
        if "running" not in name and "tracked" not in name:
            assert torch.allclose(value.double(), mean, atol=1e-6), name
    assert any("running_var" in name and not torch.equal(averaged[name], states[0][name]) for name in averaged)
    assert "weights   runs/kept/average.safetensors" in done.out
    again = trained.succeed("evaluate", "runs/kept/average.safetensors")
    assert again.out == done.out, "the file has all that an evaluation needs"


def test_same_model_twice_is_itself_but_for_its_statistics(trained: Entrypoint) -> None:
    """Those are of an epoch of training images, and close to what training has left."""
    run = trained.folder / "runs/plain"
    trained.succeed("average", "runs/plain", "runs/plain/model.safetensors")
    averaged, plain = read_state_dict(run / "average.safetensors"), read_state_dict(run / "model.safetensors")
    for name, value in plain.items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(averaged[name], value), name
    means = [name for name in plain if name.endswith("running_mean")]
    apart = [float((averaged[name] - plain[name]).abs().max() / plain[name].abs().max()) for name in means]
    assert means
    assert max(apart) < 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("runs/plain",), "average runs/plain: is no run with several best checkpoints. Train with TRAIN_KEEP_BEST=3"),
        (("runs/kept", "--nproc-per-node=2"), "average: one rank computes, and this job has 2"),
        (("runs/kept", "runs/digits"), "TRAIN_AVERAGE=runs/digits: has other classes, or another normalization, than"),
        (("runs/kept", "nothing"), "TRAIN_AVERAGE=nothing: no such file."),
        ((), "average: needs a trained model. Use `entrypoint average RUN`."),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_the_plan(trained: Entrypoint, words: tuple[str, ...], said: str) -> None:
    if "runs/digits" in words and not Path(trained.folder, "runs/digits").exists():
        trained.train(env={"TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "digits"})
    for more in ((), ("--dry-run",)):
        assert said in trained.error_line("average", *words, *more)


def test_frozen_statistics_stay(trained: Entrypoint) -> None:
    env = {"TRAIN_EPOCHS": "3", "TRAIN_FREEZE": "statistics", "TRAIN_WEIGHTS": "runs/plain"}
    trained.train(env=RUN | env | {"TRAIN_RUN_NAME": "frozen"})
    run = trained.folder / "runs/frozen"
    trained.succeed("average", "runs/frozen")
    averaged, before = read_state_dict(run / "average.safetensors"), read_state_dict(run / "model.safetensors")
    names = [name for name in before if "running" in name]
    assert names
    assert all(torch.equal(averaged[name], before[name]) for name in names)


def test_average_of_checkpoints_is_written_into_their_run(trained: Entrypoint) -> None:
    first, second, *_ = best_first(trained.folder / "runs/kept/checkpoint")
    trained.succeed("average", first, second)
    assert not (first / "average.safetensors").exists()
    assert (trained.folder / "runs/kept/average.safetensors").exists()
