"""Checks of the trainer's settings that need neither torch nor a started rank."""

from __future__ import annotations

from entrypoint.core.errors import UserError, count_text, printable, refuse_if
from entrypoint.core.packages import require_extra
from entrypoint.core.settings_base import ParsedSettings
from train.data.dataset_info import DatasetInfo
from train.planning.export_formats import check_formats
from train.planning.image_sizes import check_image_sizes, model_input_shape
from train.planning.trained_run import read_trained_run
from train.setting_groups.arguments import parse_class_weights
from train.setting_groups.data import DataSettings
from train.setting_groups.optimization import ELEMENTWISE, LOSSES, OptimizationSettings
from train.settings import PROFILE_WARM_UP, TrainSettings

# What poolings, and speednet's whitening, leave nothing of.
MIN_PIXELS = {"cnn": 4, "speednet": 9, "speednet-half": 9}


def check_trainer_settings(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> None:
    """Raise `UserError` for a model, batch or profile that the run would refuse at its start."""
    check_smallest_images(given, dataset)
    check_augment(given.values.data, dataset.shape[0])
    check_copies(given.values, dataset.shape[0])
    check_optimizer(given)
    check_choice(given, dataset)
    check_teacher(given.values, dataset)
    if given.values.optim.class_weights not in ("", "auto"):
        parse_class_weights(given.values.optim.class_weights, dataset.classes)
    check_extras(given)
    check_image_sizes(given, dataset)
    check_batch_fits(given, dataset)
    check_pruning_length(given.values, dataset)
    check_profile_length(given, dataset)


def check_teacher(settings: TrainSettings, dataset: DatasetInfo) -> None:
    """Raise `UserError` for a teacher that cannot be read, or does not know these classes or images."""
    if not settings.optim.teacher or settings.data.task != "classify":
        return
    trained = read_trained_run(settings.optim.teacher, "TRAIN_TEACHER", settings.network.model)
    source = f"TRAIN_TEACHER={printable(settings.optim.teacher)}"
    if trained.settings.data.task != settings.data.task:
        raise UserError(
            f"{source}: was trained for {trained.settings.data.task}, which has no classes. Name another one."
        )
    trained.order_of(dataset.classes, source)
    if trained.shape[0] != dataset.shape[0]:
        raise UserError(
            f"{source}: was trained on images of {count_text(trained.shape[0], 'channel')}, and these have"
            f" {dataset.shape[0]}. Name another one."
        )


def check_profile_length(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> None:
    """Raise `UserError` if the run has fewer steps than TRAIN_PROFILE needs after its warm-up."""
    settings = given.values
    if not settings.run.profile or not dataset.train_images:
        return
    steps = settings.optim.total_steps(steps_of_epoch(settings, dataset))
    needed = PROFILE_WARM_UP + settings.run.profile
    if steps < needed:
        raise UserError(
            f"{given.sources['profile']}: needs {needed} steps, {PROFILE_WARM_UP} of them as a warm-up, and this run"
            f" has {steps}. Lower it to {max(0, steps - PROFILE_WARM_UP)} or train longer."
        )


def check_smallest_images(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> None:
    """Raise `UserError` for images that are too small for this project's own networks."""
    _, height, width = model_input_shape(given.values.data, dataset.shape)
    needed = MIN_PIXELS.get(given.values.network.model, 0)
    if min(height, width) >= needed:
        return
    recipe = f"{given.sources.get('recipe', '')} (TRAIN_MODEL={given.values.network.model})"
    resize = ", or set TRAIN_IMAGE_SIZE=32" if given.values.data.reads_files else ""
    raise UserError(
        f"{given.sources.get('model', recipe)}: needs images of {needed} pixels, and these have {height}x{width}. Take"
        f" another model{resize}."
    )


def check_augment(settings: DataSettings, channels: int) -> None:
    """Raise `UserError` for flips that the transform does not make, and for colors that gray images do not have."""
    transform, names = (
        settings.transform_of(channels),
        {part.split("-")[0] for part in settings.augment.split(",")},
    )
    for name, is_wrong, why in (
        ("hflip", transform in ("none", "book"), f"{transform} does not take a chance to flip"),
        ("gray", channels == 1, "the images are gray"),
    ):
        if is_wrong and name in names:
            raise UserError(f"TRAIN_AUGMENT={settings.augment}: {name} has no effect, as {why}. Leave it out.")


def check_optimizer(given: ParsedSettings[TrainSettings]) -> None:
    """Raise `UserError` for an optimizer that FSDP cannot shard."""
    settings = given.values
    if settings.compute.parallelism == "fsdp" and settings.optim.optimizer.lower() not in ELEMENTWISE:
        recipe = f"{given.sources.get('recipe', '')} (TRAIN_OPTIMIZER={settings.optim.optimizer})"
        raise UserError(
            f"{given.sources.get('optimizer', recipe)} and {given.sources['parallelism']} contradict: its step needs"
            f" whole parameters, and each rank has a shard. Use one of: {', '.join(sorted(ELEMENTWISE))}."
        )


def check_extras(given: ParsedSettings[TrainSettings]) -> None:
    """Raise `UserError` for a setting that needs an extra of the wheel which is not installed."""
    values = given.values
    needed = {
        "track": values.run.track if values.run.track != "off" else "",
        "prune_ratio": "prune" if values.network.prune_ratio else "",
        "tensorboard": "tensorboard" if values.run.tensorboard else "",
    }
    if values.run.export != "off":
        check_formats(values.run.export.split(","), printable(given.sources["export"]))
    for name, extra in needed.items():
        if extra and name in given.sources:  # the default, TensorBoard, is left out instead
            require_extra(extra, given.sources.get(name, f"TRAIN_{name.upper()}"))


def images_to_train(settings: DataSettings, dataset: DatasetInfo) -> int:
    """Return the number of training images without those that choose the best checkpoint, 0 if unknown."""
    return dataset.train_images - round(dataset.train_images * settings.val_split)


def steps_of_epoch(settings: TrainSettings, dataset: DatasetInfo) -> int:
    """Return the optimizer steps of an epoch, 0 if unknown."""
    return images_to_train(settings.data, dataset) // settings.optim.batch_size


def check_copies(settings: TrainSettings, channels: int) -> None:
    """Raise `UserError` for copies of an image that are all equal, or more than a batch has images."""
    data, times, size = settings.data, settings.data.repeated_augment, settings.optim.batch_size
    unchanged = data.transform_of(channels) == data.augment == "none" and not data.erasing
    refuse_if(
        {
            f"TRAIN_REPEATED_AUGMENT={times}: nothing is augmented, so the copies are equal. Unset it.": (
                times > 1 and unchanged
            ),
            f"TRAIN_REPEATED_AUGMENT={times}: a batch has {size} images (TRAIN_BATCH_SIZE). Lower it.": times > size,
        }
    )


def check_choice(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> None:
    """Raise `UserError` for two kinds of images that choose the best checkpoint."""
    source, is_asked = given.sources.get("val_split"), given.values.data.val_split > 0
    refuse_if(
        {
            f"{source}: the folder has val/ next to test/, which chooses the best checkpoint. Unset one of the two.": (
                is_asked and dataset.has_val
            ),
            f"{source}: leaves no image to choose by, as each class has one. Unset it or add images.": (
                is_asked and 0 < dataset.train_images <= len(dataset.classes)
            ),
        }
    )


def check_batch_fits(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> None:
    """Raise `UserError` if a batch is larger than the training set."""
    size, count = given.values.optim.batch_size, images_to_train(given.values.data, dataset)
    if not count or size <= count:
        return
    recipe = given.sources.get("recipe", "")
    source = f"{recipe}: its batch of {size} is" if recipe and "batch_size" not in given.sources else ""
    raise UserError(
        f"{source or f'TRAIN_BATCH_SIZE={size}:'} larger than the training set of {count:,} images."
        f" {'Set TRAIN_BATCH_SIZE lower' if source else 'Lower it'}."
    )


def check_pruning_length(settings: TrainSettings, dataset: DatasetInfo) -> None:
    """Raise `UserError` if TRAIN_STEPS ends within the epochs before pruning.

    A folder whose unreadable images are skipped may have more epochs than its files say.
    """
    may_shrink = settings.data.reads_files and settings.data.on_unreadable_image == "skip"
    if not settings.network.prune_ratio or not settings.optim.steps or may_shrink:
        return
    steps_per_epoch = steps_of_epoch(settings, dataset)
    if steps_per_epoch:
        check_epochs_after_pruning(settings, settings.optim.total_epochs(steps_per_epoch))


def check_epochs_after_pruning(settings: TrainSettings, epochs: int) -> None:
    """Raise `UserError` if no epoch of the run is left to train the pruned model."""
    if settings.network.prune_ratio and settings.network.prune_warmup >= epochs:
        raise UserError(
            f"TRAIN_PRUNE_WARMUP={settings.network.prune_warmup}: TRAIN_STEPS={settings.optim.steps} are {epochs}"
            " epochs. Lower it, so that the pruned model is trained on."
        )


def check_shares(settings: OptimizationSettings, ranks: int) -> None:
    """Raise `UserError` where a batch has fewer images than there are ranks and micro-batches."""
    shares = ranks * settings.grad_accum_steps
    if settings.batch_size < shares:
        raise UserError(
            f"TRAIN_BATCH_SIZE={settings.batch_size}: too small for {count_text(ranks, 'rank')} x"
            f" {settings.grad_accum_steps} micro-batches. It is the global batch size; set at least {shares}."
        )


def check_contradictions(given: ParsedSettings[TrainSettings]) -> None:
    """Raise `UserError` for settings that contradict each other."""
    settings, sources = given.values, given.sources
    check_task(given)
    epochs, warmup = settings.optim.epochs, settings.network.prune_warmup
    is_resized, is_limited = settings.data.image_size != "auto", settings.run.max_minutes is not None
    refuse_if(
        {
            f"{sources.get('epochs')} and {sources.get('steps')} both set the length of the run. Drop one.": (
                settings.optim.steps and "epochs" in sources
            ),
            f"{sources.get('image_size')}: only imagefolder, csv and shards resize images, and TRAIN_DATASET is"
            f" {settings.data.dataset}. Unset it.": is_resized and not settings.data.reads_files,
            f"TRAIN_PRUNE_WARMUP={warmup}: no epoch of TRAIN_EPOCHS={epochs} is left to train the pruned model. Lower"
            " it.": (settings.network.prune_ratio and not settings.optim.steps and warmup >= epochs),
            f"{sources.get('max_minutes')}: needs a checkpoint to resume from, and TRAIN_CHECKPOINT_EVERY=0 writes"
            " none. Set TRAIN_CHECKPOINT_EVERY=1.": is_limited and not settings.run.checkpoint_every,
        }
    )
    check_fsdp_settings(given)


# Settings that do not work with FSDP: the value that is fine, and why others are not.
FSDP_INCOMPATIBLE = {
    "prune_ratio": (0.0, "pruning needs the whole model. Prune in a run without FSDP"),
    "keep_best": (1, "an average needs whole checkpoints, and each rank writes a part. Drop one of the two"),
    "ddp_find_unused_parameters": (False, "it is a setting of DDP. Drop one of the two"),
}


def check_task(given: ParsedSettings[TrainSettings]) -> None:
    """Raise `UserError` for a task without targets, and for a loss of another task."""
    settings = given.values
    task, loss, dataset = settings.data.task, settings.optim.loss, settings.data.dataset
    has_targets = task == "classify" or dataset in ("csv", "shards") or settings.data.reads_items
    refuse_if(
        {
            f"TRAIN_TASK={task}: the labels stand in train.csv or in shards, and TRAIN_DATASET is {dataset}. Set"
            " TRAIN_DATASET=csv or shards.": not has_targets,
            f"{given.sources.get('loss', f'TRAIN_LOSS={loss}')}: is no loss of TRAIN_TASK={task}. Use"
            f" {', '.join(LOSSES[task])}.": loss not in ("auto", *LOSSES[task]),
        }
    )


def check_fsdp_settings(given: ParsedSettings[TrainSettings]) -> None:
    """Raise `UserError` for settings that do not work with FSDP."""
    settings = given.values
    if settings.compute.parallelism == "ddp":
        return
    for field, (allowed, why) in FSDP_INCOMPATIBLE.items():
        if settings.value(field) != allowed:
            raise UserError(f"{given.sources[field]} and {given.sources['parallelism']} contradict: {why}.")
