"""What planning knows of optimizers without torch; the model report says the rest."""

from __future__ import annotations

from collections.abc import Mapping

from train.setting_groups.optimization import OptimizationSettings

SGD = "sgd"
# Peak learning rate of sgd for the CNN on CIFAR-10 and digits at the default batch size, and torch's own of the others.
DEFAULT_LR: Mapping[str, float] = {SGD: 0.05, "adam": 0.001, "adamw": 0.001}
# Optimizers whose step is elementwise, so that each rank can take it on its shard of a parameter.
ELEMENTWISE = frozenset({"sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adadelta", "asgd"})


def peak_lr(settings: OptimizationSettings, default_lr: float) -> float:
    """Return the peak learning rate of a run; `default_lr` is the optimizer's own."""
    return default_lr if settings.lr == "auto" else settings.lr
