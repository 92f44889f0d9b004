"""How a run is evaluated, where it is kept, and what becomes of it."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from entrypoint.core.setting_types import (
    AboveZero,
    Fraction,
    NotNegative,
    PathOrUrl,
    PathText,
    Positive,
    WordOrPath,
    about,
)
from entrypoint.core.settings_base import Auto, Settings


class RunSettings(Settings, frozen=True, kw_only=True):
    """A run's evaluations, folder, length, checkpoints and reports."""

    eval_every: Annotated[Positive, about("Epochs between evaluations; the last epoch has one too.")] = 1
    eval_batch_size: Annotated[
        Auto | Positive,
        about("Images per evaluation step of a rank.", speed=False, resume="may_change", evaluate="adopted"),
    ] = "auto"
    test_time_augment: Annotated[
        Literal["off", "flip", "flip-shift"],
        about(
            "Test-time augmentation: the mean over an image and its mirror image, or over six copies with"
            " flip-shift. It takes 2 or 6 times as long.",
            evaluate="adopted",
        ),
    ] = "off"
    threshold: Annotated[
        Auto | Fraction,
        about(
            "multilabel: the least probability of a label. auto: that of the best F1 on the val images, else 0.5.",
            speed=False,
            evaluate="adopted",
            needs="task=multilabel",
        ),
    ] = "auto"
    evaluate: Annotated[
        PathText,
        about(
            "Evaluate this run, checkpoint or model.safetensors, and train nothing.",
            speed=False,
            resume="may_change",
            evaluate="own",
        ),
    ] = ""
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
