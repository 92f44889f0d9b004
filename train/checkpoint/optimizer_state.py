"""The optimizer's state by parameter name, so that another order of parameters cannot mix it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from train.checkpoint.tensor_files import Tensors

# Ends the name of a Python number, which is stored as a tensor. timm's optimizers count their steps so.
NUMBER = "#number"
# Starts the name of a number that belongs to a group of parameters.
GROUP = "#group"


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors called `<parameter>.<field>`; `names` are in the optimizer's order.

    Everything else in an optimizer's state comes from the settings, also when a run resumes.
    """
    state = optimizer.state_dict()["state"]
    found: dict[str, Tensor] = {}
    for index, name in enumerate(names):
        for field, value in state.get(index, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{field}"] = value
            elif is_number(value):
                found[f"{name}.{field}{NUMBER}"] = as_tensor(value)
    for index, group in enumerate(optimizer.param_groups):
        for field in group_counters(optimizer, group):
            value = group[field]
            key = f"{GROUP}{index}.{field}"
            found |= {key: value} if isinstance(value, Tensor) else {f"{key}{NUMBER}": as_tensor(value)}
    return found


def is_number(value: object) -> bool:
    """Return whether a value is a Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_tensor(number: float) -> Tensor:
    """Return a Python number as a tensor that keeps all its digits."""
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)


def group_counters(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[str]:
    """Return the numbers of a group that are no arguments: what an optimizer counts while it trains."""
    arguments = {*optimizer.defaults, "lr", "rate", "initial_lr"}
    counters = {name: value for name, value in group.items() if name not in arguments}
    return [name for name, value in counters.items() if is_number(value) or isinstance(value, Tensor)]


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Tensors) -> None:
    """Load tensors that `optimizer_tensors` returned; raises ValueError for one that belongs to no parameter."""
    indices = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    counters: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, field = key.rpartition(".")
        number: Any = value
        if field.endswith(NUMBER):
            if value.numel() != 1:
                raise ValueError(f"{key} is no number")
            field, number = field.removesuffix(NUMBER), value.item()
        if name.startswith(GROUP) and name.removeprefix(GROUP).isdigit():
            counters.setdefault(int(name.removeprefix(GROUP)), {})[field] = number
        elif name in indices:
            state.setdefault(indices[name], {})[field] = number
        else:
            raise ValueError(f"the optimizer has no parameter {name or key}")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for index, values in counters.items():
        if index >= len(optimizer.param_groups):
            raise ValueError(f"the optimizer has no group {index}")
        copies = {name: one.clone() if isinstance(one, Tensor) else one for name, one in values.items()}
        optimizer.param_groups[index].update(copies)


def check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the loaded state is not what this optimizer's own step makes, or has other shapes.

    SGD may lack its momentum, which it then starts: at 0 for one parameter, as its fused step cannot.
    """
    start_missing_momentum(optimizer)
    groups = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    expected: dict[tuple[int, torch.Size], dict[str, Any]] = {}
    for group, parameter in groups:
        state = optimizer.state.get(parameter)
        if not state:
            continue
        key = (id(group), parameter.shape)
        if key not in expected:
            expected[key] = state_after_a_step(optimizer, group, parameter)
        needed = {} if isinstance(optimizer, torch.optim.SGD) else expected[key]
        if missing := set(needed) - set(state):
            raise ValueError(f"its optimizer state has no {min(missing)}")
        for field, value in state.items():
            if not isinstance(value, Tensor) or value.numel() == 1:
                continue
            fitting = expected[key].get(field)
            shape = fitting.shape if isinstance(fitting, Tensor) else parameter.shape
            if value.shape != shape:
                raise ValueError(f"{field} of its optimizer state has the shape of no parameter")


def start_missing_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start the momentum of parameters that have none at 0 if others have one, which gives the same first step.

    A parameter that got no gradient yet has none.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        states = [(one, optimizer.state[one]) for one in group["params"]]
        if group["dampening"] or not any(state.get("momentum_buffer") is not None for _, state in states):
            continue
        for parameter, state in states:
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def state_after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that a new optimizer of this class has for a parameter after one step."""
    trial = torch.zeros_like(parameter, device="cpu", requires_grad=True)
    trial.grad = torch.zeros_like(trial)
    options = {name: value for name, value in group.items() if name in optimizer.defaults}
    made = type(optimizer)([{**options, "params": [trial]}])  # type: ignore[call-arg]
    made.step()
    return {name: one for name, one in made.state[trial].items() if isinstance(one, Tensor) or is_number(one)}
