"""Decisions about reading images: what they become, what decodes them, and with how many threads."""

from __future__ import annotations

from math import prod

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


def decide_workers(given: ParsedSettings[TrainSettings], plan: Plan, source: str) -> tuple[int, Decision]:
    """Return the threads of each rank that decode: none for data in memory."""
    requested = given.values.num_workers
    if source == "memory":
        return 0, Decision("loader workers", "0", "batches come from memory")
    if requested != "auto":
        return requested, make_decision("loader workers", str(requested), "", "", given.sources.get("num_workers", ""))
    workers = min(rank.threads for rank in plan.ranks)
    return workers, Decision("loader workers", str(workers), "one per thread of the rank; more if files are slow")


def check_prefetching(
    given: ParsedSettings[TrainSettings], plan: Plan, dataset: DatasetInfo, workers: int, memory_bytes: int
) -> None:
    """Raise `UserError` if the batches that are decoded ahead do not fit into this node's memory, 0 if unknown.

    A batch in use and those ahead of it are held, a byte a value, and never more than the images of their part.
    """
    settings, ranks = given.values, len(plan.ranks)
    batches = 1 + settings.prefetch_factor if workers else 1
    for field, size, images in parts_read(settings, dataset, plan.nodes.world_size):
        held = batches * size if images is None else min(batches * size, images)
        needed = held * ranks * prod(dataset.shape)
        if memory_bytes and needed > memory_bytes * USABLE_SHARE:
            raise UserError(
                f"TRAIN_PREFETCH_FACTOR={settings.prefetch_factor}: the images decoded ahead take"
                f" {needed / 2**30:,.1f} GiB on {count_text(ranks, 'rank')}, over {100 * USABLE_SHARE:.0f} % of this"
                f" node's {memory_bytes / 2**30:,.1f} GiB. Lower it, or {field}.",
                ExitCode.MACHINE,
            )


def parts_read(settings: TrainSettings, dataset: DatasetInfo, ranks: int) -> list[tuple[str, int, int | None]]:
    """Return for training and evaluation the setting of a batch, the images of a rank in it, and in all of the part.

    The last is None where the images were not all counted.
    """
    size = STREAM_EVAL_BATCH_SIZE if settings.eval_batch_size == "auto" else settings.eval_batch_size
    trained, others = dataset.train_images or dataset.images, dataset.images - dataset.train_images
    others = max(others, round(trained * settings.val_split))
    micro_batch = settings.batch_size // (settings.grad_accum_steps * ranks)
    training = ("TRAIN_BATCH_SIZE", micro_batch, trained // ranks if dataset.counted_all else None)
    evaluation = ("TRAIN_EVAL_BATCH_SIZE", size, -(-others // ranks) if dataset.counted_all else None)
    return [evaluation] if settings.evaluate else [training, evaluation]
