"""What is trained: model, pruning and average of the weights."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from entrypoint.core.settings_base import Settings
from train.setting_groups.value_types import BelowOne

# Names of models and optimizers that timm has.
TIMM_PREFIX = "timm:"
# Networks of this project.
OWN_MODELS = ("cnn", "speednet", "speednet-half")


class ModelSettings(Settings, frozen=True, kw_only=True):
    """What is trained: model, pruning and average of the weights."""

    recipe: Annotated[
        Literal["default", "speedrun"],
        Meta(
            description="Preset. speedrun trains CIFAR-10 fast: it sets model, batch size, learning rate and epochs."
            " Your own settings win."
        ),
    ] = "default"
    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=300, title="the name of a model")],
        Meta(
            description="cnn (the book's), speednet, speednet-half, any torchvision classifier such as resnet18,"
            " timm:NAME, or your own as package.module:function."
        ),
    ] = "cnn"
    model_path: Annotated[
        Path | None, Meta(description="Folder of your own model's module, if it is no installed package.")
    ] = None
    weights: Annotated[
        str,
        Meta(
            description="Weights to start from: a file (safetensors, or a state dict), a run folder, or pretrained for"
            " those of torchvision and timm. Unset: random."
        ),
    ] = ""
    weights_strict: Annotated[
        bool, Meta(description="Refuse weights that do not fill all layers but the head. 0 loads what fits.")
    ] = True
    head: Annotated[
        Literal["auto", "new"],
        Meta(description="The last layer. auto: from the weights, or new if they have other classes. new: always new."),
    ] = "auto"
    freeze: Annotated[
        str, Meta(description="Layers that are not trained: backbone (all but the head), or names with commas.")
    ] = ""
    bias: Annotated[bool, Meta(description="Bias parameters in the layers of cnn.")] = True
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
    ema_decay: Annotated[
        BelowOne,
        Meta(
            description="Decay of the exponential moving average (EMA) of the weights, used for evaluation and export;"
            " 0 disables it."
        ),
    ] = 0.0

    @property
    def is_own_model(self) -> bool:
        """Whether the model is code that the user names: `package.module:function`."""
        return ":" in self.model and not self.model.startswith(TIMM_PREFIX)
