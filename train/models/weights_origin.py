"""Where weights come from: the file behind TRAIN_WEIGHTS, and what is known of the run that trained them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from entrypoint.core.errors import UserError, printable
from train.checkpoint.metadata import METADATA_FILE, CorruptCheckpoint, Normalization, read_metadata

WEIGHTS_FILE = "model.safetensors"
# In a checkpoint; the average is what a run evaluates and exports.
EMA_FILE = "ema.safetensors"


@dataclass(frozen=True)
class WeightsOrigin:
    """The classes and the normalization that weights were trained with, empty and None where nothing says it."""

    classes: tuple[str, ...] = ()
    normalization: Normalization | None = None


def find_weights_file(text: str) -> Path:
    """Return the file that a path means: itself, or the weights of a run folder or a checkpoint.

    Raises `UserError` where there is none.
    """
    path = Path(text)
    if not path.is_dir():
        if path.exists():
            return path
        raise UserError(
            f"TRAIN_WEIGHTS={printable(text)}: no such file. Name a file of weights, a run folder, or `pretrained`."
        )
    for folder in (path, path / "checkpoint/best"):
        names = (EMA_FILE, WEIGHTS_FILE) if (folder / METADATA_FILE).is_file() else (WEIGHTS_FILE,)
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise UserError(
        f"TRAIN_WEIGHTS={printable(text)}: the folder has no {WEIGHTS_FILE}. Name a file, a run folder or a checkpoint."
    )


def read_origin(path: Path) -> WeightsOrigin:
    """Return what a file of this trainer says of its weights, and nothing for other files."""
    if (path.parent / METADATA_FILE).is_file():
        try:
            metadata, _ = read_metadata(path.parent)
        except CorruptCheckpoint:
            return WeightsOrigin()  # the tensors are still safetensors
        return WeightsOrigin(metadata.data.classes, metadata.normalization)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        classes = tuple(msgspec.json.decode(header.get("classes", "[]"), type=list[str]))
        text = header.get("normalization", "")
        return WeightsOrigin(classes, msgspec.json.decode(text, type=Normalization) if text else None)
    except (SafetensorError, OSError, ValueError, msgspec.MsgspecError):
        return WeightsOrigin()  # no file of this trainer


def origin_header(classes: tuple[str, ...], normalization: Normalization) -> dict[str, str]:
    """Return the header of a safetensors file from which `read_origin` reads."""
    return {
        "format": "pt",
        "classes": json.dumps(classes, ensure_ascii=True),
        "normalization": json.dumps(msgspec.to_builtins(normalization)),
    }
