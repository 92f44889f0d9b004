"""Decisions about reading images: what they become, what decodes them, with how many threads, and the normalization."""

from __future__ import annotations

from math import prod
from statistics import mean

from entrypoint.core.errors import ExitCode, UserError, count_text
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.plan.model import Decision, Plan, make_decision
from train.data.dataset_info import DatasetInfo
from train.settings import STREAM_EVAL_BATCH_SIZE, TrainSettings

# The share of memory that batches are planned with; the rest is for the libraries and other processes.
USABLE_SHARE = 0.8


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


def decide_workers(
    given: ParsedSettings[TrainSettings], plan: Plan, source: str, dataset: DatasetInfo, memory_bytes: int
) -> tuple[int, Decision]:
    """Return the threads of each rank that decode, none for data in memory; raises `UserError` for too many batches."""
    if source == "memory":
        return 0, Decision("loader workers", "0", "batches come from memory")
    requested = given.values.num_workers
    if requested != "auto":
        workers = requested
        decision = make_decision("loader workers", str(workers), "", "", given.sources.get("num_workers", ""))
    else:
        workers = min(rank.threads for rank in plan.ranks)
        decision = Decision("loader workers", str(workers), "one per thread of the rank; more if files are slow")
    check_prefetching(given, plan, dataset, workers, memory_bytes)
    return workers, decision


def check_prefetching(
    given: ParsedSettings[TrainSettings], plan: Plan, dataset: DatasetInfo, workers: int, memory_bytes: int
) -> None:
    """Raise `UserError` if the batches that are decoded ahead do not fit into this node's memory, 0 if unknown.

    A batch in use and those ahead of it are held, a byte a value, and never more than the images of their part.
    """
    settings, ranks = given.values, len(plan.ranks)
    batches = 1 + settings.prefetch_factor if workers else 1
    for field, size, images in parts_read(settings, dataset, plan.nodes.world_size):
        needed = min(batches * size, images) * ranks * prod(dataset.shape)
        if memory_bytes and needed > memory_bytes * USABLE_SHARE:
            raise UserError(
                f"TRAIN_PREFETCH_FACTOR={settings.prefetch_factor}: the images decoded ahead take"
                f" {needed / 2**30:,.1f} GiB on {count_text(ranks, 'rank')}, over {100 * USABLE_SHARE:.0f} % of this"
                f" node's {memory_bytes / 2**30:,.1f} GiB. Lower it, or {field}.",
                ExitCode.MACHINE,
            )


def parts_read(settings: TrainSettings, dataset: DatasetInfo, ranks: int) -> list[tuple[str, int, int]]:
    """Return for training and evaluation the setting of a batch, the images of a rank in it, and in all of the part."""
    size = STREAM_EVAL_BATCH_SIZE if settings.eval_batch_size == "auto" else settings.eval_batch_size
    trained, others = dataset.train_images or dataset.images, dataset.images - dataset.train_images
    others = max(others, round(trained * settings.val_split))
    micro_batch = settings.batch_size // (settings.grad_accum_steps * ranks)
    training = ("TRAIN_BATCH_SIZE", micro_batch, trained // ranks)
    evaluation = ("TRAIN_EVAL_BATCH_SIZE", size, -(-others // ranks))
    return [evaluation] if settings.evaluate else [training, evaluation]


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
    value, setting = given.values.normalize, given.sources.get("normalize", "")
    if value == "auto" and given.values.weights and of_weights and len(of_weights[0]) in (1, 3):
        found = adapt(of_weights, channels)
        return found, Decision("normalization", text_of(found), "that of the weights")
    if value == "data" or (value == "auto" and source == "memory" and not given.values.weights):
        return None, make_decision("normalization", "data", "", "mean and deviation of the training images", setting)
    if value in ("auto", "imagenet"):
        found = adapt(IMAGENET, channels)
        reason = "the weights do not say theirs" if given.values.weights else "a stream's own is not known before"
        return found, make_decision("normalization", text_of(found), f"ImageNet's; {reason}", "", setting)
    mean, deviation = (tuple(map(float, part.split(","))) for part in value.split("/"))
    if not len(mean) == len(deviation) == channels:
        raise UserError(
            f"{setting}: has {len(mean)} means and {len(deviation)} deviations, and the images have {channels}"
            f" channel{'s' * (channels != 1)}. Give one of each for every channel."
        )
    if not all(deviation) or max(*mean, *deviation) > 1:
        raise UserError(f"{setting}: means are from 0 to 1, and deviations above 0 to 1. Divide byte values by 255.")
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
