"""Models that the user brings: a function by import path, and timm's models by name."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from entrypoint.core.errors import UserError, did_you_mean, first_line, printable
from train.setting_groups.model import TIMM_PREFIX, ModelSettings
from train.settings import ImageShape


def factory_model(settings: ModelSettings, shape: ImageShape, classes: int) -> nn.Module:
    """Return what the user's function makes; raises `UserError` if it cannot be called or makes no model.

    It is called with `num_classes`, and with `in_channels` and `image_size` if it takes them.
    """
    name = settings.model
    factory = import_factory(name, settings.model_path)
    given = {"num_classes": classes, "in_channels": shape[0], "image_size": shape[1]}
    try:
        accepted = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        accepted = {}  # type: ignore[assignment]  # a callable of a compiled module says nothing
    if accepted and "num_classes" not in accepted and not takes_any_name(accepted):
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: takes no num_classes but ({printable(', '.join(accepted))}). Define it as"
            " `def model(num_classes): ...`."
        )
    arguments = {key: value for key, value in given.items() if key in accepted or key == "num_classes"}
    try:
        model = factory(**arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(f"TRAIN_MODEL={printable(name)}: {describe_failure(error)}. Correct the function.") from None
    if not isinstance(model, nn.Module):
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: returns {printable(type(model).__name__)} and not an nn.Module. Return"
            " the model."
        )
    if not any(one.requires_grad for one in model.parameters()):
        raise UserError(f"TRAIN_MODEL={printable(name)}: the model has no parameters to train. Return another one.")
    return model


def takes_any_name(accepted: Any) -> bool:
    """Return whether a signature has `**kwargs`."""
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())


def describe_failure(error: BaseException) -> str:
    """Return what the user's code raised, and where."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    where = f" in {Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno}" if frame else ""
    cause = first_line(error)
    text = f"{type(error).__name__}: {cause}" if cause else type(error).__name__
    return f"raised {printable(text)}{printable(where)}"


def import_factory(name: str, folder: Path | None) -> Callable[..., Any]:
    """Return the callable at an import path; raises `UserError` for one that cannot be imported."""
    module_name, _, path = name.partition(":")
    if folder is not None and not folder.is_dir():
        raise UserError(f"TRAIN_MODEL_PATH={printable(folder)}: no such folder. Name the one that has the module.")
    if folder is not None and str(folder.absolute()) not in sys.path:
        sys.path.insert(0, str(folder.absolute()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        own = module_name == missing or module_name.startswith(f"{missing}.")
        where = f" or in TRAIN_MODEL_PATH={printable(folder)}" if folder else ""
        what = f"no module {printable(missing)} is installed{where}" if own else f"needs {printable(missing)}"
        to_do = "Set TRAIN_MODEL_PATH to its folder" if own else "Install it"
        raise UserError(f"TRAIN_MODEL={printable(name)}: {what}. {to_do}.") from None
    except BaseException as error:  # a module runs any code when it is imported, and may even exit
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"TRAIN_MODEL={printable(name)}: its module {describe_failure(error)}. Correct it.") from None
    for part in path.split("."):
        owner, found = found, getattr(found, part, None)
        if found is None:
            known = [one for one in dir(owner) if callable(getattr(owner, one, None)) and not one.startswith("_")]
            raise UserError(
                f"TRAIN_MODEL={printable(name)}: no {printable(part)} in {printable(module_name)}."
                f" {did_you_mean(part, known)}Name a function of it."
            )
    if not callable(found):
        raise UserError(f"TRAIN_MODEL={printable(name)}: cannot be called. Name a function that returns a model.")
    return found  # type: ignore[no-any-return]


def timm_model(settings: ModelSettings, shape: ImageShape, classes: int) -> nn.Module:
    """Return a model of timm by name; raises `UserError` for an unknown one, or if timm is not installed."""
    name = settings.model.removeprefix(TIMM_PREFIX)
    timm = import_timm(settings.model)
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise UserError(
            f"TRAIN_MODEL={printable(settings.model)}: no such model in timm {timm.__version__}. {hint}Name one of"
            " timm.list_models()."
        )
    arguments = {"num_classes": classes, "in_chans": shape[0]}
    try:
        try:  # transformers of a fixed size take it; others raise TypeError
            model: nn.Module = timm.create_model(name, pretrained=False, img_size=shape[1:], **arguments)
        except TypeError:
            model = timm.create_model(name, pretrained=False, **arguments)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise UserError(
            f"TRAIN_MODEL={printable(settings.model)}: cannot take {shape[0]}x{shape[1]}x{shape[2]} images"
            f" ({first_line(error)}). Take another model or TRAIN_IMAGE_SIZE=224."
        ) from None
    return model


def import_timm(name: str) -> Any:
    """Return the package timm; raises `UserError` if it cannot be loaded."""
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: timm cannot be loaded here ({first_line(error)}). Install it by"
            " `pip install timm`."
        ) from None
