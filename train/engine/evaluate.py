"""Evaluate accuracy and loss of a split over all ranks, each image counted exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from entrypoint.core.errors import ExitCode, UserError
from train.acceleration.amp import autocast
from train.data.batches import IGNORE_LABEL
from train.distributed.ddp import is_sharded
from train.distributed.process_group import ProcessGroup


@dataclass(frozen=True)
class EvalResult:
    """Accuracy in percent, mean loss and the number of evaluated images."""

    accuracy: float
    loss: float
    images: int


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    group: ProcessGroup,
    precision: str = "fp32",
    stop: Callable[[], bool] = lambda: False,
) -> EvalResult | None:
    """Return the result over all ranks' batches, the same on every rank; None if any rank's `stop` returns true.

    Shares of ranks may differ in size and may be empty, so counts and sums are reduced instead of means. Buffers such
    as BatchNorm's statistics are broadcast from rank 0 first. All ranks of a sharded model evaluate the same number of
    batches. torchmetrics is not imported because that is slow. A test compares the results.
    Raises `UserError` if the ranks have no image that can be read.
    """
    spread = is_sharded(model)
    group.broadcast_buffers(list(model.buffers()))
    totals = torch.zeros(4, dtype=torch.float64, device=group.device)
    model.eval()
    with torch.inference_mode():
        for images, labels in pad_to_same_length(batches, group) if spread else batches:
            if group.all_reduce_max_async(int(stop()))() if spread else stop():
                totals[3] = 1
                break
            with autocast(precision, group.device):
                logits = model(images)
            logits = logits.float()
            counted = labels != IGNORE_LABEL
            right = (logits.argmax(1) == labels) & counted
            loss = cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_LABEL)
            totals[:3] += torch.stack((right.sum(), loss, counted.sum())).to(torch.float64)
    model.train()
    if spread:
        model.reshard()  # type: ignore[operator]  # the root module keeps gathered weights until a backward pass
    right_count, loss_sum, images_count, stopped = group.sum(totals).tolist()
    if stopped:
        return None
    if not images_count:
        raise UserError("no test image can be read any more; check TRAIN_DATA_DIR", ExitCode.RANK_FAILED)
    return EvalResult(100 * right_count / images_count, loss_sum / images_count, int(images_count))


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
