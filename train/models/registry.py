"""Models by name: the book's CNN, SpeedNet, torchvision's and timm's classifiers, and the user's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from entrypoint.core.errors import UserError, did_you_mean, first_line, printable
from train.models.cnn import CNN, GrayscaleToRGB
from train.models.factory import describe_failure, factory_model, timm_model
from train.models.inspection import dry_run
from train.models.speednet import WIDTHS, SpeedNet
from train.setting_groups.model import TIMM_PREFIX, ModelSettings
from train.settings import ImageShape, TrainSettings

# Classifiers with auxiliary heads return a tuple in training mode. Only the main head is trained here.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def build_model(settings: ModelSettings, shape: ImageShape, classes: int) -> nn.Module:
    """Return a newly initialized model for (channels, height, width) images.

    Raises `UserError` for an unknown name, for images that the model cannot process, and for other than one logit for
    each class.
    """
    name = settings.model
    if name == "cnn":
        if min(shape[1:]) < 4:
            raise UserError(f"TRAIN_MODEL=cnn: needs at least 4x4 pixels, and the images have {shape[1]}x{shape[2]}")
        return CNN(shape, classes, bias=settings.bias)
    if not settings.bias:
        raise UserError(f"TRAIN_BIAS=0: only the cnn can do without biases, not {name}; leave it unset")
    if name in WIDTHS:
        model: nn.Module = SpeedNet(WIDTHS[name], shape, classes)
    elif settings.is_own_model:
        model = factory_model(settings, shape, classes)
    elif name.startswith(TIMM_PREFIX):
        model = timm_model(settings, shape, classes)
    else:
        model = torchvision_model(name, shape, classes)
    check_outputs(model, name, shape, classes)
    return model


def restore_state_metadata(model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state that the model can load, with the versions of its modules.

    Why: a checkpoint holds tensors alone, and torchvision's MNASNet does not load a state without versions.
    """
    marked = OrderedDict(state)
    marked._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    return marked


def torchvision_model(name: str, shape: ImageShape, classes: int) -> nn.Module:
    """Return a torchvision classifier by name; raises `UserError` for an unknown name."""
    try:
        from torchvision import models
    except (ImportError, RuntimeError, AttributeError) as error:
        raise UserError(f"TRAIN_MODEL={name}: torchvision cannot be loaded here ({error}); only cnn can") from None
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
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **arguments)
    except (ValueError, RuntimeError, AssertionError) as error:
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
            check_outputs(model, settings.model, shape, classes)
        except UserError as error:
            is_eval = settings.eval_size in shape[1:]
            name, value = (
                ("TRAIN_EVAL_SIZE", settings.eval_size) if is_eval else ("TRAIN_SIZE_SCHEDULE", settings.size_schedule)
            )
            raise UserError(
                f"{name}={value}: {printable(settings.model)} does not take images of {shape[1]}x{shape[2]}"
                f" ({printable(str(error))}). Take a model for several sizes, or other sizes."
            ) from None


def incompatible_input_error(name: str, shape: ImageShape, error: Exception) -> UserError:
    """Return the error for images that a model cannot process."""
    size = f"{shape[0]}x{shape[1]}x{shape[2]}"
    cause = first_line(error)
    to_do = "take another model, or for an imagefolder TRAIN_IMAGE_SIZE=224"
    return UserError(f"TRAIN_MODEL={printable(name)}: cannot take {size} images ({cause}); {to_do}")
