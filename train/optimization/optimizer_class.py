"""Optimizers by name, those of torch.optim and of timm, with the arguments that they take."""

from __future__ import annotations

import importlib
import inspect

import torch

from entrypoint.core.errors import UserError, did_you_mean, printable
from train.planning.optimizers import DEFAULT_LR, SGD, peak_lr
from train.setting_groups.arguments import Argument, parse_argument
from train.setting_groups.model import TIMM_PREFIX
from train.setting_groups.optimization import OptimizationSettings

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
            f"TRAIN_OPTIMIZER={settings.optimizer}: timm cannot be loaded here. `pip install timm`."
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
        name, equals, text = part.partition("=")
        if name in own:
            raise UserError(f"{source}: {name} is no argument to give, {own[name]}. Leave it out.")
        if name in allowed and not text:
            raise UserError(f"{source}: {name} has no value. Write {name}=value.")
        if not equals or name not in allowed:
            hint = did_you_mean(name, allowed)
            raise UserError(
                f"{source}: {printable(part)} is no argument of {kind.__name__}. {hint}It takes"
                f" {', '.join(allowed)}, as name=value."
            )
        arguments[name] = value = parse_argument(text)
        if isinstance(value, str):
            raise UserError(
                f"{source}: {printable(text)} is no number, numbers with commas, true or false. Correct it."
            )
    return arguments
