"""Quantize a trained model to int8 for CPUs, and compare both in score and speed: `entrypoint quantize`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

from entrypoint.core.console import write_stdout
from entrypoint.core.errors import UserError, count_text, one_line
from train.evaluation.exports import Exported, Runner, run_onnx
from train.models.pruning import silence_library
from train.planning.export_formats import INT8_FILE
from train.report.metrics import disk_errors_as_user_errors
from train.transforms.normalize import Normalize

# What has a kernel for int8 in onnxruntime, and most of a network's time.
QUANTIZED_LAYERS = ("Conv", "Gemm", "MatMul")
# Of a transformer's weights, of which so many in a row have a scale. Its products are computed in int8 too (4), by
# scales that each row of the activations gets as it comes (onnxruntime, MatMulNBits).
WEIGHTS_ALONE = DefaultWeightOnlyQuantConfig(block_size=64, is_symmetric=True, accuracy_level=4, bits=8)
# Images from which the ranges of activations are taken, and those that find the layers that lose most.
CALIBRATION_IMAGES, COMPARED_IMAGES = 256, 32
# Images of a batch whose time is measured, and how often.
TIMED_BATCH, TIMED_ROUNDS = 32, 9


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Images as onnxruntime's calibrator asks for them, one batch at a time."""

    def __init__(self, pixels: Tensor) -> None:
        self.batches: Iterator[Tensor] = iter(torch.split(pixels, TIMED_BATCH))

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        """Return the next batch, None after the last one."""
        batch = next(self.batches, None)
        return None if batch is None else {"pixels": batch.numpy()}


class OnnxModel(nn.Module):
    """A file's network in the place of a module: from normalized images to the logits of the trained model."""

    def __init__(self, run: Runner, normalize: Normalize) -> None:
        super().__init__()
        self.run, self.normalize = run, normalize

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of normalized (N, C, H, W) images."""
        logits, outputs = self.run(self.normalize.pixels(images)), self.normalize.outputs
        if outputs.mean:
            logits = (logits - torch.tensor(outputs.mean)) / torch.tensor(outputs.deviation)
        return logits.to(images.device)


class Quantizer:
    """Writes int8 files of a model, with the ranges of activations that `pixels` have.

    Of a transformer (`weights_alone`) the weights are quantized: its activations have outliers, for which one range is
    too coarse (Xiao et al., SmoothQuant, 2023).
    """

    def __init__(self, exported: Exported, pixels: Tensor, folder: Path) -> None:
        self.pixels, self.plain, self.int8 = pixels, folder / "model.onnx", folder / INT8_FILE
        exported.write_onnx(self.plain)
        self.prepared = folder / "prepared.onnx"
        quant_pre_process(self.plain, self.prepared)
        graph = onnx.load(self.prepared).graph
        self.weights_alone = any(node.op_type == "Softmax" for node in graph.node)  # of its attention
        weights = {tensor.name for tensor in graph.initializer}
        self.layers = [
            node.name
            for node in graph.node
            if node.op_type in QUANTIZED_LAYERS
            and not (self.weights_alone and (node.op_type != "MatMul" or node.input[1] not in weights))
        ]

    def write(self, layers: Sequence[str], pixels: Tensor) -> Runner:
        """Write the file with these layers in int8, and return what computes its logits.

        Weights have 7 bits: on CPUs without VNNI sums of 8 bits overflow in silence (onnxruntime's page on
        quantization), and a file that was measured here is used elsewhere.
        """
        if self.weights_alone:
            quantizer = MatMulNBitsQuantizer(
                onnx.load(self.prepared),
                algo_config=WEIGHTS_ALONE,
                nodes_to_exclude=list(set(self.layers).difference(layers)),
            )
            quantizer.process()
            quantizer.model.save_model_to_file(str(self.int8))
            return run_onnx(self.int8)
        quantize_static(
            self.prepared,
            self.int8,
            Calibration(pixels),
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_quantize=list(layers),
        )
        return run_onnx(self.int8)

    def worst_first(self) -> list[str]:
        """Return the layers by what each alone in int8 changes of the logits, the largest change first."""
        some = self.pixels[:COMPARED_IMAGES]
        expected = run_onnx(self.plain)(some)
        change = {layer: float((self.write([layer], some)(some) - expected).square().sum()) for layer in self.layers}
        return sorted(change, key=change.__getitem__, reverse=True)


def find_layers(
    quantizer: Quantizer, score_of: Callable[[Runner], float], least: float
) -> tuple[Runner, float, Sequence[str]]:
    """Return the int8 model that leaves out the fewest layers for a score of `least`; its file is the last written.

    With it come its score and the layers that are left out, as they would lose too much. Their number doubles from 1
    on. Raises `UserError` if half of the layers are not enough.
    """
    score = score_of(run := quantizer.write(quantizer.layers, quantizer.pixels))
    if score >= least:
        return run, score, ()
    worst, count, first = quantizer.worst_first(), 1, score
    while 2 * count <= len(worst):
        score = score_of(run := quantizer.write(worst[count:], quantizer.pixels))
        if score >= least:
            return run, score, worst[:count]
        count *= 2
    raise UserError(
        f"TRAIN_MAX_LOSS: int8 has a score of {first:.2f} %, and {least:.2f} % are asked for. Half of the layers left"
        " out are not enough. Raise it, or use the model as it is.",
    )


def quantize(
    exported: Exported, images: Tensor, score_of: Callable[[nn.Module], float], least: float, path: Path
) -> None:
    """Write the model in int8 to `path` and print what it gives and takes; raises `UserError` for a lower score.

    `images` are normalized as the model's are, and come from training.
    """
    pixels = exported.normalize.pixels(images[:: max(1, len(images) // CALIBRATION_IMAGES)])
    with disk_errors_as_user_errors(path), TemporaryDirectory(prefix=".quantize-", dir=path.parent) as temporary:
        with silence_library():
            quantizer = Quantizer(exported, pixels, Path(temporary))

            def score(run: Runner) -> float:
                return score_of(OnnxModel(run, exported.normalize))

            plain = run_onnx(quantizer.plain)
            before = score(plain)
            int8, after, left_out = find_layers(quantizer, score, least)
        sizes = [file.stat().st_size for file in (quantizer.plain, quantizer.int8)]
        seconds = {count: side_by_side((plain, int8), pixels[:count]) for count in (1, TIMED_BATCH)}
        quantizer.int8.replace(path)
    rows = {
        "score": [f"{value:.2f} %" for value in (before, after)],
        "images/s": [f"{len(pixels[:TIMED_BATCH]) / value:,.0f}" for value in seconds[TIMED_BATCH]],
        "one image": [f"{1000 * value:.2f} ms" for value in seconds[1]],
        "file": [f"{value / 1e6:.1f} MB" for value in sizes],
    }
    alone, whole = "int8 has  the weights alone, as the network is a transformer", one_line(", ".join(left_out))
    lines = (
        f"{'int8':9} {'fp32':>10} {'int8':>10}",
        *(f"{name:9} {left:>10} {right:>10}" for name, (left, right) in rows.items()),
        *((alone,) if quantizer.weights_alone else ()),
        *((f"fp32      {count_text(len(left_out), 'layer')}: {whole}",) if left_out else ()),
        f"written   {one_line(path)}",
    )
    with suppress(BrokenPipeError):
        write_stdout("\n".join(lines))


def side_by_side(runs: tuple[Runner, Runner], pixels: Tensor) -> list[float]:
    """Return each model's median time (s) for a batch, measured in turns, as a machine's speed changes."""
    times: list[list[float]] = [[], []]
    for _ in range(TIMED_ROUNDS):
        for run, own in zip(runs, times, strict=True):
            start = time.perf_counter()
            run(pixels)
            own.append(time.perf_counter() - start)
    return [median(each) for each in times]
