"""Ask a child process what a model and its weights are: the plan itself does without torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from entrypoint.core.console import last_error_line
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.settings_base import ParsedSettings
from train.settings import ImageShape, TrainSettings

PROBE_TIMEOUT_S = 600


class ModelQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process builds: the trainer's variables, the images' shapes and the classes.

    `shape` is that of training, and `other_shapes` are further ones that the model must take.
    """

    variables: dict[str, str]
    shape: ImageShape
    classes: tuple[str, ...]
    other_shapes: tuple[ImageShape, ...] = ()


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process found; `error` and `code` say why the model or its weights cannot be used.

    `weights` says what was loaded. `normalization` is mean and standard deviation of the weights' images, from 0 to 1.
    `without_gradient` are trained parameters that get none. `trainable` counts the parameters that are trained, out of
    `parameters`. `bytes_per_image` is what training keeps of an image until its backward pass, `fixed_bytes` what the
    weights, gradients and the optimizer take; 0 where nobody asked.
    """

    error: str = ""
    code: int = 0
    weights: str = ""
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    parameters: int = 0
    trainable: int = 0
    without_gradient: tuple[str, ...] = ()
    bytes_per_image: int = 0
    fixed_bytes: int = 0


def portable(text: str) -> str:
    """Return a text with a character for each of its bytes: JSON cannot hold a path of any other bytes."""
    return os.fsencode(text).decode("latin-1")


def original(text: str) -> str:
    """Return the text that `portable` was given."""
    return os.fsdecode(text.encode("latin-1"))


def needs_report(given: ParsedSettings[TrainSettings]) -> bool:
    """Return whether only the model itself shows if the settings can be used.

    Optimizers and sizes of recipes are known.
    """
    settings = given.values
    chosen = "optimizer" in given.sources or "optimizer_args" in given.sources
    plain = not chosen or (settings.optimizer in ("sgd", "adam", "adamw") and not settings.optimizer_args)
    schedule = settings.size_schedule and "size_schedule" in given.sources
    sizes = schedule or settings.eval_size or settings.grad_accum_steps == "auto"
    return bool(":" in settings.model or settings.weights or settings.freeze or sizes or not plain)


def ask_about_model(
    given: ParsedSettings[TrainSettings], recipe: Mapping[str, str], shapes: Sequence[ImageShape],
    classes: tuple[str, ...], python: str,
) -> ModelReport:  # fmt: skip
    """Return the report of a child process; raises `UserError` if the model or its weights cannot be used.

    `recipe` are the variables that a recipe sets. The first of `shapes` is that of training. The child imports torch,
    which takes some seconds.
    """
    variables = {**recipe, **given.as_variables()}
    shape, *others = shapes
    question = msgspec.json.encode(
        ModelQuestion(
            variables={name: portable(value) for name, value in variables.items()},
            shape=shape,
            classes=tuple(map(portable, classes)),
            other_shapes=tuple(others),
        )
    )
    command = [python, "-I", "-m", "train.engine.model_probe"]
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"TRAIN_MODEL={given.values.model}: was not built within {PROBE_TIMEOUT_S} s. Take a smaller model.",
            ExitCode.MACHINE,
        ) from None
    try:
        report = msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=ModelReport)
    except msgspec.MsgspecError:
        cause = last_error_line(done.stderr.decode(errors="replace"), f"exit code {done.returncode}")
        raise UserError(
            f"TRAIN_MODEL={given.values.model}: cannot be built ({cause}). Take another model.", ExitCode.MACHINE
        ) from None
    if report.error:
        raise UserError(report.error, ExitCode(report.code))
    return report
