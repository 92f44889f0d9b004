"""Export the trained model as one ONNX file, from pixels to logits."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from entrypoint.core.atomic_files import atomic_open
from entrypoint.core.errors import ExitCode, UserError, first_line
from train.acceleration.faster_conv import original_convolutions
from train.models.pruning import silence_library
from train.settings import ImageShape
from train.transforms.normalize import Normalize


class NormalizedModel(nn.Module):
    """Model with the input normalization included, so that users of the file need neither mean nor scale."""

    def __init__(self, model: nn.Module, normalize: Normalize) -> None:
        super().__init__()
        self.model = model
        self.mean, self.scale = nn.Buffer(normalize.mean.cpu()), nn.Buffer(normalize.scale.cpu())
        self.is_regression = bool(normalize.outputs.mean)
        self.output_mean = nn.Buffer(torch.tensor(normalize.outputs.mean))
        self.deviation = nn.Buffer(torch.tensor(normalize.outputs.deviation))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return (N, classes) logits of (N, C, H, W) pixels, floats from 0 to 255; or a regression's numbers."""
        logits: Tensor = self.model((pixels - self.mean) * self.scale)
        return logits * self.deviation + self.output_mean if self.is_regression else logits


def export_onnx(
    model: nn.Module, normalize: Normalize, shape: ImageShape, classes: tuple[str, ...], path: Path
) -> None:
    """Write the model as ONNX for any batch size: input `pixels`, output `logits`.

    The metadata entry `classes` is a JSON list with the name of each logit's class. `threshold` is that of several
    labels.
    Raises `UserError` if PyTorch's exporter fails. The run is saved before.
    """
    with original_convolutions(model):
        whole = NormalizedModel(copy.deepcopy(model).cpu().eval(), normalize)
    images = torch.export.Dim("images", min=2)  # torch.export treats 1 as a constant; the file also accepts one image
    try:
        with silence_library():  # the exporter prints its progress
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
        outputs = normalize.outputs
        for key, value in (("classes", json.dumps(classes)), ("threshold", json.dumps(outputs.threshold))):
            entry = model_proto.metadata_props.add()
            entry.key, entry.value = key, value
        content = model_proto.SerializeToString()
    except Exception as error:  # the exporter raises many types: OnnxExporterError, ImportError, ValueError…
        cause = first_line(error)
        raise UserError(
            f"TRAIN_EXPORT=onnx: the model cannot be exported ({cause}). Set TRAIN_EXPORT=off; the run is saved.",
            ExitCode.MACHINE,
        ) from None
    check_logits(whole, content, shape)
    with atomic_open(path) as file:
        file.write(content)


# Images of different sizes of batches: one, and more than the export saw.
CHECKED_BATCHES = (1, 3)
# Of the largest logit. Kernels that fuse and reorder sums differ by about 1e-6.
TOLERANCE = 1e-3


def check_logits(model: nn.Module, content: bytes, shape: ImageShape) -> None:
    """Raise `UserError` if the file's logits are not the model's, on random pixels.

    onnxruntime computes them if it is installed, else the slower reference of the onnx package.
    """
    run = onnx_runner(content)
    random = torch.Generator().manual_seed(0)
    for count in CHECKED_BATCHES:
        pixels = torch.randint(0, 256, (count, *shape), generator=random).float()
        with torch.inference_mode():
            expected = model(pixels)
        found = torch.from_numpy(run(pixels.numpy()))
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if found.shape != expected.shape or not error <= TOLERANCE:
            raise UserError(
                f"TRAIN_EXPORT=onnx: the file's logits differ from the model's by {100 * error:.2g} %, so it was not"
                " written. Set TRAIN_EXPORT=off; the run is saved.",
                ExitCode.MACHINE,
            )


def onnx_runner(content: bytes) -> Callable[[Any], Any]:
    """Return a function from an array of pixels to the array of logits that a file computes."""
    if find_spec("onnxruntime"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return lambda pixels: session.run(None, {"pixels": pixels})[0]
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load_model_from_string(content))
    return lambda pixels: next(iter(evaluator.run(None, {"pixels": pixels})))
