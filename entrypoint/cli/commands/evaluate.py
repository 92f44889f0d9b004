"""`entrypoint evaluate`, `quantize` and `average`: launch the trainer to evaluate a trained model."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from entrypoint.cli.commands import train_run
from entrypoint.cli.parser import Invocation
from entrypoint.core.console import RESULT_VAR
from entrypoint.core.errors import UserError, printable, refuse_if
from entrypoint.core.packages import require_extra

# The command of each setting that makes one of an evaluation; `average` gets its own from the words.
COMMAND_OF = {"TRAIN_AVERAGE": "average", "TRAIN_MAX_LOSS": "quantize"}


def run(invocation: Invocation) -> int:
    """Launch the trainer with the model that the words name, or that TRAIN_EVALUATE as a flag does."""
    command, name = invocation.command, invocation.command.command
    model, *others = command.words or (command.flags.get("TRAIN_EVALUATE", ""),)
    given = {**invocation.environ, **command.flags}
    other = next((one for one in COMMAND_OF if given.get(one) and (one, name) != ("TRAIN_MAX_LOSS", "quantize")), "")
    refuse_if(
        {
            f"{other}={printable(given.get(other, ''))}: is not for `{name}`. Unset it, or use `entrypoint"
            f" {COMMAND_OF.get(other)}`.": other,
            f"{name}: needs a trained model. Use `entrypoint {name} RUN`.": not model,
            f"{name} {printable(''.join(others[:1]))}: one model at a time. Evaluate each by itself.": (
                others and name != "average"
            ),
        }
    )
    require_extra("train", name)
    from train.checkpoint.store import local_run

    models = [local_run(word, invocation.environ) for word in (model, *others)]
    flags, defaults = {**command.flags, "TRAIN_EVALUATE": models[0]}, {"LAUNCH_NPROC_PER_NODE": "1"}
    if name == "average":
        averaged = models if others else best_of_run(models[0])
        if any("," in path for path in averaged):
            raise UserError(f"average {printable(model)}: commas divide the names of models. Rename it.")
        flags["TRAIN_AVERAGE"] = ",".join(averaged)
    if name == "quantize":
        defaults["TRAIN_MAX_LOSS"] = "1"
    if name != "evaluate":
        flags = {variable: value for variable, value in defaults.items() if variable not in invocation.environ} | flags
    environ = {**invocation.environ, RESULT_VAR: "json"} if command.json else invocation.environ
    return train_run.run(replace(invocation, command=replace(command, flags=flags, words=()), environ=environ))


def best_of_run(folder: str) -> list[str]:
    """Return the best checkpoints that a run has kept; raises `UserError` for fewer than two."""
    from train.checkpoint.folder import FOLDER, best_first
    from train.checkpoint.metadata import read_json
    from train.planning.run_selection import SETTINGS_FILE

    count = (read_json(Path(folder, SETTINGS_FILE), dict[str, object]) or {}).get("keep_best", 1)
    checkpoints = best_first(Path(folder, FOLDER))[: count if isinstance(count, int) else 1]
    if len(checkpoints) < 2:
        raise UserError(
            f"average {printable(folder)}: is no run with several best checkpoints. Train with TRAIN_KEEP_BEST=3, or"
            " name several models."
        )
    return list(map(str, checkpoints))
