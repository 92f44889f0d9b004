"""Data sets of the user's: a function that returns the images of a split, by index, with their labels.

Those of Hugging Face are read so too: a folder of parquet or arrow files, the hub's cache, or the hub.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.packages import package_version, require_extra
from train.data.sources.image_file import FileList, OwnSplit, TarMember, read_file
from train.data.sources.image_list import ImageList, append_split
from train.data.sources.targets import MAX_TARGET, Targets
from train.models.users_code import describe_failure, import_factory
from train.setting_groups.data import HUGGING_FACE, DataSettings
from train.settings import TrainSettings


def list_own_splits(settings: TrainSettings, *, only_test: bool = False) -> tuple[ImageList, ImageList]:
    """Return train and test, with val behind test if there is one; raises `UserError` for what cannot be used.

    The function is called with `split`, and may return None for `val`.
    """
    function = (
        partial(open_hugging_face, settings.data)
        if settings.data.is_hugging_face
        else import_factory(settings.data.dataset, settings.network.model_path, "TRAIN_DATASET")
    )
    targets = None if settings.data.task == "classify" else Targets(())
    names = ("test",) if only_test else ("train", "test", "val")
    splits: dict[str, ImageList] = {}
    for split in names:
        dataset = call_users_code(settings.data, partial(function, split=split))
        if dataset is not None:
            splits[split] = list_split(settings, split, dataset, targets)
        elif split != "val":
            raise own_error(settings.data, f"gives nothing for split={split}")
    train, test = splits[names[0]], splits["test"]
    for split, listing in splits.items():
        if listing.classes != train.classes:
            raise own_error(settings.data, f"the classes of split={split} differ from those of {names[0]}")
    return train, append_split(test, splits["val"], test.folder) if "val" in splits else test


def list_split(settings: TrainSettings, split: str, dataset: Any, targets: Targets | None) -> ImageList:
    """Return the images of a split; `targets` gets the rows of a task that has no classes."""
    count = call_users_code(settings.data, lambda: len(dataset))
    if not count:
        raise own_error(settings.data, f"has no images for split={split}")
    name = Path(f"{settings.data.dataset} {split}")

    def get(row: int) -> bytes:
        return encoded_image(settings.data, split, row, item_of(settings.data, dataset, row)[0])

    source = OwnSplit(path=name, size=0, mtime_ns=0, ctime_ns=0, get=get, state=state_of(dataset, get, count))
    files = FileList(Path())
    for row in range(count):
        files.append(TarMember(source, row, 1))
    labels = labels_of(settings.data, dataset, count)
    classes = list(getattr(dataset, "classes", None) or ())
    if targets is not None:
        rows = [tuple(np.atleast_1d(np.asarray(label, dtype=np.float64)).tolist()) for label in labels]
        targets.names = tuple(map(str, classes)) or tuple(f"value{index}" for index in range(len(rows[0])))
        fit = [
            len(row) == len(targets.names)
            and all(one in (0, 1) if settings.data.task == "multilabel" else abs(one) < MAX_TARGET for one in row)
            for row in rows
        ]
        check_labels(settings.data, split, labels, fit)
        return ImageList(Path(), targets.names, files, array("q", map(targets.number_of, rows)), targets=targets)
    known = classes if isinstance(labels[0], str) else list(range(len(classes)))
    known = known or call_users_code(settings.data, lambda: sorted(set(labels)))
    numbers = {label: index for index, label in enumerate(known)}
    check_labels(settings.data, split, labels, [label in numbers for label in labels])
    names = tuple(map(str, classes or known))
    return ImageList(Path(), names, files, array("q", map(numbers.__getitem__, labels)))


def check_labels(settings: DataSettings, split: str, labels: Sequence[Any], fit: Sequence[bool]) -> None:
    """Raise `UserError` for the first label that does not fit."""
    if not all(fit):
        row = fit.index(False)
        wanted = {
            "classify": "class",
            "multilabel": "row of 0 and 1 for each label",
            "regress": "row of numbers below 1e30",
        }
        raise own_error(
            settings, f"{split}[{row}] has the label {printable(labels[row])}, which is no {wanted[settings.task]}"
        )


def labels_of(settings: DataSettings, dataset: Any, count: int) -> Sequence[Any]:
    """Return the label of each item, by `targets` as torchvision's data sets have them, or from the items."""
    known = None if getattr(dataset, "target_transform", None) else getattr(dataset, "targets", None)
    if known is not None and len(known) == count:
        return list(known.tolist() if hasattr(known, "tolist") else known)
    return [item_of(settings, dataset, row)[1] for row in range(count)]


def item_of(settings: DataSettings, dataset: Any, row: int) -> tuple[Any, Any]:
    """Return the image and the label of an item; raises `UserError` for what is no such pair."""
    item = call_users_code(settings, lambda: dataset[row], f"[{row}]")
    if not isinstance(item, Sequence) or len(item) != 2:
        raise own_error(settings, f"[{row}] is {type(item).__name__} and not (image, label)")
    return item[0], item[1].item() if hasattr(item[1], "item") and np.ndim(item[1]) == 0 else item[1]


def encoded_image(settings: DataSettings, split: str, row: int, image: Any) -> bytes:
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
    out, is_flat = BytesIO(), image.mode in ("1", "L", "P", "RGB")
    mode = "RGBA" if is_flat and "transparency" in image.info else "RGB" if image.mode == "HSV" else image.mode
    visible = image if mode == image.mode else image.convert(mode)
    visible.save(out, format="TIFF")  # holds all of Pillow's other modes, bit for bit
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


def call_users_code(settings: DataSettings, call: Callable[[], Any], where: str = "") -> Any:
    """Return what the user's code returns; raises `UserError` for what it raises."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise own_error(settings, f"{where}{' ' * bool(where)}{describe_failure(error)}") from None


def own_error(settings: DataSettings, problem: str) -> UserError:
    """Return the error of one line for a data set that cannot be used."""
    fix = "Name another one" if settings.is_hugging_face else "Correct the function"
    return UserError(f"TRAIN_DATASET={printable(settings.dataset)}: {problem}. {fix}.")


# The hub's names of a split, best first. A test split may come without its labels.
VAL = ("validation", "valid", "val", "dev")
NAMES = {"train": ("train",), "test": ("test", *VAL), "val": VAL}
# Without any other, so much of the training split is what tests.
TEST_SHARE = 0.1


class HuggingFaceSplit:
    """One split as the trainer reads data sets of the user's: encoded images by index, with their labels."""

    def __init__(self, rows: Any, columns: tuple[str, str], *, several: bool) -> None:
        (self.image, self.label), self.rows, self.several = columns, rows, several
        feature = rows.features[self.label]
        self.classes: list[str] = list(getattr(getattr(feature, "feature", feature), "names", ()))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[bytes, Any]:
        """Return the bytes of an image, and its label; raises OSError for one that is not there."""
        image = self.rows[row][self.image]
        if not image:
            raise OSError("its row has no image")
        content = image["bytes"] or read_file(Path(image["path"]))  # a row may name any file, and a pipe would hang
        return content, self.targets[row]

    @property
    def fingerprint(self) -> str:
        """A digest of the labels and of what is stored of 256 images."""
        digest = hashlib.blake2b(json.dumps(self.targets).encode(), digest_size=16)
        for row in range(0, len(self), max(1, len(self) // 256)):
            digest.update(str(self.rows[row][self.image]).encode())
        return digest.hexdigest()

    @cached_property
    def targets(self) -> list[Any]:
        """The label of each image; of several classes a list of 0 and 1."""
        labels = list(self.rows[self.label])
        if not self.several or not self.classes:
            return labels
        return [[float(number in row) for number in range(len(self.classes))] for row in labels]


def open_hugging_face(settings: DataSettings, split: str) -> HuggingFaceSplit | None:
    """Return a split, None for `val` where there is none; raises `UserError` for what cannot be read.

    datasets runs no code of a data set from version 4 on, so no older one is used.
    """
    source = f"TRAIN_DATASET={printable(settings.dataset)}"
    require_extra("hf", source)
    if int(package_version("datasets").partition(".")[0]) < 4:
        raise UserError(f"{source}: needs datasets 4 or newer, which runs no code of a data set.", ExitCode.MACHINE)
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    place = settings.data_dir if settings.dataset == "hf" else Path(settings.dataset[3:]).expanduser()
    if place is None:
        raise UserError(f"{source}: needs TRAIN_DATA_DIR, a folder of parquet or arrow files, or hf:NAME of the hub.")
    if "://" in settings.dataset:
        loaded = datasets.load_dataset(
            "parquet",
            data_files=remote_files(settings.dataset[3:].rstrip("/")),
            download_config=datasets.DownloadConfig(use_etag=True),  # else a changed file is taken for the old one
        )
    else:
        is_saved = any((place / name).is_file() for name in HUGGING_FACE)
        # A relative name could be that of a kind of file, as `parquet`, and stand for the whole working folder.
        loaded = (datasets.load_from_disk if is_saved else datasets.load_dataset)(str(place.absolute()))
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    columns = choose_columns(settings, source, next(iter(splits.values())).features)
    has_names = getattr(next(iter(splits.values())).features[columns[1]], "names", ())
    none = (-1, None) if has_names else (None,)  # what a public test split has in place of labels
    known = {
        name: rows
        for name, rows in splits.items()
        if name == "train" or (len(rows) and rows[columns[1]][0] not in none)
    }
    if "train" in known and not any(name in known for name in NAMES["test"]):
        rows, order = known["train"], np.random.default_rng(0).permutation(len(known["train"]))  # with any TRAIN_SEED
        tested = math.ceil(TEST_SHARE * len(rows))
        known = {
            "train": rows.select(order[tested:], keep_in_memory=True),  # the user's folder stays as it is
            "test": rows.select(order[:tested], keep_in_memory=True),
        }
    names = [name for name in NAMES[split] if name in known]
    if not names or (split == "val" and "test" not in known):  # it is what tests then
        return None
    rows = known[names[0]].select_columns(list(columns)).cast_column(columns[0], datasets.Image(decode=False))
    return HuggingFaceSplit(rows, columns, several=settings.task == "multilabel")


def remote_files(url: str) -> dict[str, list[str]]:
    """Return the files below a URL by split, as datasets knows them by their names and fsspec finds them.

    What datasets downloads is in its cache, by address and ETag, so each node downloads a file once, and again when it
    was changed.
    """
    from datasets.data_files import get_data_patterns

    return {split: [f"{url}/{pattern}" for pattern in found] for split, found in get_data_patterns(url).items()}


def choose_columns(settings: DataSettings, source: str, features: Any) -> tuple[str, str]:
    """Return the columns of images and labels, by TRAIN_DATA_COLUMNS or by their types; raises `UserError`."""
    if settings.data_columns:
        image, _, label = settings.data_columns.partition(",")
        if unknown := [name for name in (image, label) if name not in features]:
            columns = ", ".join(map(printable, features))
            raise UserError(f"TRAIN_DATA_COLUMNS: no column {printable(unknown[0])}. Choose of {columns}.")
        return image, label
    kinds = {name: type(getattr(feature, "feature", feature)).__name__ for name, feature in features.items()}
    images, labels = ([name for name, kind in kinds.items() if kind == wanted] for wanted in ("Image", "ClassLabel"))
    if len(images) != 1 or len(labels) != 1:
        columns = ", ".join(f"{printable(name)} ({kind})" for name, kind in kinds.items())
        raise UserError(
            f"{source}: has {len(images)} columns of images and {len(labels)} of class labels among {columns}."
            " Set TRAIN_DATA_COLUMNS=IMAGE,LABEL."
        )
    return images[0], labels[0]
