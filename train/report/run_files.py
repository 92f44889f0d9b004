"""The JSON files of a run's folder as the report and `compare` read them: somebody else may have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from entrypoint.core.errors import UserError, printable
from entrypoint.core.paths import is_file, read_regular


class RankRow(TypedDict):
    """What is read of a rank; its times are only shown."""

    rank: int
    node: str
    gpu_clock_mhz: NotRequired[float | None]
    gpu_max_clock_mhz: NotRequired[float | None]
    gpu_slowed_by: NotRequired[str | None]


class Stragglers(TypedDict):
    """What the summary says of slow ranks; `train.report.stragglers` writes it."""

    ranks: list[RankRow]
    slowest_rank: int
    slowest_rank_node: str
    slowest_rank_cost_percent: float
    slowest_node: str | None
    slowest_node_cost_percent: float | None


class Summary(TypedDict, total=False):
    """What is computed with of summary.json."""

    test_accuracy: float
    best_accuracy: float | None
    best_chosen_on: str
    images_per_second: float
    train_seconds: float
    cpu_wait_share: float
    data_share: float
    data_slow_part: str
    epochs: int
    parameters: int
    all_parameters: int
    world_size: int
    images_skipped: int
    device: str
    stragglers: Stragglers | None


class Binding(TypedDict, total=False):
    """The drawing of the plan's binding."""

    core_map: list[str]


class PlanFile(TypedDict, total=False):
    """What is shown of plan.json."""

    decisions: list[dict[str, Any]]
    warnings: list[str]
    binding: Binding
    trainer: dict[str, Any] | None


MistakeEntry = TypedDict(
    "MistakeEntry", {"class": str, "predicted": str, "probability": float, "png": NotRequired[str | None]}
)


class Evaluation(TypedDict, total=False):
    """What is shown of evaluation.json."""

    classes: list[str]
    confusion: list[list[int]]
    class_accuracy: dict[str, float | None]
    mistakes: list[MistakeEntry]


SCHEMAS: dict[str, Any] = {
    "summary.json": Summary,
    "plan.json": PlanFile,
    "evaluation.json": Evaluation,
    "settings.json": dict[str, Any],
    "ranks.json": list[dict[str, Any]],
}


def read_run_file(folder: Path, name: str) -> Any:
    """Return the content of a file of `SCHEMAS`, None without one; raises `UserError` for another content."""
    path = folder / name
    if not is_file(path):
        return None
    try:
        content = json.loads(read_regular(path))
        msgspec.convert(content, SCHEMAS[name])
        if name == "evaluation.json":
            check_confusion(content)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UserError(f"{printable(path)}: is not what a run writes ({printable(str(error))}). Remove it.") from None
    return content


def check_confusion(evaluation: Evaluation) -> None:
    """Raise ValueError unless the confusion matrix has a row and a column for each class."""
    classes, rows = len(evaluation.get("classes", ())), evaluation.get("confusion", [])
    if rows and {len(rows), *map(len, rows)} != {classes}:
        raise ValueError(f"the confusion matrix is not {classes} x {classes}")
