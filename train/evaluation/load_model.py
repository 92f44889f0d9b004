"""Load a trained model to use it: for `evaluate` and `predict`."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from entrypoint.core.errors import UserError
from train.models.pruning import resize_to_state, same_shapes
from train.models.registry import build_model, restore_state_metadata
from train.models.state_dict_file import read_state_dict
from train.planning.image_sizes import model_input_shape
from train.planning.trained_run import TrainedRun
from train.settings import TrainSettings


def load_model(trained: TrainedRun, settings: TrainSettings) -> nn.Module:
    """Return the trained model in evaluation mode on the CPU; raises `UserError` if the weights do not fit.

    A pruned model gets the shapes of its weights.
    """
    shape = model_input_shape(settings.data, trained.shape)
    model = build_model(settings.network, shape, len(trained.classes))
    state = read_state_dict(trained.weights)
    own = model.state_dict()
    if state.keys() != own.keys():
        name = min(state.keys() ^ own.keys())
        raise fit_error(trained.weights, settings.network.model, f"only one of them has {name}")
    try:
        if settings.network.prune_ratio and not same_shapes(model, state):
            resize_to_state(model, state)
        model.load_state_dict(restore_state_metadata(model, state))
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise fit_error(trained.weights, settings.network.model, str(error).splitlines()[-1].strip()) from None
    wrong = next((name for name, value in model.named_parameters() if not value.isfinite().all()), "")
    if wrong:
        raise UserError(f"{trained.weights}: {wrong} is not finite, so the file is damaged. Name another one.")
    return model.eval()


def fit_error(path: Path, model: str, cause: str) -> UserError:
    """Return the error for weights that are not of the model in the settings."""
    return UserError(f"{path}: is not of TRAIN_MODEL={model} ({cause}). Name the model that it was trained as.")
