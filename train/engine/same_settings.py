"""Compare what the nodes of a job were asked to train: each reads its own environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from entrypoint.core.errors import UserError, printable
from entrypoint.plan.model import TrainerPlan
from train.settings import TrainSettings

# Settings that may differ between nodes: places on a node's own disks, how fast it reads, and what rank 0 alone does.
MAY_DIFFER = frozenset(
    {
        *("data_dir", "cache_dir", "download", "num_workers", "pin_memory", "prefetch_factor", "model_path", "weights"),
        *("output_dir", "run_name", "resume", "resume_allow_changed", "keep_checkpoints", "progress", "tensorboard"),
        *("max_minutes", "profile", "track"),
    }
)
# Of the trainer's plan: what a node's own memory, CPU and libraries decide, and what changes results by rounding alone.
PLAN_MAY_DIFFER = frozenset({"num_workers", "ipex_packs", "winograd"})


def settings_to_compare(settings: TrainSettings, plan: TrainerPlan) -> dict[str, Any]:
    """Return what must be the same on every node, as JSON types by the user's names."""
    own = {f"TRAIN_{name.upper()}": one for name, one in settings.to_json().items() if name not in MAY_DIFFER}
    planned = {name: one for name, one in msgspec.to_builtins(plan).items() if name not in PLAN_MAY_DIFFER}
    return {**own, **{f"the planned {name.replace('_', ' ')}": one for name, one in planned.items()}}


def check_same_settings(found: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise `UserError` if two nodes were asked for different things; `found` has each node's name, rank 0's first."""
    (first, wanted), *others = found
    for node, theirs in others:
        for name in {**wanted, **theirs}:
            own, other = wanted.get(name), theirs.get(name)
            if own != other:
                raise UserError(
                    f"{name}: is {printable(str(other))} on {node} and {printable(str(own))} on {first}. Give"
                    " every node the same settings."
                )
