"""Evaluate a split over all ranks, each image once: accuracy, loss, confusion matrix, and the surest mistakes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from entrypoint.core.errors import ExitCode, UserError
from train.acceleration.amp import autocast
from train.data.feeds.batches import IGNORE_LABEL
from train.distributed.ddp import is_sharded
from train.distributed.process_group import ProcessGroup
from train.evaluation.heat_map import heat_maps, show_heat
from train.evaluation.results import (
    BINS,
    CHOOSING_IMAGES,
    TEMPERATURES,
    Confidence,
    EvalMethod,
    EvalResult,
    TargetScores,
    count_confidence,
    losses_by_temperature,
)
from train.transforms.normalize import Normalize, averaged_logits

# A matrix of more classes is no longer looked at, and takes longer to count than the model.
MAX_CONFUSION_CLASSES = 1000
TOP = 5


@dataclass
class EvalCounts:
    """What a rank has counted so far, as tensors that can be summed over the ranks.

    The temperature may be chosen on these images, by the smallest cross entropy.
    """

    method: EvalMethod
    device: torch.device
    totals: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Start at zero.

        Parts: stop request, loss, images, right ones, right ones among five; confidence; losses by temperature; and the
        pairs of classes.
        """
        count = self.method.classes**2 if self.has_matrix else 2 * self.method.classes
        parts = 5 + 3 * BINS + len(TEMPERATURES) + count
        self.totals = torch.zeros(parts, dtype=torch.float64, device=self.device)
        self.plain, self.confidence, self.losses, self.pairs = self.parts_of(self.totals)

    def parts_of(self, totals: Tensor) -> list[Tensor]:
        """Return the parts of such a vector."""
        known = [5, 3 * BINS, len(TEMPERATURES)]
        return list(torch.split(totals, [*known, len(totals) - sum(known)]))

    @property
    def has_matrix(self) -> bool:
        """Whether every pair of classes is counted."""
        return self.method.classes <= MAX_CONFUSION_CLASSES

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch of (N, classes) fp32 logits; images with IGNORE_LABEL do not count."""
        counted = labels != IGNORE_LABEL
        predicted = logits.argmax(1)
        right = (predicted == labels) & counted
        loss = self.method.loss(logits, labels)
        top5 = torch.zeros((), device=logits.device)
        if logits.shape[1] > TOP:
            top5 = ((logits.topk(TOP).indices == labels[:, None]).any(1) & counted).sum()
        self.plain[1:] += torch.stack([one.to(torch.float64) for one in (loss, counted.sum(), right.sum(), top5)])
        classes, logits, known, own = self.method.classes, logits[counted], predicted[counted], labels[counted]
        shares = (logits / self.method.outputs.temperature).softmax(1).amax(1)
        self.confidence += count_confidence(shares, known == own).flatten()
        if self.method.chooses:
            self.losses += losses_by_temperature(logits, own)
        if not classes:
            return
        if self.has_matrix:
            self.pairs += torch.bincount(own * classes + known, minlength=classes**2)
        else:
            hits = own[own == known]
            self.pairs += torch.cat([torch.bincount(one, minlength=classes) for one in (own, hits)])

    def result(self, sums: Tensor, _: ProcessGroup) -> EvalResult:
        """Return the result of the sums over all ranks."""
        plain, confidence, losses, pairs = self.parts_of(sums)
        _stop, loss, images, right, top5 = plain.tolist()
        answers = Confidence(confidence.view(3, BINS).cpu())
        chooses = self.method.chooses and images >= CHOOSING_IMAGES
        temperature = TEMPERATURES[int(losses.argmin())] if chooses else self.method.outputs.temperature
        confusion: tuple[tuple[int, ...], ...] = ()
        if self.has_matrix:
            matrix = pairs.view(self.method.classes, self.method.classes)
            confusion = tuple(tuple(int(one) for one in row) for row in matrix.tolist())
            own, correct = matrix.sum(1).tolist(), matrix.diagonal().tolist()
        else:
            own, correct = (one.tolist() for one in pairs.chunk(2))
        by_class = tuple(100 * hit / count if count else None for hit, count in zip(correct, own, strict=True))
        others = {"ece": answers.error, "temperature": temperature}
        return EvalResult(
            100 * right / images,
            loss / images,
            int(images),
            100 * top5 / images,
            confusion,
            by_class,
            others,
            answers,
        )


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    group: ProcessGroup,
    method: EvalMethod | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
    look: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> EvalResult | None:
    """Return the result over all ranks' batches, the same on every rank; None if any rank's `stop` returns true.

    Shares of ranks may differ in size and may be empty, so counts and sums are reduced instead of means. Buffers such
    as BatchNorm's statistics are broadcast from rank 0 first. All ranks of a sharded model evaluate the same number of
    batches. `look` gets the images, logits and labels of each batch. torchmetrics is not imported, because that takes
    longer than to load torch. A test compares the results.
    Raises `UserError` if the ranks have no image that can be read.
    """
    spread, method = is_sharded(model), method or EvalMethod()
    group.broadcast_buffers(list(model.buffers()))
    kind = EvalCounts if method.loss.targets is None else TargetScores
    counts = kind(method, group.device)
    model.eval()
    # A sharded model may gather its weights for the first time here, into tensors that training needs too.
    with torch.no_grad() if spread else torch.inference_mode():
        for images, labels in pad_to_same_length(batches, group) if spread else batches:
            if group.all_reduce_max_async(int(stop()))() if spread else stop():
                counts.totals[0] = 1
                break
            with autocast(method.precision, group.device):
                logits = averaged_logits(model, images, method.test_time_augment)
            counts.add(logits, labels)
            if look:
                look(images, logits, labels)
    model.train()
    if spread:
        model.reshard()  # type: ignore[operator]  # the root module keeps gathered weights until a backward pass
    sums = group.sum(counts.totals)
    if sums[0]:
        return None
    if not sums[2]:
        raise UserError("no test image can be read any more; check TRAIN_DATA_DIR", ExitCode.RANK_FAILED)
    return counts.result(sums, group)


def pad_to_same_length(
    batches: Iterable[tuple[Tensor, Tensor]], group: ProcessGroup
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield equally many batches on every rank; a rank without more repeats its last one with ignored labels."""
    rest = iter(batches)
    images, labels = next(rest)
    more = True
    while group.all_reduce_max_async(int(more))():
        yield images, labels if more else torch.full_like(labels, IGNORE_LABEL)
        following = next(rest, None) if more else None
        more = following is not None
        images, labels = following or (images, labels)


def evaluation_values(score: EvalResult, classes: tuple[str, ...], name: str) -> dict[str, Any]:
    """Return an evaluation as JSON types, with the score of each class and the confusion matrix.

    `name` is that of the score.
    """
    by_class = dict(zip(classes, score.class_accuracy, strict=True)) if score.class_accuracy else {}
    return {
        "score": name,
        name: score.accuracy,
        "loss": score.loss,
        "images": score.images,
        "top5_accuracy": score.top5 or None,
        "class_accuracy": by_class,
        **score.others,
        "classes": list(classes),
        "confusion": score.confusion or None,
        "calibration": score.confidence and score.confidence.calibration,
        "precision_recall": score.confidence and score.confidence.precision_recall,
    }


KEPT = 12
# Sides of a kept image in pixels; a larger one is reduced.
MAX_SIDE = 96
# Gray and color.
SHOWN_CHANNELS = (1, 3)


@dataclass(frozen=True, order=True)
class Mistake:
    """A wrongly predicted image: the probability of the wrong class, both classes, and (C, H, W) bytes.

    `place` is its number among those that the rank evaluated, and `file` its name where it is known.
    """

    probability: float
    label: int
    predicted: int
    place: int
    pixels: Tensor = field(compare=False)
    file: str = field(default="", compare=False)


@dataclass
class MistakeCollector:
    """Collects a rank's surest mistakes batch by batch, and as `sample` one of `every` images with their labels."""

    normalize: Normalize
    every: int = 1
    kept: list[Mistake] = field(default_factory=list)
    sample: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    evaluated: int = 0

    def add(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Look at a batch of normalized (N, C, H, W) images with their (N, classes) logits."""
        first, self.evaluated = self.evaluated, self.evaluated + len(images)
        picked = slice(-first % self.every, None, self.every)
        self.sample.append((self.normalize.undo(images[picked]), labels[picked].cpu()))
        shares, predicted = (logits / self.normalize.outputs.temperature).softmax(1).max(1)
        wrong = ((predicted != labels) & (labels != IGNORE_LABEL)).nonzero().flatten()
        if not len(wrong):
            return
        best = wrong[shares[wrong].topk(min(KEPT, len(wrong))).indices]
        pixels = self.normalize.undo(images[best])
        places = (first + best).tolist()
        rows = zip(shares[best].tolist(), labels[best].tolist(), predicted[best].tolist(), places, pixels, strict=True)
        self.kept = sorted([*self.kept, *(Mistake(*row) for row in rows)], reverse=True)[:KEPT]


def as_json(mistakes: list[Mistake], classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return mistakes for evaluation.json, each image as a PNG in base64."""
    return [
        {
            "class": classes[one.label],
            "predicted": classes[one.predicted],
            "probability": round(one.probability, 4),
            "file": one.file,
            "png": png_of(one.pixels),
        }
        for one in mistakes
    ]


def add_heat(shown: list[dict[str, Any]], mistakes: list[Mistake], model: nn.Module, normalize: Normalize) -> None:
    """Add to each mistake an image of where the model finds the class that it names, if it has maps of features."""
    if not mistakes or len(mistakes[0].pixels) not in SHOWN_CHANNELS:
        return
    device = next(model.parameters()).device  # a model that was sharded is on the CPU
    inputs = normalize(torch.stack([one.pixels for one in mistakes]).permute(0, 2, 3, 1)).to(device)
    heat = heat_maps(model.eval(), inputs, torch.tensor([one.predicted for one in mistakes], device=device))
    for entry, mistake, where in zip(shown, mistakes, () if heat is None else heat.cpu(), strict=False):
        entry["heat"] = png_of(show_heat(mistake.pixels, where))


def png_of(pixels: Tensor) -> str:
    """Return (C, H, W) bytes as a small PNG in base64; only gray and color images can be shown."""
    if len(pixels) not in SHOWN_CHANNELS:
        return ""
    array = (pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).numpy()
    image = Image.fromarray(array)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    out = io.BytesIO()
    image.save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode()
