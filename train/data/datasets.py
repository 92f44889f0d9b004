"""Data sets by name, as images in memory or as lists of files to stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import one_hot

from entrypoint.core.errors import UserError, first_line
from train.checkpoint.metadata import DataFingerprint
from train.data.cache.fingerprint import digest_of_file, fingerprint_of_arrays, fingerprint_of_files
from train.data.cache.image_cache import ImageSource, decode_splits, load_or_build
from train.data.cache_folder import cache_folder
from train.data.dataset_info import inspect_synthetic, list_files
from train.data.decoding.decoder import read_image
from train.data.sources.image_list import ImageList, UnreadableImage, check_classes
from train.data.sources.targets import Targets
from train.data.val_split import ALL_ROWS, SplitRows, behind_test, cut_from_training
from train.data.workers import WorkerSpec
from train.lock_file import folder_lock
from train.models.weights_origin import find_weights_file
from train.seeding import make_generator
from train.settings import ImageShape, TrainSettings


@dataclass(frozen=True)
class ImageTensors:
    """A split in memory: images (N, H, W, C) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """Both splits, either in memory or as file lists; `shape` is (channels, height, width).

    `listings` are the files of an image folder, and `content` is a digest of all decoded images, if that is known.
    """

    train: ImageTensors | ImageList
    test: ImageTensors | ImageList
    classes: tuple[str, ...]
    shape: ImageShape
    skipped: tuple[str, ...] = ()
    listings: tuple[ImageList, ImageList] | None = None
    content: str = ""
    rows: SplitRows = ALL_ROWS

    def with_choice(self, settings: TrainSettings, left_out: Sequence[int] = ()) -> DataSet:
        """Return the data set with the images that choose the best checkpoint.

        `left_out` are rows of test files that are not among the images.
        """
        if settings.data.val_split:
            labels = self.labels_of(self.train)
            rows = cut_from_training(
                labels * 0 if self.targets else labels, settings.data.val_split, settings.optim.seed
            )
            if rows.val is None or not len(rows.val):
                raise UserError(
                    f"TRAIN_VAL_SPLIT={settings.data.val_split}: leaves no image to choose by, as each class has one."
                    " Unset it."
                )
            return replace_fields(self, rows=rows)
        if self.listings and self.listings[1].val_start is not None:
            test = self.listings[1]
            return replace_fields(self, rows=behind_test(len(test), test.val_start or 0, left_out))
        return self

    @property
    def targets(self) -> Targets | None:
        """What the label numbers stand for, None where they are classes."""
        return self.listings[0].targets if self.listings else None

    def labels_of(self, split: ImageTensors | ImageList) -> Tensor:
        """Return the (N,) label numbers of a split."""
        return split.labels if isinstance(split, ImageTensors) else torch.frombuffer(split.labels, dtype=torch.int64)

    @property
    def trained_labels(self) -> Tensor:
        """The (N,) label numbers of the images that are trained on."""
        labels = self.labels_of(self.train)
        return labels if self.rows.train is None else labels[self.rows.train]

    @property
    def trained_images(self) -> int:
        """Number of images that are trained on."""
        return len(self.train) if self.rows.train is None else len(self.rows.train)

    def fingerprint(self, settings: TrainSettings) -> DataFingerprint:
        """Return what distinguishes this data set, and the teacher's answers, from others."""
        teacher = (
            digest_of_file(find_weights_file(settings.optim.teacher, "TRAIN_TEACHER")) if settings.optim.teacher else ""
        )
        return replace(self.whole_fingerprint(settings), train_examples=self.trained_images, teacher=teacher)

    def whole_fingerprint(self, settings: TrainSettings) -> DataFingerprint:
        """Return the fingerprint of all images, also of those that choose the best checkpoint."""
        if self.listings:
            files = fingerprint_of_files(self.listings, settings.optim.seed)
            return replace(files, content=self.content, train_examples=len(self.train), test_examples=len(self.test))
        assert isinstance(self.train, ImageTensors)
        assert isinstance(self.test, ImageTensors)
        if settings.data.dataset == "synthetic":  # a function of the settings
            return DataFingerprint(classes=self.classes, train_examples=len(self.train), test_examples=len(self.test))
        splits = [(one.images.numpy(), one.labels.numpy()) for one in (self.train, self.test)]
        return fingerprint_of_arrays(self.classes, *splits)


def load(settings: TrainSettings, shape: ImageShape, source: str, workers: WorkerSpec) -> DataSet:
    """Return the configured data set; raises `UserError` if it is not available.

    Every rank of a node calls this at once; one of them decodes, with the threads of `workers`.
    """
    if settings.data.reads_files:
        if settings.data.reads_items:
            from train.data.sources.own_dataset import list_own_splits

            listings = list_own_splits(settings, only_test=settings.run.tests_only)
        else:
            listings = list_files(settings)
        if source == "stream":
            probed: tuple[str, ...] = ()
            if settings.data.on_unreadable_image == "skip":  # otherwise the first one that is met ends the run
                probed = tuple(str(one) for listing in listings for one in probe_classes(listing, shape))
            found = DataSet(*listings, listings[0].classes, shape, (*unreadable_entries(listings), *probed), listings)
            return found.with_choice(settings)
        return load_image_folder(settings, listings, shape, workers)
    return LOADERS[settings.data.dataset](settings).with_choice(settings)


def load_image_folder(
    settings: TrainSettings, listings: tuple[ImageList, ImageList], shape: ImageShape, workers: WorkerSpec
) -> DataSet:
    """Return an image folder from the cache; it is decoded first if the cache does not have it."""
    policy = settings.data.on_unreadable_image
    build = partial(decode_splits, listings, shape, policy, workers)
    source = ImageSource(listings, shape, policy)
    entry = load_or_build(source, cache_folder(settings.data.cache_dir), build)
    splits = dict(zip(("train", "test"), listings, strict=True))
    bad: dict[str, dict[int, UnreadableImage]] = {split: {} for split in splits}
    for split, row, reason in entry.skipped:
        bad[split][row] = UnreadableImage(splits[split].files[row], reason)
    for (split, listing), labels in zip(splits.items(), (entry.train_labels, entry.test_labels), strict=True):
        check_classes(listing, set(labels.tolist()), bad[split])
    found = DataSet(
        ImageTensors(torch.from_numpy(entry.train_images), torch.from_numpy(entry.train_labels)),
        ImageTensors(torch.from_numpy(entry.test_images), torch.from_numpy(entry.test_labels)),
        listings[0].classes,
        shape,
        (*unreadable_entries(listings), *(str(one) for found in bad.values() for one in found.values())),
        listings,
        entry.content,
    )
    return found.with_choice(settings, list(bad["test"]))


def unreadable_entries(listings: tuple[ImageList, ImageList]) -> tuple[str, ...]:
    """Return the entries of both splits that cannot be used, each with the reason."""
    return tuple(str(one) for listing in listings for one in listing.unreadable)


def load_digits(_: TrainSettings) -> DataSet:
    """Return UCI's handwritten digits: 1,797 images of 8x8, every fifth of each class for testing.

    Pixels of 0 to 16 become 0 to 255.
    """
    path = Path(__file__).with_name("digits.csv.gz")
    table = torch.from_numpy(np.loadtxt(path, dtype=np.int64, delimiter=","))
    images, labels = (
        (table[:, :64] * 255 // 16).to(torch.uint8).reshape(-1, 8, 8, 1),
        table[:, 64].contiguous(),
    )
    counts = one_hot(labels).cumsum(0)  # of the images of each class up to here
    test = counts.gather(1, labels[:, None])[:, 0] % 5 == 0
    return DataSet(
        ImageTensors(images[~test], labels[~test]),
        ImageTensors(images[test], labels[test]),
        tuple(map(str, range(10))),
        (1, 8, 8),
    )


def load_synthetic(settings: TrainSettings) -> DataSet:
    """Return noise around one random image per class: learnable, in any shape, equal for equal seeds."""
    facts = inspect_synthetic(settings.data)
    channels, height, width = facts.shape
    centres = torch.randint(
        64, 192, (len(facts.classes), height, width, channels), generator=make_generator(settings.optim.seed, "centres")
    )

    def draw(count: int, split: str) -> ImageTensors:
        random = make_generator(settings.optim.seed, split)
        labels = torch.randint(len(facts.classes), (count,), generator=random)
        images = torch.randint(-48, 49, (count, height, width, channels), generator=random, dtype=torch.int16)
        for start in range(0, count, 4096):
            images[start : start + 4096] += centres[labels[start : start + 4096]].to(torch.int16)
        return ImageTensors(images.to(torch.uint8), labels)

    test = draw(facts.images - facts.train_images, "test")
    return DataSet(draw(facts.train_images, "train"), test, facts.classes, facts.shape)


def load_torchvision(settings: TrainSettings, name: str) -> DataSet:
    """Return a data set that torchvision reads, after a download if needed; raises `UserError` if both fail."""
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"TRAIN_DATASET={settings.data.dataset}: needs torchvision, which cannot be loaded ({error})"
        ) from None
    folder = settings.data.data_dir or Path("data")
    read = partial(read_splits, getattr(datasets, name), folder)
    splits = read(download=False) or fetch_splits(read, folder, settings)
    train, test = (
        ImageTensors(
            torch.as_tensor(split.data, dtype=torch.uint8).view(*split.data.shape[:3], -1),  # gray ones have no axis
            torch.as_tensor(split.targets, dtype=torch.int64),
        )
        for split in splits
    )
    _, height, width, channels = train.images.shape
    return DataSet(train, test, tuple(splits[0].classes), (channels, height, width))


def read_splits(dataset: Callable[..., Any], folder: Path, *, download: bool) -> list[Any] | None:
    """Return train and test of one of torchvision's data sets, None if its files are not there."""
    try:
        return [dataset(folder, train=train, download=download) for train in (True, False)]
    except RuntimeError:
        if download:
            raise
        return None


def fetch_splits(read: Callable[..., list[Any] | None], folder: Path, settings: TrainSettings) -> list[Any]:
    """Download and return train and test; raises `UserError` if that is not possible.

    Ranks and jobs that start at once download once.
    """
    where = f"TRAIN_DATASET={settings.data.dataset}: not in {folder.resolve()}"
    advice = "put the files there, or name their folder with TRAIN_DATA_DIR"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder / ".download.lock", f"another process that downloads into {folder}"):
            splits = read(download=False) or read(download=True)
    except (OSError, RuntimeError) as error:
        cause = first_line(error).rstrip(": ") or type(error).__name__
        raise UserError(f"{where} and cannot be fetched ({cause}); {advice}") from None
    assert splits is not None
    return splits


LOADERS: dict[str, Callable[[TrainSettings], DataSet]] = {
    "digits": load_digits,
    "synthetic": load_synthetic,
    "fashion-mnist": partial(load_torchvision, name="FashionMNIST"),
    "cifar10": partial(load_torchvision, name="CIFAR10"),
}


def probe_classes(listing: ImageList, shape: ImageShape) -> tuple[UnreadableImage, ...]:
    """Read images of each class until one can be read; return the unreadable ones before it.

    Raises `UserError` for a class without any. It decodes one image of each class, if no image is damaged.
    """
    readable: set[int] = set()
    bad: dict[int, UnreadableImage] = {}
    for row, number in enumerate(listing.labels):
        label = 0 if listing.targets else number  # rows of targets are no classes
        if label in readable:
            continue
        image = read_image(listing.files[row], shape)
        if isinstance(image, UnreadableImage):
            bad[row] = image
        else:
            readable.add(label)
    check_classes(listing, readable, bad)
    return tuple(bad.values())
