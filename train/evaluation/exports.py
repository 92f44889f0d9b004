"""Export a trained model for other runtimes, from pixels to logits: `TRAIN_EXPORT`, and `entrypoint export`."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from entrypoint.core.console import report_error, writing_stdout
from entrypoint.core.errors import ExitCode, UserError, first_line, one_line
from entrypoint.core.files import atomic_write_text
from entrypoint.core.settings_base import read_settings
from train.acceleration.faster_conv import original_convolutions
from train.evaluation.predict import Predictor
from train.models.pruning import silence_library
from train.planning.export_formats import FORMATS
from train.planning.image_sizes import BOOK_CROP, image_sizes
from train.predict_settings import PredictSettings
from train.report.metrics import disk_errors_as_user_errors
from train.setting_groups.data import DataSettings
from train.settings import BOOK_PIXELS, ImageShape
from train.transforms.normalize import Normalize

# Returns the logits of (N, C, H, W) pixels, as a runtime computes them from a file.
Runner = Callable[[Tensor], Tensor]


class NormalizedModel(nn.Module):
    """Model with the input normalization included, so that users of the file need neither mean nor scale."""

    def __init__(self, model: nn.Module, normalize: Normalize) -> None:
        super().__init__()
        self.model = model
        self.mean, self.scale = nn.Buffer(normalize.mean.cpu()), nn.Buffer(normalize.scale.cpu())
        self.output_mean = nn.Buffer(torch.tensor(normalize.outputs.mean))
        self.deviation = nn.Buffer(torch.tensor(normalize.outputs.deviation))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return (N, classes) logits of (N, C, H, W) pixels, floats from 0 to 255; or a regression's numbers."""
        logits: Tensor = self.model((pixels - self.mean) * self.scale)
        return logits * self.deviation + self.output_mean if len(self.output_mean) else logits


@dataclass(frozen=True)
class Exported:
    """What is exported: the model, the shape of its images, and what a program that uses it has to know."""

    whole: NormalizedModel
    normalize: Normalize
    shape: ImageShape
    metadata: dict[str, Any]

    @staticmethod
    def of(
        model: nn.Module, normalize: Normalize, decoded: ImageShape, settings: DataSettings, classes: tuple[str, ...]
    ) -> Exported:
        """Return a copy of a model on the CPU, with its normalization; `decoded` is the shape of decoded images."""
        with original_convolutions(model):
            whole = NormalizedModel(copy.deepcopy(model).cpu().eval(), normalize)
        whole.to(memory_format=torch.contiguous_format)  # what ExecuTorch's passes expect
        shape = image_sizes(settings, decoded).eval
        outputs = normalize.outputs
        metadata = {
            "task": settings.task,
            "classes": classes,
            "threshold": outputs.threshold,
            "temperature": outputs.temperature,
            "pixels": pixel_steps(settings, decoded, shape),
        }
        return Exported(whole, normalize, shape, metadata)

    def graph(self, images: Dim) -> ExportedProgram:
        """Return the model as a graph for a number of `images`."""
        return torch.export.export(self.whole, (torch.zeros(2, *self.shape),), dynamic_shapes={"pixels": {0: images}})

    @cached_property
    def program(self) -> ExportedProgram:
        """The graph for any number of images, which several formats are written from."""
        return self.graph(Dim("images", min=2))  # torch.export treats 1 as a constant; the graph also takes one image

    def write_onnx(self, path: Path) -> None:
        """Write the input `pixels`, the output `logits`, and the metadata as entries of JSON."""
        program = torch.onnx.export(
            self.program,
            dynamo=True,
            input_names=["pixels"],
            output_names=["logits"],
            verbose=False,
        )
        assert program is not None
        model_proto = program.model_proto  # a new one at each access
        for key, value in self.metadata.items():
            entry = model_proto.metadata_props.add()
            entry.key, entry.value = key, json.dumps(value)
        path.write_bytes(model_proto.SerializeToString())

    def write_torch_export(self, path: Path) -> None:
        """Write the graph for `torch.export.load`."""
        torch.export.save(self.program, path)

    def write_openvino(self, path: Path) -> None:
        """Write OpenVINO's two files, by way of ONNX."""
        import openvino

        self.write_onnx(path.with_suffix(".onnx"))
        openvino.save_model(openvino.convert_model(path.with_suffix(".onnx")), path, compress_to_fp16=False)
        path.with_suffix(".onnx").unlink()

    def write_executorch(self, path: Path) -> None:
        """Write the program with XNNPACK's kernels, which phones and small boards have too."""
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        program = self.graph(Dim("images", min=1, max=EXECUTORCH_BATCH))
        path.write_bytes(
            to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer
        )


def pixel_steps(settings: DataSettings, decoded: ImageShape, shape: ImageShape) -> list[str]:
    """Return how a file becomes an image of this `shape`, as `predict` does it; `decoded` is the shape of decoding."""
    channels, height, width = decoded
    crops = settings.transforms == "imagenet" and settings.crop_ratio < 1
    steps = [
        f"decode as {'gray' if channels == 1 else 'RGB'} of 8 bits, transparent parts on white, upright by EXIF",
        f"cut the largest box with the sides {width}:{height} out of the middle"
        + f", of that {settings.crop_ratio:g} of each side in the middle" * crops,
        f"resize to width {width} and height {height}, bilinear with antialiasing",
    ]
    if settings.transforms == "book":
        steps += [f"resize the shorter side to {BOOK_PIXELS}", f"cut {BOOK_CROP} x {BOOK_CROP} out of the middle"]
    elif shape != decoded:
        steps.append(f"resize to width {shape[2]} and height {shape[1]}, bilinear with antialiasing")
    return steps


# The largest batch of an ExecuTorch file, which reserves the memory for it. From 16 images on torch 2.15 takes another
# way for convolutions on a CPU, and an exported graph has one.
EXECUTORCH_BATCH = 15


def run_onnx(path: Path) -> Runner:
    """Return what onnxruntime computes on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])


def run_torch_export(path: Path) -> Runner:
    """Return the module that torch loads."""
    runner: Runner = torch.export.load(path).module()
    return runner


def run_openvino(path: Path) -> Runner:
    """Return what OpenVINO computes on the CPU, in the number format of the file."""
    import openvino

    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda pixels: torch.from_numpy(model(pixels.numpy())[0])


def run_executorch(path: Path) -> Runner:
    """Return what ExecuTorch computes."""
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    return lambda pixels: method.execute([pixels])[0]


RUNNERS: dict[str, Callable[[Path], Runner]] = {
    "onnx": run_onnx,
    "torch-export": run_torch_export,
    "openvino": run_openvino,
    "executorch": run_executorch,
}


def export_model(exported: Exported, formats: Sequence[str], folder: Path) -> list[Path]:
    """Write the model in each format once, and model.json with what a program that uses it has to know.

    A file is there only if its own runtime gives the model's logits. Return the files. Raises `UserError` at the end
    for the first format that cannot be exported.
    """
    written: list[Path] = []
    failed: list[UserError] = []
    with disk_errors_as_user_errors(folder):
        for name in dict.fromkeys(formats):
            with TemporaryDirectory(prefix=".export-", dir=folder) as temporary:
                path = Path(temporary, FORMATS[name])
                try:
                    write(exported, name, path)
                except UserError as error:
                    failed.append(error)
                    continue
                written += [each.rename(folder / each.name) for each in path.parent.iterdir()]
        if written:
            atomic_write_text(folder / "model.json", json.dumps(exported.metadata | {"shape": exported.shape}) + "\n")
    if failed:
        raise failed[0]
    return written


def write(exported: Exported, name: str, path: Path) -> None:
    """Write one format and compare its logits; raises `UserError` if its exporter or its runtime fails."""
    writers = {
        "onnx": exported.write_onnx,
        "torch-export": exported.write_torch_export,
        "openvino": exported.write_openvino,
        "executorch": exported.write_executorch,
    }
    try:
        with silence_library():  # the exporters print their progress
            writers[name](path)
            check_logits(exported, name, RUNNERS[name](path))
    except Exception as error:  # the exporters raise many types: OnnxExporterError, ImportError, ValueError…
        if isinstance(error, UserError) or getattr(error, "errno", None):  # of a disk
            raise
        cause = one_line(first_line(error.__cause__ or error))
        raise UserError(
            f"export {name}: the model cannot be exported ({cause}). Leave this format out; the run is saved.",
            ExitCode.MACHINE,
        ) from None


# Images of different sizes of batches: one, more than the export saw, and the most that each format takes.
CHECKED_BATCHES = (1, 3, EXECUTORCH_BATCH)
# Of the largest logit. Kernels that fuse and reorder sums differ by about 1e-6.
TOLERANCE = 1e-3


def check_logits(exported: Exported, name: str, run: Runner) -> None:
    """Raise `UserError` if the file's logits are not the model's, on random pixels."""
    random = torch.Generator().manual_seed(0)
    for count in CHECKED_BATCHES:
        pixels = torch.randint(0, 256, (count, *exported.shape), generator=random).float()
        with torch.inference_mode():
            expected, logits = exported.whole(pixels), run(pixels)
        error = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if logits.shape != expected.shape or not error <= TOLERANCE:
            raise UserError(
                f"export {name}: the file's logits differ from the model's by {100 * error:.2g} %, so it was not"
                " written. Leave this format out; the run is saved.",
                ExitCode.MACHINE,
            )


def main() -> int:
    """Export what the command line asks for: a run, then formats; return the exit code."""
    try:
        source, *formats = sys.argv[1:]
        predictor = Predictor.load(read_settings(PredictSettings, os.environ, {}).values, source, "export")
        trained = predictor.trained
        exported = Exported.of(
            predictor.model, predictor.normalize, trained.shape, trained.settings.data, trained.classes
        )
        files = export_model(exported, formats, trained.weights.parent)
    except UserError as error:
        return report_error(error)
    with suppress(BrokenPipeError), writing_stdout():
        print("\n".join(one_line(file) for file in files))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
