"""How the weights are optimized."""

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
        Annotated[str, Meta(pattern=r"^(timm:)?[A-Za-z]\w{0,50}$", title="the name of an optimizer")],
        Meta(description="sgd (with Nesterov momentum), or any optimizer of torch.optim such as adamw; timm:NAME."),
    ] = "sgd"
    optimizer_args: Annotated[
        str, Meta(description="Further arguments of the optimizer: betas=0.9,0.95 eps=1e-6, divided by spaces.")
    ] = ""
    lr: Annotated[
        Auto | AboveZero, Meta(description="Peak learning rate. auto: 0.05 for sgd, else the optimizer's own default.")
    ] = "auto"
    head_lr: Annotated[
        AboveZero | None, Meta(description="Peak learning rate of the model's head. Unset: that of the others.")
    ] = None
    lr_layer_decay: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Meta(description="Learning rate of each block as a factor of the next block's; 1 gives all the same."),
    ] = 1.0
    momentum: Annotated[BelowOne, Meta(description="Momentum of sgd.")] = 0.9
    weight_decay: Annotated[NotNegative, Meta(description="Weight decay.")] = 0.0005
    decay_norms: Annotated[
        bool, Meta(description="Weight decay for biases and normalization layers too; 0 leaves them out.")
    ] = True
    schedule: Annotated[
        Literal["onecycle", "cosine", "constant", "step", "wsd"],
        Meta(description="Learning-rate schedule. wsd: warm-up, stable, decay."),
    ] = "onecycle"
    warmup: Annotated[
        Auto | Fraction, Meta(description="Fraction of all steps used for warm-up. auto: 0.25 for onecycle, else none.")
    ] = "auto"
    min_lr: Annotated[NotNegative, Meta(description="Learning rate at the end of the schedule.")] = 0.0
    lr_step_epochs: Annotated[Positive, Meta(description="step: epochs between two reductions.")] = 30
    lr_gamma: Annotated[Annotated[float, Meta(gt=0, lt=1)], Meta(description="step: factor of each reduction.")] = 0.1
    decay_fraction: Annotated[
        Fraction, Meta(description="wsd: fraction of all steps at the end in which the learning rate falls.")
    ] = 0.2
    label_smoothing: Annotated[BelowOne, Meta(description="Label smoothing.")] = 0.0
    max_grad_norm: Annotated[
        NotNegative, Meta(description="Gradient clipping: the largest gradient norm; 0 disables it.")
    ] = 0.0
    early_stopping: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="Stop after so many epochs without improvement on the images that choose; 0 never does."),
    ] = 0
    early_stopping_metric: Annotated[
        Literal["accuracy", "loss"], Meta(description="What has to improve for TRAIN_EARLY_STOPPING.")
    ] = "accuracy"
    seed: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)], Meta(description="Seed of the weights, data order and augmentation.")
    ] = 0
