"""The format of a checkpoint: a folder of safetensors files, `checkpoint.json` and `SHA256SUMS`.

No file of it is pickled, so a checkpoint of a stranger runs no code. `sha256sum -c SHA256SUMS` verifies it by hand.
This module does without torch, so a plan can read the metadata, and compare it with a run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from entrypoint.core.errors import ExitCode, UserError, first_line, printable, refuse_if
from entrypoint.core.files import atomic_open, open_regular, read_regular
from entrypoint.core.setting_types import value_text
from entrypoint.core.settings_base import annotations_of, rules_of
from train.settings import TrainSettings

METADATA_FILE, CHECKSUM_FILE = "checkpoint.json", "SHA256SUMS"
# What a checkpoint holds tensors of, in the files and in the index.
MODEL, OPTIMIZER, EMA = "model", "optimizer", "ema"
SECTIONS = (MODEL, OPTIMIZER, EMA)
# A line as `sha256sum` writes it; the name is that of a file in the same folder.
CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  (\w[\w.-]{0,200})\n", re.ASCII)
# Every other name in the folder of checkpoints is the user's: it is neither resumed from nor removed.
STEP_NAME = re.compile(r"step-(\d{9,})", re.ASCII)

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]
# Below every score; JSON has no infinity.
NO_BEST = -1e300


class DataFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a run knows of its data set.

    `files` is a digest of relative path and label of all files, and `sample` one of the bytes of some of them,
    which `sample_seed` selects. `content` is a digest of all images, and `teacher` one of the teacher's weights. Each
    is empty where it is not known.
    """

    classes: tuple[str, ...] = ()
    train_examples: Count = 0
    test_examples: Count = 0
    files: str = ""
    sample: str = ""
    sample_seed: int = 0
    content: str = ""
    teacher: str = ""


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a tensor, from row `start` on, that are stored as `key` in `file`."""

    file: str
    key: str
    start: Count = 0


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a tensor, and the parts that hold it."""

    shape: tuple[Count, ...]
    parts: tuple[TensorPart, ...]


class ScalerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of fp16's gradient scaler."""

    scale: Annotated[float, Meta(gt=0)]
    growth_tracker: Count


class OutputScale(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's outputs are read: numbers times `deviation` plus `mean`, and labels from `threshold` on.

    Logits of classes are divided by `temperature` before they become probabilities.

    A regression learns targets of mean 0 and standard deviation 1.
    """

    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    threshold: float = 0.5
    temperature: Annotated[float, Meta(gt=0)] = 1.0


PLAIN_OUTPUTS = OutputScale()


class Normalization(msgspec.Struct, frozen=True, kw_only=True):
    """What is subtracted from each channel's bytes, and what the rest is multiplied by; and the model's outputs."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    outputs: OutputScale = PLAIN_OUTPUTS


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checkpoint.json`: the state after `step` steps and `epoch` finished epochs.

    `examples` counts the examples of the current epoch that were trained on. `seconds` is the training time so far.
    `losses` holds one loss per step of the current epoch. `best` is the best score saved so far.
    `score` is that of these weights, on the images that choose, if it is known.
    `best_metric` is the best value of what early stopping looks at, `stale_epochs` epochs ago. `skipped_steps` changed
    nothing. `plan` is the run's plan. `tensors` is the index of all tensors by section and name. No generator state is
    saved: order, transforms, mixing and dropout are functions of seed, epoch, step and rank.
    """

    format: Literal[2] = 2
    epoch: Count
    step: Count
    examples: Count = 0
    seconds: Annotated[float, Meta(ge=0, le=1e10)] = 0.0
    best: Annotated[float, Meta(le=100)] = NO_BEST
    score: Annotated[float, Meta(le=100)] | None = None
    losses: tuple[float, ...] = ()
    stale_epochs: Count = 0
    best_metric: float | None = None
    skipped_steps: Count = 0
    scaler: ScalerState | None = None
    normalization: Normalization | None = None
    settings: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    data: DataFingerprint = DataFingerprint()
    tensors: dict[str, dict[str, TensorEntry]] = {}


class CorruptCheckpoint(UserError):
    """Raised for a missing or corrupt checkpoint; an older one may still be valid."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. Set TRAIN_RESUME to another checkpoint.")
        self.reason = reason


def corrupt_error(path: Path, error: BaseException) -> CorruptCheckpoint:
    """Return the error for a missing or corrupt checkpoint."""
    cause = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return CorruptCheckpoint(f"{printable(path)}: cannot be read as a checkpoint ({printable(cause)})")


def write_error(folder: Path, error: OSError) -> UserError:
    """Return the error for a run's folder or checkpoints that cannot be written (no space or no permission)."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "Free disk space or set TRAIN_OUTPUT_DIR; earlier checkpoints are kept." if is_full else "Make it writable."
    return UserError(f"{folder}: cannot be written ({error.strerror}). {fix}", ExitCode.MACHINE)


def write_synced(path: Path, content: bytes) -> str:
    """Write a file and sync it; return its SHA-256. Raises OSError."""
    with atomic_open(path) as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()


def write_metadata(folder: Path, metadata: Metadata, digests: Mapping[str, str]) -> None:
    """Write `checkpoint.json` and then `SHA256SUMS`, which completes a checkpoint; raises OSError."""
    # Python's JSON refuses values that are not finite, and is indented for people.
    text = json.dumps(msgspec.to_builtins(metadata), indent=1, allow_nan=False) + "\n"
    digests = {**digests, METADATA_FILE: write_synced(folder / METADATA_FILE, text.encode())}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    write_synced(folder / CHECKSUM_FILE, lines.encode())


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_json(path: Path, kind: type[T]) -> T | None:
    """Return what a JSON file of a run says, None without a readable one of this type."""
    try:
        # Unlike msgspec's JSON the standard library's holds names that are no UTF-8.
        return msgspec.convert(json.loads(read_regular(path)), kind)
    except (OSError, ValueError, RecursionError):
        return None


def read_checksums(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name; raises OSError or ValueError."""
    digests: dict[str, str] = {}
    for line in read_bytes(path / CHECKSUM_FILE).decode("ascii").splitlines(keepends=True):
        found = CHECKSUM_LINE.fullmatch(line)
        if not found or found[2] in digests:
            raise ValueError(f"{CHECKSUM_FILE} has a line that is no checksum")
        digests[found[2]] = found[1]
    if METADATA_FILE not in digests:
        raise ValueError(f"{CHECKSUM_FILE} does not list {METADATA_FILE}")
    return digests


def check_index(metadata: Metadata, digests: Mapping[str, str]) -> None:
    """Raise ValueError if the index has unknown sections, or names another set of files than the checksums."""
    if not set(metadata.tensors) <= set(SECTIONS):
        raise ValueError(f"{METADATA_FILE} has an unknown section of tensors")
    indexed = {part.file for named in metadata.tensors.values() for entry in named.values() for part in entry.parts}
    if indexed != set(digests) - {METADATA_FILE}:
        raise ValueError(f"{CHECKSUM_FILE} and {METADATA_FILE} name different files")


def read_verified(path: Path, digest: str) -> bytes:
    """Return the content of a file that has this SHA-256; raises OSError or ValueError."""
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"the checksum of {path.name} does not match: it was changed or damaged")
    return content


def read_metadata(path: Path) -> tuple[Metadata, dict[str, str]]:
    """Return the metadata of a checkpoint and the SHA-256 of each file; raises `CorruptCheckpoint`."""
    try:
        digests = read_checksums(path)
        content = read_verified(path / METADATA_FILE, digests[METADATA_FILE])
        metadata = msgspec.json.decode(content, type=Metadata)
        check_index(metadata, digests)
        if (match := STEP_NAME.fullmatch(path.name)) and int(match[1]) != metadata.step:
            raise ValueError(f"its name says step {int(match[1])} and {METADATA_FILE} says step {metadata.step}")
    except RecursionError:
        raise corrupt_error(path, ValueError("its JSON is nested too deeply")) from None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise corrupt_error(path, error) from None
    return metadata, digests


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
    kept = {
        name
        for name in differ
        if rules[name].resume == "must_keep"
        or (rules[name].resume == "set_once" and before.get(rules[name].needs or name))
    }
    fixed = next((text for name, text in differ.items() if name in kept), "")
    other_data = not settings.get("resume_allow_changed") and any(rules[name].resume == "data" for name in differ)
    refuse_if(
        {
            f"{path}: saved with other settings: {', '.join(differ.values())}. Restore these settings, start a new run,"
            " or set TRAIN_RESUME_ALLOW_CHANGED=1 to resume anyway.": other_data or (differ and not changed),
            f"{path}: {fixed}. The checkpoint fits no other value. Restore it or start a new run.": fixed,
        }
    )
    return tuple(differ.values())


def check_end(path: Path, step: int, last: int | None, after: int, changes: Sequence[str]) -> None:
    """Raise `UserError` for a checkpoint of after the run's end, or at it where settings have changed.

    The run has `last` steps if that is known; `after` is above 0 for a later checkpoint, 0 for one at the end.
    """
    refuse_if(
        {
            f"{path}: is after step {step:,}, and this run ends {f'with step {last:,}' if last else 'before'}. Raise"
            " TRAIN_EPOCHS or TRAIN_STEPS, or start a new run.": after > 0,
            f"{path}: all steps are trained already, and {', '.join(changes[:1])}. Raise TRAIN_EPOCHS or TRAIN_STEPS,"
            " restore it, or start a new run.": after == 0 and changes,
        }
    )


def saved_settings(settings: Mapping[str, Any]) -> TrainSettings:
    """Return the settings of a saved run; raises `msgspec.ValidationError`, ValueError or TypeError."""
    types, settings = annotations_of(TrainSettings), msgspec.convert(settings, dict[str, Any])
    if unknown := settings.keys() - types.keys():
        raise ValueError(f"there is no setting {min(unknown)}")
    convert = partial(msgspec.convert, strict=False, dec_hook=lambda kind, value: kind(value))
    return TrainSettings().with_values(**{name: convert(value, types[name]) for name, value in settings.items()})


def check_data(path: Path, was: DataFingerprint, now: DataFingerprint, *, changed: bool) -> list[str]:
    """Return the accepted differences of the data, one text each; raises `UserError` for the others.

    Other classes can be accepted only where each class that is still there keeps its number.
    """
    differ = data_differences(was, now)
    said = f"{path}: saved with other data: {', '.join(differ)}."
    numbers = {name: number for number, name in enumerate(now.classes)}
    moved = [name for number, name in enumerate(was.classes) if numbers.get(name, number) != number]
    refuse_if(
        {
            f"{said} Restore the data set, start a new run, or set TRAIN_RESUME_ALLOW_CHANGED=1 to resume anyway.": (
                differ and not changed
            ),
            f"{said} The model's outputs cannot be mapped to these classes. Start a new run.": (
                moved or (was.classes and now.classes and len(was.classes) != len(now.classes))
            ),
        }
    )
    return differ


def data_differences(was: DataFingerprint, now: DataFingerprint) -> list[str]:
    """Return how two data sets differ, one text each; what one of them does not know is not compared."""
    found = []
    if was.classes and now.classes and was.classes != now.classes:
        pairs = zip_longest(was.classes, now.classes, fillvalue="none")
        index, (old, new) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
        found.append(
            f"class {index} of {len(was.classes)} was {printable(old)}, is {printable(new)} of {len(now.classes)}"
        )
    counts = (
        ("training images", was.train_examples, now.train_examples),
        ("test images", was.test_examples, now.test_examples),
    )
    found += [f"{new:,} {name} instead of {old:,}" for name, old, new in counts if old and new and old != new]
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
