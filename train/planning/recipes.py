"""Recipes: sets of settings under a name, which a user's own settings win over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from entrypoint.core.setting_types import parse_value
from entrypoint.core.settings_base import ParsedSettings, annotations_of, variable_name
from entrypoint.plan.model import Decision, Plan, Source
from train.settings import TrainSettings

# What airbench94 (arXiv:2404.00498) and this trainer have in common, and its rates for the mean of a batch's losses.
AIRBENCH = {
    "batch_size": "512",
    "momentum": "0.85",
    "label_smoothing": "0.2",
    "transforms": "flip-crop",
    "schedule": "onecycle",
    "precision": "auto",
    "lr": "1",
    "weight_decay": "0.001",
}
# On two cores of an AMD EPYC eight epochs gave 86.4 % in 275 s; nine gave 87.3 % in 330 s, as long as the book's loop
# takes there.
# By device: a CPU has minutes where a GPU has seconds. Airbench's ten epochs rest on more: an average of the weights to
# look ahead to, alternating flips, shifted test images.
RECIPES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "default": {"cpu": {}, "cuda": {}},
    "speedrun": {
        "cpu": {**AIRBENCH, "model": "speednet-half", "epochs": "8"},
        "cuda": {**AIRBENCH, "model": "speednet", "epochs": "20"},
    },
}


def with_recipe(given: ParsedSettings[TrainSettings], plan: Plan) -> tuple[ParsedSettings[TrainSettings], Plan]:
    """Return settings and plan with the recipe's values for the plan's device, where a user gave none of their own.

    They travel to the ranks as variables, so that a run's folder lists and repeats them one by one.
    """
    name = given.values.recipe
    chosen = {field: text for field, text in RECIPES[name][plan.device].items() if field not in given.sources}
    if not chosen:
        return given, plan
    types = annotations_of(TrainSettings)
    values = msgspec.structs.replace(
        given.values, **{field: parse_value(text, types[field]) for field, text in chosen.items()}
    )
    text = " ".join(f"{field}={text}" for field, text in sorted(chosen.items()))
    variables = {variable_name("TRAIN_", field): text for field, text in chosen.items()}
    decision = Decision("recipe", name, text, Source.USER, given.sources["recipe"])
    plan = replace(plan.with_variables(variables), decisions=(*plan.decisions, decision))
    return replace(given, values=values), plan
