"""Continue a run that TRAIN_RESUME names by its folder, with that run's settings where the user gives none.

This module does without torch, and runs no code that a file names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from entrypoint.core.errors import UserError, printable
from entrypoint.core.paths import is_file, read_regular
from entrypoint.core.settings_base import ParsedSettings, read_settings
from entrypoint.plan.model import Decision
from train.checkpoint.compare import saved_settings
from train.planning.run_selection import SETTINGS_FILE
from train.planning.trained_run import as_variables, code_error
from train.settings import TrainSettings

# What belongs to one start of a run, not to the run; the folder is that of the run, unless the user names another.
OF_A_START = ("resume", "resume_allow_changed", "run_name", "output_dir", "max_minutes", "evaluate", "evaluation_file")
# Said even where they are the defaults, as the data set could decide otherwise.
ALWAYS = ("recipe", "model", "dataset")


def with_resumed_settings(
    asked: ParsedSettings[TrainSettings], environ: Mapping[str, str], flags: Mapping[str, str]
) -> tuple[ParsedSettings[TrainSettings], dict[str, str], tuple[Decision, ...]]:
    """Return the settings of the run to continue, the variables that say so, and the decision.

    Nothing changes unless TRAIN_RESUME is the folder of a run. What the user sets is changed, as far as the checkpoint
    can be mapped. Raises `UserError` for settings that cannot be read, and as `read_trained_run` does for own code.
    """
    folder = Path(asked.values.resume)
    if asked.values.evaluate or not is_file(folder / SETTINGS_FILE):
        return asked, {}, ()
    variables = settings_of_run(folder, asked)
    parsed = read_settings(TrainSettings, {**environ, **variables}, flags)
    changed = [source for name, source in asked.sources.items() if name not in OF_A_START]
    values, schedule = parsed.values, ""
    if {"epochs", "steps"} & set(asked.sources):
        length = f"{values.steps} steps" if values.steps else f"{values.epochs} epochs"
        schedule = f"; the schedule {values.schedule} covers {length} from the first on, so the rate may rise"
    reason = f"settings of that run{', but ' if changed else ''}{', '.join(map(printable, changed))}{schedule}"
    written = {name: f"{printable(folder)}: {name}={text}" for name, text in parsed.texts.items()}
    decision = Decision("resume", printable(folder), reason)
    return msgspec.structs.replace(parsed, sources={**written, **asked.sources}), variables, (decision,)


def settings_of_run(folder: Path, asked: ParsedSettings[TrainSettings]) -> dict[str, str]:
    """Return a run's settings as variables where the user gives none."""
    what = f"TRAIN_RESUME={printable(folder)}"
    try:
        saved = saved_settings(json.loads(read_regular(folder / SETTINGS_FILE)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        line = f"{what}: its {SETTINGS_FILE} cannot be read ({printable(error)}). Name one of its checkpoints."
        raise UserError(line) from None
    for field, is_code in (("model", saved.is_own_model), ("dataset", saved.is_own_dataset)):
        if is_code and field not in asked.sources:
            raise code_error(what, field, getattr(saved, field))
    defaults, left_out = TrainSettings(), {*OF_A_START, *asked.sources}
    left_out |= {"epochs", "steps"} if {"epochs", "steps"} & left_out else set()
    texts = {
        name: value
        for name in TrainSettings.__struct_fields__
        if name not in left_out and (value := getattr(saved, name)) is not None
        if name in ALWAYS or value != getattr(defaults, name)
    }
    changes = {"resume_allow_changed": True} if set(asked.sources) - set(OF_A_START) else {}
    return as_variables({**texts, **changes})
