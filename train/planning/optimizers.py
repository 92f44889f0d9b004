"""Optimizers by name: those of torch.optim and of timm, read from their sources without importing torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from entrypoint.core.errors import UserError, did_you_mean, printable
from train.setting_groups.model import TIMM_PREFIX
from train.setting_groups.optimization import OptimizationSettings

SGD = "sgd"
# Peak learning rate of sgd for the CNN on CIFAR-10 and digits at the default batch size.
SGD_LR = 0.05
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
# Optimizers whose step is elementwise, so that each rank can take it on its shard of a parameter.
ELEMENTWISE = frozenset({"sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adadelta", "asgd"})
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
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}

Argument = float | int | bool | tuple[float, ...] | None


@dataclass(frozen=True)
class OptimizerClass:
    """An optimizer: the name of its class, its package, and the arguments that it takes with their defaults."""

    name: str
    package: str
    defaults: Mapping[str, object] = field(default_factory=dict)


def source_folders(package: str, part: str) -> list[Path]:
    """Return the folders of a part of a package, found without an import; nothing where it is not installed."""
    spec = find_spec(package)
    return [Path(folder, part) for folder in (spec.submodule_search_locations or [])] if spec else []


@cache
def optimizer_of_file(name: str) -> OptimizerClass | None:
    """Return the optimizer that a file of its name has, as most do; None for another, which all files may have.

    The packages have some fifty files, and each plan and each rank looks for one optimizer.
    """
    package, word = ("timm", name.removeprefix(TIMM_PREFIX)) if name.startswith(TIMM_PREFIX) else ("torch", name)
    if not word.isidentifier():
        return None
    files = [folder / f"{start}{word}.py" for folder in source_folders(package, "optim") for start in ("", "_")]
    found = [one for path in files if path.is_file() for one in classes_in(path, package)]
    return next((one for one in found if one.name.lower() == word), None)


@cache
def known_optimizers() -> Mapping[str, OptimizerClass]:
    """Return all optimizers by lower-case name; those of timm as `timm:NAME`."""
    found: dict[str, OptimizerClass] = {}
    for package, prefix in (("torch", ""), ("timm", TIMM_PREFIX)):
        for folder in source_folders(package, "optim"):
            for path in sorted(folder.glob("*.py")):
                for one in classes_in(path, package):
                    found.setdefault(prefix + one.name.lower(), one)
    found.pop("optimizer", None)
    return found


def classes_in(path: Path, package: str) -> list[OptimizerClass]:
    """Return the optimizers of a source file: classes that derive from a class of that kind."""
    tree = ast.parse(path.read_text(errors="replace"))
    found: list[OptimizerClass] = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        bases = {getattr(base, "attr", getattr(base, "id", "")) for base in node.bases}
        if not bases & {"Optimizer", "Adam", "SGD"}:
            continue
        init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        found.append(OptimizerClass(node.name, package, arguments_of(init) if init else {}))
    return found


def arguments_of(function: ast.FunctionDef) -> dict[str, object]:
    """Return the arguments of an `__init__` with their defaults, None where a default is no literal."""
    positional = function.args.args[1:]
    missing = len(positional) - len(function.args.defaults)
    defaults = [None] * missing + list(function.args.defaults)
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {one.arg: literal(default) for one, default in pairs}


def literal(node: ast.expr | None) -> object:
    """Return the value of a literal expression, None for another one."""
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def find_optimizer(settings: OptimizationSettings) -> OptimizerClass:
    """Return the optimizer that TRAIN_OPTIMIZER names; raises `UserError` for an unknown or unsupported one."""
    name = settings.optimizer.lower()
    if why := UNSUPPORTED.get(name):
        raise UserError(f"TRAIN_OPTIMIZER={settings.optimizer}: {why}. Use another one, such as adamw.")
    if found := optimizer_of_file(name):
        return found
    known = known_optimizers()
    if name in known:
        return known[name]
    usable = [one for one in known if one not in UNSUPPORTED]
    if name.startswith(TIMM_PREFIX) and not any(one.startswith(TIMM_PREFIX) for one in known):
        raise UserError(f"TRAIN_OPTIMIZER={settings.optimizer}: timm is not installed here. `pip install timm`.")
    is_timm = name.startswith(TIMM_PREFIX)
    listed = ", ".join(sorted(one for one in usable if one.startswith(TIMM_PREFIX) == is_timm))
    raise UserError(
        f"TRAIN_OPTIMIZER={settings.optimizer}: no such optimizer. {did_you_mean(name, usable)}Use one of: {listed}."
    )


def peak_lr(settings: OptimizationSettings) -> float:
    """Return the peak learning rate of a run."""
    if settings.lr != "auto":
        return settings.lr
    if settings.optimizer.lower() == SGD:
        return SGD_LR
    default = find_optimizer(settings).defaults.get("lr")
    return float(default) if isinstance(default, (int, float)) else 0.001


def parse_arguments(settings: OptimizationSettings) -> dict[str, Argument]:
    """Return TRAIN_OPTIMIZER_ARGS by name; raises `UserError` for a name or a value that the optimizer cannot take."""
    optimizer = find_optimizer(settings)
    source = f"TRAIN_OPTIMIZER_ARGS={printable(settings.optimizer_args)}"
    own = {**OWN_ARGUMENTS, **(SGD_ARGUMENTS if settings.optimizer.lower() == SGD else {})}
    allowed = [name for name in optimizer.defaults if name not in own]
    found: dict[str, Argument] = {}
    for part in settings.optimizer_args.split():
        name, equals, text = part.partition("=")
        if name in own:
            raise UserError(f"{source}: {name} is no argument to give, {own[name]}. Leave it out.")
        if name in allowed and not text:
            raise UserError(f"{source}: {name} has no value. Write {name}=value.")
        if not equals or name not in allowed:
            hint = did_you_mean(name, allowed)
            raise UserError(
                f"{source}: {printable(part)} is no argument of {optimizer.name}. {hint}It takes"
                f" {', '.join(allowed)}, as name=value."
            )
        found[name] = parse_argument(source, text)
    return found


def parse_argument(source: str, text: str) -> Argument:
    """Return a value: a number, several with commas, or true, false or none; raises `UserError` for another text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    parts = text.split(",")
    if not all(NUMBER.fullmatch(part) for part in parts):
        raise UserError(f"{source}: {printable(text)} is no number, numbers with commas, true or false. Correct it.")
    numbers = tuple(int(part) if re.fullmatch(r"[+-]?\d+", part) else float(part) for part in parts)
    return numbers if len(numbers) > 1 else numbers[0]
