"""Compare what the nodes of a job were asked to train: each reads its own environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from entrypoint.core.errors import UserError, printable
from entrypoint.core.settings_base import rules_of
from entrypoint.plan.model import TrainerPlan
from train.settings import TrainSettings

# Of the trainer's plan: what a node's own memory, CPU and libraries decide, and what changes results by rounding alone.
PLAN_MAY_DIFFER = frozenset({"num_workers", "ipex_packs", "winograd"})


def settings_to_compare(settings: TrainSettings, plan: TrainerPlan) -> dict[str, Any]:
    """Return what must be the same on every node, as JSON types by the user's names."""
    rules = rules_of(TrainSettings)
    own = {f"TRAIN_{name.upper()}": one for name, one in settings.to_json().items() if rules[name].nodes == "same"}
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
