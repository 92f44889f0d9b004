"""What is trained: model, pruning and average of the weights."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from entrypoint.core.setting_types import BelowOne, WordOrPath, about
from entrypoint.core.settings_base import Settings

# Names of models and optimizers that timm has.
TIMM_PREFIX = "timm:"
# Values of TRAIN_FREEZE besides names.
BACKBONE, STATISTICS = "backbone", "statistics"
# Networks of this project.
OWN_MODELS = ("cnn", "speednet", "speednet-half")


class NetworkSettings(Settings, frozen=True, kw_only=True):
    """What is trained: model, pruning and average of the weights."""

    recipe: Annotated[
        Literal["default", "speedrun", "finetune", "imagenet", "vit"],
        about(
            "Preset of model, optimizer, augmentation and epochs. speedrun: CIFAR-10 fast. finetune: pretrained"
            " weights. imagenet: a ResNet-50. vit: a transformer. Your own settings win.",
            basic=True,
            resume="may_change",
        ),
    ] = "default"
    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=300, title="the name of a model")],
        about(
            "cnn (the book's), speednet, speednet-half, any torchvision classifier such as resnet18,"
            " timm:NAME, or your own as package.module:function.",
            basic=True,
            resume="must_keep",
            evaluate="adopted",
        ),
    ] = "cnn"
    model_path: Annotated[
        Path | None,
        about(
            "Folder of your own model's module, if it is no installed package.",
            speed=False,
            nodes="may_differ",
            evaluate="own",
        ),
    ] = None
    model_args: Annotated[
        Annotated[str, Meta(pattern=r"^( *[A-Za-z_]\w*=[^ ]+)* *$", title="name=value, divided by blanks")],
        about(
            "Further arguments of the model, of timm, torchvision or your function: drop_path_rate=0.1 img_size=128."
            " cnn takes bias=0.",
            resume="must_keep",
            evaluate="adopted",
        ),
    ] = ""
    weights: Annotated[
        WordOrPath,
        about(
            "Weights to start from: a file (safetensors, their index, or a state dict), a run folder, or pretrained for"
            " those of torchvision and timm. Unset: random.",
            basic=True,
            speed=False,
            nodes="may_differ",
        ),
    ] = ""
    weights_strict: Annotated[
        bool,
        about(
            "Refuse weights that do not fill all layers but the head. 0 loads what fits.", speed=False, needs="weights"
        ),
    ] = True
    freeze: Annotated[
        str,
        about(
            "What is not trained: backbone (all layers but the head), statistics (BatchNorm's), or layers' names,"
            " with commas.",
            resume="must_keep",
        ),
    ] = ""
    prune_ratio: Annotated[
        BelowOne,
        about(
            "Fraction of each convolution's filters to prune, smallest L1 norm first; 0: none.",
            resume="set_once",
            evaluate="adopted",
        ),
    ] = 0.0
    prune_exclude: Annotated[
        str,
        about(
            "Layers to keep unpruned, with commas: conv1,layer1.",
            resume="set_once",
            evaluate="adopted",
            needs="prune_ratio",
        ),
    ] = ""
    prune_warmup: Annotated[
        Annotated[int, Meta(ge=0)],
        about(
            "Epochs before pruning; training continues after it.", speed=False, resume="set_once", needs="prune_ratio"
        ),
    ] = 1
    ema_decay: Annotated[
        BelowOne,
        about(
            "Decay of the exponential moving average (EMA) of the weights, used for evaluation and export;"
            " 0 disables it."
        ),
    ] = 0.0

    @property
    def is_own_model(self) -> bool:
        """Whether the model is code that the user names: `package.module:function`."""
        return ":" in self.model and not self.model.startswith(TIMM_PREFIX)
