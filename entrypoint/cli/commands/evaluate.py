"""`entrypoint evaluate`: launch the trainer to evaluate a trained model."""

from __future__ import annotations

from msgspec.structs import replace

from entrypoint.cli.commands import train_run
from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import UserError, printable


def run(invocation: Invocation) -> int:
    """Launch the trainer with the model that the words name, or that TRAIN_EVALUATE as a flag does."""
    command = invocation.command
    model, *others = command.words or (command.flags.get("TRAIN_EVALUATE", ""),)
    if not model:
        raise UserError("evaluate: needs a trained model. Use `entrypoint evaluate RUN`.")
    if others:
        raise UserError(f"evaluate {printable(others[0])}: one model at a time. Evaluate each by itself.")
    flags = {**command.flags, "TRAIN_EVALUATE": model}
    return train_run.run(replace(invocation, command=replace(command, flags=flags, words=())))
