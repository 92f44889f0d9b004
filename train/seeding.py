"""Assignment of examples to steps and ranks: pure functions of seed, epoch and step.

Only the slice of a rank depends on the number of ranks. The sequence of global batches and their augmentation does not,
and any step can be recomputed after a restart.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def derive_seed(*key: int | str) -> int:
    """Return a 63-bit seed derived from the key alone: (seed, purpose, epoch, step…)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_generator(*key: int | str) -> torch.Generator:
    """Return a generator seeded by the key alone."""
    return torch.Generator().manual_seed(derive_seed(*key))


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and of the device.

    torch.manual_seed does the same but probes every kind of accelerator, which costs time in each step.
    """
    seed_python(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_python(seed: int) -> None:
    """Seed the generators of Python and numpy, from which a user's model may draw."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def epoch_permutation(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of one epoch: an int64 permutation of range(count)."""
    return torch.randperm(count, generator=make_generator(seed, "order", epoch))


def shard_slice(total: int, part: int, parts: int) -> slice:
    """Return slice `part` of range(total) cut into `parts` contiguous slices, whose sizes differ by at most 1."""
    return slice(total * part // parts, total * (part + 1) // parts)
