"""Name the user's settings that have no effect in a run, because other settings or the data exclude them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from entrypoint.core.errors import printable
from entrypoint.core.setting_types import value_text
from entrypoint.core.settings_base import ParsedSettings, rules_of, variable_name
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


def needed_setting(run: RunFacts, needs: str) -> str:
    """Return why the setting that another one needs switches it off, empty if it does not; see `SettingRules`."""
    if not needs:
        return ""
    name, _, wanted = needs.partition("=")
    value = getattr(run.settings, name.removesuffix("!"))
    is_on = str(value).lower() in wanted.split(",") if wanted else bool(value)
    if is_on != name.endswith("!"):
        return ""
    text = value_text(value)
    variable = variable_name(TrainSettings.PREFIX, name.removesuffix("!"))
    return f"{variable} is {'not set' if text == 'unset' else text}"


def in_memory(run: RunFacts) -> str:
    """Return the reason for settings of loader workers."""
    return "batches come from memory, without loader workers" if run.data_source == "memory" else ""


def without_workers(run: RunFacts) -> str:
    """Return the reason for settings that each loader worker has."""
    return in_memory(run) or ("" if run.num_workers else "there are no loader workers")


def without_cache(run: RunFacts) -> str:
    """Return the reason for settings of the image cache."""
    if not run.settings.reads_files:
        return f"{run.settings.dataset} is not decoded"
    streams = run.data_source == "stream" and run.settings.dataset != "shards"  # their index is cached
    return "streamed images are not cached" if streams else ""


def without_batchnorm(run: RunFacts) -> str:
    """Return the reason for settings of BatchNorm."""
    return on_one_rank(run) or ("the cnn has no BatchNorm" if run.settings.model == "cnn" else "")


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


# Field -> why it has no effect, empty if it has one, where that hangs on more than one other setting.
UNUSED: Mapping[str, Reason] = {
    "num_workers": in_memory,
    "prefetch_factor": without_workers,
    "cache_dir": without_cache,
    "weight_decay": without_weight_decay,
    "decay_norms": without_decayed_weights,
    "schedule": when(ends_before_a_reduction, "the run ends before TRAIN_LR_STEP_EPOCHS"),
    "early_stopping": when(
        lambda settings: not settings.steps and settings.epochs <= max(settings.early_stopping, settings.eval_every),
        "the run has no more epochs, or no other evaluation than the last",
    ),
    "repeated_augment": when(
        lambda settings: settings.transforms == "none" and settings.augment == "none" and not settings.erasing,
        "nothing is augmented, so the copies are equal",
    ),
    "eval_size": when(lambda settings: settings.eval_size == settings.image_size, "TRAIN_IMAGE_SIZE is the same"),
    "model_path": when(lambda settings: not settings.is_own_model, "TRAIN_MODEL is no package.module:function"),
    "gradient_compression": on_one_rank,
    "ddp_static_graph": on_one_rank,
    "ddp_find_unused_parameters": on_one_rank,
    "sync_batchnorm": without_batchnorm,
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
    for field, rules in rules_of(TrainSettings).items():
        if field not in given.sources or getattr(given.values, field) == getattr(defaults, field):
            continue
        reason = needed_setting(run, rules.needs)
        if field in UNUSED:
            reason = reason or UNUSED[field](run)
        if reason:
            lines.append(f"{printable(given.sources[field])} has no effect: {reason}")
    return tuple(lines)
