"""Optimizers by name, those of torch.optim and of timm, the learning-rate schedule and the EMA model."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from entrypoint.core.errors import ExitCode, UserError, did_you_mean, first_line, printable, refuse_if
from train.acceleration.torch_workarounds import skip_dynamo_import, unwrap_step
from train.models.inspection import in_modules
from train.setting_groups.arguments import Argument, parse_argument
from train.setting_groups.network import TIMM_PREFIX, NetworkSettings
from train.setting_groups.optimization import DEFAULT_LR, SGD, OptimizationSettings, peak_lr
from train.settings import TrainSettings

ONECYCLE_WARMUP = 0.25
# The part of a name up to the number of its block: `layer1.0` of `layer1.0.conv1.weight`.
BLOCK = re.compile(r"(?:[^.]+\.)*?[^.]*\d(?:\.\d+)*(?=\.)")

Listed = list[Tensor] | tuple[Tensor, ...]


# Optimizers that this trainer's step cannot drive, by lower-case name.
UNSUPPORTED = {
    "lbfgs": "needs a closure that computes the loss again",
    "sparseadam": "is for sparse gradients",
    "muon": "takes matrices only, and models have vectors too; timm:muon takes both",
    "timm:adahessian": "needs second derivatives",
    "timm:kron": "draws random numbers that no checkpoint holds",
    "timm:lookahead": "wraps another optimizer",
    "timm:madgrad": "keeps a state that belongs to no parameter",
}
# Arguments that are settings of their own, or that are decided here.
OWN_ARGUMENTS = {
    "lr": "TRAIN_LR sets it",
    "weight_decay": "TRAIN_WEIGHT_DECAY sets it",
    "params": "it is the model's",
    "fused": "it is chosen by the precision",
    "foreach": "it is chosen by torch",
    "capturable": "it is for CUDA graphs",
    "differentiable": "it is for second derivatives",
    "maximize": "the loss is minimized",
}
SGD_ARGUMENTS = {"momentum": "TRAIN_MOMENTUM sets it", "nesterov": "it follows from TRAIN_MOMENTUM"}
# What an optimizer without a default learning rate gets.
USUAL_LR = 0.001

OptimizerClass = type[torch.optim.Optimizer]


def optimizer_classes(package: str) -> dict[str, OptimizerClass]:
    """Return the optimizers of torch or timm by lower-case name; raises ImportError."""
    members = vars(importlib.import_module(f"{package}.optim")).values()
    classes = (kind for kind in members if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer))
    own = (kind for kind in classes if kind.__module__.startswith(f"{package}."))
    return {kind.__name__.lower(): kind for kind in own if kind is not torch.optim.Optimizer}


def find_optimizer(settings: OptimizationSettings) -> OptimizerClass:
    """Return the optimizer that TRAIN_OPTIMIZER names; raises `UserError` for an unknown or unsupported one."""
    name = settings.optimizer.lower()
    if why := UNSUPPORTED.get(name):
        raise UserError(f"TRAIN_OPTIMIZER={settings.optimizer}: {why}. Use another one, such as adamw.")
    prefix, package = (TIMM_PREFIX, "timm") if name.startswith(TIMM_PREFIX) else ("", "torch")
    try:
        known = {prefix + word: kind for word, kind in optimizer_classes(package).items()}
    except (ImportError, RuntimeError):  # RuntimeError: a torchvision of another torch
        raise UserError(
            f"TRAIN_OPTIMIZER={settings.optimizer}: timm cannot be loaded here. `pip install timm`.", ExitCode.MACHINE
        ) from None
    if name in known:
        return known[name]
    usable = sorted(word for word in known if word not in UNSUPPORTED)
    raise UserError(
        f"TRAIN_OPTIMIZER={settings.optimizer}: no such optimizer. {did_you_mean(name, usable)}"
        f"Use one of: {', '.join(usable)}."
    )


def argument_defaults(kind: OptimizerClass) -> dict[str, object]:
    """Return the arguments of an optimizer with their defaults; one without a default has `inspect`'s marker."""
    return {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}


def default_lr(settings: OptimizationSettings, kind: OptimizerClass) -> float:
    """Return the learning rate that an optimizer gets unless the user sets one."""
    own = argument_defaults(kind).get("lr")
    return DEFAULT_LR.get(settings.optimizer.lower(), float(own) if isinstance(own, (int, float)) else USUAL_LR)


def run_peak_lr(settings: OptimizationSettings) -> float:
    """Return the peak learning rate of a run."""
    return peak_lr(settings, 0.0 if settings.lr != "auto" else default_lr(settings, find_optimizer(settings)))


def parse_arguments(settings: OptimizationSettings, kind: OptimizerClass) -> dict[str, Argument]:
    """Return TRAIN_OPTIMIZER_ARGS by name; raises `UserError` for a name or a value that the optimizer cannot take."""
    source = f"TRAIN_OPTIMIZER_ARGS={printable(settings.optimizer_args)}"
    own = {**OWN_ARGUMENTS, **(SGD_ARGUMENTS if settings.optimizer.lower() == SGD else {})}
    allowed = [name for name in argument_defaults(kind) if name not in own]
    arguments: dict[str, Argument] = {}
    for part in settings.optimizer_args.split():
        name, _, text = part.partition("=")
        value = parse_argument(text)
        refuse_if(
            {
                f"{source}: {name} is there twice. Leave one out.": name in arguments,
                f"{source}: {name} is no argument to give, {own.get(name)}. Leave it out.": name in own,
                f"{source}: {name} has no value. Write {name}=value.": name in allowed and not text,
                f"{source}: {printable(part)} is no argument of {kind.__name__}. {did_you_mean(name, allowed)}It takes"
                f" {', '.join(allowed)}, as name=value.": name not in allowed,
                f"{source}: {printable(text)} is no number, numbers with commas, true or false. Correct it.": (
                    isinstance(value, str)
                    and not re.search(r"\bstr\b", str(inspect.signature(kind).parameters.get(name)))
                ),
            }
        )
        arguments[name] = value
    return arguments


def build_optimizer(
    settings: TrainSettings, model: nn.Module, head: tuple[str, ...] = (), *, fused: bool = True
) -> torch.optim.Optimizer:
    """Return the optimizer; `set_lr` sets its learning rate before each step. `head` names the modules of the head.

    Do not fuse it for scaled fp16 gradients. They usually overflow in the first step, which is skipped. torch 2.8's
    fused SGD leaves momentum uninitialized then. Raises `UserError` for arguments that the optimizer refuses.
    """
    kind = find_optimizer(settings.optim)
    taken = argument_defaults(kind)
    arguments: dict[str, Any] = {
        "lr": run_peak_lr(settings.optim),
        **parse_arguments(settings.optim, kind),
    }
    if "weight_decay" in taken:
        arguments["weight_decay"] = settings.optim.weight_decay
    is_sgd = settings.optim.optimizer.lower() == SGD
    if "fused" in taken:
        # Own models may leave a parameter without a gradient in some steps, where fused SGD fails (torch 2.15).
        fused = fused and not (is_sgd and settings.network.is_own_model)
        arguments["fused"] = fused and all(parameter.is_floating_point() for parameter in model.parameters())
    if is_sgd:
        arguments |= {"momentum": settings.optim.momentum, "nesterov": settings.optim.momentum > 0}
    groups = parameter_groups(settings.optim, model, head)
    if settings.compute.compile == "off":
        skip_dynamo_import()
    try:
        optimizer = kind(groups, **arguments)
    except Exception as error:  # optimizers raise what their checks raise
        raise arguments_error(settings.optim, kind.__name__, error) from None
    if settings.compute.compile == "off":
        unwrap_step(optimizer)
    return optimizer


def arguments_error(settings: OptimizationSettings, name: str, error: Exception) -> UserError:
    """Return the error for arguments that an optimizer refuses."""
    return UserError(
        f"TRAIN_OPTIMIZER_ARGS={printable(settings.optimizer_args)}: {name} refuses them ({first_line(error)}). Correct"
        " them."
    )


def parameter_groups(settings: OptimizationSettings, model: nn.Module, head: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the trainable parameters, grouped by learning-rate factor (`rate`) and weight decay.

    Factors of the model's own `lr_multipliers` apply to SGD only, and leave the weight decay per step the same.
    """
    multipliers: Mapping[str, float] = {}
    if settings.optimizer.lower() == SGD:
        multipliers = getattr(model, "lr_multipliers", {})
    factors = lr_factors(settings, model, head)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = multipliers.get(name, 1.0)
        decays = settings.decay_norms or parameter.ndim > 1
        key = (own * factors[name], settings.weight_decay / own if decays else 0.0)
        group = groups.setdefault(key, {"params": [], "rate": key[0], "weight_decay": key[1]})
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def lr_factors(settings: OptimizationSettings, model: nn.Module, head: tuple[str, ...]) -> dict[str, float]:
    """Return the factor of each parameter's learning rate by TRAIN_LR_LAYER_DECAY and TRAIN_HEAD_LR.

    The head has the peak learning rate, the last block one decay less, and so on to the input (BEiT, arXiv:2106.08254).
    """
    names = [name for name, _ in model.named_parameters()]
    depths = block_depths(model, head)
    deepest = max(depths.values(), default=0) + 1
    decayed = {name: settings.lr_layer_decay ** (deepest - depths.get(name, deepest)) for name in names}
    head_rate = settings.head_lr / run_peak_lr(settings) if settings.head_lr else 1.0
    return {name: head_rate if in_modules(name, head) else decayed[name] for name in names}


def block_depths(model: nn.Module, head: tuple[str, ...]) -> dict[str, int]:
    """Return the number of the block of each parameter outside of the head, counted from the input.

    A block is what has a number in its name. Parameters without one belong to the block before them.
    """
    blocks: list[str] = []
    depths: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if in_modules(name, head):
            continue
        found = BLOCK.match(name)
        block = found[0] if found else ""
        is_new = block not in blocks and parameter.ndim > 1
        if not blocks or (block and is_new):
            blocks.append(block)
        depths[name] = blocks.index(block) if block and block in blocks else len(blocks) - 1
    return depths


def parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the trained parameters in the order in which the optimizer has them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group, multiplied by the group's `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate", 1.0)


def lr_schedule(settings: OptimizationSettings, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0.

    It depends on nothing else, so a resumed run continues with the same rates. One-cycle is piecewise linear
    (Smith, 2018, arXiv:1803.09820). Cosine follows SGDR (arXiv:1608.03983).
    """
    peak = run_peak_lr(settings)
    share = settings.warmup
    if share == "auto":
        share = ONECYCLE_WARMUP if settings.schedule == "onecycle" else 0.0
    warm_steps = share * total_steps

    def lr(step: int) -> float:
        if step < warm_steps:
            return peak * (step + 1) / (warm_steps + 1)
        left = (total_steps - step) / max(1.0, total_steps - warm_steps)
        if settings.schedule == "onecycle":
            return peak * left
        if settings.schedule == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * (1 - left)))
        return peak

    return lr


def make_ema(model: nn.Module, settings: NetworkSettings) -> AveragedModel | None:
    """Return the EMA model, or None if TRAIN_EMA_DECAY is 0."""
    if not settings.ema_decay:
        return None

    def update(averages: Listed, weights: Listed, updates: Tensor | int) -> None:
        """Move the averages towards the weights; the decay grows, since a short run would keep the first weights."""
        decay = min(settings.ema_decay, (1 + int(updates)) / (10 + int(updates)))
        get_ema_multi_avg_fn(decay)(averages, weights, updates)  # type: ignore[no-untyped-call]

    return AveragedModel(model, multi_avg_fn=update)
