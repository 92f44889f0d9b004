"""Use a trained model from Python: as a module of torch, with its classes and what images become before it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from reference_training.commands import RunError
from reference_training.own_modules import own_modules

with own_modules():
    from entrypoint.core.errors import UserError
    from train.checkpoint.store import local_run
    from train.data.decoding.decoder import decode_image, failure_reason
    from train.data.decoding.pixel_values import convert_to_visible
    from train.data.sources.image_file import read_file
    from train.evaluation.predict import Predictor
    from train.predict_settings import PredictSettings
    from train.transforms.registry import select_transform

if TYPE_CHECKING:
    from train.transforms.image_part import View

# A path, what Pillow has opened, bytes of shape (height, width) or (height, width, channels), or a file's content.
ImageSource = str | os.PathLike[str] | Image.Image | np.ndarray[Any, np.dtype[np.uint8]] | bytes
# The classes of an image with their probabilities, likeliest first; for `task=regress` the names and values.
Answer = list[tuple[str, float]]


class TrainedModel(nn.Module):
    """A trained network in evaluation mode, from (N, channels, height, width) inputs to (N, outputs) logits."""

    classes: tuple[str, ...]

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.network, self.classes = predictor.model, predictor.trained.classes
        self._predictor = predictor
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of inputs as `preprocess` makes them."""
        logits: Tensor = self.network(inputs)
        return logits

    def preprocess(self, images: Iterable[ImageSource]) -> Tensor:
        """Return the inputs of some images as the run made them, in the model's number format and on its device.

        Raises ValueError for an image that cannot be read, and for none.
        """
        check_list(images)
        trained = self._predictor.trained
        view = select_transform(trained.settings.data, trained.shape[0]).eval_view(trained.shape)
        pixels = [decoded(number, image, trained.shape, view) for number, image in enumerate(images)]
        if not pixels:
            raise ValueError("there are no images")
        inputs = self._predictor.inputs(pixels)
        like = next((each for each in self.network.parameters() if each.is_floating_point()), inputs)
        return inputs.to(like.device, like.dtype)

    def predict(self, images: Sequence[ImageSource], *, top: int = 1, batch_size: int = 64) -> list[Answer]:
        """Return what the model says of each image: its `top` classes, or its labels, or its numbers.

        Raises ValueError for an image that cannot be read, and for a `top` or `batch_size` below 1.
        """
        check_list(images)
        if min(top, batch_size) < 1:
            raise ValueError("top and batch_size are 1 or more")
        predictor = replace(self._predictor, model=self.network, settings=PredictSettings(top=top))
        answers: list[Answer] = []
        for start in range(0, len(images), batch_size):
            logits = predictor.logits(self.preprocess(images[start : start + batch_size]))
            answers += [list(predictor.answer(row)) for row in logits.float().cpu()]
        return answers

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainedModel:
        """Return a copy with weights of its own."""
        return TrainedModel(replace(self._predictor, model=deepcopy(self.network, memo)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be pickled: its network's class may be one that no other process can import."""
        raise TypeError("a TrainedModel is not pickled: keep its run folder, and call load_model where it is used")


def check_list(images: object) -> None:
    """Raise TypeError for a single image in place of several."""
    if isinstance(images, (str, bytes, os.PathLike, np.ndarray, Image.Image)) or not isinstance(images, Sequence):
        raise TypeError("images are a list: write [image] for one")


def decoded(number: int, image: ImageSource, shape: tuple[int, int, int], view: View) -> Tensor:
    """Return an image as (height, width, channels) bytes; raises ValueError with its path or number."""
    if not isinstance(image, (str, os.PathLike, bytes, np.ndarray, Image.Image)):
        raise TypeError(f"image {number}: is {type(image).__name__}, and no path, bytes, array or Pillow's image")
    channels, height, width = shape
    path = Path(image) if isinstance(image, (str, os.PathLike)) else Path(f"image {number}")
    target = np.empty((height, width, channels), dtype=np.uint8)
    try:
        if isinstance(image, np.ndarray):
            image = image_of(image)
        if isinstance(image, Image.Image):
            image = content_of(image, channels)
        decode_image(image if isinstance(image, bytes) else read_file(path), target, view)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plug-ins raise what their parsers meet
        raise ValueError(f"{path}: {failure_reason(error)}") from None
    return torch.from_numpy(target)


def image_of(pixels: np.ndarray[Any, Any]) -> Image.Image:
    """Return an image of bytes; raises ValueError for another type or shape."""
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (1,), (3,), (4,)):
        raise ValueError(f"is {pixels.dtype} of shape {pixels.shape}, not bytes of (height, width[, channels])")
    return Image.fromarray(pixels.reshape(pixels.shape[:2]) if pixels.shape[2:] == (1,) else pixels)


def content_of(image: Image.Image, channels: int) -> bytes:
    """Return an image that Pillow has opened as a file's content: as a viewer shows it, and without loss."""
    out = BytesIO()
    convert_to_visible(ImageOps.exif_transpose(image), channels).save(out, format="TIFF")
    return out.getvalue()


def load_model(source: str | os.PathLike[str], *, model: str = "", model_path: str | None = None) -> TrainedModel:
    """Return the trained model of a run folder or its URL, a checkpoint, or a run's `model.safetensors`, on the CPU.

    A file may not choose which code runs. For a model of your own name its function by `model="package.module:name"`,
    and the folder of its module by `model_path`. Raises `RunError` for a file that cannot be used.
    """
    settings = PredictSettings(model=model, model_path=Path(model_path) if model_path else None)
    with own_modules():  # building a model may import more
        try:
            return TrainedModel(Predictor.load(settings, local_run(os.fspath(source), os.environ)))
        except UserError as error:
            raise RunError(str(error).removeprefix("predict="), error.code) from None


def predict(source: str | os.PathLike[str], images: Sequence[ImageSource], *, top: int = 1) -> list[Answer]:
    """Return what the trained model of `source` says of each image; see `TrainedModel.predict`."""
    return load_model(source).predict(images, top=top)
