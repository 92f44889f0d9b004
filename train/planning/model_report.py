"""Ask a child process what a model, its optimizer and its weights are: the plan itself does without torch.

An answer that no file of the user's can change is kept in the user's cache, by settings and versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.files import atomic_write_text
from entrypoint.core.settings_base import ParsedSettings, variable_name
from train.checkpoint.metadata import read_json
from train.child import ask_child
from train.setting_groups.network import OWN_MODELS, NetworkSettings
from train.setting_groups.optimization import DEFAULT_LR, SGD
from train.settings import ImageShape, TrainSettings

# Networks of ours that grow with the images: from this number of pixels on, memory may not hold the weights.
MANY_PIXELS = 128 * 128
# The settings that the child process reads.
PROBED = frozenset(
    {
        *NetworkSettings.__struct_fields__,
        *("optimizer", "optimizer_args", "lr", "head_lr", "lr_layer_decay", "momentum", "weight_decay", "decay_norms"),
        *("channels_last", "parallelism", "image_size", "eval_size", "size_schedule"),
    }
)


class ModelQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process builds: the trainer's variables, the images' shapes and the classes.

    `shape` is that of training, and `other_shapes` are further ones that the model must take. `memory_bytes` is what a
    rank has, 0 if unknown. `single_shapes` are those of which a micro-batch may be one image, which
    BatchNorm sees alone.
    """

    variables: dict[str, str] = {}
    shape: ImageShape
    classes: tuple[str, ...]
    other_shapes: tuple[ImageShape, ...] = ()
    memory_bytes: int = 0
    single_shapes: tuple[ImageShape, ...] = ()


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process found; `error` and `code` say why the model or its weights cannot be used.

    `weights` says what was loaded. `normalization` is mean and standard deviation of the weights' images, from 0 to 1.
    `without_gradient` are trained parameters that get none. A model that `needs_contiguous` images has a `view` that
    the channels-last memory format does not allow. `trainable` counts the parameters that are trained, out of
    `parameters`, and `batchnorm_layers` the layers of BatchNorm. `default_lr` is the learning rate that the optimizer
    gets unless the user sets one.
    """

    error: str = ""
    code: int = 0
    weights: str = ""
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    parameters: int = 0
    batchnorm_layers: int = 0
    trainable: int = 0
    without_gradient: tuple[str, ...] = ()
    needs_contiguous: bool = False
    single_image_problem: str = ""
    default_lr: float = DEFAULT_LR[SGD]
    has_weight_decay: bool = True


def has_single_images(settings: TrainSettings, ranks: int) -> bool:
    """Return whether a micro-batch may be one image, with BatchNorm's statistics of it alone."""
    shared = ranks > 1 and settings.compute.sync_batchnorm
    return settings.optim.batch_size < 2 * ranks * settings.optim.grad_accum_steps and not shared


def needs_report(given: ParsedSettings[TrainSettings], shape: ImageShape, ranks: int = 1) -> bool:
    """Return whether only the model itself shows if the settings can be used, with images of this shape.

    Optimizers and sizes of recipes are known.
    """
    settings = given.values
    chosen = "optimizer" in given.sources or "optimizer_args" in given.sources or settings.optim.lr == "auto"
    schedule = settings.data.size_schedule and "size_schedule" in given.sources
    large = settings.network.model not in OWN_MODELS or shape[1] * shape[2] > MANY_PIXELS
    optimizer = chosen and (settings.optim.optimizer.lower() not in DEFAULT_LR or settings.optim.optimizer_args)
    return bool(
        large
        or has_single_images(settings, ranks)
        or settings.network.model_args
        or settings.network.weights
        or settings.network.prune_ratio
        or settings.network.freeze
        or schedule
        or settings.data.eval_size
        or optimizer
    )


def ask_about_model(
    given: ParsedSettings[TrainSettings], recipe: Mapping[str, str], question: ModelQuestion, python: str,
    versions: Mapping[str, str], cache: Path | None,
) -> ModelReport:  # fmt: skip
    """Return the report; raises `UserError` if the model, its weights or its optimizer cannot be used.

    `recipe` are the variables that a recipe sets. `cache` is the user's cache folder, or None. The child imports torch,
    which takes some seconds.
    """
    probed = {variable_name(TrainSettings.PREFIX, name) for name in PROBED}
    variables = {name: text for name, text in {**recipe, **given.as_variables()}.items() if name in probed}
    # The standard library's JSON holds paths and classes that are no UTF-8.
    asked = json.dumps(msgspec.to_builtins(msgspec.structs.replace(question, variables=variables))).encode()
    depends_on_files = given.values.network.is_own_model or given.values.network.weights
    digest = hashlib.sha256(asked + msgspec.json.encode(sorted(versions.items()))).hexdigest()[:32]
    file = None if cache is None or depends_on_files else cache / "models" / f"{digest}.json"
    report = read_json(file, ModelReport) if file else None
    if report is None:
        report = run_probe(given.values.network.model, asked, python)
        if file:
            with suppress(OSError):  # a full or read-only cache costs seconds, and no run
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                atomic_write_text(file, msgspec.json.encode(report).decode())
    return report


def run_probe(model: str, asked: bytes, python: str) -> ModelReport:
    """Return the report of a child process; raises `UserError`."""
    try:
        report = ask_child("train.engine.model_probe", asked, ModelReport, python=python)
    except ValueError as error:
        raise UserError(
            f"TRAIN_MODEL={printable(model)}: cannot be built ({error}). Take another model.", ExitCode.MACHINE
        ) from None
    if report.error:
        raise UserError(report.error, ExitCode(report.code))
    return report
