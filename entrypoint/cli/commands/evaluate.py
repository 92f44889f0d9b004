"""`entrypoint evaluate` and `quantize`: launch the trainer to evaluate a trained model."""

from __future__ import annotations

from msgspec.structs import replace

from entrypoint.cli.commands import train_run
from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import UserError, printable
from entrypoint.core.packages import require_extra


def run(invocation: Invocation) -> int:
    """Launch the trainer with the model that the words name, or that TRAIN_EVALUATE as a flag does."""
    command, name = invocation.command, invocation.command.command
    model, *others = command.words or (command.flags.get("TRAIN_EVALUATE", ""),)
    if not model:
        raise UserError(f"{name}: needs a trained model. Use `entrypoint {name} RUN`.")
    if others:
        raise UserError(f"{name} {printable(others[0])}: one model at a time. Evaluate each by itself.")
    require_extra("train", name)
    from train.checkpoint.store import local_run

    flags = {**command.flags, "TRAIN_EVALUATE": local_run(model, invocation.environ)}
    if name == "quantize":
        defaults = {"TRAIN_MAX_LOSS": "1", "LAUNCH_NPROC_PER_NODE": "1"}
        flags = {variable: value for variable, value in defaults.items() if variable not in invocation.environ} | flags
    return train_run.run(replace(invocation, command=replace(command, flags=flags, words=())))
