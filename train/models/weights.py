"""Start from weights of a file, or from those that torchvision and timm publish."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from train.models.cnn import GrayscaleToRGB
from train.models.inspection import head_names, in_modules
from train.models.registry import import_library
from train.models.state_dict_file import read_state_dict
from train.models.weights_origin import (
    PACKAGED_MODULE,
    PACKAGED_NETWORK,
    PRETRAINED,
    WeightsOrigin,
    find_weights_file,
    packaged_weights,
    read_origin,
)
from train.setting_groups.network import TIMM_PREFIX, NetworkSettings
from train.settings import ImageShape

# Extra classifiers of torchvision's GoogLeNet and Inception, which are trained without here.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
# A profiler's counters, which are no weights (thop).
COUNTERS = ("total_ops", "total_params")
NAMED = 3
# torchvision's own loaders rename them: of DenseNet (densenet.py, _load_state_dict), and of the MLPs of ViT (MLPBlock).
# timm's do for DeiT III and CrossViT, by functions that no name leads to (deit.py and crossvit.py).
OLD_NAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"(\.mlp\.)linear_1\."), r"\g<1>0."),
    (re.compile(r"(\.mlp\.)linear_2\."), r"\g<1>3."),
    (re.compile(r"\.gamma_([12])$"), r".ls\1.gamma"),
    (re.compile(r"^(pos_embed|cls_token)\."), r"\1_"),
)
# What timm's modules call their functions for the files of others, and of images of another size.
CONVERTERS = ("checkpoint_filter_fn", "_filter_fn")


@dataclass(frozen=True)
class FittedWeights:
    """The tensors that a model takes from a file, by its own names; `new` and `unused` are names of the others.

    `head` are those of a new linear head, which starts at zero: random outputs would first undo what the weights know
    (BiT, arXiv:1912.11370).
    """

    tensors: Mapping[str, Tensor]
    new: tuple[str, ...]
    unused: tuple[str, ...]
    head: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return how many tensors were loaded, and which were not."""
        new = f"new: {name_some(self.new)}" if self.new else "nothing is new"
        unused = f"; left over: {name_some(self.unused)}" if self.unused else ""
        return f"{len(self.tensors):,} tensors loaded; {new}{unused}"

    def load_into(self, model: nn.Module) -> None:
        """Copy the tensors into the model, and set a new head to zero."""
        own = without_adapter(model).state_dict()
        with torch.no_grad():
            for name, value in self.tensors.items():
                own[name].copy_(value)
            for name in self.head:
                own[name].zero_()


def name_some(names: tuple[str, ...]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return printable(", ".join(names[:NAMED]) + more)


def without_adapter(model: nn.Module) -> nn.Module:
    """Return the model inside of the adapter for grayscale images."""
    return model.model if isinstance(model, GrayscaleToRGB) else model


def load_weights(
    settings: NetworkSettings, model: nn.Module, shape: ImageShape, classes: tuple[str, ...]
) -> FittedWeights:
    """Return the tensors for a model by TRAIN_WEIGHTS; raises `UserError` for a file that does not fit."""
    if settings.weights == PRETRAINED:
        state, origin = published_state(settings, shape), WeightsOrigin()
    else:
        path = find_weights_file(settings.weights)
        state, origin = read_state_dict(path), read_origin(path)
    return fit_weights(settings, model, state, origin, classes)


def fit_weights(
    settings: NetworkSettings,
    model: nn.Module,
    state: Mapping[str, Tensor],
    origin: WeightsOrigin,
    classes: tuple[str, ...],
) -> FittedWeights:
    """Match a state's tensors with the model's by name and shape; raises `UserError` where they do not fit.

    Only the head may be new, and is where the file names other classes: a file of another model often shares some
    names. TRAIN_WEIGHTS_STRICT=0 allows more.
    """
    source = f"TRAIN_WEIGHTS={printable(settings.weights)}"
    inner = without_adapter(model)
    own = inner.state_dict()
    check_values(source, state)
    state = converted(inner, with_names_of(source, own, state))
    head = head_names(inner, len(classes))
    same = {
        name
        for name in own
        if name in state
        and own[name].shape == state[name].shape
        and own[name].is_floating_point() == state[name].is_floating_point()
    }
    if origin.classes not in ((), classes):
        same = {name for name in same if not in_modules(name, head)}
    unused = tuple(
        name for name in state if name not in own and not name.startswith(AUXILIARY) and not name.endswith(COUNTERS)
    )
    # Old files have no counters of BatchNorm, which nothing reads.
    new = tuple(name for name in own if name not in same and not name.endswith("num_batches_tracked"))
    strange = [name for name in new if not in_modules(name, head)]
    body = [name for name in own if not in_modules(name, head)]
    if not same.intersection(body or own):
        raise UserError(
            f"{source}: fits nothing of {printable(settings.model)}: it has {name_some(tuple(state))}, and the model"
            f" has {name_some(tuple(own))}. Set TRAIN_MODEL to the model that it is of."
        )
    if settings.weights_strict and (strange or unused):
        name = strange[0] if strange else unused[0]
        trained_at = origin.shape or getattr(inner, "pretrained_cfg", {}).get("input_size")
        side = f"={trained_at[1]}" if trained_at else ""
        raise UserError(
            f"{source}: is of another model than {printable(settings.model)}: {printable(name)} is"
            f" {shape_text(state.get(name))} there and {shape_text(own.get(name))} here. Set"
            f" TRAIN_MODEL or TRAIN_IMAGE_SIZE{side} as it was trained, or TRAIN_WEIGHTS_STRICT=0 to load what fits."
        )
    linear = tuple(name for name in head if isinstance(inner.get_submodule(name), nn.Linear))
    zeroed = tuple(name for name in new if in_modules(name, linear))
    return FittedWeights({name: state[name] for name in own if name in same}, new, unused, zeroed)


def fitting_prefixes(there: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return what stands before the model's names in a file, () if nothing does; several models may be in one file.

    Lightning writes `model.`, others `net.` or `student.`, with the tensors of a loss or an average next to it.
    """
    if there.keys() & state.keys():
        return []
    counts = Counter(
        name[: -len(own)]
        for name in state
        for own in accumulate(reversed(name.split(".")), lambda end, part: f"{part}.{end}")
        if own in there
    )
    most = max(counts.values(), default=0)
    return sorted(prefix for prefix, count in counts.items() if count > most / 2)


def with_names_of(source: str, there: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a file's tensors under the model's names: those below a prefix, and without old names.

    Raises `UserError` for a file with several models that fit.
    """
    prefixes = fitting_prefixes(there, state)
    if len(prefixes) > 1:
        below = " and ".join(printable(prefix.rstrip(".")) for prefix in prefixes)
        raise UserError(f"{source}: holds several models that fit, below {below}. Save the one that you mean alone.")
    prefix = "".join(prefixes)
    state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {current_name(name, there): value for name, value in state.items()}


def current_name(name: str, there: Mapping[str, Tensor]) -> str:
    """Return the model's name for one of an older release of torchvision, and any other name as it is."""
    renamed = (pattern.sub(new, name) for pattern, new in OLD_NAMES)
    return name if name in there else next((new for new in renamed if new in there), name)


def converted(model: Any, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a file's tensors as the model's library would load them, which changes names and sizes of embeddings."""
    library = type(model).__module__
    functions = vars(sys.modules[library]) if library.startswith(("timm.models.", "torchvision.models.")) else {}
    with suppress(Exception):  # what a conversion makes of another model's tensors can fail in any way
        if interpolate := functions.get("interpolate_embeddings"):
            state = interpolate(model.image_size, model.patch_size, OrderedDict(state))
        for convert in filter(None, map(functions.get, CONVERTERS)):
            state = convert(*(dict(state), model)[: len(inspect.signature(convert).parameters)])
    return state


def check_values(source: str, state: Mapping[str, Tensor]) -> None:
    """Raise `UserError` for weights that are quantized or not finite: training could only fail."""
    for name, one in state.items():
        if one.element_size() == 1 and one.dtype != torch.bool and one.dim() > 1:
            kind = str(one.dtype).removeprefix("torch.")
            raise UserError(f"{source}: {printable(name)} is quantized ({kind}). Convert the file to 16 or 32 bits.")
        if one.is_floating_point() and not bool(one.isfinite().all()):
            raise UserError(f"{source}: {printable(name)} has values that are not finite. Use another file.")


def shape_text(tensor: Tensor | None) -> str:
    """Return a tensor's shape, or that there is none; integers are named, as weights are not."""
    if tensor is None:
        return "not"
    kind = "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"
    return ("x".join(map(str, tensor.shape)) or "one value") + kind


def published_state(settings: NetworkSettings, shape: ImageShape) -> dict[str, Tensor]:
    """Return the weights that a model's library publishes, from its cache or the network; raises `UserError`."""
    name = settings.model
    if name.startswith(TIMM_PREFIX):
        return timm_state(name, shape)
    weights = torchvision_weights(name)
    if weights is None:
        raise UserError(
            f"TRAIN_WEIGHTS=pretrained: nobody publishes weights of {printable(name)}. Use torchvision's or timm's"
            " model, or a file."
        )
    from torchvision import models

    try:
        model = models.get_model(name, weights=weights)
    except Exception as error:  # the network, the disk, and what torch finds wrong with a file
        raise missing_weights(name, error) from None
    return dict(model.state_dict())


def torchvision_weights(name: str) -> Any:
    """Return torchvision's entry of a model's best weights, None if there are none."""
    from torchvision import models

    if name not in models.list_models(module=models):
        return None
    weights: Any = models.get_model_weights(name)
    return weights.DEFAULT if len(weights) else None


def missing_weights(name: str, error: Exception) -> UserError:
    """Return the error for published weights that cannot be had."""
    return UserError(
        f"TRAIN_WEIGHTS=pretrained: the weights of {printable(name)} are in no cache and cannot be downloaded"
        f" ({printable(first_line(error))}). Name a file, or fill the cache of its library.",
        ExitCode.MACHINE,
    )


def timm_state(name: str, shape: ImageShape) -> dict[str, Tensor]:
    """Return the weights that timm publishes for a model, or a package has; raises `UserError` if neither has them."""
    timm = import_library("timm", name)
    if name == PACKAGED_NETWORK and (file := packaged_weights()):
        return with_names_of_timm(read_state_dict(file), timm.create_model(name.removeprefix(TIMM_PREFIX)), shape[0])
    try:
        # Of the size that they were published for: `fit_weights` converts them, or says that no other size fits.
        model = timm.create_model(name.removeprefix(TIMM_PREFIX), in_chans=shape[0], pretrained=True)
    except Exception as error:  # the Hugging Face client raises many types
        raise missing_weights(name, error) from None
    return dict(model.state_dict())


def with_names_of_timm(state: Mapping[str, Tensor], model: nn.Module, channels: int) -> dict[str, Tensor]:
    """Return a state of the same network under timm's names: the tensors have the same order and shapes.

    For gray images the filters of the first layer are summed over the colors, as timm does.
    """
    timms = model.state_dict()
    if [tensor.shape for tensor in state.values()] != [tensor.shape for tensor in timms.values()]:
        raise UserError(
            f"TRAIN_WEIGHTS=pretrained: {PACKAGED_MODULE} has no weights of {PACKAGED_NETWORK}. Install it again."
        )
    named = dict(zip(timms, state.values(), strict=True))
    first = next(iter(named))
    if channels == 1:
        named[first] = named[first].sum(1, keepdim=True)
    return named


def published_normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and standard deviation (of 1) that a library's weights were trained with, None if it says none."""
    if name.startswith(TIMM_PREFIX):
        config = import_library("timm", name).get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
        return (tuple(config.mean), tuple(config.std)) if config else None
    weights = torchvision_weights(name)
    if weights is None:
        return None
    if name in ("googlenet", "inception_v3"):  # `get_model(weights=…)` sets transform_input, which leads to these
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    preset = weights.transforms()
    return tuple(preset.mean), tuple(preset.std)
