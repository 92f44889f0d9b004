"""Which examples go into which step and to which rank: pure functions of seed, epoch and step.

Nothing here depends on the number of ranks but the cut itself, so every number of ranks sees the same sequence
of global batches with the same augmentation, and any step can be recomputed after a restart.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*key: int | str) -> int:
    """Return a number of 63 bits that is decided by the key alone: (seed, purpose, epoch, step…)."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_generator(*key: int | str) -> torch.Generator:
    """Return a generator whose stream is decided by the key alone."""
    return torch.Generator().manual_seed(derive_seed(*key))


def seed_everything(seed: int, device: torch.device) -> None:
    """Let what is drawn without a generator of its own, on the CPU and the device, depend on a seed.

    As torch.manual_seed does, which asks every kind of accelerator whether it is there: 0.25 ms of each step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def epoch_permutation(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of one epoch: a permutation of range(count), int64."""
    return torch.randperm(count, generator=make_generator(seed, "order", epoch))


def shard_slice(total: int, part: int, parts: int) -> slice:
    """Return the slice of range(total) that belongs to one of `parts`: contiguous, disjoint, equal to ±1."""
    return slice(total * part // parts, total * (part + 1) // parts)
