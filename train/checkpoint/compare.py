"""Compare a checkpoint's settings and data with a run's. This module does without torch, so a plan can use it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from entrypoint.core.errors import UserError, printable
from entrypoint.core.setting_types import value_text
from entrypoint.core.settings_base import annotations_of, rules_of
from train.checkpoint.metadata import DataFingerprint, Metadata
from train.settings import TrainSettings


def compare_settings(path: Path, found: Metadata, settings: Mapping[str, Any], *, changed: bool) -> tuple[str, ...]:
    """Return the settings that differ, one text each; raises `UserError` if they must not."""
    rules = rules_of(TrainSettings)
    # A setting that is newer than the checkpoint had its default.
    before = {**TrainSettings().to_json(), **found.settings}
    differ = {
        name: f"TRAIN_{name.upper()} was {printable(value_text(before.get(name)))}, is {printable(value_text(value))}"
        for name, value in settings.items()
        if rules[name].resume != "may_change" and before.get(name) != value
    }
    if differ and not changed:
        raise UserError(
            f"{path}: saved with other settings: {', '.join(differ.values())}. Restore these settings, start a new run,"
            " or set TRAIN_RESUME_ALLOW_CHANGED=1 to resume anyway."
        )
    fixed = next((text for name, text in differ.items() if rules[name].resume == "must_keep"), "")
    if fixed:
        raise UserError(f"{path}: {fixed}. Its tensors fit no other value. Restore it or start a new run.")
    return tuple(differ.values())


def saved_settings(settings: Mapping[str, Any]) -> TrainSettings:
    """Return the settings of a saved run; raises `msgspec.ValidationError`, ValueError or TypeError."""
    types = annotations_of(TrainSettings)
    if unknown := settings.keys() - types.keys():
        raise ValueError(f"there is no setting {min(unknown)}")
    convert = partial(msgspec.convert, strict=False, dec_hook=lambda kind, value: kind(value))
    return TrainSettings().with_values(**{name: convert(value, types[name]) for name, value in settings.items()})


def data_differences(was: DataFingerprint, now: DataFingerprint) -> list[str]:
    """Return how two data sets differ, one text each; what one of them does not know is not compared."""
    found = []
    if was.classes and now.classes and was.classes != now.classes:
        pairs = zip_longest(was.classes, now.classes, fillvalue="none")
        index, (old, new) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
        found.append(
            f"class {index} of {len(was.classes)} was {printable(old)}, is {printable(new)} of {len(now.classes)}"
        )
    for name, old_count, new_count in (
        ("training images", was.train_examples, now.train_examples),
        ("test images", was.test_examples, now.test_examples),
    ):
        if old_count and new_count and old_count != new_count:
            found.append(f"{new_count:,} {name} instead of {old_count:,}")
    known_sample = was.sample if was.sample_seed == now.sample_seed else ""
    digests = (
        (was.files, now.files, "files have other names or classes"),
        (known_sample, now.sample, "files of the same names have other bytes"),
        (was.content, now.content, "images have other contents"),
    )
    if not found:
        found += [text for old, new, text in digests if old and new and old != new][:1]
    if was.teacher and now.teacher and was.teacher != now.teacher:
        found.append("the teacher has other weights")
    return found
