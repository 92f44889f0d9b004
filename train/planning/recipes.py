"""Recipes: sets of settings under a name, which a user's own settings win over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec

import msgspec
from msgspec.structs import replace

from entrypoint.core.errors import UserError
from entrypoint.core.setting_types import parse_value
from entrypoint.core.settings_base import ParsedSettings, annotations_of, variable_name
from entrypoint.plan.model import Plan, make_decision
from train.data.dataset_info import DatasetInfo
from train.planning.fine_tuning import fine_tuning_values
from train.planning.image_sizes import image_sizes
from train.setting_groups.model import TIMM_PREFIX
from train.settings import TrainSettings

# The network, label smoothing and test-time augmentation of airbench94 (arXiv:2404.00498). Muon (arXiv:2502.16982) is
# what gains most over its SGD: benchmarks/README.md has the worth of each part.
AIRBENCH = {
    "optimizer": "timm:muon",
    "optimizer_args": "momentum=0.6 nesterov=true",
    "batch_size": "1024",
    "lr": "0.03",
    "weight_decay": "0.5",
    "decay_norms": "0",
    "schedule": "onecycle",
    "warmup": "0.1",
    "label_smoothing": "0.2",
    "transforms": "flip-crop",
    "test_time_augment": "flip-shift",
    "eval_every": "1000",
    "precision": "auto",
}
# Settings that fit a recipe's own optimizer, and no other one that a user chooses.
OF_THE_OPTIMIZER = ("optimizer_args", "lr", "head_lr", "weight_decay", "decay_norms")
# For a CPU, which has minutes where a GPU has seconds: half the filters, and smaller images first, so that more epochs
# fit into them. The sizes end with CIFAR-10's, so images of another size are not resized.
CIFAR_SIDE = 32
ON_CPU = {
    "model": "speednet-half",
    "batch_size": "512",
    "lr": "0.04",
    "weight_decay": "0.2",
    "epochs": "10",
    "size_schedule": f"20:0.6,{CIFAR_SIDE}",
}
# By device.
RECIPES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "speedrun": {
        "cpu": {**AIRBENCH, **ON_CPU},
        "cuda": {**AIRBENCH, "model": "speednet", "epochs": "10"},
    },
}


def with_recipe(
    given: ParsedSettings[TrainSettings], plan: Plan, dataset: DatasetInfo, at_hand: Collection[str] = ()
) -> tuple[ParsedSettings[TrainSettings], Plan]:
    """Return settings and plan with the recipe's values for the plan's device, where a user gave none of their own.

    Without a recipe the data set decides, and the networks `at_hand`, whose weights need no download. The sizes of a
    schedule are for CIFAR-10 and the recipe's own model, so another one has none.
    The values travel to the ranks as variables, so that a run's folder lists and repeats them one by one.
    Raises `UserError` for an optimizer that is not installed.
    """
    name = given.values.recipe
    by_data = {} if "recipe" in given.sources else fine_tuning_values(given, dataset, at_hand)
    recipe = RECIPES[name][plan.device] if name in RECIPES else by_data
    needs = recipe.get("optimizer", "")
    if "optimizer" not in given.sources and needs.startswith(TIMM_PREFIX) and find_spec("timm") is None:
        raise UserError(
            f"{given.sources['recipe']}: its optimizer {needs} needs timm, which is not installed here. `pip install"
            " timm`, or set TRAIN_OPTIMIZER=sgd."
        )
    has_own = "optimizer" in given.sources and given.values.optimizer.lower() != needs
    left_out = {*given.sources, *(OF_THE_OPTIMIZER if has_own else ())}
    has_own_model = "model" in given.sources and given.values.model != recipe.get("model")
    has_side = min(image_sizes(given.values, dataset.shape).train[1:]) == CIFAR_SIDE
    if has_own_model or not has_side or given.values.transforms == "book":
        left_out.add("size_schedule")
    chosen = {field: text for field, text in recipe.items() if field not in left_out}
    if not chosen:
        return given, plan
    types = annotations_of(TrainSettings)
    values = msgspec.structs.replace(
        given.values, **{field: parse_value(text, types[field]) for field, text in chosen.items()}
    )
    text = " ".join(f"{field}={text}" for field, text in sorted(chosen.items()))
    variables = {variable_name("TRAIN_", field): text for field, text in chosen.items()}
    value = name if name in RECIPES else "fine-tuning" if "lr" in chosen else "photos"
    decision = make_decision("recipe", value, "your own settings win", text, given.sources.get("recipe", ""))
    plan = replace(plan.with_variables(variables), decisions=(*plan.decisions, decision))
    return replace(given, values=values), plan
