"""The images of the user's files, as TRAIN_DATASET says where they and their classes stand."""

from __future__ import annotations

from train.data.sources.image_folder import ImageList, list_splits
from train.data.sources.label_files import list_label_splits
from train.settings import TrainSettings


def list_files(settings: TrainSettings) -> tuple[ImageList, ImageList]:
    """Return train and test; raises `UserError` for a folder or a file that cannot be used."""
    only_test = bool(settings.evaluate)
    if settings.dataset == "csv":
        return list_label_splits(settings.data_dir, only_test=only_test)
    if settings.dataset == "shards":
        from train.data.sources.shards import list_shard_splits  # loads numpy

        return list_shard_splits(settings.data_dir, settings.cache_dir, only_test=only_test)
    return list_splits(settings.data_dir, settings.on_unreadable_image, only_test=only_test)
