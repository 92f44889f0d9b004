"""How the weights are optimized."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from entrypoint.core.setting_types import AboveZero, BelowOne, Fraction, NotNegative, PathText, Positive, about
from entrypoint.core.settings_base import Auto, Settings

SGD = "sgd"
# Peak learning rate of sgd for the CNN on CIFAR-10 and digits at the default batch size, and torch's own of the others.
DEFAULT_LR: Mapping[str, float] = {SGD: 0.05, "adam": 0.001, "adamw": 0.001}
# Optimizers whose step is elementwise, so that each rank can take it on its shard of a parameter.
ELEMENTWISE = frozenset({"sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adadelta", "asgd"})
# The loss of each task unless the user names one, and those that can be named.
LOSSES = {
    "classify": ("cross_entropy", "bce", "focal"),
    "multilabel": ("bce", "focal"),
    "regress": ("huber", "mse", "mae"),
}


class OptimizationSettings(Settings, frozen=True, kw_only=True):
    """How the weights are optimized."""

    epochs: Annotated[
        Annotated[int, Meta(ge=1, le=10**6)], about("Passes over the training images.", basic=True, speed=False)
    ] = 10
    steps: Annotated[
        Annotated[int, Meta(ge=1, le=10**9)] | None,
        about("Optimizer steps of the whole run, instead of TRAIN_EPOCHS.", speed=False),
    ] = None
    batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=10**7)],
        about("Global batch size: images per optimizer step over all ranks.", basic=True),
    ] = 64
    grad_accum_steps: Annotated[
        Positive, about("Gradient accumulation: micro-batches per optimizer step and rank.")
    ] = 1
    optimizer: Annotated[
        Annotated[str, Meta(pattern=r"^(timm:)?[A-Za-z]\w{0,50}$", title="the name of an optimizer")],
        about(
            "sgd (with Nesterov momentum), or any optimizer of torch.optim such as adamw; timm:NAME.",
            resume="must_keep",
        ),
    ] = "sgd"
    optimizer_args: Annotated[
        str, about("Further arguments of the optimizer: betas=0.9,0.95 eps=1e-6, divided by spaces.")
    ] = ""
    lr: Annotated[
        Auto | AboveZero,
        about("Peak learning rate. auto: 0.05 for sgd, else the optimizer's own default.", basic=True, speed=False),
    ] = "auto"
    head_lr: Annotated[
        AboveZero | None, about("Peak learning rate of the model's head. Unset: that of the others.", speed=False)
    ] = None
    lr_layer_decay: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        about("Learning rate of each block as a factor of the next block's; 1 gives all the same.", speed=False),
    ] = 1.0
    momentum: Annotated[BelowOne, about("Momentum of sgd.", speed=False, needs="optimizer=sgd")] = 0.9
    weight_decay: Annotated[NotNegative, about("Weight decay.", speed=False)] = 0.0005
    decay_norms: Annotated[
        bool, about("Weight decay for biases and normalization layers too; 0 leaves them out.", speed=False)
    ] = True
    schedule: Annotated[Literal["onecycle", "cosine", "constant"], about("Learning-rate schedule.", speed=False)] = (
        "onecycle"
    )
    warmup: Annotated[
        Auto | Fraction,
        about("Fraction of all steps used for warm-up. auto: 0.25 for onecycle, else none.", speed=False),
    ] = "auto"
    loss: Annotated[
        Literal["auto", "cross_entropy", "bce", "focal", "mse", "mae", "huber"],
        about(
            "Loss. auto: cross_entropy, bce for multilabel, huber for regress. focal has a gamma of 2.",
            speed=False,
            evaluate="adopted",
        ),
    ] = "auto"
    class_weights: Annotated[
        str,
        about(
            "Weights of the classes in the loss: ant=2,bee=0.5, 1 for all others. auto: inverse to their numbers of"
            " images.",
            speed=False,
            needs="task!=regress",
        ),
    ] = ""
    balance: Annotated[
        bool,
        about(
            "Draw each class equally often, with replacement, in place of each image once an epoch.",
            speed=False,
            needs="task=classify",
        ),
    ] = False
    teacher: Annotated[
        PathText,
        about(
            "Distillation: a run folder or its model.safetensors, whose answers for each batch are learned too.",
            needs="task=classify",
            nodes="may_differ",
        ),
    ] = ""
    teacher_weight: Annotated[
        Fraction, about("Share of the teacher's answers in the loss.", speed=False, needs="teacher")
    ] = 0.5
    label_smoothing: Annotated[BelowOne, about("Label smoothing.", speed=False, needs="task=classify")] = 0.0
    max_grad_norm: Annotated[NotNegative, about("Gradient clipping: the largest gradient norm; 0 disables it.")] = 0.0
    skip_nonfinite: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        about(
            "Skip a step whose loss or gradients are not finite, as if it had no images, up to so many in a row; 0 ends"
            " the run at the first.",
        ),
    ] = 0
    early_stopping: Annotated[
        Annotated[int, Meta(ge=0)],
        about("Stop after so many epochs without a better score on the images that choose; 0 never does.", speed=False),
    ] = 0
    seed: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)],
        about("Seed of the weights, data order and augmentation.", basic=True, speed=False, evaluate="adopted"),
    ] = 0

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the whole run."""
        return self.steps or self.epochs * steps_per_epoch

    def total_epochs(self, steps_per_epoch: int) -> int:
        """Return the number of epochs of the run; TRAIN_STEPS may end the last one early."""
        return -(-self.total_steps(steps_per_epoch) // steps_per_epoch)


def peak_lr(settings: OptimizationSettings, default_lr: float) -> float:
    """Return the peak learning rate of a run; `default_lr` is the optimizer's own."""
    return default_lr if settings.lr == "auto" else settings.lr
