"""Read what a trained model needs to be used again: weights, classes, images' shape, and the settings of its run.

This module does without torch, and runs no code that a file names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable
from entrypoint.core.settings_base import ParsedSettings, rules_of, variable_name
from train.checkpoint.compare import saved_settings
from train.checkpoint.metadata import Normalization
from train.models.weights_origin import find_weights_file, read_origin
from train.settings import ImageShape, TrainSettings

# Classes that are listed, worst first, and those that an error names.
LISTED_CLASSES = 10


@dataclass(frozen=True)
class TrainedRun:
    """A trained model on disk: `settings` are those of its run, `shape` that of its decoded images."""

    weights: Path
    settings: TrainSettings
    shape: ImageShape
    classes: tuple[str, ...]
    normalization: Normalization

    def order_of(self, classes: Sequence[str], setting: str) -> list[int]:
        """Return the model's number of each class of the data; raises `UserError` for one that it does not know.

        `setting` is what names the model, or the data.
        """
        numbers = {name: index for index, name in enumerate(self.classes)}
        unknown = [name for name in classes if name not in numbers]
        if unknown:
            raise UserError(
                f"{setting}: the model knows no class {printable(unknown[0])}; it knows"
                f" {printable(', '.join(self.classes[:LISTED_CLASSES]))}. Rename the class, or remove it."
            )
        return [numbers[name] for name in classes]


def read_trained_run(text: str, variable: str, model: str = "") -> TrainedRun:
    """Return the trained model behind a path: a run folder, a checkpoint, or a `model.safetensors` of a run.

    `model` is the user's own TRAIN_MODEL, or empty. Raises `UserError` for a file of another program, and for a model
    that is made by code, unless the user names that code: a stranger's file must not choose what is imported.
    """
    path = find_weights_file(text, variable)
    origin = read_origin(path)
    if not (origin.classes and origin.shape and origin.normalization and origin.settings):
        raise UserError(
            f"{variable}={printable(text)}: {printable(path.name)} does not say its classes and settings. Name a run"
            " folder, or a file that this trainer wrote."
        )
    try:
        settings = saved_settings(origin.settings)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise UserError(
            f"{variable}={printable(text)}: its settings cannot be read ({printable(str(error))}). Use the version"
            " that wrote it."
        ) from None
    if settings.is_own_model and model != settings.model:
        raise code_error(f"{variable}={printable(text)}", "model", settings.model)
    return TrainedRun(path, settings, origin.shape, origin.classes, origin.normalization)


def code_error(source: str, field: str, code: str) -> UserError:
    """Return the error for code of the user's that a run's files name: they may be a stranger's."""
    what, folder = ("model", " and TRAIN_MODEL_PATH") if field == "model" else ("data set", "")
    return UserError(
        f"{source}: its {what} is the code {printable(code)}, which a file may not choose. If you trust it, set"
        f" TRAIN_{field.upper()}={printable(code)}{folder}."
    )


def with_trained_settings(
    given: ParsedSettings[TrainSettings],
) -> tuple[ParsedSettings[TrainSettings], TrainedRun, dict[str, str]]:
    """Return the settings of an evaluation: the run's where the user gave none, and the variables that say so."""
    own = given.values
    trained = read_trained_run(own.evaluate, "TRAIN_EVALUATE", own.model if "model" in given.sources else "")
    if "model" in given.sources and own.model != trained.settings.model:
        raise UserError(f"{given.sources['model']}: the weights are of {printable(trained.settings.model)}. Unset it.")
    adopted = [name for name, rules in rules_of(TrainSettings).items() if rules.evaluate == "adopted"]
    taken = {name: getattr(trained.settings, name) for name in adopted if name not in given.sources}
    if trained.settings.is_own_dataset and "dataset" in taken:
        raise code_error(f"TRAIN_EVALUATE={printable(own.evaluate)}", "dataset", trained.settings.dataset)
    if "data_dir" in given.sources and trained.settings.dataset in ("digits", "synthetic"):  # which have no folder
        taken["dataset"] = "imagefolder"
    if "eval_size" in given.sources and taken.get("image_size") == "auto":
        taken["image_size"] = min(trained.shape[1:])
    values = msgspec.structs.replace(own, **taken)
    defaults = TrainSettings()
    changed = {
        name: value
        for name, value in taken.items()
        if value is not None and (name == "dataset" or value != getattr(defaults, name))
    }
    return replace(given, values=values), trained, as_variables(changed)


def as_variables(values: Mapping[str, object]) -> dict[str, str]:
    """Return values of settings, by field, as the variables that set them."""
    return {
        variable_name("TRAIN_", name): str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }
