"""Recipes: what they set by device, and that a user's own settings win."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from entrypoint.plan.model import Plan
from tests.conftest import Entrypoint
from tests.factories import make_machine, make_test_plan
from train.data.dataset_info import DatasetInfo
from train.planning.model_report import needs_report
from train.planning.recipes import RECIPES, with_recipe
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
    assert (values.model, values.epochs) == ("speednet-half", 3)
    assert made.environment.variables["TRAIN_MODEL"] == "speednet-half"
    assert "TRAIN_EPOCHS" not in made.environment.variables
    (reported,) = [one for one in made.decisions if one.key == "recipe"]
    assert reported.value == "speedrun"
    assert reported.text.startswith("(set by you) TRAIN_RECIPE=speedrun; batch_size=")
    assert "epochs" not in reported.text


def test_own_optimizer_has_its_own_defaults() -> None:
    values, made = with_it({"TRAIN_RECIPE": "speedrun", "TRAIN_OPTIMIZER": "sgd"})
    assert (values.optimizer, values.optimizer_args, values.lr) == ("sgd", "", "auto")
    assert values.weight_decay == TrainSettings().weight_decay
    assert values.label_smoothing == 0.2
    assert "TRAIN_LR" not in made.environment.variables


def test_naming_the_recipes_optimizer_keeps_its_rates() -> None:
    values, _ = with_it({"TRAIN_RECIPE": "speedrun", "TRAIN_OPTIMIZER": "timm:muon"})
    assert (values.lr, values.optimizer_args) == (0.04, "momentum=0.6 nesterov=true")


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
    assert values.size_schedule == schedule
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
    assert (chosen.values.size_schedule, chosen.values.model) == ("", "speednet-half")


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
        result = entrypoint(*words, env={"TRAIN_RECIPE": "speedrun", "TRAIN_BATCH_SIZE": "64", **env})
        assert result.code == 2
        (line,) = result.error_lines
        assert f"TRAIN_RECIPE=speedrun {said}" in line


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recipes_contain_only_settings(name: str, device: str) -> None:
    fields = {f"TRAIN_{field.upper()}": text for field, text in RECIPES[name][device].items()}
    assert set(read_train_settings(fields, {}).sources) == set(RECIPES[name][device])


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
