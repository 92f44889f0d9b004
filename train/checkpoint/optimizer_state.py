"""The optimizer's tensors by parameter name, so that another order of parameters cannot mix them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from train.checkpoint.tensor_files import Tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors called `<parameter>.<field>`; `names` are in the optimizer's order.

    Everything else in an optimizer's state comes from the settings, also when a run resumes.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"{name}.{field}": value
        for index, name in enumerate(names)
        for field, value in state.get(index, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Tensors) -> None:
    """Load tensors that `optimizer_tensors` returned; raises ValueError for one that belongs to no parameter."""
    indices = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, field = key.rpartition(".")
        if name not in indices:
            raise ValueError(f"the optimizer has no parameter {name or key}")
        state.setdefault(indices[name], {})[field] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
