"""Models by name: the book's CNN, SpeedNet, torchvision's and timm's classifiers, and the user's own."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from entrypoint.core.errors import UserError, did_you_mean, first_line, printable, refuse_if
from train.models.cnn import CNN, WIDTHS, GrayscaleToRGB, SpeedNet
from train.models.inspection import dry_run
from train.models.users_code import describe_failure, import_factory
from train.setting_groups.arguments import Argument, parse_argument
from train.setting_groups.network import OWN_MODELS, TIMM_PREFIX, NetworkSettings
from train.settings import ImageShape, TrainSettings

# Classifiers with auxiliary heads return a tuple in training mode. Only the main head is trained here.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def build_model(settings: NetworkSettings, shape: ImageShape, classes: int) -> nn.Module:
    """Return a newly initialized model for (channels, height, width) images.

    Raises `UserError` for an unknown name, for images that the model cannot process, and for other than one logit for
    each class.
    """
    name = settings.model
    if name in OWN_MODELS:
        known = ["bias"] if name == "cnn" else []
        arguments = model_arguments(settings)
        if odd := next((argument for argument in arguments if argument not in known), ""):
            raise unknown_argument_error(settings, odd, known)
        if arguments.get("bias", 1) not in (0, 1):
            raise UserError(f"TRAIN_MODEL_ARGS={printable(settings.model_args)}: bias is 0 or 1. Correct it.")
    if name == "cnn":
        return CNN(shape, classes, bias=bool(arguments.get("bias", 1)))
    if name in WIDTHS:
        model: nn.Module = SpeedNet(WIDTHS[name], shape, classes)
    elif settings.is_own_model:
        model = factory_model(settings, shape, classes)
    elif name.startswith(TIMM_PREFIX):
        model = timm_model(settings, shape, classes)
    else:
        model = torchvision_model(settings, shape, classes)
    check_outputs(model, name, shape, classes)
    return model


def restore_state_metadata(model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state that the model can load, with the versions of its modules.

    Why: a checkpoint holds tensors alone, and torchvision's MNASNet does not load a state without versions.
    """
    marked = OrderedDict(state)
    # As torch.load would return it.
    marked._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # noqa: SLF001
    return marked


# Arguments of models that are decided here.
DECIDED = {
    "num_classes": "the data have classes",
    **dict.fromkeys(("in_chans", "in_channels"), "the images have channels"),
    **dict.fromkeys(("weights", "pretrained"), "TRAIN_WEIGHTS sets it"),
}
UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")


def model_arguments(settings: NetworkSettings) -> dict[str, Argument]:
    """Return TRAIN_MODEL_ARGS by name; raises `UserError` for what is decided elsewhere, or is there twice."""
    arguments = [part.split("=", 1) for part in settings.model_args.split()]
    names, source = [name for name, _ in arguments], f"TRAIN_MODEL_ARGS={printable(settings.model_args)}"
    for name in names:
        refuse_if(
            {
                f"{source}: {name} is there twice. Leave one out.": names.count(name) > 1,
                f"{source}: {name} is no argument to give, {DECIDED.get(name)}. Leave it out.": name in DECIDED,
            }
        )
    return {name: parse_argument(text) for name, text in arguments}


def explain_arguments(settings: NetworkSettings, error: Exception, plain: Callable[[], nn.Module]) -> None:
    """Raise `UserError` if a model does not take what TRAIN_MODEL_ARGS says; `plain` makes one without."""
    unknown = UNKNOWN_ARGUMENT.search(str(error))
    name = unknown[1] if unknown else ""
    if name not in model_arguments(settings):
        return
    parameters = inspect.signature(type(plain())).parameters.values()
    known = [one.name for one in parameters if one.default is not one.empty and one.name not in DECIDED]
    raise unknown_argument_error(settings, name, known) from None


def unknown_argument_error(settings: NetworkSettings, name: str, known: Sequence[str]) -> UserError:
    """Return the error for an argument that a model does not take."""
    return UserError(
        f"TRAIN_MODEL_ARGS={printable(settings.model_args)}: {name} is no argument of {printable(settings.model)}."
        f" {did_you_mean(name, known)}It takes {printable(', '.join(known)) or 'none'}."
    )


def torchvision_model(settings: NetworkSettings, shape: ImageShape, classes: int) -> nn.Module:
    """Return a torchvision classifier by name; raises `UserError` for an unknown name."""
    name = settings.model
    models = import_library("torchvision.models", name)
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: no such model. {did_you_mean(name, ['cnn', *WIDTHS, *known])}It is cnn,"
            " speednet or a torchvision classifier such as resnet18."
        )
    arguments = dict(ARGUMENTS.get(name, {}))
    if name.startswith("vit_"):
        arguments["image_size"] = shape[1]
    if name.startswith("maxvit_"):
        arguments["input_size"] = shape[1:]
    build = partial(models.get_model, name, weights=None, num_classes=classes)
    try:
        model: nn.Module = build(**{**arguments, **model_arguments(settings)})
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        explain_arguments(settings, error, partial(build, **arguments))
        raise incompatible_input_error(name, shape, error) from None
    return GrayscaleToRGB(model) if shape[0] == 1 else model


def check_outputs(model: nn.Module, name: str, shape: ImageShape, classes: int) -> None:
    """Run one blank image through the model; raises `UserError` if it cannot process it or returns no logits."""
    try:
        outputs = dry_run(model, shape)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise incompatible_input_error(name, shape, error) from None
    except Exception as error:  # the user's own model may raise anything
        raise UserError(f"TRAIN_MODEL={printable(name)}: the model {describe_failure(error)}. Correct it.") from None
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: the model returns {printable(type(outputs).__name__)} and not a tensor of"
            " logits. Return the logits alone."
        )
    if tuple(outputs.shape) != (1, classes):
        got = "x".join(map(str, outputs.shape)) or "one value"
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: the model returns {got} for one image, and {classes} classes need"
            f" 1x{classes}. Make its last layer as large as num_classes."
        )


def check_other_size(settings: TrainSettings, model: nn.Module, shapes: Iterable[ImageShape], classes: int) -> None:
    """Run a blank image of each shape through the model; raises `UserError` that names the setting of the size."""
    for shape in shapes:
        try:
            check_outputs(model, settings.network.model, shape, classes)
        except UserError as error:
            is_eval = settings.data.eval_size in shape[1:]
            name, value = (
                ("TRAIN_EVAL_SIZE", settings.data.eval_size)
                if is_eval
                else ("TRAIN_SIZE_SCHEDULE", settings.data.size_schedule)
            )
            raise UserError(
                f"{name}={value}: {printable(settings.network.model)} does not take images of {shape[1]}x{shape[2]}"
                f" ({printable(str(error))}). Take a model for several sizes, or other sizes."
            ) from None


def factory_model(settings: NetworkSettings, shape: ImageShape, classes: int) -> nn.Module:
    """Return what the user's function makes; raises `UserError` if it cannot be called or makes no model.

    It is called with `num_classes`, and with `in_channels` and `image_size` if it takes them.
    """
    name = settings.model
    factory = import_factory(name, settings.model_path)
    given: dict[str, Argument] = {"num_classes": classes, "in_channels": shape[0], "image_size": shape[1]}
    try:
        accepted = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        accepted = {}  # type: ignore[assignment]  # a callable of a compiled module says nothing
    takes_any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    if accepted and "num_classes" not in accepted and not takes_any_name:
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: takes no num_classes but ({printable(', '.join(accepted))}). Define it as"
            " `def model(num_classes): ...`."
        )
    arguments = {key: value for key, value in given.items() if key in accepted or key == "num_classes"}
    arguments |= model_arguments(settings)
    if unknown := [] if takes_any_name or not accepted else sorted(arguments.keys() - accepted.keys()):
        raise unknown_argument_error(settings, unknown[0], list(accepted))
    try:
        model: nn.Module = factory(**arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(f"TRAIN_MODEL={printable(name)}: {describe_failure(error)}. Correct the function.") from None
    kind, is_module = printable(type(model).__name__), isinstance(model, nn.Module)
    refuse_if(
        {
            f"TRAIN_MODEL={printable(name)}: returns {kind} and not an nn.Module. Return the model.": not is_module,
            f"TRAIN_MODEL={printable(name)}: the model has no parameters to train. Return another one.": (
                is_module and not any(one.requires_grad for one in model.parameters())
            ),
        }
    )
    return model


def timm_model(settings: NetworkSettings, shape: ImageShape, classes: int) -> nn.Module:
    """Return a model of timm by name; raises `UserError` for an unknown one, or if timm is not installed."""
    name = settings.model.removeprefix(TIMM_PREFIX)
    timm = import_library("timm", settings.model)
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise UserError(
            f"TRAIN_MODEL={printable(settings.model)}: no such model in timm {timm.__version__}. {hint}Name one of"
            " timm.list_models()."
        )
    build = partial(create_timm_model, timm, name, shape, pretrained=False, num_classes=classes)
    try:
        return build(**model_arguments(settings))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        explain_arguments(settings, error, build)
        raise incompatible_input_error(settings.model, shape, error) from None


def create_timm_model(timm: Any, name: str, shape: ImageShape, **arguments: Any) -> nn.Module:
    """Return a model of timm by name, for images of this shape; raises what timm raises."""
    try:  # transformers of a fixed size take it; others raise TypeError
        model: nn.Module = timm.create_model(name, in_chans=shape[0], **{"img_size": shape[1:], **arguments})
    except TypeError:
        model = timm.create_model(name, in_chans=shape[0], **arguments)
    return model


def import_library(module: str, name: str) -> Any:
    """Return the library of a model, a module of torchvision or timm; raises `UserError` if it cannot be loaded."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, AttributeError) as error:
        package = module.partition(".")[0]
        raise UserError(
            f"TRAIN_MODEL={printable(name)}: {package} cannot be loaded here ({first_line(error)}). Install it by"
            f" `pip install {package}`, or set TRAIN_MODEL=cnn."
        ) from None


def incompatible_input_error(name: str, shape: ImageShape, error: Exception) -> UserError:
    """Return the error for images that a model cannot process."""
    return UserError(
        f"TRAIN_MODEL={printable(name)}: cannot take {'x'.join(map(str, shape))} images ({first_line(error)}); take"
        " another model, or for an imagefolder TRAIN_IMAGE_SIZE=224"
    )
