"""Find a model's head: the layers whose outputs are the logits, one for each class."""

from __future__ import annotations

from torch import nn

from train.models.cnn import GrayscaleToRGB

# Names of the weights that hold one row for each class.
HEAD_LAYERS = (nn.Linear, nn.Conv2d)


def head_names(model: nn.Module, classes: int) -> tuple[str, ...]:
    """Return the names of the modules that output the logits, () if none is found.

    It is the last linear or 1x1 convolution layer with as many outputs as there are classes. timm's models say which it
    is, and some have two.
    """
    if isinstance(model, GrayscaleToRGB):
        return tuple(f"model.{name}" for name in head_names(model.model, classes))
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        found = get_classifier()
        own = found if isinstance(found, (tuple, list)) else (found,)
        names = tuple(name for name, module in model.named_modules() if any(module is one for one in own))
        if names:
            return names
    last = ""
    for name, module in model.named_modules():
        outputs = getattr(module, "out_features", getattr(module, "out_channels", None))
        if isinstance(module, HEAD_LAYERS) and outputs == classes:
            last = name
    return (last,) if last else ()


def in_modules(parameter: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter's name is inside one of the modules."""
    return any(parameter.startswith(f"{name}.") for name in modules)
