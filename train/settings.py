"""What a person may tell the trainer: the TRAIN_* variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from entrypoint.variables import Given, Settings, read_settings

PREFIX = "TRAIN_"

Auto = Literal["auto"]
Whole = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Compiler = Literal["inductor", "cudagraphs", "ipex", "onnxrt", "tvm", "openxla", "aot_eager", "eager"]


# What says where and how long a run is, and what is learnt, but not how long a step takes.
NOT_SPEED = frozenset(
    {
        *("data_dir", "download", "bad_images", "synthetic_images", "cache_dir", "epochs", "steps", "lr", "momentum"),
        *("weight_decay", "schedule", "warmup", "seed", "eval_batch_size", "output_dir", "run_name", "max_minutes"),
        *("resume", "resume_changed", "checkpoint_every", "keep", "log_interval", "progress", "profile", "export"),
        *("tensorboard", "prune_warmup", "label_smoothing"),
    }
)


class TrainSettings(Settings):
    """The trainer's settings, each a variable TRAIN_<NAME> and a flag --<name>."""

    recipe: Literal["default", "speedrun"] = Field(
        "default",
        description="speedrun sets what learns CIFAR-10 fast: speednet, batch, rates, epochs; your own settings win.",
    )
    model: str = Field(
        "cnn", description="cnn (the book's), speednet(-half), or any torchvision classifier: resnet18, vit_b_16…"
    )
    bias: bool = Field(True, description="Biases in the CNN's layers: 1 or 0.")

    dataset: Literal["digits", "fashion-mnist", "cifar10", "imagefolder", "synthetic"] = Field(
        "digits", description="digits ships with the program; imagefolder reads data-dir."
    )
    data_dir: Path | None = Field(
        None,
        description="imagefolder: the folder with train/ and test/ (or val/); others: where downloads go.",
    )
    download: bool = Field(True, description="Fetch fashion-mnist and cifar10 where they are missing: 1 or 0.")
    image_size: Auto | Annotated[int, Field(ge=4, le=4096)] = Field(
        "auto", description="Side in pixels of imagefolder's pictures: auto is their own, or 224 above 96."
    )
    bad_images: Literal["error", "skip"] = Field(
        "error", description="A picture that cannot be read: stop and name it, or skip and count."
    )
    synthetic_images: Annotated[int, Field(ge=10, le=10**8)] = Field(
        2560, description="synthetic: training images; a fifth as many test images."
    )
    synthetic_classes: Annotated[int, Field(ge=2, le=10**5)] = Field(10, description="synthetic: classes.")
    synthetic_shape: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}x[1-9]\d{0,3}x[1-9]\d{0,3}$")] = Field(
        "3x32x32", description="synthetic: channels x height x width."
    )
    feed: Literal["auto", "memory", "stream"] = Field(
        "auto", description="memory keeps all images as bytes; stream decodes them in loader workers."
    )
    workers: Auto | Annotated[int, Field(ge=0, le=1024)] = Field(
        "auto", description="Loader workers of each rank when streaming: auto is one a thread of the rank."
    )
    cache_dir: Path | None = Field(None, description="Decoded images; unset is the user's cache folder.")
    pin_memory: Auto | bool = Field("auto", description="Copy to a GPU from pinned memory: auto is with a GPU.")
    prefetch: Whole = Field(2, description="Batches that each loader worker has ready ahead.")
    transforms: Literal["auto", "none", "flip-crop", "book"] = Field(
        "auto",
        description="auto flips and shifts colour pictures, and leaves grey ones alone; book is the book's pipeline, at"
        " 224x224.",
    )
    mixup: Annotated[float, Field(ge=0)] = Field(0.0, description="Mixup: the alpha of its Beta; 0 is off.")
    cutmix: Annotated[float, Field(ge=0)] = Field(0.0, description="CutMix: the alpha of its Beta; 0 is off.")

    epochs: Annotated[int, Field(ge=1, le=10**6)] = Field(10, description="Passes over the training images.")
    steps: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        None, description="Optimizer steps of the whole run, in place of epochs; the last epoch may be cut."
    )
    batch_size: Annotated[int, Field(ge=1, le=10**7)] = Field(
        64, description="Images of one optimizer step over all ranks together."
    )
    accumulate: Whole = Field(1, description="Parts that each rank computes its share of a batch in.")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="sgd has Nesterov momentum.")
    lr: Auto | Positive = Field("auto", description="Peak learning rate: auto is 0.05 for sgd, 0.001 for adam(w).")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="Momentum of sgd.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0005, description="Weight decay.")
    schedule: Literal["onecycle", "cosine", "constant"] = Field("onecycle", description="Learning rate over time.")
    warmup: Auto | Share = Field("auto", description="Share of all steps that warms up: auto is 0.25 for onecycle.")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Label smoothing.")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = Field(
        "fp32",
        description="bf16 and fp16 are autocast, weights stay fp32; tf32 is for GPUs; auto takes bf16 where CPU or GPU"
        " have units for it.",
    )
    compile: Literal["off", "default", "reduce-overhead", "max-autotune", "auto"] = Field(
        "off", description="torch.compile and its mode: auto compiles where that pays and proves faster."
    )
    compile_backend: Compiler = Field("inductor", description="What compiles; `entrypoint doctor` lists which can.")
    ipex: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Intel's extension: auto leaves it, since it gained nothing where it was tried; on takes it.",
    )
    ema: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Also keep an average of the weights over the steps, and judge it: the decay, 0 is off."
    )
    prune: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of each layer's filters to cut out, those of the smallest L1 norm; 0 is off."
    )
    prune_with: Literal["torch-pruning", "nni"] = Field("torch-pruning", description="What prunes.")
    prune_ops: Annotated[str, Field(pattern=r"^(conv2d|linear)(,(conv2d|linear))*$")] = Field(
        "conv2d", description="Kinds of layers that are pruned: conv2d, linear, or both with a comma."
    )
    prune_exclude: str = Field("", description="Layers that stay whole, with commas: conv1,layer1.")
    prune_warmup: Annotated[int, Field(ge=0)] = Field(1, description="Epochs before the cut; it trains on after it.")
    clip_norm: Annotated[float, Field(ge=0)] = Field(0.0, description="Largest norm of the gradient; 0 is off.")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="Decides weights, order and augmentation.")
    deterministic: bool = Field(False, description="Only deterministic kernels, slower on CUDA: 1 or 0.")
    channels_last: bool = Field(True, description="Pictures and filters with channels innermost in memory: 1 or 0.")
    sync_batchnorm: Auto | bool = Field(
        "auto", description="BatchNorm over the batches of all ranks: auto, and 1; 0 is each rank's own."
    )
    find_unused: bool = Field(False, description="Models with parameters that a step may leave out: 1 or 0.")
    static_graph: bool = Field(False, description="Tell DDP that every step is alike: 1 or 0.")
    compress: Literal["off", "bf16", "fp16", "powersgd"] = Field(
        "off",
        description="Gradients smaller on their way between ranks, at a loss of accuracy; by powersgd a run does not go"
        " on to the bit.",
    )
    shard: Literal["off", "fsdp", "dataparallel"] = Field(
        "off",
        description="fsdp spreads weights, gradients and optimizer over the ranks, for models that fit no one device;"
        " dataparallel is refused: it says why.",
    )
    eval_batch_size: Auto | Whole = Field("auto", description="Images of one evaluation step of a rank.")

    output_dir: Path = Field(Path("runs"), description="Where run folders go.")
    run_name: Annotated[str, Field(pattern=r"^[^/\x00]{1,200}$")] | None = Field(
        None, description="Name of the run's folder: unset is <time>-<model>-<dataset>."
    )
    max_minutes: Positive | None = Field(
        None, description="End after so many minutes with a checkpoint and exit code 75, to go on from it."
    )
    resume: str = Field(
        "off",
        description="auto goes on from the newest checkpoint of the run (or of the newest run); off; a file.",
    )
    resume_changed: bool = Field(False, description="Go on from a checkpoint of other settings all the same: 1 or 0.")
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(1, description="Epochs between checkpoints; 0 is none.")
    keep: Whole = Field(2, description="Newest checkpoints that are kept, beside the best.")
    log_interval: Auto | Whole = Field("auto", description="Steps between log lines: auto is about five an epoch.")
    progress: Literal["auto", "bar", "plain", "off"] = Field(
        "auto", description="auto is a bar on a terminal, else plain lines."
    )
    profile: Annotated[int, Field(ge=0, le=1000)] = Field(
        0, description="Steps to profile after a warm-up: operators, phases, a trace and a diagnosis."
    )
    export: Literal["off", "onnx"] = Field("off", description="Also write the trained model as model.onnx.")
    tensorboard: bool = Field(True, description="Write TensorBoard events: 1 or 0.")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the whole run."""
        return self.steps or self.epochs * steps_per_epoch

    def epochs_begun(self, steps_per_epoch: int) -> int:
        """Return the number of epochs that the run has, the last of which may be cut."""
        return -(-self.total_steps(steps_per_epoch) // steps_per_epoch)

    def that_bear_on_speed(self) -> dict[str, Any]:
        """Return the settings that a step's time hangs on, as JSON has them."""
        return self.model_dump(mode="json", exclude=set(NOT_SPEED))

    @field_validator("run_name")
    @classmethod
    def no_dots(cls, name: str | None) -> str | None:
        """Refuse names that would leave the output folder or hide."""
        if name and (name.startswith(".") or name == "latest"):
            raise ValueError("a name that does not begin with a dot and is not `latest`")
        return name


def read_train_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> Given[TrainSettings]:
    """Validate TRAIN_* and the trainer's flags; raises `Refused`."""
    return read_settings(TrainSettings, PREFIX, environ, flags)
