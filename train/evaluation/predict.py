"""Program of `entrypoint predict`: the class of each image and its probability, as a table, CSV or JSON."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
from torch import Tensor, nn

from entrypoint.core.console import report_error, write_stderr, writing_stdout
from entrypoint.core.errors import ExitCode, UserError, one_line, printable, refuse_if
from entrypoint.core.files import atomic_open
from entrypoint.core.settings_base import read_settings
from train.acceleration.amp import memory_format
from train.data.decoding.decoder import read_image
from train.data.sources.image_folder import scan_class
from train.data.sources.image_list import UnreadableImage
from train.evaluation.heat_map import record_features
from train.evaluation.load_model import load_model
from train.planning.evaluation_plan import check_result_file
from train.planning.image_sizes import image_sizes
from train.planning.trained_run import TrainedRun, check_model, read_trained_run
from train.predict_settings import PredictSettings
from train.transforms.normalize import Normalize, averaged_logits, resize_batch
from train.transforms.registry import select_transform


@dataclass(frozen=True)
class Prediction:
    """What a model says of an image, or why the image cannot be read.

    `classes` are the most likely ones with their probabilities, or the names of numbers with these (`kind`).
    """

    path: Path
    classes: tuple[tuple[str, float], ...] = ()
    problem: str = ""
    kind: Literal["probability", "value"] = "probability"


@dataclass(frozen=True)
class Predictor:
    """A trained model with what turns image files into its inputs."""

    trained: TrainedRun
    settings: PredictSettings
    model: nn.Module
    normalize: Normalize

    @staticmethod
    def load(settings: PredictSettings, path: str, command: str = "predict") -> Predictor:
        """Return the predictor of a run folder, a checkpoint or a file of weights; raises `UserError`."""
        trained = read_trained_run(path, command, settings.model)
        check_model(trained, settings.model, f"TRAIN_MODEL={settings.model}")
        own = trained.settings.with_values(model_path=settings.model_path)
        model = load_model(trained, own)
        layout = memory_format(channels_last=own.compute.channels_last)
        normalize = Normalize.from_metadata(trained.normalization, torch.device("cpu"), layout)
        return Predictor(trained, settings, model, normalize)

    def predict(self, paths: Sequence[Path]) -> Iterator[Prediction]:
        """Yield the prediction of each image in order; files are decoded by as many threads as there are CPUs."""
        view = select_transform(self.trained.settings.data, self.trained.shape[0]).eval_view(self.trained.shape)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            size = 64 if self.settings.eval_batch_size == "auto" else self.settings.eval_batch_size
            for start in range(0, len(paths), size):
                some = paths[start : start + size]
                images = list(pool.map(lambda path: read_image(path, self.trained.shape, view), some))
                yield from self.predict_batch(some, images)

    def predict_batch(self, paths: Sequence[Path], images: Sequence[object]) -> Iterator[Prediction]:
        """Yield the predictions of one batch of decoded images, some of which may be unreadable."""
        pixels = [torch.as_tensor(one) for one in images if not isinstance(one, UnreadableImage)]
        rows = map(self.answer, self.logits(self.inputs(pixels)) if pixels else ())
        kind: Literal["probability", "value"] = (
            "value" if self.trained.settings.data.task == "regress" else "probability"
        )
        for path, image in zip(paths, images, strict=True):
            if isinstance(image, UnreadableImage):
                yield Prediction(path, problem=image.reason, kind=kind)
            else:
                yield Prediction(path, next(rows), kind=kind)

    def inputs(self, pixels: Sequence[Tensor]) -> Tensor:
        """Return the model's inputs of decoded images, each (height, width, channels) bytes."""
        transform = select_transform(self.trained.settings.data, self.trained.shape[0])
        inputs = self.normalize(transform.after_decoding(torch.stack(list(pixels))))
        return resize_batch(inputs, image_sizes(self.trained.settings.data, self.trained.shape).eval)

    @property
    def copies(self) -> str:
        """Return over which copies of an image the run or the user asks to average."""
        of_run, own = self.trained.settings.run.test_time_augment, self.settings.test_time_augment
        return of_run if own == "auto" else own

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the (N, outputs) logits of inputs."""
        with torch.inference_mode():
            return averaged_logits(self.model, inputs, self.copies)

    def keep_features(self) -> list[Tensor]:
        """Return a list that gets the (N, features) inputs of the last linear layer, batch by batch.

        Raises `UserError` without such a layer, for features of several copies, and for a file that cannot be written.
        """
        check_result_file(self.settings.features, "PREDICT_FEATURES")
        source = f"PREDICT_FEATURES={printable(self.settings.features)}"
        recorded = record_features(self.model, len(self.trained.classes))
        refuse_if(
            {
                f"{source}: is no name of a NumPy file. Name one that ends with .npy.": (
                    self.settings.features and self.settings.features.suffix != ".npy"
                ),
                f"{source}: an image has one row. Set TRAIN_TEST_TIME_AUGMENT=off.": self.copies != "off",
                f"{source}: the model has no last layer, whose inputs the features are. Unset it.": not recorded,
            }
        )
        return recorded[0] if recorded else []

    def answer(self, logits: Tensor) -> tuple[tuple[str, float], ...]:
        """Return what an image's logits say: the likeliest classes, all labels over the threshold, or all numbers.

        Labels come the likeliest first, and at least `--top` of them.
        """
        names, outputs = self.trained.classes, self.trained.normalization.outputs
        if self.trained.settings.data.task == "regress":
            deviation, mean = (torch.tensor(part, dtype=torch.float64) for part in (outputs.deviation, outputs.mean))
            numbers = logits.double() * deviation + mean
            return tuple(zip(names, numbers.tolist(), strict=True))
        count = min(self.settings.top, len(names))
        if self.trained.settings.data.task == "multilabel":
            shares = logits.sigmoid()
            count = max(count if self.settings.top > 1 else 0, int((shares >= outputs.threshold).sum()))
        else:
            shares = (logits / outputs.temperature).softmax(0)
        top = shares.topk(count)
        return tuple(
            (names[index], share) for index, share in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        )


def find_images(words: Sequence[str]) -> list[Path]:
    """Return the images that words name: files, and all files below folders in order of path; hidden ones are left out.

    Raises `UserError` if there is none.
    """
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if not path.is_dir():
            found.append(path)
            continue
        found += [Path(str(one.path)) if isinstance(one, UnreadableImage) else Path(one) for one in scan_class(path)]
    if not found:
        raise UserError("predict: no images there. Use `entrypoint predict RUN IMAGES…`, with files or folders.")
    return found


def write_table(predictions: Iterator[Prediction], out: TextIO) -> None:
    """Write a line for each image: file, class and percentage, and the next classes after them."""
    for one in predictions:
        values = (f"{share:.10g}" if one.kind == "value" else f"{100 * share:.1f} %" for _, share in one.classes)
        pairs = zip(one.classes, values, strict=True)
        if not one.problem:
            text = "  ".join(f"{one_line(name)} {value}" for (name, _), value in pairs)
            print(f"{one_line(one.path)}  {text or 'no label'}", file=out)


def write_csv(predictions: Iterator[Prediction], out: TextIO) -> None:
    """Write a line for each image and class: file, rank, class, and its probability or value; one if it has none."""
    writer = csv.writer(out)
    for index, one in enumerate(predictions):
        if not index:
            writer.writerow(("file", "rank", "class", one.kind))
        for rank, (name, share) in enumerate(one.classes, 1):
            writer.writerow(
                (cell_text(str(one.path)), rank, cell_text(name), f"{share:.{'12g' if one.kind == 'value' else '6f'}}")
            )
        if not (one.classes or one.problem):
            writer.writerow((cell_text(str(one.path)), "", "", ""))


def cell_text(text: str) -> str:
    """Return a cell that no spreadsheet takes for a formula, without control characters (OWASP, CSV injection)."""
    return f"'{one_line(text)}" if text.startswith(FORMULA_STARTS) else one_line(text)


def write_json(predictions: Iterator[Prediction], out: TextIO) -> None:
    """Write one JSON list with an object for each image, unreadable ones with an `error`."""
    listed = [
        {"file": os.fsencode(one.path).decode(errors="replace"), "error": one.problem}
        if one.problem
        else {
            "file": os.fsencode(one.path).decode(errors="replace"),
            "predictions": [
                {"class": name, one.kind: share if one.kind == "value" else round(share, 6)}
                for name, share in one.classes
            ],
        }
        for one in predictions
    ]
    print(json.dumps(listed, indent=1), file=out)


# With a quotation mark before them spreadsheets show them as text.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
WRITERS = {"table": write_table, "csv": write_csv, "json": write_json}


def write_features(path: Path, rows: Tensor, readable: Sequence[bool]) -> None:
    """Write a row for each image, of NaN where it cannot be read; raises `UserError` for a disk."""
    table = torch.full((len(readable), rows.shape[1]), torch.nan)
    table[torch.tensor(readable)] = rows
    try:
        with atomic_open(path) as file:
            np.save(file, table.numpy())
    except OSError as error:
        raise UserError(
            f"PREDICT_FEATURES={printable(path)}: cannot be written ({error.strerror}). Free disk space.",
            ExitCode.MACHINE,
        ) from None


def predict_command(settings: PredictSettings, words: Sequence[str]) -> int:
    """Print the prediction of every image; return 2 if one of them could not be read. Raises `UserError`."""
    paths = find_images(words[1:])
    predictor = Predictor.load(settings, words[0])
    features = predictor.keep_features() if settings.features else []
    readable: list[bool] = []

    def named() -> Iterator[Prediction]:
        for one in predictor.predict(paths):
            readable.append(not one.problem)
            if one.problem:
                write_stderr(f"predict: {one_line(one.path)}: {one_line(one.problem)}")
            yield one

    sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # names of files are bytes
    with writing_stdout():
        WRITERS[settings.format](named(), sys.stdout)
    if settings.features and features:
        write_features(settings.features, torch.cat(features), readable)
    if unreadable := readable.count(False):
        write_stderr(f"predict: {unreadable:,} of {len(paths):,} images cannot be read")
    return ExitCode.USAGE if unreadable else ExitCode.DONE


def main() -> int:
    """Predict what the command line asks for; return the exit code."""
    try:
        return predict_command(read_settings(PredictSettings, os.environ, {}).values, sys.argv[1:])
    except UserError as error:
        return report_error(error)
    except BrokenPipeError:
        return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
