"""Decisions about what is trained and how: model, optimizer, transforms, and every technique that is switched on.

Also which of the user's settings have no effect in a run, because other settings or the data exclude them.
"""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.core.errors import count_text, printable
from entrypoint.core.packages import missing_module
from entrypoint.core.setting_types import value_text
from entrypoint.core.settings_base import ParsedSettings, rules_of, variable_name
from entrypoint.plan.model import Decision, make_decision
from train.data.dataset_info import DatasetInfo
from train.models.weights_origin import PACKAGED_MODULE, PACKAGED_NETWORK
from train.planning.checks import images_to_train
from train.planning.model_report import ModelReport
from train.setting_groups.network import BACKBONE, STATISTICS, NetworkSettings
from train.setting_groups.optimization import peak_lr
from train.settings import TrainSettings

ON_ONE_RANK = "one rank has no others to synchronize with"
OF_THE_LABELS = ("label_smoothing", "class_weights", "loss")
MIXES, UNMIXED = ("mixup_alpha", "cutmix_alpha"), "TRAIN_UNMIXED_EPOCHS leaves no epoch to mix"
NO_DECAY = "the optimizer has no weight decay"


def needed_setting(settings: TrainSettings, needs: str) -> str:
    """Return why the setting that another one needs switches it off, empty if it does not; see `SettingRules`."""
    if not needs:
        return ""
    name, _, wanted = needs.partition("=")
    value = settings.value(name.removesuffix("!"))
    is_on = str(value).lower() in wanted.split(",") if wanted else bool(value)
    if is_on != name.endswith("!"):
        return ""
    text = value_text(value)
    variable = variable_name(TrainSettings.PREFIX, name.removesuffix("!"))
    return f"{variable} is {'not set' if text == 'unset' else text}"


def exclusions(
    settings: TrainSettings, data_source: str, world_size: int, report: ModelReport, epochs: int
) -> tuple[tuple[str, bool, str], ...]:
    """Return (field, whether it has no effect, why) where that hangs on more than one other setting."""
    uncached = data_source == "stream" and settings.data.dataset != "shards"  # the index of shards is cached
    last_epochs = max(settings.optim.early_stopping, settings.run.eval_every)
    no_batchnorm = report.parameters > 0 and not report.batchnorm_layers
    return (
        ("num_workers", data_source == "memory", "batches come from memory, without loader workers"),
        ("label_smoothing", settings.optim.loss == "focal", "TRAIN_LOSS is focal"),
        *(
            (name, bool(settings.optim.teacher) and settings.optim.teacher_weight == 1, "TRAIN_TEACHER_WEIGHT is 1")
            for name in OF_THE_LABELS
        ),
        ("teacher", not settings.optim.teacher_weight, "TRAIN_TEACHER_WEIGHT is 0"),
        ("cache_dir", not settings.data.reads_files, f"{settings.data.dataset} is not decoded"),
        ("cache_dir", uncached, "streamed images are not cached"),
        ("weight_decay", not report.has_weight_decay, NO_DECAY),
        ("decay_norms", not report.has_weight_decay, NO_DECAY),
        ("decay_norms", not settings.optim.weight_decay, "there is no weight decay"),
        (
            "early_stopping",
            epochs <= last_epochs,
            "the run has no more epochs, or no other evaluation than the last",
        ),
        *((name, settings.data.unmixed_epochs >= epochs, UNMIXED) for name in MIXES),
        ("keep_best", epochs <= settings.run.eval_every, "the run has one evaluation"),
        ("unmixed_epochs", not (settings.data.mixup_alpha or settings.data.cutmix_alpha), "nothing is mixed"),
        ("weights", settings.run.resume not in ("off", "auto"), "the checkpoint has the weights"),
        ("lr_layer_decay", settings.network.freeze == BACKBONE, "only the head is trained"),
        ("sync_batchnorm", settings.network.freeze == STATISTICS, "TRAIN_FREEZE=statistics keeps those of BatchNorm"),
        ("eval_size", settings.data.eval_size == settings.data.image_size, "TRAIN_IMAGE_SIZE is the same"),
        (
            "model_path",
            not settings.network.is_own_model and not settings.data.is_own_dataset,
            "neither TRAIN_MODEL nor TRAIN_DATASET is a package.module:function",
        ),
        ("preemption", not settings.run.checkpoint_every, "TRAIN_CHECKPOINT_EVERY=0 writes nothing to resume from"),
        ("data_columns", not settings.data.is_hugging_face, "TRAIN_DATASET is none of Hugging Face's"),
        ("ddp_find_unused_parameters", world_size == 1, ON_ONE_RANK),
        ("sync_batchnorm", world_size == 1, ON_ONE_RANK),
        (
            "sync_batchnorm",
            settings.network.model == "cnn" or no_batchnorm,
            f"{settings.network.model} has no BatchNorm",
        ),
    )


def unused_settings(
    given: ParsedSettings[TrainSettings],
    data_source: str,
    world_size: int,
    report: ModelReport,
    epochs: int,
) -> tuple[str, ...]:
    """Return a line for each setting of the user that has no effect in this run of so many epochs."""
    settings, defaults = given.values, TrainSettings()
    rows = exclusions(settings, data_source, world_size, report, epochs)
    lines = []
    for field, rules in rules_of(TrainSettings).items():
        if field not in given.sources or settings.value(field) == defaults.value(field):
            continue
        others = (why for name, is_excluded, why in rows if name == field and is_excluded)
        reason = needed_setting(settings, rules.needs) or next(others, "")
        if reason:
            lines.append(f"{printable(given.sources[field])} has no effect: {reason}")
    return tuple(lines)


def describe_pruning(settings: NetworkSettings) -> str:
    """Return how the model is pruned, and when."""
    kept = f", but not {settings.prune_exclude}" if settings.prune_exclude else ""
    when = f"after {settings.prune_warmup} epoch{'s' * (settings.prune_warmup != 1)}"
    return f"of convolutions{kept}, {when}"


# Field -> the key in the plan, the value that says off, and a description (pruning has its own).
TECHNIQUES: Mapping[str, tuple[str, object, str]] = {
    "grad_accum_steps": ("grad accumulation", 1, "micro-batches per step and rank"),
    "augment": ("augmentation", "none", "drawn for each image"),
    "erasing": ("random erasing", 0.0, "fraction of images that lose a box"),
    "repeated_augment": ("repeats", 1, "times that an image is in a batch"),
    "balance": ("balance", False, "each class is drawn equally often, with replacement"),
    "class_weights": ("class weights", "", "of the classes in the loss"),
    "loss": ("loss", "auto", "computed in fp32"),
    "teacher": ("teacher", "", "its answers are learned too"),
    "early_stopping": ("early stopping", 0, "epochs without improvement"),
    "mixup_alpha": ("mixup", 0.0, "alpha of its Beta distribution"),
    "cutmix_alpha": ("CutMix", 0.0, "alpha of its Beta distribution"),
    "label_smoothing": ("label smoothing", 0.0, "share of each label spread over all classes"),
    "ema_decay": ("EMA", 0.0, "decay of the weights' average; it is evaluated and exported"),
    "max_grad_norm": ("gradient clipping", 0.0, "the largest gradient norm"),
    "skip_nonfinite": ("skipped steps", 0, "in a row at most, whose loss or gradients are not finite"),
    "prune_ratio": ("pruning", 0.0, ""),
    "deterministic": ("deterministic", False, "deterministic kernels only"),
    "export": ("export", "off", "files for other runtimes after the last epoch"),
    "eval_every": ("eval every", 1, "epochs; the last one is evaluated too"),
    "test_time_augment": ("test-time copies", "off", "evaluation takes the mean over copies of an image"),
    "track": ("tracker", "off", "gets the numbers of the run too"),
    "profile": ("profile", 0, "steps after a warm-up"),
}


def decide_techniques(
    given: ParsedSettings[TrainSettings], dataset: DatasetInfo, report: ModelReport
) -> tuple[Decision, ...]:
    """Return the decisions of data, model, weights, optimizer, transforms and the techniques that are on."""
    return (
        *decide_dataset(given, dataset),
        decide_model(given),
        *decide_weights(given, report),
        decide_optimizer(given, report),
        decide_transforms(given, dataset),
        *decide_choice(given, dataset),
        *(
            make_decision(
                key, str(value), "", text or describe_pruning(given.values.network), given.sources.get(field, "")
            )
            for field, (key, off, text) in TECHNIQUES.items()
            if (value := given.values.value(field)) != off
            and not needed_setting(given.values, rules_of(TrainSettings)[field].needs)  # else it has no effect
        ),
    )


def decide_model(given: ParsedSettings[TrainSettings]) -> Decision:
    """Return the model, with its arguments."""
    model, detail = given.values.network.model, printable(given.values.network.model_args)
    by_recipe = (
        "by the recipe" if given.values.network.recipe != "default" else "its size does not grow with the images"
    )
    reason = "the default" if model == TrainSettings().network.model else by_recipe
    if given.values.run.evaluate:
        reason = "as it was trained"
    return make_decision("model", model, reason, detail, given.sources.get("model", ""))


def decide_weights(given: ParsedSettings[TrainSettings], report: ModelReport) -> tuple[Decision, ...]:
    """Return which weights the model starts from, and which layers are not trained."""
    settings, found = given.values, []
    if settings.network.weights:
        place = f"the package {PACKAGED_MODULE}" if settings.network.model == PACKAGED_NETWORK else "torch's cache"
        source, origin = given.sources.get("weights", ""), f"ImageNet's, of {place}"
        found.append(make_decision("weights", settings.network.weights, origin, report.weights, source))
    if settings.network.freeze:
        trained = f"{report.trainable:,} of {report.parameters:,} parameters are trained"
        if settings.network.freeze == STATISTICS:
            layers = count_text(report.batchnorm_layers, "layer")
            trained = f"of {layers} of BatchNorm" if report.batchnorm_layers else "no effect: no layer of BatchNorm"
        found.append(make_decision("frozen", settings.network.freeze, "", trained, given.sources.get("freeze", "")))
    return tuple(found)


def decide_optimizer(given: ParsedSettings[TrainSettings], report: ModelReport) -> Decision:
    """Return the optimizer, with its learning rate and schedule."""
    optim = given.values.optim
    parts = {
        f"learning rate {peak_lr(optim, report.default_lr):g}, schedule {optim.schedule}": True,
        f", head {optim.head_lr or 0:g}": optim.head_lr,
        f", a factor of {optim.lr_layer_decay:g} for each block before": optim.lr_layer_decay < 1,
        "; no weight decay for biases and normalization layers": not optim.decay_norms,
        f"; {optim.optimizer_args}": optim.optimizer_args,
    }
    detail = "".join(text for text, holds in parts.items() if holds)
    return make_decision("optimizer", optim.optimizer, "", detail, given.sources.get("optimizer", ""))


def decide_choice(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> tuple[Decision, ...]:
    """Return which images choose the best checkpoint, if they are not the test images."""
    if dataset.has_val and not dataset.is_cut:
        return (Decision("chosen on", "val", "the folder has val/ next to test/"),)
    if given.values.data.val_split:
        text = f"{100 * given.values.data.val_split:g} % of the training images"
        return (make_decision("chosen on", "val", "", text, given.sources["val_split"]),)
    return ()


def decide_transforms(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> Decision:
    """Return the transforms of the training images; auto flips and shifts color images only."""
    settings = given.values
    name = settings.data.transform_of(dataset.shape[0])
    reasons = {
        "flip-crop": "color images are flipped and shifted",
        "none": "flips change digits, and gray images may be such",
    }
    return make_decision("transforms", name, reasons.get(name, ""), "", given.sources.get("transforms", ""))


def decide_tensorboard(settings: TrainSettings) -> tuple[Decision, ...]:
    """Return that TensorBoard's files are left out where its package is not installed."""
    if not settings.run.tensorboard or not missing_module("tensorboard"):
        return ()
    return (Decision("tensorboard", "off", "not installed; the extra `tensorboard` of the wheel has it"),)


def decide_dataset(given: ParsedSettings[TrainSettings], dataset: DatasetInfo) -> tuple[Decision, ...]:
    """Return what image files hold, how a folder was taken whose kind was not named, and how it was split."""
    if not given.values.data.reads_files or given.values.run.evaluate:
        return ()
    trained = images_to_train(given.values.data, dataset)
    use = "choose or test" if dataset.has_val or given.values.data.val_split else "test"
    kinds = {"classify": "classes", "multilabel": "labels", "regress": "numbers an image"}[given.values.data.task]
    counts, val = dataset.class_counts, "" if given.values.data.val_split else ", a tenth chooses the best checkpoint"
    parts = {
        f"{len(dataset.classes):,} {kinds}: {trained:,} images to train, {dataset.images - trained:,} to {use}": True,
        f"the first are {', '.join(map(printable, dataset.classes[:3]))}": given.values.data.task != "classify",
        f"{min(counts, default=0):,} to {max(counts, default=0):,} a class": len(counts) > 1,
        f"by what is in {printable(given.values.data.data_dir)}": "dataset" not in given.sources,
        f"no test/ there: a tenth of each class is tested{val}": dataset.is_cut,
    }
    reasons = "; ".join(text for text, holds in parts.items() if holds)
    return (make_decision("dataset", given.values.data.dataset, "", reasons, given.sources.get("dataset", "")),)
