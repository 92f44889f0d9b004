"""A run resumes from a checkpoint of its own settings and data, at its own place; what differs is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.conftest import refusal
from tests.train.checkpoint.saved import DATA, SETTINGS, checkpoint, save
from train.checkpoint.folder import list_newest_first
from train.checkpoint.metadata import CHECKSUM_FILE, NO_BEST, CorruptCheckpoint, DataFingerprint
from train.checkpoint.resume import (
    ResumePoint,
    check_length,
    check_shapes,
    compare_data,
    load,
    load_first_valid,
    map_place,
)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    refusal(load, path, SETTINGS | {"batch_size": 32}, match="TRAIN_BATCH_SIZE was 64, is 32")
    assert load(path, SETTINGS | {"keep_checkpoints": 9}).changes == ()
    found = load(path, SETTINGS | {"batch_size": 32}, changed=True)
    assert (found.step, found.changes) == (1, ("TRAIN_BATCH_SIZE was 64, is 32",))


@pytest.mark.parametrize(
    ("name", "before", "now", "said"),
    [
        ("size_schedule", "", "16:0.5,32", "TRAIN_SIZE_SCHEDULE was unset, is 16:0.5,32"),
        ("size_schedule", "16:0.5,32", "", "TRAIN_SIZE_SCHEDULE was 16:0.5,32, is unset"),
        ("eval_size", None, 40, "TRAIN_EVAL_SIZE was unset, is 40"),
        ("decay_norms", True, False, "TRAIN_DECAY_NORMS was 1, is 0"),
    ],
)
def test_other_settings_are_named_as_users_write_them(
    tmp_path: Path, name: str, before: object, now: object, said: str
) -> None:
    path = save(tmp_path, 1, settings=SETTINGS | {name: before})
    assert load(path, SETTINGS | {name: now}, changed=True).changes == (said,)


@pytest.mark.parametrize("name", ["model", "freeze", "optimizer"])
def test_settings_that_give_tensors_a_meaning_cannot_change(tmp_path: Path, name: str) -> None:
    settings = SETTINGS | {"model": "cnn", "freeze": "backbone", "optimizer": "sgd"}
    path = save(tmp_path, 1, settings=settings)
    refusal(
        load,
        path,
        settings | {name: "other"},
        changed=True,
        match=rf"TRAIN_{name.upper()} was \w+, is other\. The checkpoint fits no other value",
    )


def test_corrupt_checkpoints_are_skipped_and_named(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    (paths[2] / "model.safetensors").write_bytes(b"")
    (paths[1] / CHECKSUM_FILE).unlink()
    start = load_first_valid(list_newest_first(tmp_path), SETTINGS, changed=False)
    assert (start.path, start.step) == (paths[0], 1)
    assert [line.split(" (")[0] for line in start.skipped] == [
        f"skipped {path}: cannot be read as a checkpoint" for path in (paths[2], paths[1])
    ]
    refusal(
        load_first_valid,
        paths,
        SETTINGS | {"batch_size": 1},
        changed=False,
        match=r"TRAIN_BATCH_SIZE was 64, is 1\. Restore",
    )
    with pytest.raises(CorruptCheckpoint, match="Set TRAIN_RESUME to another checkpoint"):
        load_first_valid(paths[2:], SETTINGS, changed=False)
    refusal(
        load_first_valid,
        paths[:0:-1],
        SETTINGS,
        changed=False,
        match=r"; 1 older checkpoints are corrupt too\. Set TRAIN_RESUME=off to",
    )


def start(**more: Any) -> ResumePoint:
    """Return where a run resumes whose epochs have 10 steps of 64 images."""
    made = checkpoint(more.pop("step", 20), **{"epoch": 2, **more})
    metadata = made.metadata
    return ResumePoint(Path("saved"), made, (), (), metadata.epoch, metadata.step, metadata.losses)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"classes": ("dog", "zebra")}, "class 0 of 2 was cat, is dog of 2"),
        ({"classes": ("bird", "cat", "dog")}, "class 0 of 2 was cat, is bird of 3"),
        ({"classes": ("cat",)}, "class 1 of 2 was dog, is none of 1"),
        ({"train_examples": 160}, "160 training images instead of 640"),
        ({"test_examples": 65}, "65 test images instead of 64"),
        ({"files": "e" * 32}, "files have other names or classes"),
        ({"sample": "6" * 32}, "files of the same names have other bytes"),
        ({"content": "d" * 32}, "images have other contents"),
    ],
)
def test_other_data_is_refused_with_what_differs(fields: dict[str, Any], said: str) -> None:
    assert f"saved: saved with other data: {said}. Restore the data set" in refusal(
        compare_data, start(), replace(DATA, **fields), changed=False
    )


@pytest.mark.parametrize(
    "known",
    [
        DATA,
        replace(DATA, files="", sample="", content=""),
        replace(DATA, sample="6" * 32, sample_seed=1),
        replace(DATA, content=""),
        DataFingerprint(),
    ],
)
def test_what_is_not_known_is_not_compared(known: DataFingerprint) -> None:
    assert compare_data(start(), known, changed=False).changes == ()


@pytest.mark.parametrize(
    ("classes", "accepted"),
    [
        (("cat", "wolf"), True),  # a new name for the same number
        (("dog", "zebra"), False),  # dog was number 1
        (("bird", "cat", "dog"), False),
        (("cat",), False),
    ],
)
def test_changed_classes_keep_their_numbers_or_are_refused(classes: tuple[str, ...], accepted: bool) -> None:
    now = replace(DATA, classes=classes)
    if accepted:
        found = compare_data(start(), now, changed=True)
        assert found.changes == ("class 1 of 2 was dog, is wolf of 2",)
        assert found.metadata.best == NO_BEST, "the score of other images is no measure"
    else:
        refusal(compare_data, start(), now, changed=True, match="outputs cannot be mapped to these classes")


@pytest.mark.parametrize(
    ("saved", "batch_size", "images", "place"),
    [
        ({}, 64, 640, (2, 20, 0)),  # nothing changed
        ({}, 32, 640, (2, 40, 0)),
        ({}, 320, 640, (2, 4, 0)),
        ({}, 64, 1280, (2, 40, 0)),
        ({}, 64, 64, (2, 2, 0)),
        ({"step": 25, "examples": 320, "losses": (1.0,) * 5}, 64, 640, (2, 25, 5)),
        ({"step": 25, "examples": 320, "losses": (1.0,) * 5}, 32, 640, (2, 50, 10)),
        ({"step": 25, "examples": 320, "losses": (1.0,) * 5}, 100, 640, (2, 15, 3)),
        ({"data": DataFingerprint()}, 64, 640, (2, 20, 0)),  # it does not say how many images an epoch has
    ],
)
def test_place_is_mapped_to_the_steps_of_this_run(
    saved: dict[str, Any], batch_size: int, images: int, place: tuple[int, int, int]
) -> None:
    found = map_place(start(**saved), batch_size, images // batch_size, images)
    assert (found.epoch, found.step, len(found.losses)) == place


def test_place_inside_an_epoch_of_other_images_is_refused() -> None:
    inside = start(step=25, examples=320, losses=(1.0,) * 5)
    refusal(
        map_place, inside, 64, 2, 160, match="saved inside epoch 3, after 320 of 640 images; the data set has 160 now"
    )


@pytest.mark.parametrize(
    ("saved", "wanted", "said"),
    [
        ({"w": (3, 2)}, {"w": (3, 4)}, "w is 3x2 there and 3x4 here"),
        ({"w": ()}, {"w": (3,)}, "w is one value there and 3 here"),
        ({}, {"w": (3,)}, "w is not there and 3 here"),
        ({"w": (3,)}, {}, "w is 3 there and not here"),
    ],
)
def test_tensors_of_another_model_are_named(
    saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], said: str
) -> None:
    refusal(check_shapes, Path("saved"), "model", saved, wanted, match=f"saved: is of another model: {said}")
    check_shapes(Path("saved"), "model", wanted, wanted)


def test_checkpoint_after_the_end_of_the_run_is_refused(tmp_path: Path) -> None:
    start = load_first_valid([save(tmp_path, 13)], SETTINGS, changed=False)
    assert check_length(start, 13) == start
    refusal(check_length, start, 12, match="is after step 13, and this run ends with step 12")
    assert check_length(dataclasses.replace(start, changes=("TRAIN_LR was 1, is 2",)), 14)
    assert check_length(start, 13) == start
    said = "all steps are trained already, and TRAIN_LR was 1, is 2. Raise TRAIN_EPOCHS or TRAIN_STEPS"
    refusal(check_length, dataclasses.replace(start, changes=("TRAIN_LR was 1, is 2",)), 13, match=said)


def test_setting_newer_than_the_checkpoint_had_its_default(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    load_first_valid([path], {**SETTINGS, "prune_exclude": ""}, changed=False)
    newer = {**SETTINGS, "prune_exclude": "fc1"}
    refusal(load_first_valid, [path], newer, changed=False, match="TRAIN_PRUNE_EXCLUDE was unset, is fc1")
