"""Recipes and fine-tuning: what they set by device and by images, and that a user's own settings win."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoint.cli.command_table import all_groups
from entrypoint.cli.config_file import read_config
from entrypoint.core.settings_base import describe_settings
from entrypoint.plan.model import Plan
from tests.conftest import Entrypoint
from tests.factories import make_machine, make_test_plan
from train.data.dataset_info import DatasetInfo
from train.models.cnn import CNN
from train.models.inspection import count_parameters
from train.models.weights_origin import PACKAGED_NETWORK, POOLING_NETWORK, downloaded_weights
from train.planning.model_report import needs_report
from train.planning.recipes import FINE_TUNING, FOLDER, cnn_parameters, read_recipe, warn_of_size, with_recipe
from train.settings import TrainSettings, read_train_settings

CIFAR = DatasetInfo(100, (3, 32, 32), train_images=100)


def with_it(environ: Mapping[str, str], shape: tuple[int, int, int] = (3, 32, 32)) -> tuple[TrainSettings, Plan]:
    dataset = DatasetInfo(100, shape, train_images=100)
    given, made = with_recipe(read_train_settings(environ, {}), make_test_plan(make_machine(4), {}), dataset)
    return given.values, made


def test_default_recipe_sets_nothing() -> None:
    values, made = with_it({})
    assert values == TrainSettings()
    assert made == make_test_plan(make_machine(4), {})


def test_recipe_sets_only_unset_settings() -> None:
    values, made = with_it({"TRAIN_RECIPE": "speedrun", "TRAIN_EPOCHS": "3"})
    assert (values.network.model, values.optim.epochs) == ("speednet-half", 3)
    assert made.environment.variables["TRAIN_MODEL"] == "speednet-half"
    assert "TRAIN_EPOCHS" not in made.environment.variables
    (reported,) = [one for one in made.decisions if one.key == "recipe"]
    assert reported.value == "speedrun"
    assert reported.text.startswith("(set by you) TRAIN_RECIPE=speedrun; batch_size=")
    assert "epochs" not in reported.text


def test_recipe_does_not_change_what_is_evaluated() -> None:
    values, made = with_it({"TRAIN_RECIPE": "speedrun", "TRAIN_EVALUATE": "runs/a"})
    assert (values.network.model, made.decisions) == ("cnn", make_test_plan(make_machine(4), {}).decisions)


def test_own_optimizer_has_its_own_defaults() -> None:
    values, made = with_it({"TRAIN_RECIPE": "speedrun", "TRAIN_OPTIMIZER": "sgd"})
    assert (values.optim.optimizer, values.optim.optimizer_args, values.optim.lr) == ("sgd", "", "auto")
    assert values.optim.weight_decay == TrainSettings().optim.weight_decay
    assert values.optim.label_smoothing == 0.2
    assert "TRAIN_LR" not in made.environment.variables


def test_naming_the_recipes_optimizer_keeps_its_rates() -> None:
    values, _ = with_it({"TRAIN_RECIPE": "speedrun", "TRAIN_OPTIMIZER": "timm:muon"})
    assert (values.optim.lr, values.optim.optimizer_args) == (0.04, "momentum=0.6 nesterov=true")


@pytest.mark.parametrize(
    ("shape", "environ", "schedule"),
    [
        ((3, 32, 32), {}, "20:0.6,32"),
        ((1, 32, 48), {}, "20:0.6,32"),
        ((3, 28, 28), {}, ""),
        ((3, 224, 224), {}, ""),
        ((3, 32, 32), {"TRAIN_TRANSFORMS": "book"}, ""),
        # Another model may take images of one size only.
        ((3, 32, 32), {"TRAIN_MODEL": "cnn"}, ""),
        ((3, 32, 32), {"TRAIN_MODEL": "speednet-half"}, "20:0.6,32"),
        ((3, 32, 32), {"TRAIN_SIZE_SCHEDULE": "16:0.5,32"}, "16:0.5,32"),
        ((3, 40, 40), {"TRAIN_IMAGE_SIZE": "32", "TRAIN_EVAL_SIZE": "40"}, "20:0.6,32"),
        ((3, 32, 32), {"TRAIN_IMAGE_SIZE": "24", "TRAIN_EVAL_SIZE": "32"}, ""),
    ],
)
def test_images_of_other_sizes_are_not_resized(
    shape: tuple[int, int, int], environ: dict[str, str], schedule: str
) -> None:
    values, made = with_it({"TRAIN_RECIPE": "speedrun", **environ}, shape)
    assert values.data.size_schedule == schedule
    assert made.environment.variables.get("TRAIN_SIZE_SCHEDULE", "") == (
        "" if "TRAIN_SIZE_SCHEDULE" in environ else schedule
    )


def test_recipe_alone_builds_no_model_to_plan() -> None:
    base = make_test_plan(make_machine(4), {})
    for environ, needed in (({}, False), ({"TRAIN_SIZE_SCHEDULE": "20:0.5,32"}, True)):
        given = read_train_settings({"TRAIN_RECIPE": "speedrun", **environ}, {})
        assert needs_report(with_recipe(given, base, CIFAR)[0], CIFAR.shape) is needed


def test_empty_flag_keeps_images_of_one_size() -> None:
    given = read_train_settings({"TRAIN_RECIPE": "speedrun"}, {"TRAIN_SIZE_SCHEDULE": ""})
    chosen, _ = with_recipe(given, make_test_plan(make_machine(4), {}), CIFAR)
    assert (chosen.values.data.size_schedule, chosen.values.network.model) == ("", "speednet-half")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"TRAIN_DATASET": "synthetic", "TRAIN_PARALLELISM": "fsdp"},
            r"(TRAIN_OPTIMIZER=timm:muon) and TRAIN_PARALLELISM=fsdp contradict",
        ),
        ({"TRAIN_DATASET": "digits"}, "(TRAIN_MODEL=speednet-half): needs images of 9 pixels, and these have 8x8"),
    ],
)
def test_what_a_recipe_cannot_do_names_the_recipe(entrypoint: Entrypoint, env: dict[str, str], said: str) -> None:
    pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    for words in (("plan", "train"), ("train",)):
        assert f"TRAIN_RECIPE=speedrun {said}" in entrypoint.error_line(
            *words, env={"TRAIN_RECIPE": "speedrun", "TRAIN_BATCH_SIZE": "64", **env}
        )


def test_every_recipe_has_a_file_of_settings_and_a_name() -> None:
    names = {path.stem for path in FOLDER.iterdir()}
    (about,) = [setting for setting in describe_settings(TrainSettings) if setting.name == "recipe"]
    assert {*names, "default"} == set(about.choices)


@pytest.mark.parametrize("name", [path.stem for path in FOLDER.iterdir()])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recipes_contain_only_settings(name: str, device: str) -> None:
    recipe = read_recipe(name, device)
    fields = {f"TRAIN_{field.upper()}": text for field, text in recipe.items()}
    assert set(read_train_settings(fields, {}).sources) == set(recipe)


@pytest.mark.parametrize("name", ["finetune", "imagenet", "vit"])
def test_recipe_is_a_file_of_settings_to_copy(name: str) -> None:
    assert read_config(FOLDER / f"{name}.toml", all_groups())


def test_recipe_of_another_size_of_data() -> None:
    values, _ = with_it({"TRAIN_RECIPE": "imagenet", "TRAIN_STEPS": "9"}, PHOTO)
    assert (values.network.model, values.optim.lr, values.optim.epochs, values.optim.steps) == (
        "resnet50",
        0.4,
        TrainSettings().optim.epochs,
        9,
    )
    own, _ = with_it({"TRAIN_RECIPE": "vit", "TRAIN_MODEL": "resnet18"}, PHOTO)
    assert (own.network.model_args, own.optim.optimizer, own.data.mixup_alpha) == ("", "timm:lamb", 0.8), (
        "the arguments are the model's"
    )


def test_fine_tuning_by_name_takes_weights_from_where_they_are() -> None:
    asked = {**FOLDER_SETTINGS, "TRAIN_RECIPE": "finetune"}
    values = chosen(asked, PHOTO)
    assert (values.network.model, values.network.weights, values.optim.epochs) == (PACKAGED_NETWORK, "pretrained", 6)
    values = chosen(asked, PHOTO, at_hand=())
    assert (values.network.model, values.network.weights) == (POOLING_NETWORK, "pretrained"), "which is downloaded"
    values = chosen({**asked, "TRAIN_MODEL": "a:b", "TRAIN_WEIGHTS": "a.pth"}, PHOTO)
    assert (values.network.model, values.network.weights, values.optim.lr) == ("a:b", "a.pth", 0.0003)


@pytest.mark.versions
@pytest.mark.launch
@pytest.mark.slow
def test_recipe_run_records_its_settings(entrypoint: Entrypoint) -> None:
    small = {
        "TRAIN_DATASET": "synthetic",
        "TRAIN_SYNTHETIC_IMAGES": "1024",
        "TRAIN_EPOCHS": "2",
        "TRAIN_BATCH_SIZE": "32",
    }
    pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    summary = entrypoint.train("--recipe=speedrun", env=small)
    assert summary["model"] == "speednet-half"
    assert summary["test_accuracy"] > 90
    settings = json.loads((entrypoint.folder / "runs/latest/settings.json").read_text())
    assert (settings["recipe"], settings["model"], settings["epochs"]) == ("speedrun", "speednet-half", 2)


FOLDER_SETTINGS = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "photos"}
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
    values = chosen(FOLDER_SETTINGS, shape, images, at_hand)
    assert (values.network.model, values.network.weights, values.data.image_size) == (model, weights, size)


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
    assert chosen(FOLDER_SETTINGS | more, PHOTO, images, at_hand).optim.batch_size == batch


@pytest.mark.parametrize(
    "own",
    [
        {"TRAIN_MODEL": "cnn"},
        {"TRAIN_WEIGHTS": "a.pth"},
        {"TRAIN_TRANSFORMS": "book"},
        {"TRAIN_DATASET": "cifar10"},
        {"TRAIN_EVALUATE": "runs/a"},
        {"TRAIN_PRUNE_RATIO": "0.5"},
    ],
)
def test_own_network_stays(own: dict[str, str]) -> None:
    assert chosen({**FOLDER_SETTINGS, **own}, PHOTO).network.model == "cnn"


def test_weights_are_fine_tuned_and_own_settings_win() -> None:
    resnet = {"TRAIN_MODEL": "resnet50", "TRAIN_WEIGHTS": "pretrained"}
    values = chosen({**FOLDER_SETTINGS, **resnet}, PHOTO)
    optim = values.optim
    assert (optim.lr, optim.head_lr, optim.epochs, optim.batch_size) == (0.0003, 0.01, 6, 32)
    assert values.network.freeze == "statistics"
    assert chosen({**FOLDER_SETTINGS, **resnet, "TRAIN_FREEZE": "backbone"}, PHOTO).network.freeze == "backbone"
    assert chosen({**FOLDER_SETTINGS, **resnet, "TRAIN_STEPS": "9"}, PHOTO).optim.epochs == TrainSettings().optim.epochs
    defaults = TrainSettings().optim
    sgd = chosen({**FOLDER_SETTINGS, **resnet, "TRAIN_OPTIMIZER": "sgd"}, PHOTO)
    assert (sgd.optim.lr, sgd.optim.head_lr, sgd.optim.weight_decay) == ("auto", None, defaults.weight_decay)
    assert chosen({**FOLDER_SETTINGS, **resnet}, PHOTO, images=50_000).optim.batch_size == defaults.batch_size
    own_model = chosen({**FOLDER_SETTINGS, "TRAIN_MODEL": "a:b", "TRAIN_WEIGHTS": "a.pth"}, PHOTO)
    assert all(
        own_model.value(name) == TrainSettings().value(name) for name in read_recipe(FINE_TUNING) if name != "weights"
    )


@pytest.mark.parametrize(
    ("environ", "images", "warned"),
    [({}, 2_000, "cnn has 2,122,186 random weights"), ({}, 3_000, ""), ({"TRAIN_WEIGHTS": "a.pth"}, 10, "")],
)
def test_network_that_is_too_large_is_named(environ: dict[str, str], images: int, warned: str) -> None:
    dataset = DatasetInfo(images, SMALL, train_images=images, classes=tuple("0123456789"))
    said = warn_of_size(read_train_settings({**FOLDER_SETTINGS, **environ}, {}), dataset, SMALL, 0)
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
