"""Name the user's settings that have no effect in a run, because other settings or the data exclude them."""

from __future__ import annotations

from entrypoint.core.errors import printable
from entrypoint.core.setting_types import value_text
from entrypoint.core.settings_base import ParsedSettings, rules_of, variable_name
from train.planning.model_report import ModelReport
from train.settings import TrainSettings

FROM_MEMORY = "batches come from memory, without loader workers"
ON_ONE_RANK = "one rank has no others to synchronize with"
ONLY_TEACHER = "TRAIN_TEACHER_WEIGHT is 1"
OF_THE_LABELS = ("label_smoothing", "class_weights", "loss")
NO_DECAY = "the optimizer has no weight decay"


def needed_setting(settings: TrainSettings, needs: str) -> str:
    """Return why the setting that another one needs switches it off, empty if it does not; see `SettingRules`."""
    if not needs:
        return ""
    name, _, wanted = needs.partition("=")
    value = getattr(settings, name.removesuffix("!"))
    is_on = str(value).lower() in wanted.split(",") if wanted else bool(value)
    if is_on != name.endswith("!"):
        return ""
    text = value_text(value)
    variable = variable_name(TrainSettings.PREFIX, name.removesuffix("!"))
    return f"{variable} is {'not set' if text == 'unset' else text}"


def exclusions(
    settings: TrainSettings, data_source: str, world_size: int, num_workers: int, report: ModelReport
) -> tuple[tuple[str, bool, str], ...]:
    """Return (field, whether it has no effect, why) where that hangs on more than one other setting."""
    in_memory, alone, epochs = data_source == "memory", world_size == 1, settings.epochs
    uncached = data_source == "stream" and settings.dataset != "shards"  # the index of shards is cached
    last_epochs = max(settings.early_stopping, settings.eval_every)
    no_batchnorm = report.parameters > 0 and not report.batchnorm_layers
    unchanged = settings.transforms == settings.augment == "none" and not settings.erasing
    return (
        ("num_workers", in_memory, FROM_MEMORY),
        ("prefetch_factor", in_memory, FROM_MEMORY),
        ("prefetch_factor", not num_workers, "there are no loader workers"),
        ("label_smoothing", settings.loss == "focal", "TRAIN_LOSS is focal"),
        *((name, bool(settings.teacher) and settings.teacher_weight == 1, ONLY_TEACHER) for name in OF_THE_LABELS),
        ("teacher", not settings.teacher_weight, "TRAIN_TEACHER_WEIGHT is 0"),
        ("cache_dir", not settings.reads_files, f"{settings.dataset} is not decoded"),
        ("cache_dir", uncached, "streamed images are not cached"),
        ("weight_decay", not report.has_weight_decay, NO_DECAY),
        ("decay_norms", not report.has_weight_decay, NO_DECAY),
        ("decay_norms", not settings.weight_decay, "there is no weight decay"),
        (
            "schedule",
            settings.schedule == "step" and not settings.steps and epochs <= settings.lr_step_epochs,
            "the run ends before TRAIN_LR_STEP_EPOCHS",
        ),
        (
            "early_stopping",
            not settings.steps and epochs <= last_epochs,
            "the run has no more epochs, or no other evaluation than the last",
        ),
        ("repeated_augment", unchanged, "nothing is augmented, so the copies are equal"),
        ("eval_size", settings.eval_size == settings.image_size, "TRAIN_IMAGE_SIZE is the same"),
        (
            "model_path",
            not settings.is_own_model and not settings.is_own_dataset,
            "neither TRAIN_MODEL nor TRAIN_DATASET is a package.module:function",
        ),
        ("preemption", not settings.checkpoint_every, "TRAIN_CHECKPOINT_EVERY=0 writes nothing to resume from"),
        ("data_columns", not settings.is_hugging_face, "TRAIN_DATASET is none of Hugging Face's"),
        ("gradient_compression", alone, ON_ONE_RANK),
        ("ddp_find_unused_parameters", alone, ON_ONE_RANK),
        ("sync_batchnorm", alone, ON_ONE_RANK),
        ("sync_batchnorm", settings.model == "cnn" or no_batchnorm, f"{settings.model} has no BatchNorm"),
    )


def unused_settings(
    given: ParsedSettings[TrainSettings],
    data_source: str,
    world_size: int,
    num_workers: int,
    report: ModelReport,
) -> tuple[str, ...]:
    """Return a line for each setting of the user that has no effect in this run."""
    settings, defaults = given.values, TrainSettings()
    rows = exclusions(settings, data_source, world_size, num_workers, report)
    lines = []
    for field, rules in rules_of(TrainSettings).items():
        if field not in given.sources or getattr(settings, field) == getattr(defaults, field):
            continue
        others = (why for name, is_excluded, why in rows if name == field and is_excluded)
        reason = needed_setting(settings, rules.needs) or next(others, "")
        if reason:
            lines.append(f"{printable(given.sources[field])} has no effect: {reason}")
    return tuple(lines)
