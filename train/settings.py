"""What a person may tell the trainer: the TRAIN_* variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from entrypoint.variables import Given, Settings, read_settings

PREFIX = "TRAIN_"

Auto = Literal["auto"]
Whole = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class TrainSettings(Settings):
    """The trainer's settings, each a variable TRAIN_<NAME> and a flag --<name>."""

    model: str = Field("cnn", description="cnn (the book's), or any torchvision classifier: resnet18, vit_b_16…")
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
    augment: Literal["auto", "none", "flip-crop"] = Field(
        "auto", description="auto flips and shifts colour pictures, and leaves grey ones alone."
    )

    epochs: Annotated[int, Field(ge=1, le=10**6)] = Field(10, description="Passes over the training images.")
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
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "fp32",
        description="bf16 is autocast, weights stay fp32; auto takes it where CPU or GPU have units for it.",
    )
    ipex: Literal["auto", "on", "off"] = Field(
        "auto", description="Intel's extension: auto takes it on CPUs with AMX, where it gains, for runs of minutes."
    )
    clip_norm: Annotated[float, Field(ge=0)] = Field(0.0, description="Largest norm of the gradient; 0 is off.")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(0, description="Decides weights, order and augmentation.")
    deterministic: bool = Field(False, description="Only deterministic kernels, slower on CUDA: 1 or 0.")
    eval_batch_size: Auto | Whole = Field("auto", description="Images of one evaluation step of a rank.")

    output_dir: Path = Field(Path("runs"), description="Where run folders go.")
    run_name: Annotated[str, Field(pattern=r"^[^/\x00]{1,200}$")] | None = Field(
        None, description="Name of the run's folder: unset is <time>-<model>-<dataset>."
    )
    resume: str = Field(
        "off",
        description="auto goes on from the newest checkpoint of the run (or of the newest run); off; a file.",
    )
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(1, description="Epochs between checkpoints; 0 is none.")
    keep: Whole = Field(2, description="Newest checkpoints that are kept.")
    log_interval: Auto | Whole = Field("auto", description="Steps between log lines: auto is about five an epoch.")
    progress: Literal["auto", "bar", "plain", "off"] = Field(
        "auto", description="auto is a bar on a terminal, else plain lines."
    )
    tensorboard: bool = Field(True, description="Write TensorBoard events: 1 or 0.")

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
