"""The run that is gone on with, as far as planning needs it: without torch."""

from __future__ import annotations

from pathlib import Path

from entrypoint.plan import Plan
from train.settings import TrainSettings


def begun(settings: TrainSettings) -> Path | None:
    """Return the folder of the run that is gone on with if it is there, None where one begins."""
    if settings.resume == "off":
        return None
    if settings.resume == "auto":
        return settings.output_dir / (settings.run_name or "latest")
    return Path(settings.resume).resolve().parent.parent  # of the folder with its checkpoints


def plan_before(settings: TrainSettings) -> Plan | None:
    """Return the plan of the run that is gone on with, None where none is there."""
    folder = begun(settings)
    try:
        return Plan.from_json((folder / "plan.json").read_text()) if folder else None
    except (OSError, ValueError, KeyError, TypeError):  # it has none, or one of another version: as one that begins
        return None
