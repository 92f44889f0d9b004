"""Export the trained model as one ONNX file, from pixels to logits."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from entrypoint.core.atomic_files import atomic_open
from entrypoint.core.errors import ExitCode, UserError, first_line
from train.acceleration.small_conv import original_convolutions
from train.settings import ImageShape
from train.transforms.normalize import Normalize


class NormalizedModel(nn.Module):
    """Model with the input normalization included, so that users of the file need neither mean nor scale."""

    def __init__(self, model: nn.Module, normalize: Normalize) -> None:
        super().__init__()
        self.model = model
        self.mean, self.scale = nn.Buffer(normalize.mean.cpu()), nn.Buffer(normalize.scale.cpu())

    def forward(self, pixels: Tensor) -> Tensor:
        """Return (N, classes) logits of (N, C, H, W) pixels, floats from 0 to 255."""
        logits: Tensor = self.model((pixels - self.mean) * self.scale)
        return logits


def export_onnx(
    model: nn.Module, normalize: Normalize, shape: ImageShape, classes: tuple[str, ...], path: Path
) -> None:
    """Write the model as ONNX for any batch size: input `pixels`, output `logits`.

    The metadata entry `classes` is a JSON list with the name of each logit's class.
    Raises `UserError` if PyTorch's exporter fails. The run is saved before.
    """
    with original_convolutions(model):
        whole = NormalizedModel(copy.deepcopy(model).cpu().eval(), normalize)
    images = torch.export.Dim("images", min=2)  # torch.export treats 1 as a constant; the file also accepts one image
    for name in ("onnxscript", "torch.onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # the exporter prints its progress
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                whole,
                (torch.zeros(2, *shape),),
                dynamo=True,
                input_names=["pixels"],
                output_names=["logits"],
                dynamic_shapes={"pixels": {0: images}},
                verbose=False,
            )
        assert program is not None
        model_proto = program.model_proto  # a new one at each access
        entry = model_proto.metadata_props.add()
        entry.key, entry.value = "classes", json.dumps(classes)
        content = model_proto.SerializeToString()
    except Exception as error:  # the exporter raises many types: OnnxExporterError, ImportError, ValueError…
        cause = first_line(error)
        raise UserError(
            f"TRAIN_EXPORT=onnx: the model cannot be exported ({cause}). Set TRAIN_EXPORT=off; the run is saved.",
            ExitCode.MACHINE,
        ) from None
    with atomic_open(path) as file:
        file.write(content)
