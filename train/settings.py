"""The trainer's settings: the TRAIN_* variables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from entrypoint.core.settings_base import Auto, ParsedSettings, read_settings
from train.setting_groups.performance import PerformanceSettings
from train.setting_groups.value_types import AboveZero, Positive

# Settings that do not change the time of a training step.
NOT_SPEED = frozenset(
    {
        *("data_dir", "download", "on_unreadable_image", "synthetic_images", "cache_dir", "epochs", "steps", "lr"),
        *("momentum", "weight_decay", "schedule", "warmup", "seed", "eval_batch_size", "output_dir", "run_name"),
        *("max_minutes", "resume", "resume_allow_changed", "checkpoint_every", "keep_checkpoints", "log_interval"),
        *(
            "progress",
            "profile",
            "export",
            "tensorboard",
            "track",
            "prune_warmup",
            "label_smoothing",
            "model_path",
            "weights",
        ),
        *("weights_strict", "head", "head_lr", "lr_layer_decay", "normalize", "min_lr", "lr_step_epochs"),
        *("lr_gamma", "decay_fraction", "decay_norms", "evaluate", "evaluation_file"),
        *("early_stopping", "early_stopping_metric"),
    }
)

# Channels, height and width.
ImageShape = tuple[int, int, int]
# Steps before a profile: caches fill, kernels are chosen, graphs are compiled.
PROFILE_WARM_UP = 5
# The book's pipeline crops its 224 pixels from images of this side.
BOOK_PIXELS = 255
# Images per evaluation step of a rank, on auto, where they are decoded as they are needed.
STREAM_EVAL_BATCH_SIZE = 256


class TrainSettings(PerformanceSettings, frozen=True, kw_only=True):
    """The trainer's settings, each a variable TRAIN_<NAME> and a flag --<name>."""

    PREFIX: ClassVar[str] = "TRAIN_"
    # Shown by `--help`; `--help-all` shows every setting.
    BASIC: ClassVar[tuple[str, ...]] = (
        *("recipe", "model", "weights", "dataset", "data_dir", "image_size", "epochs", "batch_size", "lr", "precision"),
        *("compile", "output_dir", "run_name", "resume", "seed"),
    )
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
    evaluate: Annotated[
        str, Meta(description="Evaluate this run, checkpoint or model.safetensors, and train nothing.")
    ] = ""
    evaluation_file: Annotated[
        Path | None, Meta(description="evaluate: also write the result as JSON, with the confusion matrix.")
    ] = None
    export: Annotated[Literal["off", "onnx"], Meta(description="Also write the trained model as model.onnx.")] = "off"
    tensorboard: Annotated[bool, Meta(description="Write TensorBoard events.")] = True
    track: Annotated[
        Literal["off", "mlflow", "wandb"],
        Meta(description="Also send numbers to MLflow or Weights & Biases, without a network unless these are set up."),
    ] = "off"

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
