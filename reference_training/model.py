"""Use a trained model from Python: as a module of torch, with its classes and what images become before it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from reference_training.commands import RunError
from reference_training.own_modules import own_modules

if TYPE_CHECKING:
    from train.evaluation.predict import Predictor
    from train.transforms.image_part import View

# A path, what Pillow has opened, (height, width, channels) bytes, or an image file's content.
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
        """Return the inputs of some images, as the run made them; raises ValueError for one that cannot be read."""
        device = next(self.network.parameters()).device
        with own_modules():
            from train.transforms.registry import select_transform

            trained = self._predictor.trained
            view = select_transform(trained.settings, trained.shape[0]).eval_view(trained.shape)
            pixels = [decoded(number, image, trained.shape, view) for number, image in enumerate(images)]
            return self._predictor.inputs(pixels).to(device)

    def predict(self, images: Sequence[ImageSource], *, top: int = 1, batch_size: int = 64) -> list[Answer]:
        """Return what the model says of each image: its `top` classes, or its labels, or its numbers.

        Raises ValueError for an image that cannot be read.
        """
        answers: list[Answer] = []
        for start in range(0, len(images), batch_size):
            inputs = self.preprocess(images[start : start + batch_size])
            with own_modules():
                from train.predict_settings import PredictSettings

                asked = replace(self._predictor, settings=PredictSettings(top=top))
                answers += [list(asked.answer(row)) for row in asked.logits(inputs).cpu()]
        return answers


def decoded(number: int, image: ImageSource, shape: tuple[int, int, int], view: View) -> Tensor:
    """Return an image as (height, width, channels) bytes; raises ValueError with its path or number."""
    from train.data.decoding.decoder import decode_image, failure_reason
    from train.data.sources.image_file import read_file

    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    if isinstance(image, Image.Image):
        out = BytesIO()
        image.save(out, format="TIFF")  # holds all of Pillow's modes, bit for bit
        image = out.getvalue()
    path = Path(f"image {number}" if isinstance(image, bytes) else image)
    channels, height, width = shape
    target = np.empty((height, width, channels), dtype=np.uint8)
    try:
        decode_image(path, image if isinstance(image, bytes) else read_file(path), target, view)
    except Exception as error:  # Pillow's plug-ins raise what their parsers meet
        raise ValueError(f"{path}: {failure_reason(error)}") from None
    return torch.from_numpy(target)


def load_model(source: str | os.PathLike[str], *, model: str = "", model_path: str = "") -> TrainedModel:
    """Return the trained model of a run folder, a checkpoint, or a `model.safetensors` that a run wrote, on the CPU.

    A file may not choose which code runs: for a model of your own name it, `model="package.module:function"`, and the
    folder of its module. Raises `RunError` for a file that cannot be used.
    """
    with own_modules():
        from entrypoint.core.errors import UserError
        from train.evaluation.predict import Predictor
        from train.predict_settings import PredictSettings

        settings = PredictSettings(model=model, model_path=Path(model_path) if model_path else None)
        try:
            predictor = Predictor.load(settings, os.fspath(source))
        except UserError as error:
            raise RunError(str(error), error.code) from None
    return TrainedModel(predictor)


def predict(source: str | os.PathLike[str], images: Sequence[ImageSource], *, top: int = 1) -> list[Answer]:
    """Return what the trained model of `source` says of each image; see `TrainedModel.predict`."""
    return load_model(source).predict(images, top=top)
