"""Look up or count a data set before any of it is loaded, so that the plan can choose how to feed it."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path

import msgspec

from entrypoint.core.errors import UserError, printable
from entrypoint.core.files import exists, is_folder, resolve
from entrypoint.core.setting_types import as_url
from train.child import ask_child
from train.data.sources.image_file import ImageFile, open_image
from train.data.sources.image_folder import list_splits, whole_folder
from train.data.sources.image_list import (
    ImageList,
    UnreadableImage,
    count_shared,
    split_places,
    take_rows,
    unreadable_image_error,
)
from train.data.sources.label_files import list_label_splits
from train.models.weights_origin import find_weights_file, read_origin
from train.setting_groups.data import IMAGE_ENDINGS, DataSettings, has_file
from train.settings import BOOK_PIXELS, TrainSettings

KEEP_SIZE_MAX_PX = 96
LARGE_PIXELS = 224
SYNTHETIC_CLASSES = 10
# Headers that are read: of so many images, evenly over the classes, and of more while all are gray.
SAMPLED_IMAGES, SAMPLED_GRAY_IMAGES = 128, 1000


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a data set: train and test images together, and one image's (channels, height, width).

    `becomes` says what its image files become, empty for a set that has no files, and `is_resized` whether they become
    another size. `train_images` is 0 if unknown.
    `classes` are their names, in the order of the model's outputs.
    `has_val` says whether a folder has val/ next to test/, and `is_cut` whether it has neither and was split here.
    `has_kernel` says whether the compiled JPEG decoder is there.
    `class_counts` are the numbers of training images of each class, empty where they are not known.
    `constant` are the names of targets that are the same for all images.
    `same_targets` says that all test images have the same ones.
    `loose` is a folder whose images lie next to the classes' folders, and are in no class.
    `problem` says why a data set of the user's cannot be used.
    `shared` says how many of how many test images are training images too.
    `loading_bytes` is the memory that each rank needs to load a set that cannot be streamed, 0 if that is little.
    """

    images: int
    shape: tuple[int, int, int]
    becomes: str = ""
    is_resized: bool = False
    train_images: int = 0
    loading_bytes: int = 0
    has_kernel: bool = False
    classes: tuple[str, ...] = ()
    has_val: bool = False
    is_cut: bool = False
    shared: tuple[int, int] = (0, 0)
    class_counts: tuple[int, ...] = ()
    constant: tuple[str, ...] = ()
    same_targets: bool = False
    task: str = "classify"
    loose: str = ""
    problem: str = ""

    @property
    def bytes(self) -> int:
        """All images decoded, a byte a value."""
        channels, height, width = self.shape
        return self.images * channels * height * width


# As torchvision names them; a test compares.
FASHION = (*("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),)
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
KNOWN = {
    "digits": DatasetInfo(1797, (1, 8, 8), train_images=1442, classes=tuple(map(str, range(10)))),
    "fashion-mnist": DatasetInfo(70_000, (1, 28, 28), train_images=60_000, classes=FASHION),
    "cifar10": DatasetInfo(60_000, (3, 32, 32), train_images=50_000, classes=CIFAR10),
}


def inspect_dataset(settings: TrainSettings, *, launches: bool = True) -> DatasetInfo:
    """Return the facts of the settings' data set; raises `UserError` for a folder that cannot be used.

    Without a launch that follows, little is copied out of object storage.
    """
    if (url := as_url(settings.data.data_dir)) and settings.data.dataset not in ("csv", "shards"):
        raise UserError(
            f"TRAIN_DATA_DIR={printable(url)}: only csv and shards are read from object storage, and TRAIN_DATASET is"
            f" {printable(settings.data.dataset)}. Set TRAIN_DATASET=shards or csv; hf:URL reads parquet files."
        )
    if settings.data.dataset in KNOWN:
        return KNOWN[settings.data.dataset]
    if settings.data.dataset == "synthetic":
        return inspect_synthetic(settings.data)
    if settings.data.reads_items:
        return ask_probe(settings)
    return describe_lists(settings, *list_files(settings, launches=launches))


@cache
def ask_probe(settings: TrainSettings) -> DatasetInfo:
    """Return the facts of a data set of the user's, which a child process imports; raises `UserError`."""
    try:
        report = ask_child("train.data.dataset_probe", msgspec.json.encode(settings.to_json()), DatasetInfo)
    except ValueError as error:
        raise UserError(
            f"TRAIN_DATASET={printable(settings.data.dataset)}: cannot be read ({error}). Correct it."
        ) from None
    if report.problem:
        raise UserError(report.problem)
    return report


def describe_lists(settings: TrainSettings, train: ImageList, test: ImageList) -> DatasetInfo:
    """Return the facts of listed files; raises `UserError` for an image that cannot be read."""
    from train.data.decoding.decoder import jpeg_kernel

    headers = read_headers(train, settings.data.on_unreadable_image)
    shape = target_shape(headers, settings.data)
    trained = 0 if settings.run.evaluate else len(train)  # both are the same list then
    counts = Counter(() if train.targets else train.labels)
    folders = (train.folder, test.folder) if settings.data.dataset == "imagefolder" else ()
    return DatasetInfo(
        trained + len(test),
        shape,
        becomes=headers.describe(shape),
        is_resized=headers.are_resized(shape),
        train_images=trained,
        has_kernel=jpeg_kernel() is not None,
        classes=train.classes,
        has_val=test.val_start is not None,
        is_cut=test.is_cut,
        class_counts=tuple(counts[label] for label in range(len(train.classes))) if counts else (),
        constant=train.targets.constant_names() if train.targets and not settings.run.evaluate else (),
        same_targets=bool(test.targets) and len(test) > 0 and all(label == test.labels[0] for label in test.labels),
        task=settings.data.task,
        loose=next((str(folder) for folder in folders if has_file(folder, IMAGE_ENDINGS)), ""),
        shared=(0, 0) if settings.run.evaluate or test.is_cut else count_shared(train, test),
    )


WANTED_FOLDER = {
    "imagefolder": "the folder that holds train/ and test/",
    "csv": "the folder that holds train.csv",
    "shards": "the folder that holds train/*.tar and test/*.tar",
}


def list_files(settings: TrainSettings, *, launches: bool = True) -> tuple[ImageList, ImageList]:
    """Return train and test as TRAIN_DATASET says where they and their classes stand.

    Raises `UserError` for a folder or a file that cannot be used.
    """
    if not (url := as_url(settings.data.data_dir)):
        return list_folder(settings, settings.data.data_dir)
    from train.data.sources.stored_files import list_stored

    return list_stored(settings.data, url, partial(list_folder, settings), launches=launches)


def list_folder(settings: TrainSettings, data_dir: Path | None) -> tuple[ImageList, ImageList]:
    """Return train and test of a folder of the kind TRAIN_DATASET; raises `UserError`."""
    only_test = settings.run.tests_only
    if data_dir is None:
        raise UserError(
            f"TRAIN_DATASET={settings.data.dataset}: needs TRAIN_DATA_DIR, {WANTED_FOLDER[settings.data.dataset]}"
        )
    if not is_folder(data_dir):
        what = "is a file, not a folder" if exists(data_dir) else "no such folder"
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: {what}; name {WANTED_FOLDER[settings.data.dataset]}")
    if settings.data.dataset == "shards":
        from train.data.sources.shards import list_shard_splits  # loads numpy

        return list_shard_splits(data_dir, settings.data.cache_dir, settings.data.task, only_test=only_test)
    list_both: Callable[..., tuple[ImageList, ImageList]] = partial(
        list_splits, data_dir, settings.data.on_unreadable_image, cache_dir=settings.data.cache_dir
    )
    if settings.data.dataset == "csv":
        list_both = partial(list_label_splits, settings.data, data_dir)
    if only_test and (cuts_val := choice_of_trained_run(settings, data_dir)) is not None:
        test = list_both(cuts_val=cuts_val)[1]
        test = take_rows(test, range(len(test) if test.val_start is None else test.val_start))
        return test, test
    return list_both(only_test=only_test, cuts_val=not settings.data.val_split)


def choice_of_trained_run(settings: TrainSettings, folder: Path) -> bool | None:
    """Return whether the run to evaluate has set images of this folder apart for the choice of its checkpoint.

    None if it was trained on another folder, or on one that has a test/: then all of the folder is new to it.
    """
    try:
        origin = read_origin(find_weights_file(settings.run.evaluate, "TRAIN_EVALUATE"))
    except UserError:  # the loading of the weights reports it
        return None
    trained_on = origin.settings.get("data_dir")
    is_whole = whole_folder(folder) is not None
    if settings.data.dataset == "csv":
        is_whole = split_places(folder, ".csv").keys() == {"train"}
    if not isinstance(trained_on, str) or not is_whole:
        return None
    is_same = settings.data.data_dir and resolve(Path(trained_on)) == resolve(settings.data.data_dir)
    return not origin.settings.get("val_split") if is_same else None


def inspect_synthetic(settings: DataSettings) -> DatasetInfo:
    """Return the facts of a synthetic set, with a fifth of the training images for the test, and at least one a class.

    Each value is 2 bytes while it is made, and then 1. A value of a class's center is 8 bytes, and so is a label.
    """
    channels, height, width = (int(part) for part in settings.synthetic_shape.split("x"))
    train, count = settings.synthetic_images, SYNTHETIC_CLASSES
    test = max(count, train // 5)
    values = channels * height * width
    loading = 3 * values * train + 8 * values * count + 8 * (train + test)
    classes = tuple(f"class{index}" for index in range(count))
    return DatasetInfo(
        train + test, (channels, height, width), train_images=train, loading_bytes=loading, classes=classes
    )


@dataclass
class Headers:
    """What the headers of some images say: their sizes (height, width) and Pillow's modes."""

    sizes: list[tuple[int, int]] = field(default_factory=list)
    modes: set[str] = field(default_factory=set)
    is_turned: bool = False
    has_transparency: bool = False

    @property
    def is_gray(self) -> bool:
        """Return whether no image has color."""
        from train.data.decoding.pixel_values import GRAY_MODES

        return self.modes <= GRAY_MODES

    def add(self, path: ImageFile) -> None:
        """Read one header; raises whatever Pillow's plug-in raises."""
        from train.data.decoding.pixel_values import open_with_pillow, orientation_of
        from train.transforms.image_part import swaps_sides

        with open_image(path) as file, open_with_pillow(file) as image:
            turned = swaps_sides(orientation_of(image))
            self.is_turned |= turned
            self.has_transparency |= image.has_transparency_data
            self.modes.add(image.mode)
            self.sizes.append((image.width, image.height) if turned else (image.height, image.width))

    @property
    def median_size(self) -> tuple[int, int]:
        """The median height and width: one large photo must not enlarge a thousand small ones."""
        middle = (len(self.sizes) - 1) // 2
        heights, widths = (sorted(sides)[middle] for sides in zip(*self.sizes, strict=True))
        return heights, widths

    def are_resized(self, shape: tuple[int, int, int]) -> bool:
        """Return whether these images have other sizes than those of a set of that shape."""
        return set(self.sizes) != {shape[1:]}

    def describe(self, shape: tuple[int, int, int]) -> str:
        """Return what these images become in a set of that shape."""
        color, resized = "gray" if self.is_gray else "color", self.are_resized(shape)
        height, width = self.median_size if resized else (0, 0)
        parts = {
            f"{color}, cropped to the shape and resized" if resized else color: True,
            f"half of {len(self.sizes)} that were looked at are {width}x{height} or larger": resized,
            "12 and 16 bits scaled to 8": any(mode.startswith("I;16") for mode in self.modes),
            "32 bits scaled to 8, per file, from 0 to 1 (floats), 255 or 65535, whichever holds its values": self.modes
            & {"I", "F"},
            "transparent parts white": self.has_transparency,
            "turned as EXIF says": self.is_turned,
        }
        return "; ".join(text for text, holds in parts.items() if holds)


def read_headers(listing: ImageList, policy: str) -> Headers:
    """Read the headers of up to 128 images, evenly over the classes, and of up to 1,000 while all are gray.

    Raises `UserError` for an image that cannot be read; with the policy `skip`, only if none can.
    """
    from train.data.decoding.decoder import failure_reason

    headers = Headers()
    unreadable: UnreadableImage | None = None
    for index, row in enumerate(sampled_rows(listing)):
        path = listing.files[row]
        enough = index >= SAMPLED_IMAGES and not headers.is_gray
        if headers.sizes and (enough or len(headers.sizes) >= SAMPLED_GRAY_IMAGES):
            break
        try:
            headers.add(path)
        except Exception as error:  # Pillow's plug-ins raise what their parsers raise
            unreadable = UnreadableImage(path, failure_reason(error))
            if policy == "error":
                raise unreadable_image_error([unreadable]) from None
    if not headers.sizes:
        raise UserError(f"{unreadable}; check TRAIN_DATA_DIR")
    return headers


def sampled_rows(listing: ImageList) -> Iterator[int]:
    """Yield the first row of each class, then further rows of each, evenly spaced over the class."""
    rows_of: defaultdict[int, array[int]] = defaultdict(partial(array, "I"))
    for row, label in enumerate(listing.labels):
        rows_of[label].append(row)
    most = max(1, SAMPLED_GRAY_IMAGES // len(rows_of))
    spaced = (rows[:: max(1, len(rows) // most)] for rows in rows_of.values())
    return (row for row in chain.from_iterable(zip_longest(*spaced)) if row is not None)


def target_shape(headers: Headers, settings: DataSettings) -> tuple[int, int, int]:
    """Return what the folder's images become: gray if all are, and their own size if at least half are small."""
    channels = 1 if headers.is_gray else 3
    if settings.image_size != "auto":
        side = max(settings.image_size, settings.eval_size or 0)
        return channels, side, side
    if max(headers.median_size) <= KEEP_SIZE_MAX_PX:
        return channels, *headers.median_size
    side = BOOK_PIXELS if settings.transforms == "book" else LARGE_PIXELS
    return channels, side, side
