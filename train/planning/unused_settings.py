"""Name the user's settings that have no effect in a run, because other settings or the data exclude them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from entrypoint.core.errors import printable
from entrypoint.core.settings_base import ParsedSettings
from train.planning.optimizers import SGD
from train.setting_groups.data import FILE_DATASETS
from train.settings import TrainSettings


@dataclass(frozen=True)
class RunFacts:
    """What decides whether a setting has an effect."""

    settings: TrainSettings
    data_source: str
    world_size: int
    num_workers: int
    has_weight_decay: bool


Reason = Callable[[RunFacts], str]
FOLDERLESS = ("digits", "synthetic")


def unless_dataset(*names: str) -> Reason:
    """Return a reason for settings of some data sets only."""
    only = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return lambda run: "" if run.settings.dataset in names else f"it is for {only}"


def in_memory(run: RunFacts) -> str:
    """Return the reason for settings of loader workers."""
    return "batches come from memory, without loader workers" if run.data_source == "memory" else ""


def without_workers(run: RunFacts) -> str:
    """Return the reason for settings that each loader worker has."""
    return in_memory(run) or ("" if run.num_workers else "there are no loader workers")


def without_cache(run: RunFacts) -> str:
    """Return the reason for settings of the image cache."""
    other = unless_dataset(*FILE_DATASETS)(run)
    streams = run.data_source == "stream" and run.settings.dataset != "shards"  # their index is cached
    return other or ("streamed images are not cached" if streams else "")


def without_batchnorm(run: RunFacts) -> str:
    """Return the reason for settings of BatchNorm."""
    return on_one_rank(run) or ("the cnn has no BatchNorm" if run.settings.model == "cnn" else "")


def without_pruning(run: RunFacts) -> str:
    """Return the reason for settings of pruning."""
    return "" if run.settings.prune_ratio else "TRAIN_PRUNE_RATIO is 0"


def on_one_rank(run: RunFacts) -> str:
    """Return the reason for settings of the communication between ranks."""
    return "one rank has no others to synchronize with" if run.world_size == 1 else ""


def when(condition: Callable[[TrainSettings], bool], reason: str) -> Reason:
    """Return a reason that depends on other settings."""
    return lambda run: reason if condition(run.settings) else ""


def ends_before_a_reduction(settings: TrainSettings) -> bool:
    """Return whether a run of epochs ends before the schedule `step` lowers the learning rate."""
    return settings.schedule == "step" and not settings.steps and settings.epochs <= settings.lr_step_epochs


def without_weight_decay(run: RunFacts) -> str:
    """Return the reason for settings of the weight decay."""
    return "" if run.has_weight_decay else "the optimizer has no weight decay"


def without_decayed_weights(run: RunFacts) -> str:
    """Return the reason for settings of what decays."""
    return without_weight_decay(run) or ("" if run.settings.weight_decay else "there is no weight decay")


# Field -> why it has no effect, empty if it has one. A value that says "off" is never named.
UNUSED: Mapping[str, Reason] = {
    "num_workers": in_memory,
    "prefetch_factor": without_workers,
    "cache_dir": without_cache,
    "on_unreadable_image": unless_dataset(*FILE_DATASETS),
    "data_dir": lambda run: f"{run.settings.dataset} has no folder" if run.settings.dataset in FOLDERLESS else "",
    "download": unless_dataset("fashion-mnist", "cifar10"),
    "synthetic_images": unless_dataset("synthetic"),
    "synthetic_classes": unless_dataset("synthetic"),
    "synthetic_shape": unless_dataset("synthetic"),
    "prune_backend": without_pruning,
    "prune_layer_types": without_pruning,
    "prune_exclude": without_pruning,
    "prune_warmup": without_pruning,
    "momentum": when(lambda settings: settings.optimizer.lower() != SGD, "only TRAIN_OPTIMIZER=sgd has it"),
    "weight_decay": without_weight_decay,
    "decay_norms": without_decayed_weights,
    "min_lr": when(lambda settings: settings.schedule == "constant", "TRAIN_SCHEDULE is constant"),
    "lr_step_epochs": when(lambda settings: settings.schedule != "step", "TRAIN_SCHEDULE is not step"),
    "lr_gamma": when(lambda settings: settings.schedule != "step", "TRAIN_SCHEDULE is not step"),
    "decay_fraction": when(lambda settings: settings.schedule != "wsd", "TRAIN_SCHEDULE is not wsd"),
    "schedule": when(ends_before_a_reduction, "the run ends before TRAIN_LR_STEP_EPOCHS"),
    "early_stopping": when(
        lambda settings: not settings.steps and settings.epochs <= max(settings.early_stopping, settings.eval_every),
        "the run has no more epochs, or no other evaluation than the last",
    ),
    "repeated_augment": when(
        lambda settings: settings.transforms == "none" and settings.augment == "none" and not settings.erasing,
        "nothing is augmented, so the copies are equal",
    ),
    "early_stopping_metric": when(lambda settings: not settings.early_stopping, "TRAIN_EARLY_STOPPING is 0"),
    "crop_scale": when(lambda settings: settings.transforms != "imagenet", "TRAIN_TRANSFORMS is not imagenet"),
    "crop_ratio": when(lambda settings: settings.transforms != "imagenet", "TRAIN_TRANSFORMS is not imagenet"),
    "eval_size": when(lambda settings: settings.eval_size == settings.image_size, "TRAIN_IMAGE_SIZE is the same"),
    "weights_strict": when(lambda settings: not settings.weights, "TRAIN_WEIGHTS is not set"),
    "head": when(lambda settings: not settings.weights, "TRAIN_WEIGHTS is not set"),
    "model_path": when(lambda settings: not settings.is_own_model, "TRAIN_MODEL is no package.module:function"),
    "gradient_compression": on_one_rank,
    "ddp_static_graph": on_one_rank,
    "ddp_find_unused_parameters": on_one_rank,
    "sync_batchnorm": without_batchnorm,
    "keep_checkpoints": when(lambda settings: settings.checkpoint_every == 0, "TRAIN_CHECKPOINT_EVERY is 0"),
    "resume_allow_changed": when(lambda settings: settings.resume == "off", "TRAIN_RESUME is off"),
}


def unused_settings(
    given: ParsedSettings[TrainSettings],
    data_source: str,
    world_size: int,
    num_workers: int,
    *,
    has_weight_decay: bool = True,
) -> tuple[str, ...]:
    """Return a line for each setting of the user that has no effect in this run."""
    run = RunFacts(
        settings=given.values,
        data_source=data_source,
        world_size=world_size,
        num_workers=num_workers,
        has_weight_decay=has_weight_decay,
    )
    defaults = TrainSettings()
    lines = []
    for field, reason_for in UNUSED.items():
        if field not in given.sources or getattr(given.values, field) == getattr(defaults, field):
            continue
        if reason := reason_for(run):
            lines.append(f"{printable(given.sources[field])} has no effect: {reason}")
    return tuple(lines)
