"""A user's own model and weights, through the entrypoint: planned, trained, resumed, on one rank and two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import Entrypoint, needs_two_cores
from tests.train.given import SMALL, TWO_RANKS

pytestmark = pytest.mark.launch

MODULE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, in_channels=1):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        return self.head(self.body(self.norm1(self.stem(images)).relu()).flatten(1))

class Auxiliary(Net):
    def forward(self, images):
        logits = super().forward(images)
        return (logits, logits) if self.training else logits

class TrainingFails(Net):
    def forward(self, images):
        if self.training:
            raise ValueError("not ready")
        return super().forward(images)

class NoGradient(Net):
    def forward(self, images):
        from torch import no_grad
        with no_grad():
            return super().forward(images)

class Unused(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.spare = nn.Linear(3, 3)

class Views(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.flat = nn.Linear(16 * 4 * 4, num_classes)

    def forward(self, images):
        return self.flat(self.body[0](self.stem(images)).view(len(images), -1))

class Skips(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.extra, self.calls = nn.Linear(16, 16), 0

    def forward(self, images):
        features = self.body(self.norm1(self.stem(images)).relu()).flatten(1)
        self.calls += self.training
        return self.head(features if self.calls % 3 == 1 else self.extra(features))

class Tied(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.again = nn.Linear(16, num_classes)
        self.again.weight = self.head.weight

def frozen(num_classes):
    return Net(num_classes).requires_grad_(False)

def leaves(num_classes):
    raise SystemExit(0)
"""
OWN = {**SMALL, "TRAIN_MODEL": "own_net:Net", "TRAIN_EPOCHS": "2", "TRAIN_LR": "0.01", "TRAIN_TENSORBOARD": "0"}


@pytest.fixture
def code(entrypoint: Entrypoint) -> dict[str, str]:
    """Return the environment of a run of the own model."""
    (entrypoint.folder / "code").mkdir()
    (entrypoint.folder / "code/own_net.py").write_text(MODULE)
    return {**OWN, "TRAIN_MODEL_PATH": str(entrypoint.folder / "code")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has trained the own model, and left its weights as `own.safetensors`."""
    first = Entrypoint(tmp_path_factory.mktemp("trained"))
    (first.folder / "own_net.py").write_text(MODULE)
    first.train("--run-name=first", env={**OWN, "TRAIN_MODEL_PATH": str(first.folder)})
    weights = load_file(first.folder / "runs/first/checkpoint/best/model.safetensors")
    save_file({f"module.{name}": one for name, one in weights.items()}, first.folder / "own.safetensors")
    return first.folder


@pytest.fixture
def own(entrypoint: Entrypoint, code: dict[str, str], trained: Path) -> dict[str, str]:
    """Return the environment of runs that start from the weights of the trained model."""
    shutil.copytree(trained / "runs", entrypoint.folder / "runs", symlinks=True)
    return {**code, "TRAIN_WEIGHTS": str(trained / "own.safetensors")}


def test_fine_tuned_backbone_stays_as_it_was(entrypoint: Entrypoint, own: dict[str, str]) -> None:
    tuned = {**own, "TRAIN_FREEZE": "backbone"}
    plan = entrypoint.plan("train", env=tuned)
    reasons = {one["key"]: one["reason"] for one in plan["decisions"]}
    assert reasons["weights"] == "15 tensors loaded; nothing is new"
    assert reasons["frozen"] == "170 of 1,458 parameters are trained"
    entrypoint.train("--run-name=tuned", env=tuned)
    before = load_file(entrypoint.folder / "runs/first/checkpoint/best/model.safetensors")
    after = load_file(entrypoint.folder / "runs/tuned/checkpoint/best/model.safetensors")
    changed = {name for name, one in after.items() if not one.equal(before[name])}
    assert changed == {"head.weight", "head.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["rmsprop", "adafactor"])
def test_fine_tuning_resumes_bitwise_equal(entrypoint: Entrypoint, own: dict[str, str], optimizer: str) -> None:
    tuned = {**own, "TRAIN_OPTIMIZER": optimizer, "TRAIN_FREEZE": "norm1"}
    entrypoint.train("--run-name=whole", env=tuned)
    entrypoint.train("--run-name=cut", env={**tuned, "TRAIN_SCHEDULE": "constant", "TRAIN_EPOCHS": "1"})
    entrypoint.train("--run-name=straight", env={**tuned, "TRAIN_SCHEDULE": "constant"})
    changed = {"TRAIN_SCHEDULE": "constant", "TRAIN_RESUME_ALLOW_CHANGED": "1", "TRAIN_RESUME": "auto"}
    entrypoint.train("--run-name=cut", env={**tuned, **changed})
    digests = [
        json.loads((entrypoint.folder / f"runs/{name}/summary.json").read_text())["weights_sha256"]
        for name in ("cut", "straight", "whole")
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow_except("Nett")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"TRAIN_MODEL": "own_net:Nett"}, "no Nett in own_net. Did you mean Net?"),
        ({"TRAIN_MODEL": "resnet18"}, "fits nothing of resnet18"),
        ({"TRAIN_WEIGHTS": "nobody.pth"}, "TRAIN_WEIGHTS=nobody.pth: no such file"),
        ({"TRAIN_FREEZE": "heat"}, "no layer is called heat. Did you mean head?"),
        ({"TRAIN_OPTIMIZER": "adamw", "TRAIN_OPTIMIZER_ARGS": "betas=3,4"}, "AdamW refuses them"),
        ({"TRAIN_OPTIMIZER": "adamq"}, "no such optimizer. Did you mean adam"),
        ({"TRAIN_NORMALIZE": "0.5,0.5,0.5/1,1,1"}, "the images have 1 channel"),
        ({"TRAIN_FREEZE": ","}, "names no layer"),
        ({"TRAIN_MODEL_PATH": "nobody"}, "TRAIN_MODEL_PATH=nobody: no such folder"),
        ({"TRAIN_OPTIMIZER": "adamax", "TRAIN_OPTIMIZER_ARGS": "betas=0.9,0.9,0.9"}, "Adamax refuses them"),
        ({"TRAIN_OPTIMIZER": "adamw", "TRAIN_OPTIMIZER_ARGS": "eps"}, "eps has no value"),
        ({"TRAIN_OPTIMIZER": "adagrad", "TRAIN_PARALLELISM": "fsdp"}, "its step needs whole parameters"),
    ],
)
def test_refused_by_the_plan_and_by_the_run(
    entrypoint: Entrypoint, own: dict[str, str], more: dict[str, str], said: str
) -> None:
    for command in ("plan", "train"):
        assert said in entrypoint.error_line(command, env={**own, **more, "LAUNCH_QUIET": "1"})


@pytest.mark.slow_except("Auxiliary")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Auxiliary", "in training the model returns tuple and not a tensor"),
        ("TrainingFails", "in training the model raised ValueError: not ready"),
        ("NoGradient", "the logits have no gradient"),
        ("frozen", "has no parameters to train"),
        ("leaves", "raised SystemExit"),
    ],
)
def test_model_that_cannot_be_trained_is_refused_by_the_plan(
    entrypoint: Entrypoint, code: dict[str, str], name: str, said: str
) -> None:
    assert said in entrypoint.error_line("plan", "--quiet", env={**code, "TRAIN_MODEL": f"own_net:{name}"})


@pytest.mark.slow
@needs_two_cores
def test_parameter_without_gradient_is_refused_over_ranks_only(entrypoint: Entrypoint, code: dict[str, str]) -> None:
    unused = {**code, "TRAIN_MODEL": "own_net:Unused"}
    assert entrypoint("plan", env=unused).code == 0
    assert (
        "spare.weight gets no gradient, and DDP waits for it. Set TRAIN_DDP_FIND_UNUSED_PARAMETERS=1"
        in entrypoint.error_line("plan", env={**unused, **TWO_RANKS})
    )
    assert entrypoint("train", env={**unused, **TWO_RANKS, "TRAIN_DDP_FIND_UNUSED_PARAMETERS": "1"}).code == 0


def test_view_of_a_model_gets_contiguous_images(entrypoint: Entrypoint, code: dict[str, str]) -> None:
    views = {**code, "TRAIN_MODEL": "own_net:Views", "TRAIN_RUN_NAME": "a"}
    assert "warning: TRAIN_CHANNELS_LAST=0 is used: the model has a `view`" in entrypoint.succeed("plan", env=views).out
    line = entrypoint.error_line("train", env={**views, "TRAIN_CHANNELS_LAST": "1"})
    assert "TRAIN_CHANNELS_LAST=1: the model has a `view` that this layout does not allow. Unset it" in line
    entrypoint.succeed("train", env=views)
    assert json.loads((entrypoint.folder / "runs/a/settings.json").read_text())["channels_last"] is False
    model = {name: views[name] for name in ("TRAIN_MODEL", "TRAIN_MODEL_PATH")}
    entrypoint.succeed("evaluate", "runs/a", env=model)


@pytest.mark.versions
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_layer_that_some_steps_skip_is_trained(entrypoint: Entrypoint, code: dict[str, str], optimizer: str) -> None:
    entrypoint.succeed("train", env={**code, "TRAIN_MODEL": "own_net:Skips", "TRAIN_OPTIMIZER": optimizer})


def test_tied_weights_are_saved_and_resumed(entrypoint: Entrypoint, code: dict[str, str]) -> None:
    tied = {**code, "TRAIN_MODEL": "own_net:Tied", "TRAIN_RUN_NAME": "tied"}
    entrypoint.train(env=tied)
    entrypoint.succeed("train", env={**tied, "TRAIN_RESUME": "auto"})
    state = load_file(entrypoint.folder / "runs/tied/model.safetensors")
    assert state["head.weight"].equal(state["again.weight"])


def test_weights_of_the_latest_run_are_those_of_the_run_before(entrypoint: Entrypoint, own: dict[str, str]) -> None:
    entrypoint.succeed("train", env={**own, "TRAIN_WEIGHTS": "runs/latest", "TRAIN_RUN_NAME": "second"})
    settings = json.loads((entrypoint.folder / "runs/second/settings.json").read_text())
    assert settings["weights"] == str(entrypoint.folder / "runs/first")
