"""The trainer's settings: the TRAIN_* variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from entrypoint.core.settings_base import Auto, ParsedSettings, Settings, read_settings

# Settings that do not change the time of a training step.
NOT_SPEED = frozenset(
    {
        *("data_dir", "download", "on_unreadable_image", "synthetic_images", "cache_dir", "epochs", "steps", "lr"),
        *("momentum", "weight_decay", "schedule", "warmup", "seed", "eval_batch_size", "output_dir", "run_name"),
        *("max_minutes", "resume", "resume_allow_changed", "checkpoint_every", "keep_checkpoints", "log_interval"),
        *("progress", "profile", "export", "tensorboard", "prune_warmup", "label_smoothing"),
    }
)

# Channels, height and width.
ImageShape = tuple[int, int, int]
# Steps before a profile: caches fill, kernels are chosen, graphs are compiled.
PROFILE_WARM_UP = 5
# The book's pipeline crops its 224 pixels from images of this side.
BOOK_PIXELS = 255

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
AboveZero = Annotated[float, Meta(gt=0)]
# Larger ones give the same mix, a half of each image.
Alpha = Annotated[float, Meta(ge=0, le=1000)]


class TrainSettings(Settings, frozen=True, kw_only=True):
    """The trainer's settings, each a variable TRAIN_<NAME> and a flag --<name>."""

    PREFIX: ClassVar[str] = "TRAIN_"
    # Shown by `--help`; `--help-all` shows every setting.
    BASIC: ClassVar[tuple[str, ...]] = (
        *("recipe", "model", "dataset", "data_dir", "image_size", "epochs", "batch_size", "lr", "precision"),
        *("compile", "output_dir", "run_name", "resume", "seed"),
    )
    RENAMED: ClassVar[Mapping[str, str]] = {
        "feed": "data_source",
        "workers": "num_workers",
        "prefetch": "prefetch_factor",
        "accumulate": "grad_accum_steps",
        "clip_norm": "max_grad_norm",
        "compress": "gradient_compression",
        "shard": "parallelism",
        "find_unused": "ddp_find_unused_parameters",
        "static_graph": "ddp_static_graph",
        "keep": "keep_checkpoints",
        "ema": "ema_decay",
        "prune": "prune_ratio",
        "prune_with": "prune_backend",
        "prune_ops": "prune_layer_types",
        "mixup": "mixup_alpha",
        "cutmix": "cutmix_alpha",
        "bad_images": "on_unreadable_image",
        "resume_changed": "resume_allow_changed",
    }
    RENAMED_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = {"parallelism": {"off": "ddp"}}

    recipe: Annotated[
        Literal["default", "speedrun"],
        Meta(
            description="Preset. speedrun trains CIFAR-10 fast: it sets model, batch size, learning rate and epochs."
            " Your own settings win."
        ),
    ] = "default"
    model: Annotated[
        str,
        Meta(description="cnn (the book's), speednet, speednet-half, or any torchvision classifier such as resnet18."),
    ] = "cnn"
    bias: Annotated[bool, Meta(description="Bias parameters in the layers of cnn.")] = True

    dataset: Annotated[
        Literal["digits", "fashion-mnist", "cifar10", "imagefolder", "synthetic"],
        Meta(description="Dataset. digits needs no download; imagefolder reads TRAIN_DATA_DIR."),
    ] = "digits"
    data_dir: Annotated[
        Path | None,
        Meta(description="imagefolder: the folder with train/ and test/ (or val/). Other datasets: download folder."),
    ] = None
    download: Annotated[bool, Meta(description="Download fashion-mnist and cifar10 if they are missing.")] = True
    image_size: Annotated[
        Auto | Annotated[int, Meta(ge=4, le=4096)],
        Meta(description="Side of imagefolder's images in pixels. auto: their own size, or 224 above 96 pixels."),
    ] = "auto"
    on_unreadable_image: Annotated[
        Literal["error", "skip"],
        Meta(description="What to do with an image that cannot be read: stop and name it, or skip and count it."),
    ] = "error"
    synthetic_images: Annotated[
        Annotated[int, Meta(ge=10, le=10**8)],
        Meta(description="synthetic: training images. Test images: a fifth of them."),
    ] = 2560
    synthetic_classes: Annotated[
        Annotated[int, Meta(ge=2, le=10**5)], Meta(description="synthetic: number of classes.")
    ] = 10
    synthetic_shape: Annotated[
        Annotated[
            str,
            Meta(pattern=r"^[1-9]\d{0,3}x[1-9]\d{0,3}x[1-9]\d{0,3}$", title="channels x height x width, as 3x32x32"),
        ],
        Meta(description="synthetic: channels x height x width."),
    ] = "3x32x32"
    data_source: Annotated[
        Literal["auto", "memory", "stream"],
        Meta(description="memory keeps all decoded images in memory. stream decodes them in loader workers."),
    ] = "auto"
    num_workers: Annotated[
        Auto | Annotated[int, Meta(ge=0, le=1024)],
        Meta(
            description="Threads per rank that decode when streaming. auto: one per thread of the rank, and more if"
            " files are slow to read."
        ),
    ] = "auto"
    cache_dir: Annotated[
        Path | None, Meta(description="Folder for decoded images. Unset: the user's cache folder.")
    ] = None
    pin_memory: Annotated[
        Auto | bool, Meta(description="Copy batches to a GPU from pinned memory. auto: if there is a GPU.")
    ] = "auto"
    prefetch_factor: Annotated[Positive, Meta(description="Batches that are decoded ahead of the one in use.")] = 2
    transforms: Annotated[
        Literal["auto", "none", "flip-crop", "imagenet", "book"],
        Meta(
            description="Augmentation. auto: flip-crop for color images, none for grayscale."
            " imagenet: random resized crop and flip. book: the book's pipeline at 224x224."
        ),
    ] = "auto"
    mixup_alpha: Annotated[Alpha, Meta(description="Alpha of mixup's Beta distribution; 0 disables mixup.")] = 0.0
    cutmix_alpha: Annotated[Alpha, Meta(description="Alpha of CutMix's Beta distribution; 0 disables CutMix.")] = 0.0

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
    precision: Annotated[
        Literal["auto", "fp32", "tf32", "bf16", "fp16"],
        Meta(
            description="bf16 and fp16 use autocast with fp32 weights; tf32 is for GPUs."
            " auto: bf16 where the hardware supports it."
        ),
    ] = "fp32"
    compile: Annotated[
        Literal["off", "default", "reduce-overhead", "max-autotune", "auto"],
        Meta(description="torch.compile and its mode. auto measures whether compilation pays off."),
    ] = "off"
    compile_backend: Annotated[
        Annotated[str, Meta(pattern=r"^[\w.-]{1,100}$", title="the name of a backend")],
        Meta(description="Backend of torch.compile."),
    ] = "inductor"
    ipex: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Intel Extension for PyTorch. auto: off, because it gave no speedup."),
    ] = "auto"
    ema_decay: Annotated[
        BelowOne,
        Meta(
            description="Decay of the exponential moving average (EMA) of the weights, used for evaluation and export;"
            " 0 disables it."
        ),
    ] = 0.0
    prune_ratio: Annotated[
        BelowOne,
        Meta(description="Fraction of each layer's filters to prune, smallest L1 norm first; 0 disables pruning."),
    ] = 0.0
    prune_backend: Annotated[Literal["torch-pruning", "nni"], Meta(description="Library that prunes.")] = (
        "torch-pruning"
    )
    prune_layer_types: Annotated[
        Annotated[
            str, Meta(pattern=r"^(conv2d|linear)(,(conv2d|linear))*$", title="conv2d, linear, or both with a comma")
        ],
        Meta(description="Types of layers to prune: conv2d, linear, or both with a comma."),
    ] = "conv2d"
    prune_exclude: Annotated[str, Meta(description="Layers to keep unpruned, with commas: conv1,layer1.")] = ""
    prune_warmup: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="Epochs before pruning; training continues after it.")
    ] = 1
    max_grad_norm: Annotated[
        NotNegative, Meta(description="Gradient clipping: the largest gradient norm; 0 disables it.")
    ] = 0.0
    seed: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)], Meta(description="Seed of the weights, data order and augmentation.")
    ] = 0
    deterministic: Annotated[bool, Meta(description="Use deterministic kernels only; slower on CUDA.")] = False
    channels_last: Annotated[bool, Meta(description="Use the channels-last memory format.")] = True
    sync_batchnorm: Annotated[
        Auto | bool,
        Meta(description="Compute BatchNorm statistics over all ranks. auto and 1: yes. 0: each rank its own."),
    ] = "auto"
    ddp_find_unused_parameters: Annotated[
        bool,
        Meta(description="DDP's find_unused_parameters: set to 1 if some parameters get no gradient in a step."),
    ] = False
    ddp_static_graph: Annotated[bool, Meta(description="DDP's static_graph: every step uses the same graph.")] = False
    gradient_compression: Annotated[
        Literal["off", "bf16", "fp16", "powersgd"],
        Meta(
            description="Gradient compression for DDP; may reduce accuracy."
            " Resuming with powersgd is not bitwise identical."
        ),
    ] = "off"
    parallelism: Annotated[
        Literal["ddp", "fsdp"],
        Meta(description="ddp replicates the model. fsdp (FSDP2) shards parameters, gradients and optimizer state."),
    ] = "ddp"
    eval_batch_size: Annotated[Auto | Positive, Meta(description="Images per evaluation step of a rank.")] = "auto"

    output_dir: Annotated[Path, Meta(description="Folder for run folders.")] = Path("runs")
    run_name: Annotated[
        Annotated[
            str,
            Meta(
                pattern=r"^(?!latest$)[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]{0,199}$",
                title="a name without slashes or control characters that does not begin with a dot and is not `latest`",
            ),
        ]
        | None,
        Meta(description="Name of the run folder. Unset: <time>-<model>-<dataset>."),
    ] = None
    max_minutes: Annotated[
        AboveZero | None,
        Meta(description="Stop after this many minutes with a checkpoint and exit code 75."),
    ] = None
    resume: Annotated[
        str,
        Meta(description="auto: the newest checkpoint of the run, or of the newest run. Or a path to one."),
    ] = "off"
    resume_allow_changed: Annotated[
        bool, Meta(description="Resume although settings or data changed, where the checkpoint can be mapped.")
    ] = False
    checkpoint_every: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="Epochs between checkpoints; 0 writes none.")
    ] = 1
    keep_checkpoints: Annotated[Positive, Meta(description="Newest checkpoints to keep, besides the best.")] = 2
    log_interval: Annotated[
        Auto | Positive, Meta(description="Steps between log lines. auto: about five lines per epoch.")
    ] = "auto"
    progress: Annotated[
        Literal["auto", "bar", "plain", "off"],
        Meta(description="Progress display. auto: a bar on a terminal, else plain lines."),
    ] = "auto"
    profile: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        Meta(description="Steps to profile after a warm-up: operators, phases, a trace and advice."),
    ] = 0
    export: Annotated[Literal["off", "onnx"], Meta(description="Also write the trained model as model.onnx.")] = "off"
    tensorboard: Annotated[bool, Meta(description="Write TensorBoard events.")] = True

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the whole run."""
        return self.steps or self.epochs * steps_per_epoch

    def total_epochs(self, steps_per_epoch: int) -> int:
        """Return the number of epochs of the run; TRAIN_STEPS may end the last one early."""
        return -(-self.total_steps(steps_per_epoch) // steps_per_epoch)

    def speed_relevant(self) -> dict[str, Any]:
        """Return the settings that change the time of a step, as JSON types."""
        return {name: value for name, value in self.to_json().items() if name not in NOT_SPEED}


def read_train_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> ParsedSettings[TrainSettings]:
    """Validate TRAIN_* and the trainer's flags; raises `UserError`."""
    return read_settings(TrainSettings, environ, flags)
