"""Fingerprints of data sets: a checkpoint knows its images, and nodes find out whether they have the same ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrypoint.core.errors import UserError
from train.checkpoint.metadata import DataFingerprint, data_differences
from train.data.sources.image_file import WAITING_AT_ONCE, ImageFile, TarMember, open_image
from train.data.sources.image_list import ImageList

# Files whose bytes are part of the fingerprint of a streamed set.
SAMPLED_FILES = 256


def iter_files(listings: tuple[ImageList, ImageList]) -> Iterator[tuple[ImageFile, str, int]]:
    """Yield (file, `train/` or `test/` and path inside the split, label) of every file; of members the shard's path."""
    for split, listing in zip(("train", "test"), listings, strict=True):
        for file, label in zip(listing.files, listing.labels, strict=True):
            path = file.shard.path if isinstance(file, TarMember) else file
            yield file, f"{split}/{str(path)[len(listing.files.prefix) :]}", label


def digest_of_file(file: ImageFile) -> str:
    """Return a digest of an image's content, or why it cannot be read."""
    try:
        with open_image(file) as content:
            return hashlib.file_digest(content, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    except OSError as error:
        return f"unreadable {error.errno}" if error.errno else str(error)


def fingerprint_of_files(listings: tuple[ImageList, ImageList], seed: int) -> DataFingerprint:
    """Return the fingerprint of an image folder: all names and labels, and the bytes of some files.

    Of shards it has their names, and each image's number of bytes in place of its name.

    No file is asked for its size, which would take minutes for millions of files on a network.
    """
    train, test = (listing.files for listing in listings)
    count = len(train) + len(test)
    targets = listings[0].targets
    digest = hashlib.blake2b(targets.values.tobytes() if targets else b"", digest_size=16)
    for listing in listings:
        files = listing.files
        for shard in files.shards:
            digest.update(f"{shard.path.name}\0{shard.state}\0".encode(errors="surrogateescape"))
        for buffer in (files.names, files.ends, files.numbers, files.sizes, listing.labels):
            digest.update(len(buffer).to_bytes(8, "little"))
            digest.update(buffer)
    some = sorted(random.Random(seed).sample(range(count), min(SAMPLED_FILES, count)))
    sample = hashlib.blake2b(digest_size=16)
    paths = [train[row] if row < len(train) else test[row - len(train)] for row in some]
    with ThreadPoolExecutor(WAITING_AT_ONCE) as pool:
        for one in pool.map(digest_of_file, paths):
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
