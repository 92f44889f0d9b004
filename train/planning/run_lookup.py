"""Find the run to resume, as far as planning needs it: without torch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from entrypoint.core.paths import exists, read_regular, resolve
from entrypoint.plan.inputs import PreviousRun
from entrypoint.plan.model import RankPlan
from train.settings import TrainSettings


def resumed_run_dir(settings: TrainSettings) -> Path | None:
    """Return the folder of the run to resume, None for a new run."""
    if settings.resume == "off":
        return None
    if settings.resume == "auto":
        return settings.output_dir / (settings.run_name or "latest")
    return resolve(Path(settings.resume)).parent.parent  # of the folder with its checkpoints


def previous_run(settings: TrainSettings) -> PreviousRun | None:
    """Return what the plan of the run being resumed had, None without a readable plan."""
    folder = resumed_run_dir(settings)
    try:
        plan = json.loads(read_regular(folder / "plan.json")) if folder else None
        if plan is None:
            return None
        ranks = tuple(RankPlan(rank["local_rank"], tuple(rank["cpus"]), rank["threads"]) for rank in plan["ranks"])
        return PreviousRun(ranks=ranks, reserved_cpus=plan["binding"]["reserved_cpus"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def new_run_dir(output: Path, settings: TrainSettings) -> Path:
    """Return a folder name of the moment that nobody has yet."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.model}-{settings.dataset}"
    taken = (output / (name if count == 1 else f"{name}-{count}") for count in range(1, 10_000))
    return next(folder for folder in taken if not exists(folder))


@dataclass(frozen=True)
class RecordedRank:
    """Where a rank of a run was started."""

    rank: int
    node: str
    process: int


def recorded_ranks(folder: Path) -> list[RecordedRank]:
    """Return the ranks of a run by its ranks.json, none without a readable one that says where they are."""
    try:
        ranks = json.loads(read_regular(folder / "ranks.json"))
        return [RecordedRank(int(one["rank"]), str(one["node"]), int(one["process"])) for one in ranks]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
