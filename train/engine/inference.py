"""Load a trained model to use it: for `evaluate` and `predict`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from entrypoint.core.errors import UserError
from train.models.pruning import resize_to_state, same_shapes
from train.models.registry import build_model, restore_state_metadata
from train.models.state_dict_file import read_state_dict
from train.planning.trained_run import TrainedRun
from train.settings import TrainSettings
from train.transforms.image_part import PLAIN_VIEW, View
from train.transforms.normalize import Normalize
from train.transforms.registry import select_transform


def load_model(trained: TrainedRun, settings: TrainSettings) -> nn.Module:
    """Return the trained model in evaluation mode on the CPU; raises `UserError` if the weights do not fit.

    A pruned model gets the shapes of its weights.
    """
    shape = select_transform(settings, trained.shape[0]).shape(trained.shape)
    model = build_model(settings, shape, len(trained.classes))
    state = read_state_dict(trained.weights)
    own = model.state_dict()
    state = state if state.keys() == own.keys() else without_average(state)
    if state.keys() != own.keys():
        name = min(state.keys() ^ own.keys())
        raise fit_error(trained.weights, settings, f"only one of them has {name}")
    try:
        if settings.prune_ratio and not same_shapes(model, state):
            resize_to_state(model, state)
        model.load_state_dict(restore_state_metadata(model, state))
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise fit_error(trained.weights, settings, str(error).splitlines()[-1].strip()) from None
    return model.eval()


def without_average(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an average without its counter and the prefix of its names."""
    return {name.removeprefix("module."): one for name, one in state.items() if name != "n_averaged"}


def fit_error(path: Path, settings: TrainSettings, cause: str) -> UserError:
    """Return the error for weights that are not of the model in the settings."""
    return UserError(
        f"{path}: is not of TRAIN_MODEL={settings.model} ({cause}). Name the model that it was trained as."
    )


def trained_normalization(trained: TrainedRun, device: torch.device, *, channels_last: bool) -> Normalize:
    """Return the normalization that the model was trained with."""
    mean, scale = (torch.tensor(one) for one in (trained.normalization.mean, trained.normalization.scale))
    return Normalize.from_stats(mean, 1 / scale, device, channels_last=channels_last)


def eval_view(settings: TrainSettings, channels: int, height: int, width: int) -> View:
    """Return which part of an image file is evaluated."""
    crop = select_transform(settings, channels).eval_crop
    return View(crop((width, height))) if crop else PLAIN_VIEW
