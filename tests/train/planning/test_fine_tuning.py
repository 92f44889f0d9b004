"""What a folder of photos and weights decide: the network, and how it is fine-tuned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.factories import make_machine, make_test_plan
from train.data.dataset_info import DatasetInfo
from train.models.cnn import CNN
from train.models.inspection import count_parameters
from train.models.weights_origin import PACKAGED_NETWORK, POOLING_NETWORK, downloaded_weights
from train.planning.recipes import FINE_TUNING, cnn_parameters, warn_of_size, with_recipe
from train.settings import TrainSettings, read_train_settings

FOLDER = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "photos"}
BOTH = (PACKAGED_NETWORK, POOLING_NETWORK)
PHOTO, SMALL, TINY = (3, 224, 224), (3, 32, 32), (3, 16, 16)


def chosen(
    environ: Mapping[str, str], shape: tuple[int, int, int], images: int = 800, at_hand: tuple[str, ...] = BOTH
) -> TrainSettings:
    dataset = DatasetInfo(images, shape, train_images=images)
    plan = make_test_plan(make_machine(4), {})
    return with_recipe(read_train_settings(environ, {}), plan, dataset, at_hand)[0].values


@pytest.mark.parametrize(
    ("shape", "images", "at_hand", "model", "weights", "size"),
    [
        (PHOTO, 800, BOTH, PACKAGED_NETWORK, "pretrained", "auto"),
        (PHOTO, 10**6, BOTH, PACKAGED_NETWORK, "pretrained", "auto"),
        (PHOTO, 800, (POOLING_NETWORK,), POOLING_NETWORK, "pretrained", "auto"),
        (PHOTO, 800, (), POOLING_NETWORK, "", "auto"),
        (SMALL, 800, BOTH, PACKAGED_NETWORK, "pretrained", 128),
        (SMALL, 50_000, BOTH, "cnn", "", "auto"),
        (SMALL, 800, (), "cnn", "", "auto"),
        ((1, 32, 32), 800, BOTH, "cnn", "", "auto"),
        ((1, 224, 224), 800, BOTH, PACKAGED_NETWORK, "pretrained", "auto"),
        (TINY, 800, BOTH, "cnn", "", "auto"),
    ],
)
def test_network_fits_the_images(
    shape: tuple[int, int, int], images: int, at_hand: tuple[str, ...], model: str, weights: str, size: object
) -> None:
    values = chosen(FOLDER, shape, images, at_hand)
    assert (values.model, values.weights, values.image_size) == (model, weights, size)


@pytest.mark.parametrize(
    ("images", "at_hand", "more", "batch"),
    [
        (20, BOTH, {}, 20),
        (40, BOTH, {}, 32),
        (40, (), {}, 40),
        (40, (), {"TRAIN_VAL_SPLIT": "0.1"}, 36),
        (40, (), {"TRAIN_BATCH_SIZE": "50"}, 50),
        (64, (), {}, 64),
        (0, (), {}, 64),
        (20, (), {"TRAIN_DATASET": "synthetic", "TRAIN_DATA_DIR": ""}, 64),
    ],
)
def test_batch_fits_few_images(images: int, at_hand: tuple[str, ...], more: dict[str, str], batch: int) -> None:
    assert chosen(FOLDER | more, PHOTO, images, at_hand).batch_size == batch


@pytest.mark.parametrize(
    "own",
    [
        {"TRAIN_MODEL": "cnn"},
        {"TRAIN_WEIGHTS": "a.pth"},
        {"TRAIN_BIAS": "0"},
        {"TRAIN_TRANSFORMS": "book"},
        {"TRAIN_DATASET": "cifar10"},
        {"TRAIN_EVALUATE": "runs/a"},
        {"TRAIN_PRUNE_RATIO": "0.5"},
    ],
)
def test_own_network_stays(own: dict[str, str]) -> None:
    assert chosen({**FOLDER, **own}, PHOTO).model == "cnn"


def test_weights_are_fine_tuned_and_own_settings_win() -> None:
    resnet = {"TRAIN_MODEL": "resnet50", "TRAIN_WEIGHTS": "pretrained"}
    values = chosen({**FOLDER, **resnet}, PHOTO)
    assert (values.lr, values.head_lr, values.freeze, values.epochs, values.batch_size) == (
        0.0003, 0.01, "statistics", 6, 32,
    )  # fmt: skip
    assert chosen({**FOLDER, **resnet, "TRAIN_FREEZE": "backbone"}, PHOTO).freeze == "backbone"
    assert chosen({**FOLDER, **resnet, "TRAIN_STEPS": "9"}, PHOTO).epochs == TrainSettings().epochs
    sgd = chosen({**FOLDER, **resnet, "TRAIN_OPTIMIZER": "sgd"}, PHOTO)
    assert (sgd.lr, sgd.head_lr, sgd.weight_decay) == ("auto", None, TrainSettings().weight_decay)
    assert chosen({**FOLDER, **resnet}, PHOTO, images=50_000).batch_size == TrainSettings().batch_size
    own_model = chosen({**FOLDER, "TRAIN_MODEL": "a:b", "TRAIN_WEIGHTS": "a.pth"}, PHOTO)
    assert all(getattr(own_model, name) == getattr(TrainSettings(), name) for name in FINE_TUNING)


@pytest.mark.parametrize(
    ("environ", "images", "warned"),
    [({}, 2_000, "cnn has 2,122,186 random weights"), ({}, 3_000, ""), ({"TRAIN_WEIGHTS": "a.pth"}, 10, "")],
)
def test_network_that_is_too_large_is_named(environ: dict[str, str], images: int, warned: str) -> None:
    dataset = DatasetInfo(images, SMALL, train_images=images, classes=tuple("0123456789"))
    said = warn_of_size(read_train_settings({**FOLDER, **environ}, {}), dataset, SMALL, 0)
    assert bool(said) is bool(warned)
    assert all(line.startswith(warned) for line in said)


@pytest.mark.parametrize(("shape", "classes"), [((3, 32, 32), 10), ((1, 28, 28), 10), ((3, 37, 90), 3)])
def test_parameters_of_the_books_network_are_known(shape: tuple[int, int, int], classes: int) -> None:
    assert cnn_parameters(shape, classes) == count_parameters(CNN(shape, classes))


def test_downloaded_weights_are_found(tmp_path: Path) -> None:
    file = tmp_path / "hub/checkpoints/resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    assert downloaded_weights("resnet18", {"TORCH_HOME": str(tmp_path)}) is None
    file.touch()
    assert downloaded_weights("resnet18", {"TORCH_HOME": str(tmp_path)}) == file
    assert downloaded_weights("resnet18", {"XDG_CACHE_HOME": str(tmp_path)}) is None
