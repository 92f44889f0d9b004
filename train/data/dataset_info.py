"""The size of a data set, looked up or counted before the images are loaded, because the plan depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from entrypoint.core.errors import UserError
from train.data.image_folder import class_names, files_of, split_folders
from train.settings import BOOK_PIXELS, TrainSettings

# Counting stops here. Why: larger sets are streamed at any image size, and listing them twice is slow on some disks.
MAX_COUNTED = 200_000
KEEP_SIZE_MAX_PX = 96
LARGE_PIXELS = 224
SAMPLED_CLASSES = 16


@dataclass(frozen=True)
class DatasetInfo:
    """Size of a data set: number of train and test images together, and one image's (channels, height, width)."""

    images: int
    shape: tuple[int, int, int]
    counted_all: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of all decoded images, one byte per value."""
        channels, height, width = self.shape
        return self.images * channels * height * width


KNOWN = {
    "digits": DatasetInfo(1797, (1, 8, 8)),
    "fashion-mnist": DatasetInfo(70_000, (1, 28, 28)),
    "cifar10": DatasetInfo(60_000, (3, 32, 32)),
}


def inspect_dataset(settings: TrainSettings) -> DatasetInfo:
    """Return the size of the configured data set; raises `UserError` for an unusable folder."""
    if settings.dataset in KNOWN:
        return KNOWN[settings.dataset]
    if settings.dataset == "synthetic":
        return DatasetInfo(settings.synthetic_images * 6 // 5, synthetic_shape(settings))
    train, test = split_folders(settings.data_dir)
    images = 0
    for split in (train, test):
        for name in class_names(split):
            images += sum(1 for _ in islice(files_of(split / name), MAX_COUNTED + 1 - images))
    return DatasetInfo(images, read_image_shape(settings, train), images <= MAX_COUNTED)


def synthetic_shape(settings: TrainSettings) -> tuple[int, int, int]:
    """Return (channels, height, width) of TRAIN_SYNTHETIC_SHAPE."""
    channels, height, width = (int(part) for part in settings.synthetic_shape.split("x"))
    return channels, height, width


def read_image_shape(settings: TrainSettings, folder: Path) -> tuple[int, int, int]:
    """Return the shape of the folder's decoded images: gray only if all sampled images are, small sizes unchanged.

    Reads the first image of up to 16 classes; raises `UserError` if none of them is readable.
    """
    from PIL import Image, UnidentifiedImageError

    modes: set[str] = set()
    size: tuple[int, int] | None = None
    unreadable: Path | None = None
    for name in islice(class_names(folder), SAMPLED_CLASSES):
        for path in islice(files_of(folder / name), 1):
            try:
                with Image.open(path) as image:
                    modes.add(image.mode)
                    size = size or (image.height, image.width)
            except (OSError, UnidentifiedImageError):
                unreadable = unreadable or path
    if size is None:
        seen = f"{unreadable}: is no image" if unreadable else f"{folder}: its classes have no images"
        raise UserError(f"{seen}; check TRAIN_DATA_DIR")
    channels = 1 if modes <= {"L", "1", "I;16"} else 3
    if settings.image_size != "auto":
        return channels, settings.image_size, settings.image_size
    if max(size) <= KEEP_SIZE_MAX_PX:
        return channels, *size
    side = BOOK_PIXELS if settings.transforms == "book" else LARGE_PIXELS
    return channels, side, side
