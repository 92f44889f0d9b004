"""Which images are read, and how they reach the model; which kind of data set a folder is."""

import os
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta

from entrypoint.core.setting_types import Alpha, Fraction, PathOrUrl, about
from entrypoint.core.settings_base import Auto, Settings

KnownDataset = Literal["digits", "fashion-mnist", "cifar10", "imagefolder", "csv", "shards", "hf", "synthetic"]
# A function of the user's by its import path, or a data set of Hugging Face; msgspec asks the names above for the
# pattern too.
OwnCode = Annotated[
    str,
    Meta(
        pattern=rf"^({'|'.join(get_args(KnownDataset))}|hf:.+|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$",
        title="package.module:function or hf:NAME",
    ),
]
# One part of TRAIN_AUGMENT.
AUGMENTATION = (
    r"(trivial|auto|3augment|rand-([12]?\d|30)-[1-9]|(jitter|gray|blur|vflip|hflip)-(0(\.\d+)?|1(\.0+)?|\.\d+))"
)
# Datasets whose images are files of the user.
FILE_DATASETS = ("imagefolder", "csv", "shards")
# The score of each task: mean average precision, and the coefficient of determination.
SCORES = {"classify": "accuracy", "multilabel": "mAP", "regress": "R2"}


class DataSettings(Settings, frozen=True, kw_only=True):
    """Which images are read, and how they reach the model."""

    dataset: Annotated[
        KnownDataset | OwnCode,
        about(
            "Dataset. digits needs no download; imagefolder reads the folders of TRAIN_DATA_DIR, csv its"
            " train.csv and test.csv, shards its tar files as webdataset writes them, hf its parquet or arrow files."
            " Or hf:NAME of Hugging Face's hub, hf:s3://BUCKET/FOLDER, or your own as package.module:function.",
            basic=True,
            evaluate="adopted",
        ),
    ] = "digits"
    task: Annotated[
        Literal["classify", "multilabel", "regress"],
        about(
            "What is learned. classify: one class an image. multilabel: any number of labels. regress: numbers."
            " The last two read a csv, shards or hf.",
            basic=True,
            resume="must_keep",
            evaluate="adopted",
        ),
    ] = "classify"
    label_separator: Annotated[
        Annotated[str, Meta(min_length=1, max_length=8)],
        about(
            "multilabel: what divides the labels in a cell; space for blanks.",
            speed=False,
            evaluate="adopted",
            needs="task=multilabel",
        ),
    ] = "|"
    data_dir: Annotated[
        PathOrUrl | None,
        about(
            "imagefolder, csv, shards, hf: the folder with train and test (or val), or of classes. csv and shards may"
            " be in object storage: s3://BUCKET/FOLDER. Other datasets: download folder.",
            basic=True,
            speed=False,
            resume="may_change",
            nodes="may_differ",
            evaluate="adopted",
            needs="dataset=imagefolder,csv,shards,hf,fashion-mnist,cifar10",
        ),
    ] = None
    data_columns: Annotated[
        Annotated[str, Meta(pattern=r"^([^,]+,[^,]+)?$", title="IMAGE,LABEL")],
        about(
            "hf: the columns of images and labels. Unset: the only ones of these types.",
            speed=False,
            resume="must_keep",
            evaluate="adopted",
        ),
    ] = ""
    image_size: Annotated[
        Auto | Annotated[int, Meta(ge=4, le=4096)],
        about(
            "Side of images from files in pixels. auto: their own size, or 224 above 96 pixels.",
            basic=True,
            resume="data",
            evaluate="adopted",
        ),
    ] = "auto"
    eval_size: Annotated[
        Annotated[int, Meta(ge=4, le=4096)] | None,
        about("Side of the images that evaluation sees, for image files. Unset: TRAIN_IMAGE_SIZE.", evaluate="adopted"),
    ] = None
    size_schedule: Annotated[
        Annotated[
            str,
            Meta(
                pattern=r"^(([4-9]|[1-9]\d{1,3}):0?\.\d{1,6},){1,9}[1-9]\d{0,3}$|^$",
                title="SIDE:FRACTION,SIDE such as 128:0.5,224",
            ),
        ],
        about("Progressive resizing: 128:0.5,224 trains half of all steps on images of 128 pixels, then 224."),
    ] = ""
    on_unreadable_image: Annotated[
        Literal["error", "skip"],
        about(
            "What to do with an image that cannot be read: stop and name it, or skip and count it.",
            speed=False,
            evaluate="adopted",
            needs="dataset!=digits,fashion-mnist,cifar10,synthetic",
        ),
    ] = "error"
    synthetic_images: Annotated[
        Annotated[int, Meta(ge=10, le=10**8)],
        about(
            "synthetic: training images. Test images: a fifth of them.",
            speed=False,
            evaluate="adopted",
            needs="dataset=synthetic",
        ),
    ] = 2560
    synthetic_shape: Annotated[
        Annotated[
            str,
            Meta(pattern=r"^[1-9]\d{0,3}x[1-9]\d{0,3}x[1-9]\d{0,3}$", title="channels x height x width, as 3x32x32"),
        ],
        about("synthetic: channels x height x width.", evaluate="adopted", needs="dataset=synthetic"),
    ] = "3x32x32"
    val_split: Annotated[
        Annotated[float, Meta(ge=0, le=0.5)],
        about(
            "Fraction of the training images that choose the best checkpoint, and are not trained on."
            " A folder's val/ next to test/ does the same.",
            resume="data",
        ),
    ] = 0.0
    data_source: Annotated[
        Literal["auto", "memory", "stream"],
        about("memory keeps all decoded images in memory. stream decodes them in loader workers.", resume="may_change"),
    ] = "auto"
    num_workers: Annotated[
        Auto | Annotated[int, Meta(ge=0, le=1024)],
        about(
            "Threads per rank that decode when streaming. auto: one per thread of the rank, and more if"
            " files are slow to read.",
            resume="may_change",
            nodes="may_differ",
            evaluate="own",
        ),
    ] = "auto"
    cache_dir: Annotated[
        Path | None,
        about(
            "Folder for decoded images, indexes of shards, and copies of what is in object storage. Unset: the user's"
            " cache folder.",
            speed=False,
            resume="may_change",
            nodes="may_differ",
            evaluate="own",
        ),
    ] = None
    transforms: Annotated[
        Literal["auto", "none", "flip-crop", "imagenet", "book"],
        about(
            "Augmentation. auto: flip-crop for color images, none for grayscale."
            " imagenet: random resized crop and flip. book: the book's pipeline at 224x224.",
            evaluate="adopted",
        ),
    ] = "auto"
    augment: Annotated[
        Annotated[
            str,
            Meta(
                pattern=rf"^(none|{AUGMENTATION}(,{AUGMENTATION})*)$",
                title="none, or with commas trivial, auto, 3augment, rand-M-N, and jitter-X, gray-X, blur-X, vflip-X,"
                " hflip-X with X from 0 to 1",
            ),
        ],
        about(
            "Further augmentation of each image, in the order named: TrivialAugment, AutoAugment, 3-Augment,"
            " RandAugment (rand-9-2), color jitter by a strength, gray, blur and flips by a chance. hflip-0 keeps the"
            " transform from flipping."
        ),
    ] = "none"
    erasing: Annotated[Fraction, about("Random erasing: the fraction of images that lose a box.")] = 0.0
    repeated_augment: Annotated[
        Annotated[int, Meta(ge=1, le=16)],
        about("Times that an image is in a batch, each time augmented differently; an epoch stays as long."),
    ] = 1
    crop_scale: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        about("imagenet: smallest area of a random crop.", needs="transforms=imagenet"),
    ] = 0.08
    crop_ratio: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        about(
            "imagenet: fraction of the shorter side that evaluation sees, in the middle.",
            evaluate="adopted",
            needs="transforms=imagenet",
        ),
    ] = 0.875
    normalize: Annotated[
        Annotated[
            str,
            Meta(
                pattern=r"^(auto|data|imagenet|\d*\.?\d+(,\d*\.?\d+)*/\d*\.?\d+(,\d*\.?\d+)*)$",
                title="auto, data, imagenet, or MEAN/STD of each channel as 0.5,0.5,0.5/0.25,0.25,0.25",
            ),
        ],
        about(
            "Input normalization. auto: that of TRAIN_WEIGHTS, else data in memory and imagenet for"
            " streams. data: the training images' own. Or MEAN/STD of each channel, from 0 to 1.",
            speed=False,
            resume="must_keep",
        ),
    ] = "auto"
    mixup_alpha: Annotated[Alpha, about("Alpha of mixup's Beta distribution; 0 disables mixup.")] = 0.0
    cutmix_alpha: Annotated[Alpha, about("Alpha of CutMix's Beta distribution; 0 disables CutMix.")] = 0.0
    unmixed_epochs: Annotated[
        Annotated[int, Meta(ge=0, le=10**6)], about("Last epochs, in which mixup and CutMix are off.", speed=False)
    ] = 0

    def transform_of(self, channels: int) -> str:
        """Return the transform; auto flips and shifts color images only, because flips change digits."""
        if self.transforms != "auto":
            return self.transforms
        return "flip-crop" if channels == 3 and self.dataset != "synthetic" else "none"

    @property
    def score(self) -> str:
        """The task's score, in percent: its name in files, on pages and on the screen."""
        return SCORES[self.task]

    @property
    def reads_files(self) -> bool:
        """Whether the images are files of the user, which are decoded."""
        return self.dataset in FILE_DATASETS or self.reads_items

    @property
    def is_own_dataset(self) -> bool:
        """Whether the data set is code that the user names: `package.module:function`."""
        return ":" in self.dataset and not self.is_hugging_face

    @property
    def is_hugging_face(self) -> bool:
        """Whether the data set is one of Hugging Face's, in TRAIN_DATA_DIR or by its name."""
        return self.dataset == "hf" or self.dataset.startswith("hf:")

    @property
    def reads_items(self) -> bool:
        """Whether a data set gives its images by index, in place of files that are listed."""
        return self.is_own_dataset or self.is_hugging_face


# The endings of images. Whatever the decoder then finds in a file is read.
IMAGE_ENDINGS = frozenset(
    ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff", "jp2", "avif")
)
# What the library datasets saves; the hub's own folders have parquet files in data/.
HUGGING_FACE = ("dataset_dict.json", "state.json")
# Left behind by archives of macOS, by Synology's storage, and by file systems.
IGNORED_FOLDERS = frozenset(
    ("__MACOSX", "@eaDir", "#recycle", "lost+found", "$RECYCLE.BIN", "System Volume Information")
)
# Entries of a class that are looked at until one is an image.
LOOKED_AT = 50


def kind_of_folder(folder: Path | None) -> str:
    """Return the TRAIN_DATASET that reads a folder, empty where it is none of them."""
    if folder is None:
        return ""
    try:
        names = os.listdir(folder)
        inside = os.listdir(folder / "train") if "train" in names else []
    except (OSError, ValueError):  # a null byte is no path
        return ""
    if "train.csv" in map(str.lower, names):
        return "csv"
    if any(name.endswith(".tar") for name in (*names, *inside)):
        return "shards"
    if any(name in HUGGING_FACE for name in names) or any(
        has_file(folder / name, {"parquet"}) for name in ("", "data", "train")
    ):
        return "hf"
    root, classes = (folder / "train", inside) if "train" in names else (folder, names)
    is_class = (name for name in classes if not name.startswith(".") and name not in IGNORED_FOLDERS)
    return "imagefolder" if any(has_file(root / name, IMAGE_ENDINGS) for name in is_class) else ""


def has_file(folder: Path, endings: Collection[str]) -> bool:
    """Return whether one of a folder's first files has one of these endings."""
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.lower().rpartition(".")[2] in endings for entry in islice(entries, LOOKED_AT))
    except OSError:
        return False
