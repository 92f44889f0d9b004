"""Decisions about reading images: what they become, what decodes them, and with how many threads."""

from __future__ import annotations

from math import prod

from entrypoint.core.errors import ExitCode, UserError, count_text
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.plan.model import Decision, Plan, make_decision
from train.data.dataset_info import DatasetInfo
from train.planning.model_size import USABLE_SHARE
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

    A batch in use and those ahead of it are held, a byte a value, and never more than the images of an epoch.
    """
    settings, ranks = given.values, len(plan.ranks)
    batches = 1 + settings.prefetch_factor if workers else 1
    images = batches * settings.batch_size // (settings.micro_batches * plan.nodes.world_size)
    if dataset.counted_all:
        images = min(images, dataset.images // plan.nodes.world_size)
    needed = images * ranks * prod(dataset.shape)
    if memory_bytes and needed > memory_bytes * USABLE_SHARE:
        raise UserError(
            f"TRAIN_PREFETCH_FACTOR={settings.prefetch_factor}: the images decoded ahead take"
            f" {needed / 2**30:,.1f} GiB on {count_text(ranks, 'rank')}, over {100 * USABLE_SHARE:.0f} % of this node's"
            f" {memory_bytes / 2**30:,.1f} GiB. Lower it, or TRAIN_BATCH_SIZE.",
            ExitCode.MACHINE,
        )
