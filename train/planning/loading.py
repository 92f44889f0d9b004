"""Decisions about reading images: what they become, what decodes them, with how many threads, and the normalization."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from entrypoint.core.errors import printable, refuse_if
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.plan.model import Decision, Plan, make_decision
from train.data.dataset_info import DatasetInfo
from train.settings import TrainSettings


def decide_images(dataset: DatasetInfo) -> tuple[Decision, ...]:
    """Return what the image files of a folder become, and what decodes them."""
    if not dataset.becomes:
        return ()
    decoder = ("compiled", "crops and resizes while it decodes") if dataset.has_kernel else ("Pillow", NO_KERNEL)
    return (
        Decision("images", "x".join(map(str, dataset.shape)), dataset.becomes),
        Decision("JPEG decoder", *decoder),
    )


NO_KERNEL = "the set-up found no C++ compiler or libjpeg headers"


def decide_workers(given: ParsedSettings[TrainSettings], plan: Plan, source: str) -> tuple[int, Decision]:
    """Return the threads of each rank that decode, none for data in memory."""
    if source == "memory":
        return 0, Decision("loader workers", "0", "batches come from memory")
    requested = given.values.data.num_workers
    if requested != "auto":
        workers = requested
        decision = make_decision("loader workers", str(workers), "", "", given.sources.get("num_workers", ""))
    else:
        workers = min(rank.threads for rank in plan.ranks)
        decision = Decision("loader workers", str(workers), "one per thread of the rank; more if files are slow")
    return workers, decision


Normalization = tuple[tuple[float, ...], tuple[float, ...]]
# Mean and standard deviation of ImageNet's channels, from 0 to 1. Gray images get the mean of the three.
IMAGENET: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GRAY: Normalization = ((0.5,), (64 / 255,))


def decide_normalization(
    given: ParsedSettings[TrainSettings], channels: int, source: str, of_weights: Normalization | None
) -> tuple[Normalization | None, Decision]:
    """Return mean and standard deviation of each channel (from 0 to 1), None for the training images' own.

    Raises `UserError` for another number of channels than the images have.
    """
    value, setting = given.values.data.normalize, given.sources.get("normalize", "")
    if value == "auto" and given.values.network.weights and of_weights and len(of_weights[0]) in (1, 3):
        found = adapt(of_weights, channels)
        return found, Decision("normalization", text_of(found), "that of the weights")
    if value == "data" or (value == "auto" and source == "memory" and not given.values.network.weights):
        return None, make_decision("normalization", "data", "", "mean and deviation of the training images", setting)
    if value in ("auto", "imagenet"):
        found = adapt(IMAGENET, channels)
        reason = (
            "the weights do not say theirs" if given.values.network.weights else "a stream's own is not known before"
        )
        return found, make_decision("normalization", text_of(found), f"ImageNet's; {reason}", "", setting)
    mean, deviation = (tuple(map(float, part.split(","))) for part in value.split("/"))
    refuse_if(
        {
            f"{setting}: has {len(mean)} means and {len(deviation)} deviations, and the images have {channels}"
            f" channel{'s' * (channels != 1)}. Give one of each for every channel.": (
                not len(mean) == len(deviation) == channels
            ),
            f"{setting}: means are from 0 to 1, and deviations above 0 to 1. Divide byte values by 255.": (
                not all(deviation) or max(*mean, *deviation) > 1
            ),
        }
    )
    return (mean, deviation), make_decision("normalization", text_of((mean, deviation)), "", "", setting)


def adapt(values: Normalization, channels: int) -> Normalization:
    """Return values for so many channels: the mean of three for one, and one repeated for three."""
    if len(values[0]) == channels:
        return values
    if channels == 1:
        return GRAY if values == IMAGENET else ((mean(values[0]),), (mean(values[1]),))
    return values[0] * channels, values[1] * channels


def text_of(values: Normalization) -> str:
    """Return means and deviations as TRAIN_NORMALIZE takes them."""
    return "/".join(",".join(f"{one:.3g}" for one in part) for part in values)


# Of the training images, what each epoch may leave out unsaid.
LARGE_PART = 0.1


def doubts(dataset: DatasetInfo, known: Sequence[str] = (), left_out: int = 0) -> tuple[str, ...]:
    """Return why the score of these data says little.

    `known` are the labels of a model that is evaluated, and `left_out` the images of an epoch that fill no batch.
    """
    shared, looked_at = dataset.shared
    unnamed = [printable(name) for name in known if dataset.task == "multilabel" and name not in dataset.classes]
    reasons = {
        f"{shared} of {looked_at} test images that were looked at are training images too, byte for byte. The accuracy"
        " says nothing of new images. Test others.": shared,
        "there is 1 class, so each answer is right. Add images of what is not in it.": (
            dataset.task == "classify" and len(known or dataset.classes) == 1
        ),
        f"all images have the same {', '.join(map(printable, dataset.constant[:3]))}, so each answer is right. Leave it"
        " out.": dataset.constant,
        f"the data name no {', '.join(unnamed[:3])}, which counts as absent in each image. Add what is"
        " missing.": unnamed,
        f"images in {printable(dataset.loose)} lie next to the classes' folders, and are not read. Move them.": (
            dataset.loose
        ),
        f"{left_out:,} training images fill no batch, and each epoch leaves so many out."
        " Set another TRAIN_BATCH_SIZE.": left_out > LARGE_PART * dataset.train_images,
        "all test images have the same targets, so their score says nothing. Test others.": (
            dataset.same_targets and not dataset.constant
        ),
    }
    return tuple(text for text, holds in reasons.items() if holds)
