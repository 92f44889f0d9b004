"""Decisions about reading images: what they become, what decodes them, and with how many threads."""

from __future__ import annotations

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
    """Return the threads of each rank that decode: none for data in memory."""
    requested = given.values.num_workers
    if source == "memory":
        return 0, Decision("loader workers", "0", "batches come from memory")
    if requested != "auto":
        return requested, make_decision("loader workers", str(requested), "", "", given.sources.get("num_workers", ""))
    workers = min(rank.threads for rank in plan.ranks)
    return workers, Decision("loader workers", str(workers), "one per thread of the rank; more if files are slow")
