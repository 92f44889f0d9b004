"""Which images choose the best checkpoint: the folder's val/, or a part of the training images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from train.seeding import make_generator

TRAIN, TEST = 0, 1


@dataclass(frozen=True)
class SplitRows:
    """Rows of what is trained on, evaluated for the choice of a checkpoint, and tested.

    `train` and `val` are rows of the training images if `val_is_in` is TRAIN. If it is TEST, `val` and `test` are rows
    of the test images. None means all rows, and no `val` that there is no such choice.
    """

    train: Tensor | None = None
    val: Tensor | None = None
    test: Tensor | None = None
    val_is_in: int = TRAIN


ALL_ROWS = SplitRows()


def cut_from_training(labels: Sequence[int] | Tensor, fraction: float, seed: int) -> SplitRows:
    """Return a fraction of each class for the choice, at least one image where a class has two, and the rest.

    The seed selects them, so every rank and a resumed run get the same ones.
    """
    numbers = np.asarray(labels)
    order = torch.randperm(len(numbers), generator=make_generator(seed, "val split")).numpy()
    chosen = np.zeros(len(numbers), dtype=bool)
    for label in np.unique(numbers):
        rows = order[numbers[order] == label]
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        chosen[rows[:count]] = True
    return SplitRows(torch.from_numpy(np.flatnonzero(~chosen)), torch.from_numpy(np.flatnonzero(chosen)))


def behind_test(count: int, val_start: int, left_out: Sequence[int] = ()) -> SplitRows:
    """Return the rows of test images and of those of val/ behind them, of a list of `count` files.

    `left_out` are rows of files that are not among the images.
    """
    kept = np.delete(np.arange(count), np.asarray(left_out, dtype=np.int64))
    is_val = kept >= val_start
    return SplitRows(
        None, torch.from_numpy(np.flatnonzero(is_val)), torch.from_numpy(np.flatnonzero(~is_val)), val_is_in=TEST
    )
