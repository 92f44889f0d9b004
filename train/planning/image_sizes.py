"""Sides of the images that training and evaluation see: `TRAIN_SIZE_SCHEDULE` and `TRAIN_EVAL_SIZE`."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoint.core.errors import refuse_if
from entrypoint.core.settings_base import ParsedSettings, variable_name
from entrypoint.plan.model import Decision, make_decision
from train.data.dataset_info import DatasetInfo
from train.setting_groups.data import DataSettings
from train.settings import ImageShape, TrainSettings

# The book's pipeline crops its images to this side.
BOOK_CROP = 224
SIZES = ("eval_size", "size_schedule", "transforms")


@dataclass(frozen=True)
class ImageSizes:
    """Shapes (channels, height, width) of images: decoded from the files, largest in training, and in evaluation.

    `schedule` has pairs (fraction of all steps, side): up to there training sees images of that shorter side.
    """

    decoded: ImageShape
    train: ImageShape
    eval: ImageShape
    schedule: tuple[tuple[float, int], ...] = ()

    def train_shape(self, step: int, total_steps: int) -> ImageShape:
        """Return the shape of the images of a step, counted from 0."""
        for end, side in self.schedule:
            if step < end * total_steps:
                return scale_shape(self.train, side)
        return self.train

    @property
    def smaller_shapes(self) -> tuple[ImageShape, ...]:
        """What training sees before its largest images."""
        return tuple(scale_shape(self.train, side) for _, side in self.schedule)

    @property
    def other_shapes(self) -> tuple[ImageShape, ...]:
        """What the model gets besides the largest images of training."""
        evaluated = (self.eval,) if self.eval != self.train else ()
        return (*self.smaller_shapes, *evaluated)


def scale_shape(shape: ImageShape, side: int) -> ImageShape:
    """Return the shape with this shorter side and the same aspect ratio."""
    channels, height, width = shape
    shorter = min(height, width)
    return channels, round(height * side / shorter), round(width * side / shorter)


def image_sizes(settings: DataSettings, decoded: ImageShape) -> ImageSizes:
    """Return the sizes of a run whose images are decoded to this shape: the larger one of training and evaluation.

    The book's pipeline crops them.
    """
    train = evaluated = (decoded[0], BOOK_CROP, BOOK_CROP) if settings.transforms == "book" else decoded
    if settings.eval_size and settings.image_size != "auto":
        train, evaluated = (scale_shape(decoded, side) for side in (settings.image_size, settings.eval_size))
    return ImageSizes(decoded, train, evaluated, parse_schedule(settings.size_schedule)[0])


def model_input_shape(settings: DataSettings, shape: ImageShape) -> ImageShape:
    """Return (channels, height, width) of the images that reach the model in training."""
    return image_sizes(settings, shape).train


def parse_schedule(text: str) -> tuple[tuple[tuple[float, int], ...], int]:
    """Return the pairs (end as a fraction of all steps, side) of a schedule, and the side of the remaining steps."""
    if not text:
        return (), 0
    *parts, last = text.split(",")
    ends: list[tuple[float, int]] = []
    end = 0.0
    for part in parts:
        side, _, share = part.partition(":")
        end = round(end + float(share), 9)
        ends.append((end, int(side)))
    return tuple(ends), int(last)


def check_image_sizes(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> None:
    """Raise `UserError` for sizes that contradict each other, the data or the transforms."""
    settings = given.values
    sources = {field: given.sources.get(field, variable_name("TRAIN_", field)) for field in SIZES}
    is_book, has_size = settings.data.transforms == "book", bool(settings.data.eval_size)
    refuse_if(
        {
            **{
                f"{sources[field]} and {sources['transforms']} contradict: the book's have one size. Drop one.": (
                    is_book and settings.value(field)
                )
                for field in SIZES[:2]
            },
            f"{sources['eval_size']}: only image files are resized, and TRAIN_DATASET is {settings.data.dataset}. Unset"
            " it.": has_size and not settings.data.reads_files,
            f"{sources['eval_size']}: needs TRAIN_IMAGE_SIZE, the size of training. Set both.": (
                has_size and settings.data.image_size == "auto"
            ),
        }
    )
    ends, last = parse_schedule(settings.data.size_schedule)
    if not ends:
        return
    side = min(image_sizes(settings.data, dataset.shape).train[1:])
    sides, end, source = [one for _, one in ends], ends[-1][0], sources["size_schedule"]
    refuse_if(
        {
            f"{source}: its fractions add up to {end:g}, so {last} is never trained. Lower them.": end >= 1,
            f"{source}: ends with {last}, and the images have {side}. End it with {side}, or resize them.": last
            != side,
            f"{source}: all of its sizes are {last}, so it has no effect. Unset it.": set(sides) == {last},
            f"{source}: {max(sides)} is larger than the images, which have {side}. Lower it.": max(sides) > side,
        }
    )


def decide_image_sizes(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> tuple[Decision, ...]:
    """Return what the sizes of training and evaluation are, if they differ from that of the images."""
    settings = given.values
    found: list[Decision] = []
    if settings.data.size_schedule and not settings.run.evaluate:
        each = "; each size is compiled by itself" if settings.compute.compile != "off" else ""
        reason = f"resized on the device{each}"
        source = given.sources.get("size_schedule", "")
        found.append(make_decision("image sizes", settings.data.size_schedule, "by the recipe", reason, source))
    if settings.data.eval_size:
        sizes = image_sizes(settings.data, dataset.shape)
        reason = f"files are decoded to {min(sizes.decoded[1:])} pixels"
        if sizes.train != sizes.decoded and not settings.run.evaluate:
            reason += f", and training resizes them to {min(sizes.train[1:])}"
        source = given.sources.get("eval_size", "")
        found.append(make_decision("evaluation size", str(settings.data.eval_size), "", reason, source))
    return tuple(found)
