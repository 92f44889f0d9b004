"""Data sets of the user's: a function that returns the images of a split, by index, with their labels."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from entrypoint.core.errors import UserError, printable
from train.data.sources.hugging_face import open_hugging_face
from train.data.sources.image_file import FileList, OwnSplit, TarMember
from train.data.sources.image_list import ImageList, append_split
from train.data.sources.targets import Targets
from train.models.users_code import describe_failure, import_factory
from train.settings import TrainSettings


def list_own_splits(settings: TrainSettings, *, only_test: bool = False) -> tuple[ImageList, ImageList]:
    """Return train and test, with val behind test if there is one; raises `UserError` for what cannot be used.

    The function is called with `split`, and may return None for `val`.
    """
    function = (
        partial(open_hugging_face, settings)
        if settings.is_hugging_face
        else import_factory(settings.dataset, settings.model_path, "TRAIN_DATASET")
    )
    targets = None if settings.task == "classify" else Targets(())
    names = ("test",) if only_test else ("train", "test", "val")
    splits: dict[str, ImageList] = {}
    for split in names:
        dataset = call_users_code(settings, partial(function, split=split))
        if dataset is not None:
            splits[split] = list_split(settings, split, dataset, targets)
        elif split != "val":
            raise own_error(settings, f"gives nothing for split={split}")
    train, test = splits[names[0]], splits["test"]
    for split, listing in splits.items():
        if listing.classes != train.classes:
            raise own_error(settings, f"the classes of split={split} differ from those of {names[0]}")
    return train, append_split(test, splits["val"], test.folder) if "val" in splits else test


def list_split(settings: TrainSettings, split: str, dataset: Any, targets: Targets | None) -> ImageList:
    """Return the images of a split; `targets` gets the rows of a task that has no classes."""
    count = call_users_code(settings, lambda: len(dataset))
    if not count:
        raise own_error(settings, f"has no images for split={split}")
    name = Path(f"{settings.dataset} {split}")

    def get(row: int) -> bytes:
        return encoded_image(settings, split, row, item_of(settings, dataset, row)[0])

    source = OwnSplit(path=name, size=0, mtime_ns=0, ctime_ns=0, get=get, state=state_of(dataset, get, count))
    files = FileList(Path())
    for row in range(count):
        files.append(TarMember(source, str(row), row, 1))
    labels = labels_of(settings, dataset, count)
    classes = list(getattr(dataset, "classes", None) or ())
    if targets is not None:
        rows = [tuple(np.atleast_1d(np.asarray(label, dtype=np.float64)).tolist()) for label in labels]
        targets.names = tuple(map(str, classes)) or tuple(f"value{index}" for index in range(len(rows[0])))
        check_labels(settings, split, labels, [len(row) == len(targets.names) for row in rows])
        return ImageList(Path(), targets.names, files, array("q", map(targets.number_of, rows)), targets=targets)
    known = classes if isinstance(labels[0], str) else list(range(len(classes)))
    known = known or call_users_code(settings, lambda: sorted(set(labels)))
    numbers = {label: index for index, label in enumerate(known)}
    check_labels(settings, split, labels, [label in numbers for label in labels])
    names = tuple(map(str, classes or known))
    return ImageList(Path(), names, files, array("q", map(numbers.__getitem__, labels)))


def check_labels(settings: TrainSettings, split: str, labels: Sequence[Any], fit: Sequence[bool]) -> None:
    """Raise `UserError` for the first label that does not fit."""
    if not all(fit):
        row = fit.index(False)
        raise own_error(
            settings, f"{split}[{row}] has the label {printable(labels[row])}, unlike the classes or others"
        )


def labels_of(settings: TrainSettings, dataset: Any, count: int) -> Sequence[Any]:
    """Return the label of each item, by `targets` as torchvision's data sets have them, or from the items."""
    known = getattr(dataset, "targets", None)
    if known is not None and len(known) == count:
        return list(known.tolist() if hasattr(known, "tolist") else known)
    return [item_of(settings, dataset, row)[1] for row in range(count)]


def item_of(settings: TrainSettings, dataset: Any, row: int) -> tuple[Any, Any]:
    """Return the image and the label of an item; raises `UserError` for what is no such pair."""
    item = call_users_code(settings, lambda: dataset[row], f"[{row}]")
    if not isinstance(item, Sequence) or len(item) != 2:
        raise own_error(settings, f"[{row}] is {type(item).__name__} and not (image, label)")
    return item[0], item[1].item() if hasattr(item[1], "item") and np.ndim(item[1]) == 0 else item[1]


def encoded_image(settings: TrainSettings, split: str, row: int, image: Any) -> bytes:
    """Return an image as the bytes of a file, which every decoder here reads; raises `UserError` for something else."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        image = Image.fromarray(image.reshape(image.shape[:2]) if image.shape[2:] == (1,) else image)
    if not isinstance(image, Image.Image):
        kind = f"{type(image).__name__} of {getattr(image, 'dtype', 'no pixels')}"
        raise own_error(
            settings, f"{split}[{row}] is {kind} and not a PIL image, a uint8 array (height, width, channels) or bytes"
        )
    out = BytesIO()
    image.save(out, format="TIFF")  # holds all of Pillow's modes, bit for bit
    return out.getvalue()


def state_of(dataset: Any, get: Callable[[int], bytes], count: int) -> str:
    """Return what a data set says of its content: its `fingerprint`, or a digest of its length and of some items."""
    known = getattr(dataset, "fingerprint", None)
    if known is not None:
        return str(known() if callable(known) else known)
    digest = hashlib.blake2b(str(count).encode(), digest_size=16)
    for row in range(0, count, max(1, count // 256)):
        digest.update(get(row))
    return digest.hexdigest()


def call_users_code(settings: TrainSettings, call: Callable[[], Any], where: str = "") -> Any:
    """Return what the user's code returns; raises `UserError` for what it raises."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise own_error(settings, f"{where}{' ' * bool(where)}{describe_failure(error)}") from None


def own_error(settings: TrainSettings, problem: str) -> UserError:
    """Return the error of one line for a data set that cannot be used."""
    fix = "Name another one" if settings.is_hugging_face else "Correct the function"
    return UserError(f"TRAIN_DATASET={printable(settings.dataset)}: {problem}. {fix}.")
