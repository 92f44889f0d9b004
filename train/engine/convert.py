"""Convert a checkpoint of version 0.1 to the current format."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from entrypoint.core.console import report_error
from entrypoint.core.errors import ExitCode, UserError
from train.checkpoint import replicated
from train.checkpoint.compare import saved_settings
from train.checkpoint.folder import checkpoint_path
from train.checkpoint.metadata import (
    EMA,
    MODEL,
    OPTIMIZER,
    DataFingerprint,
    Metadata,
    ScalerState,
    corrupt_error,
    write_error,
)
from train.checkpoint.tensor_files import Checkpoint
from train.checkpoint.version_0_1 import OldCheckpoint, read_old_checkpoint
from train.engine.optimizer import build_optimizer, parameter_names
from train.models.registry import build_model
from train.planning.model_size import model_input_shape
from train.settings import TrainSettings

# More than any run has, so that no checkpoint is removed.
KEEP_ALL = 2**31


def convert(path: Path) -> Path:
    """Write a checkpoint of version 0.1 next to it in the current format; return its path.

    Raises `UserError` if it cannot be read or written, or if it is there already. Reading it can run code.
    """
    old = read_old_checkpoint(path)
    try:
        settings = saved_settings(old.values["settings"])
        target = checkpoint_path(path.absolute().parent, int(old.values["step"]))
        metadata = metadata_of(old, settings)
        tensors = {MODEL: old.model, OPTIMIZER: named_optimizer(old, settings), EMA: old.average}
    except (KeyError, TypeError, ValueError, IndexError, msgspec.ValidationError) as error:
        raise corrupt_error(path, error) from None
    if target.exists():
        raise UserError(f"{target}: is there already. Remove it to convert {path.name} again.")
    try:
        return replicated.save(target.parent, Checkpoint(metadata, tensors), KEEP_ALL)
    except OSError as error:
        raise write_error(target.parent, error) from None


def metadata_of(old: OldCheckpoint, settings: TrainSettings) -> Metadata:
    """Return the metadata; version 0.1 did not know its data, except for the classes' names at its end."""
    values = old.values
    scaler = values.get("scaler") or {}
    return Metadata(
        epoch=values["epoch"],
        step=values["step"],
        examples=len(values.get("losses", ())) * settings.batch_size,
        seconds=float(values["seconds"]),
        best=float(values.get("best", -1.0)),
        losses=tuple(map(float, values.get("losses", ()))),
        scaler=ScalerState(scale=scaler["scale"], growth_tracker=scaler["_growth_tracker"]) if scaler else None,
        settings=settings.to_json(),
        plan=json.loads(values.get("plan") or "{}"),
        data=DataFingerprint(classes=tuple(values.get("classes", ()))),
    )


def named_optimizer(old: OldCheckpoint, settings: TrainSettings) -> Mapping[str, Tensor]:
    """Return the optimizer's tensors by the names of their parameters, in whose order version 0.1 numbered them."""
    if old.is_sharded or not old.optimizer:
        return old.optimizer
    plan: dict[str, Any] = json.loads(old.values["plan"])
    channels, height, width = plan["trainer"]["image_shape"] if "trainer" in plan else plan["training"]["shape"]
    shape = model_input_shape(settings, (channels, height, width))
    classes = len(list(old.model.values())[-1])  # the head's bias or weight comes last
    model = build_model(settings, shape, classes)
    names = parameter_names(build_optimizer(settings, model), model)
    by_number = {str(index): name for index, name in enumerate(names)}
    numbered = ((key.partition("."), value) for key, value in old.optimizer.items())
    return {f"{by_number[number]}.{field}": value for (number, _, field), value in numbered}


def main() -> int:
    """Convert the checkpoint that the command line names; return the exit code."""
    try:
        print(convert(Path(sys.argv[1])))
    except UserError as error:
        return report_error(error)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
