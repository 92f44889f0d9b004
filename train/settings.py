"""The trainer's settings: the TRAIN_* variables."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable
from entrypoint.core.setting_types import AboveZero, NotNegative, PathOrUrl, PathText, Positive, WordOrPath, about
from entrypoint.core.settings_base import Auto, ParsedSettings, read_settings, rules_of
from entrypoint.core.user_dirs import user_cache_dir
from train.setting_groups.folder_kind import kind_of_folder
from train.setting_groups.optimization import OptimizationSettings

# Channels, height and width.
ImageShape = tuple[int, int, int]
# Steps before a profile: caches fill, kernels are chosen, graphs are compiled.
PROFILE_WARM_UP = 5
# The book's pipeline crops its 224 pixels from images of this side.
BOOK_PIXELS = 255
# Images per evaluation step of a rank, on auto, where they are decoded as they are needed.
STREAM_EVAL_BATCH_SIZE = 256


# A file system takes 255, and a run writes files whose names are a little longer.
MAX_NAME_BYTES = 200


class TrainSettings(OptimizationSettings, frozen=True, kw_only=True):
    """The trainer's settings, each a variable TRAIN_<NAME> and a flag --<name>."""

    PREFIX: ClassVar[str] = "TRAIN_"

    output_dir: Annotated[
        PathOrUrl,
        about(
            "Folder for run folders, or its URL in object storage: s3://bucket/runs.",
            basic=True,
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = Path("runs")
    run_name: Annotated[
        Annotated[
            str,
            Meta(
                pattern=r"^(?!latest$)[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*$",
                title="a name without slashes or control characters that does not begin with a dot and is not `latest`",
            ),
        ]
        | None,
        about(
            "Name of the run folder. Unset: <time>-<model>-<dataset>.",
            basic=True,
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = None
    max_minutes: Annotated[
        AboveZero | None,
        about(
            "Stop after this many minutes with a checkpoint and exit code 75.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = None
    price_per_hour: Annotated[
        AboveZero | None,
        about(
            "What a node costs in an hour, in any currency: the summary says what the command has cost.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = None
    preemption: Annotated[
        Literal["auto", "ec2", "gce", "off"],
        about(
            "Save and exit with 75 once the cloud gives notice that it takes this machine. auto: on machines of EC2"
            " and Google.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = "auto"
    resume: Annotated[
        WordOrPath,
        about(
            "auto: the newest checkpoint of the run, or of the newest run. Or a run folder, or a checkpoint."
            " A folder brings its settings.",
            basic=True,
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = "off"
    resume_allow_changed: Annotated[
        bool,
        about(
            "Resume although settings or data changed, where the checkpoint can be mapped.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
            needs="resume!=off",
        ),
    ] = False
    checkpoint_every: Annotated[
        Annotated[int, Meta(ge=0)],
        about("Epochs between checkpoints; 0 writes none.", speed=False, resume="may_change"),
    ] = 1
    keep_checkpoints: Annotated[
        Positive,
        about(
            "Newest checkpoints to keep, besides the best.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
            needs="checkpoint_every",
        ),
    ] = 2
    keep_best: Annotated[
        Positive,
        about(
            "Best checkpoints to keep, which `entrypoint average` takes. Object storage gets the first of them.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
            needs="checkpoint_every",
        ),
    ] = 1
    log_interval: Annotated[
        Auto | Positive,
        about("Steps between log lines. auto: about five lines per epoch.", speed=False, resume="may_change"),
    ] = "auto"
    progress: Annotated[
        Literal["auto", "bar", "plain", "off"],
        about(
            "Progress display. auto: a bar on a terminal, else plain lines.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = "auto"
    profile: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        about(
            "Steps to profile after a warm-up: operators, phases and a trace.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = 0
    evaluate: Annotated[
        PathText,
        about(
            "Evaluate this run, checkpoint or model.safetensors, and train nothing.",
            speed=False,
            resume="may_change",
            evaluate="own",
        ),
    ] = ""
    evaluation_file: Annotated[
        Path | None,
        about(
            "evaluate: also write the result as JSON, with the confusion matrix.",
            speed=False,
            resume="may_change",
            evaluate="own",
            needs="evaluate",
        ),
    ] = None
    average: Annotated[
        str,
        about(
            "average: the models whose mean is computed, with commas.",
            speed=False,
            resume="may_change",
            evaluate="own",
            needs="evaluate",
        ),
    ] = ""
    max_loss: Annotated[
        NotNegative | None,
        about(
            "quantize: write int8 only if that costs at most so many points of the model's score.",
            speed=False,
            resume="may_change",
            evaluate="own",
            needs="evaluate",
        ),
    ] = None
    export: Annotated[
        str,
        about(
            "Also write the trained model for other runtimes, with commas: onnx, torch-export, openvino, executorch."
            " off: none.",
            speed=False,
            resume="may_change",
        ),
    ] = "off"
    tensorboard: Annotated[
        bool, about("Write TensorBoard events.", speed=False, resume="may_change", nodes="may_differ")
    ] = True
    track: Annotated[
        Literal["off", "mlflow", "wandb"],
        about(
            "Also send numbers to MLflow or Weights & Biases, without a network unless these are set up.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
        ),
    ] = "off"

    @property
    def tests_only(self) -> bool:
        """Whether the training images are not needed: an evaluation that neither quantizes nor averages."""
        return bool(self.evaluate) and self.max_loss is None and not self.average

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the optimizer steps of the whole run."""
        return self.steps or self.epochs * steps_per_epoch

    def total_epochs(self, steps_per_epoch: int) -> int:
        """Return the number of epochs of the run; TRAIN_STEPS may end the last one early."""
        return -(-self.total_steps(steps_per_epoch) // steps_per_epoch)

    def speed_relevant(self) -> dict[str, Any]:
        """Return the settings that change the time of a step, as JSON types."""
        rules = rules_of(type(self))
        return {name: value for name, value in self.to_json().items() if rules[name].speed}


def copy_folder(url: str, environ: Mapping[str, str]) -> Path:
    """Return the folder on this machine for copies of what is below a URL; raises `UserError` without a home."""
    cache = user_cache_dir(environ)
    if cache is None:
        raise UserError(f"{printable(url)}: its copy needs a cache folder. Set HOME or XDG_CACHE_HOME.")
    return cache / "runs" / hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()


def read_train_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> ParsedSettings[TrainSettings]:
    """Validate TRAIN_* and the trainer's flags; raises `UserError`."""
    parsed = read_settings(TrainSettings, environ, flags)
    if (length := len(os.fsencode(parsed.values.run_name or ""))) > MAX_NAME_BYTES:
        source = printable(parsed.sources["run_name"])
        raise UserError(f"{source}: is {length} bytes long, and a folder's name has at most {MAX_NAME_BYTES}.")
    is_settled = "dataset" in parsed.sources or not parsed.values.data_dir
    # The error of imagefolder says what a folder needs.
    kind = parsed.values.dataset if is_settled else kind_of_folder(parsed.values.data_dir) or "imagefolder"
    output = copy_folder(url, environ) if (url := parsed.url("output_dir")) else parsed.values.output_dir
    return replace(parsed, values=replace(parsed.values, dataset=kind, output_dir=output))
