"""Fingerprints of data sets: a checkpoint knows its images, and nodes find out whether they have the same ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrypoint.core.errors import UserError
from train.checkpoint.compare import data_differences
from train.checkpoint.metadata import DataFingerprint
from train.data.image_folder import ImageList

# Files whose bytes are part of the fingerprint of a streamed set.
SAMPLED_FILES = 256
# File sizes asked for at once, because each question waits for a network file system.
STAT_THREADS, CHUNK = 8, 512


def iter_files(listings: tuple[ImageList, ImageList]) -> Iterator[tuple[Path, str, int]]:
    """Yield (path, `train/` or `test/` and path inside the split, label) of every file."""
    for split, listing in zip(("train", "test"), listings, strict=True):
        skip = len(str(listing.folder)) + 1
        for path, label in zip(listing.files, listing.labels, strict=True):
            yield path, f"{split}/{str(path)[skip:]}", label


def digest_of_file(path: Path) -> str:
    """Return a digest of a file's content, or why it cannot be read."""
    try:
        if not S_ISREG(path.stat().st_mode):
            return "not a file"
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        return f"unreadable {error.errno}"


def sizes_of_files(paths: Sequence[Path]) -> list[int]:
    """Return the size of each file in bytes, -1 where that is not known."""
    sizes = []
    for path in paths:
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            sizes.append(-1)
    return sizes


def fingerprint_of_files(listings: tuple[ImageList, ImageList], seed: int) -> DataFingerprint:
    """Return the fingerprint of an image folder: all names, sizes and labels, and the bytes of some files."""
    files = list(iter_files(listings))
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        chunks = [[path for path, _, _ in files[start : start + CHUNK]] for start in range(0, len(files), CHUNK)]
        sizes = chain.from_iterable(pool.map(sizes_of_files, chunks))
        digest = hashlib.blake2b(digest_size=16)
        for (_, relative, label), size in zip(files, sizes, strict=True):
            digest.update(f"{relative}\0{label}\0{size}\0".encode(errors="surrogateescape"))
        some = sorted(random.Random(seed).sample(range(len(files)), min(SAMPLED_FILES, len(files))))
        sample = hashlib.blake2b(digest_size=16)
        for one in pool.map(digest_of_file, [files[index][0] for index in some]):
            sample.update(one.encode())
    return DataFingerprint(
        classes=listings[0].classes,
        train_examples=len(listings[0]),
        test_examples=len(listings[1]),
        files=digest.hexdigest(),
        sample=sample.hexdigest(),
        sample_seed=seed,
    )


def fingerprint_of_arrays(
    classes: tuple[str, ...], train: Sequence[NDArray[Any]], test: Sequence[NDArray[Any]]
) -> DataFingerprint:
    """Return the fingerprint of images and labels in memory, each split as (images, labels)."""
    digest = hashlib.sha256()
    for one in (*train, *test):
        digest.update(f"{one.dtype} {one.shape}\n".encode())
        digest.update(np.ascontiguousarray(one).data)
    return DataFingerprint(
        classes=classes, train_examples=len(train[1]), test_examples=len(test[1]), content=digest.hexdigest()
    )


def check_same_data(found: Sequence[tuple[str, DataFingerprint]]) -> None:
    """Raise `UserError` if two nodes have different data; `found` has the name and the data of each, rank 0's first."""
    (first, own), *others = found
    for node, theirs in others:
        differ = data_differences(own, theirs)
        if differ:
            raise UserError(
                f"TRAIN_DATA_DIR: {node} has other data than {first}: {', '.join(differ)}."
                " Give every node the same files."
            )
