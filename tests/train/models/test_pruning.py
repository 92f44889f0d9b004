"""Pruning for real: what is cut out is gone, on all ranks, in the checkpoint, and in what goes on from it."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from tests.conftest import Entrypoint, refusal
from tests.factories import train_settings
from tests.train.checkpoint.saved import model_of
from tests.train.started import Started
from train.checkpoint.folder import newest
from train.models.cnn import CNN
from train.models.inspection import count_parameters
from train.models.pruning import layers_to_prune, prune_state, resize_to_state, same_shapes
from train.models.registry import build_model
from train.setting_groups.network import NetworkSettings
from train.settings import TrainSettings

SHAPE = (3, 32, 32)
VIT = {"TRAIN_MODEL": "vit_b_32"}
PRUNED = {"TRAIN_PRUNE_RATIO": "0.5", "TRAIN_TENSORBOARD": "0"}


def settings(**more: object) -> TrainSettings:
    return train_settings({"prune_ratio": 0.5, **more})


def test_pruned_cnn_has_the_books_parameters() -> None:
    pytest.importorskip("torch_pruning")
    model = CNN(SHAPE, 10)
    assert count_parameters(model) == 2_122_186
    slim = prune_state(CNN(SHAPE, 10), model.state_dict(), SHAPE, settings().network)
    cut = CNN(SHAPE, 10)
    resize_to_state(cut, slim)
    assert count_parameters(cut) == 1_059_306
    first = cut.layer1[0]
    assert isinstance(first, nn.Conv2d)
    assert (first.out_channels, cut.fc1.in_features) == (16, 2048)
    filters = model.state_dict()["layer1.0.weight"]
    kept = [index for index, one in enumerate(filters) if any(torch.equal(one, left) for left in first.weight)]
    assert len(kept) == 16, "whole filters, unchanged"


@pytest.mark.seconds
@pytest.mark.usefixtures("torchvision")
def test_pruned_resnet_runs_and_learns() -> None:
    pytest.importorskip("torch_pruning")
    model = build_model(NetworkSettings(model="resnet18"), SHAPE, 10)
    before = copy.deepcopy(model.state_dict())
    slim = prune_state(model, before, SHAPE, settings(model="resnet18").network)
    cut = build_model(NetworkSettings(model="resnet18"), SHAPE, 10)
    assert not same_shapes(cut, slim)
    resize_to_state(cut, slim)
    assert same_shapes(cut, slim)
    assert count_parameters(cut) < 0.5 * sum(value.numel() for value in before.values())
    logits = cut(torch.randn(4, *SHAPE))
    logits.sum().backward()
    assert logits.shape == (4, 10)
    assert all(parameter.grad is not None for parameter in cut.parameters())
    assert all(torch.equal(value, slim[name]) for name, value in cut.state_dict().items() if "running" not in name
               and "tracked" not in name)  # fmt: skip


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ["layer1.0", "layer2.0"]),
        ({"prune_exclude": "layer1"}, ["layer2.0"]),
        ({"prune_exclude": "layer1.0,fc1"}, ["layer2.0"]),
    ],
)
def test_pruning_removes_the_requested_share_but_no_last_layer(more: dict[str, object], names: list[str]) -> None:
    assert layers_to_prune(CNN(SHAPE, 10), settings(**more).network) == names


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prune_exclude": "layer9"}, "TRAIN_PRUNE_EXCLUDE=layer9: cnn has no such layer. Did you mean layer"),
        (
            {"prune_exclude": "layer1,layer2"},
            "TRAIN_PRUNE_RATIO=0.5: cnn has no convolution left to prune. Unset it, or exclude fewer layers.",
        ),
    ],
)
def test_prune_unusable_settings_raise(more: dict[str, object], said: str) -> None:
    refusal(layers_to_prune, CNN(SHAPE, 10), settings(**more).network, match=re.escape(said))


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.launch
def test_stopped_pruned_run_resumes_pruned_and_ends_equal(entrypoint: Entrypoint) -> None:
    pytest.importorskip("torch_pruning")
    common = PRUNED | {"TRAIN_EPOCHS": "12", "TRAIN_PRUNE_WARMUP": "2", "LAUNCH_QUIET": "1"}
    whole = entrypoint.train(env=common | {"TRAIN_RUN_NAME": "whole"})
    run = Started(entrypoint, common | {"TRAIN_RUN_NAME": "stopped"})
    run.wait_for("epoch 3/12  train")
    run.preempted()
    saved = newest(entrypoint.folder / "runs/stopped/checkpoint")
    assert saved is not None
    assert model_of(saved)["layer1.0.weight"].shape[0] == 16
    again = entrypoint.train(env=common | {"TRAIN_RUN_NAME": "stopped", "TRAIN_RESUME": "auto"})
    assert again["parameters"] == whole["parameters"]
    assert again["test_loss"] == whole["test_loss"]


@pytest.mark.slow
@pytest.mark.launch
def test_run_that_goes_on_past_the_warm_up_is_pruned(entrypoint: Entrypoint) -> None:
    """The book's chapter 6: a trained model is pruned, then trained further."""
    pytest.importorskip("torch_pruning")
    common = {"TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"}
    entrypoint.train(env=common | {"TRAIN_EPOCHS": "2", "TRAIN_RUN_NAME": "trained"})
    start = {"TRAIN_RESUME": "runs/trained/checkpoint/best", "TRAIN_RESUME_ALLOW_CHANGED": "1"}
    for warm_up in ("0", "1", "2", "3"):
        more = {"TRAIN_EPOCHS": "4", "TRAIN_PRUNE_RATIO": "0.5", "TRAIN_PRUNE_WARMUP": warm_up}
        result = entrypoint.succeed("train", env=common | start | more | {"TRAIN_RUN_NAME": f"pruned{warm_up}"})
        assert "pruned: 155,530 parameters before, " in result.out
        assert entrypoint.summary(f"pruned{warm_up}")["parameters"] < 155_530


@pytest.mark.slow_except("env0")
@pytest.mark.launch
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TRAIN_PRUNE_EXCLUDE": "layer4"}, "TRAIN_PRUNE_EXCLUDE=layer4: cnn has no such layer."),
        ({"TRAIN_MODEL": "shufflenet_v2_x0_5"}, "shufflenet_v2_x0_5 cannot be pruned"),
        ({"TRAIN_PRUNE_RATIO": "0.99"}, "TRAIN_PRUNE_RATIO=0.99: removes nothing of cnn, or would leave no filter"),
        pytest.param(VIT, "removes nothing of vit_b_32", marks=pytest.mark.slow),
    ],
)
def test_impossible_pruning_is_refused_by_the_plan(entrypoint: Entrypoint, env: dict[str, str], said: str) -> None:
    pytest.importorskip("torch_pruning")
    if "TRAIN_MODEL" in env:
        pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
        env = env | {"TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_SHAPE": "3x224x224", "TRAIN_SYNTHETIC_IMAGES": "20"}
        env |= {"TRAIN_BATCH_SIZE": "10"}
    result = entrypoint("plan", env={**PRUNED, "TRAIN_EPOCHS": "2"} | env)
    assert result.code in (2, 3), result.err
    (line,) = result.error_lines
    assert said in line
    assert "Traceback" not in result.err
