"""Read what a trained model needs to be used again: weights, classes, images' shape, and the settings of its run.

A run that TRAIN_RESUME names by its folder goes on with that run's settings where the user gives none.
This module does without torch, and runs no code that a file names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable, refuse_if
from entrypoint.core.files import is_file, read_regular, resolve
from entrypoint.core.settings_base import ParsedSettings, read_settings, rules_of, variable_name
from entrypoint.plan.model import Decision
from train.checkpoint.metadata import METADATA_FILE, Normalization, saved_settings
from train.models.weights_origin import find_weights_file, read_origin
from train.planning.export_formats import AVERAGE_FILE
from train.planning.run_selection import SETTINGS_FILE
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
    if settings.network.is_own_model and model != settings.network.model:
        raise code_error(f"{variable}={printable(text)}", "model", settings.network.model)
    return TrainedRun(path, settings, origin.shape, origin.classes, origin.normalization)


def check_model(trained: TrainedRun, model: str, source: str) -> None:
    """Raise `UserError` if the user names another model than the trained one; `source` is how."""
    if model not in ("", trained.settings.network.model):
        raise UserError(
            f"{printable(source)}: the weights are of {printable(trained.settings.network.model)}. Unset it."
        )


def average_file(trained: TrainedRun) -> Path:
    """Return the file of an average: next to the model, and for one in a checkpoint in the folder of its run."""
    folder = trained.weights.parent
    return (folder.parents[1] if is_file(folder / METADATA_FILE) else folder) / AVERAGE_FILE


def code_error(source: str, field: str, code: str) -> UserError:
    """Return the error for code of the user's that a run's files name: they may be a stranger's."""
    what, folder = ("model", " and --model-path") if field == "model" else ("data set", "")
    return UserError(
        f"{source}: its {what} is the code {printable(code)}, which a file may not choose. If you trust it, name it:"
        f" --{field}={printable(code)}{folder}, which Python's functions have as arguments."
    )


def with_trained_settings(
    given: ParsedSettings[TrainSettings],
) -> tuple[ParsedSettings[TrainSettings], TrainedRun, dict[str, str]]:
    """Return the settings of an evaluation: the run's where the user gave none, and the variables that say so."""
    own = given.values
    trained = read_trained_run(
        own.run.evaluate, "TRAIN_EVALUATE", own.network.model if "model" in given.sources else ""
    )
    check_model(trained, own.network.model if "model" in given.sources else "", given.sources.get("model", ""))
    adopted = [name for name, rules in rules_of(TrainSettings).items() if rules.evaluate == "adopted"]
    adopted += ["batch_size"] if own.run.average else []
    taken = {name: trained.settings.value(name) for name in adopted if name not in given.sources}
    if trained.settings.data.is_own_dataset and "dataset" in taken:
        raise code_error(f"TRAIN_EVALUATE={printable(own.run.evaluate)}", "dataset", trained.settings.data.dataset)
    if "data_dir" in given.sources and trained.settings.data.dataset in ("digits", "synthetic"):  # which have no folder
        taken["dataset"] = "imagefolder"
    if "eval_size" in given.sources and taken.get("image_size") == "auto":
        taken["image_size"] = min(trained.shape[1:])
    values = own.with_values(**taken)
    defaults = TrainSettings()
    changed = {
        name: value
        for name, value in taken.items()
        if value is not None and (name == "dataset" or value != defaults.value(name))
    }
    return replace(given, values=values), trained, as_variables(changed)


def as_variables(values: Mapping[str, object]) -> dict[str, str]:
    """Return values of settings, by field, as the variables that set them."""
    return {
        variable_name("TRAIN_", name): str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


# What belongs to one start of a run, not to the run; the folder is that of the run, unless the user names another.
OF_A_START = ("resume", "resume_allow_changed", "run_name", "output_dir", "max_minutes", "evaluate")


def with_resumed_settings(
    asked: ParsedSettings[TrainSettings], environ: Mapping[str, str], flags: Mapping[str, str]
) -> tuple[ParsedSettings[TrainSettings], dict[str, str], tuple[Decision, ...]]:
    """Return the settings of the run to continue, the variables that say so, and the decision.

    Nothing changes unless TRAIN_RESUME is the folder of a run. What the user sets is changed, as far as the checkpoint
    can be mapped. Raises `UserError` for settings that cannot be read, and as `read_trained_run` does for own code.
    """
    folder = Path(asked.values.run.resume)
    if asked.values.run.evaluate or not is_file(folder / SETTINGS_FILE):
        return asked, {}, ()
    variables = settings_of_run(folder, asked)
    parsed = read_settings(TrainSettings, {**environ, **variables}, flags)
    changed = [source for name, source in asked.sources.items() if name not in OF_A_START]
    optim, output, run = parsed.values.optim, printable(asked.sources.get("output_dir", "")), asked.values.run
    refuse_if(
        {
            f"{output}: the run goes on in {printable(folder)}. Leave it out, or set TRAIN_RUN_NAME for a new run.": (
                output
                and not run.run_name
                and not asked.url("output_dir")
                and resolve(run.output_dir) != resolve(folder).parent
            )
        }
    )
    schedule = (
        f"; the schedule {optim.schedule} covers {optim.steps or optim.epochs} {'steps' if optim.steps else 'epochs'}"
        " from the first on, so the rate may rise"
        if {"epochs", "steps"} & set(asked.sources)
        else ""
    )
    reason = f"settings of that run{', but ' if changed else ''}{', '.join(map(printable, changed))}{schedule}"
    written = {name: f"{printable(folder)}: {name}={text}" for name, text in parsed.texts.items()}
    decision = Decision("resume", printable(folder), reason)
    return msgspec.structs.replace(parsed, sources={**written, **asked.sources}), variables, (decision,)


def settings_of_run(folder: Path, asked: ParsedSettings[TrainSettings]) -> dict[str, str]:
    """Return a run's settings as variables where the user gives none."""
    what = f"TRAIN_RESUME={printable(folder)}"
    try:
        saved = saved_settings(json.loads(read_regular(folder / SETTINGS_FILE)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        line = f"{what}: its {SETTINGS_FILE} cannot be read ({printable(error)}). Name one of its checkpoints."
        raise UserError(line) from None
    for field, is_code in (("model", saved.network.is_own_model), ("dataset", saved.data.is_own_dataset)):
        if is_code and field not in asked.sources:
            raise code_error(what, field, saved.value(field))
    defaults, left_out = TrainSettings(), {*OF_A_START, *asked.sources}
    left_out |= {"epochs", "steps"} if {"epochs", "steps"} & left_out else set()
    texts = {
        name: value
        for name in rules_of(TrainSettings)
        if name not in left_out and (value := saved.value(name)) is not None
        if name == "dataset" or value != defaults.value(name)  # the folder could decide otherwise
    }
    recipe = {} if "recipe" in asked.sources else {"recipe": "default"}  # its values are among the run's settings
    return as_variables({**texts, **recipe})
