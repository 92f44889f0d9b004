"""How the weights are optimized."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from entrypoint.core.settings_base import Auto
from train.setting_groups.data import DataSettings
from train.setting_groups.value_types import AboveZero, BelowOne, Fraction, NotNegative, Positive


class OptimizationSettings(DataSettings, frozen=True, kw_only=True):
    """How the weights are optimized."""

    epochs: Annotated[Annotated[int, Meta(ge=1, le=10**6)], Meta(description="Passes over the training images.")] = 10
    steps: Annotated[
        Annotated[int, Meta(ge=1, le=10**9)] | None,
        Meta(description="Optimizer steps of the whole run, instead of TRAIN_EPOCHS."),
    ] = None
    batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=10**7)],
        Meta(description="Global batch size: images per optimizer step over all ranks."),
    ] = 64
    grad_accum_steps: Annotated[
        Positive, Meta(description="Gradient accumulation: micro-batches per optimizer step and rank.")
    ] = 1
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"], Meta(description="Optimizer. sgd uses Nesterov momentum.")
    ] = "sgd"
    lr: Annotated[
        Auto | AboveZero, Meta(description="Peak learning rate. auto: 0.05 for sgd, 0.001 for adam and adamw.")
    ] = "auto"
    momentum: Annotated[BelowOne, Meta(description="Momentum of sgd.")] = 0.9
    weight_decay: Annotated[NotNegative, Meta(description="Weight decay.")] = 0.0005
    schedule: Annotated[Literal["onecycle", "cosine", "constant"], Meta(description="Learning-rate schedule.")] = (
        "onecycle"
    )
    warmup: Annotated[
        Auto | Fraction, Meta(description="Fraction of all steps used for warm-up. auto: 0.25 for onecycle.")
    ] = "auto"
    label_smoothing: Annotated[BelowOne, Meta(description="Label smoothing.")] = 0.0
    max_grad_norm: Annotated[
        NotNegative, Meta(description="Gradient clipping: the largest gradient norm; 0 disables it.")
    ] = 0.0
    seed: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)], Meta(description="Seed of the weights, data order and augmentation.")
    ] = 0
