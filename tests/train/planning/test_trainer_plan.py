"""The trainer's part of the plan: source, workers, and flags that travel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.machine.container import ContainerInfo
from entrypoint.plan.model import Plan
from tests.conftest import refusal
from tests.factories import make_machine, make_test_plan, train_settings
from tests.train.given import SMALL_DATASET
from tests.train.planning.memory_refusal import check_memory_refusal
from train.data.dataset_info import DatasetInfo, inspect_dataset
from train.models.weights_origin import INDEX_FILE
from train.planning.loading import doubts
from train.planning.model_report import ModelReport
from train.planning.trainer_plan import (
    TrainerFacts,
    plan_trainer,
    settled_variables,
    warn_of_data,
    warn_of_model,
)
from train.settings import read_train_settings

SHM = ContainerInfo(shm_bytes=4 << 30)
PETS = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "/pets"}
SMALL = SMALL_DATASET
LARGE = DatasetInfo(200_000, (3, 224, 224))


def planned(
    environ: Mapping[str, str], facts: DatasetInfo, ranks: int = 1, flags: Mapping[str, str] | None = None
) -> Plan:
    base = make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": str(ranks)})
    return plan_trainer(base, read_train_settings(environ, flags or {}), facts, replace(make_machine(4), container=SHM))


@pytest.mark.parametrize(
    ("environ", "facts", "source", "workers"),
    [
        ({}, DatasetInfo(1797, (1, 8, 8)), "memory", 0),
        (PETS, SMALL, "memory", 0),
        (PETS, LARGE, "stream", 2),
        (PETS, DatasetInfo(20_000, (3, 224, 224)), "stream", 2),
        (PETS | {"TRAIN_DATA_SOURCE": "stream"}, SMALL, "stream", 2),
        (PETS | {"TRAIN_DATA_SOURCE": "stream", "TRAIN_NUM_WORKERS": "7"}, SMALL, "stream", 7),
        (PETS | {"TRAIN_DATA_SOURCE": "memory"}, LARGE, "memory", 0),
    ],
)
def test_small_data_is_in_memory_large_data_streams(
    environ: dict[str, str], facts: DatasetInfo, source: str, workers: int
) -> None:
    made = planned(environ, facts, ranks=2)
    assert (made.the_trainer().data_source, made.the_trainer().num_workers) == (source, workers)
    reasons = {decision.key: decision.text for decision in made.decisions}
    assert ("(set by you)" in reasons["data source"]) is ("TRAIN_DATA_SOURCE" in environ)


@pytest.mark.parametrize(("environ", "saves"), [({}, True), ({"TRAIN_CHECKPOINT_EVERY": "0"}, False)])
def test_plan_records_whether_run_saves(environ: dict[str, str], saves: bool) -> None:
    assert planned(environ, SMALL).the_trainer().saves_checkpoints is saves


FSDP = {"TRAIN_PARALLELISM": "fsdp"}
RESTARTS = {"LAUNCH_MAX_RESTARTS": "2"}
NODES = RESTARTS | {"LAUNCH_NNODES": "2", "MASTER_ADDR": "r1"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (RESTARTS, "free"),
        (RESTARTS | {"TRAIN_RUN_NAME": "mine", "TRAIN_RESUME": "auto"}, "mine"),
        (NODES | {"TRAIN_RUN_NAME": "mine"}, "mine"),
    ],
)
def test_restartable_ranks_get_the_run_name(environ: dict[str, str], name: str) -> None:
    base = make_test_plan(make_machine(4), environ)
    node = replace(make_machine(4), container=SHM)
    made = plan_trainer(base, read_train_settings(environ, {}), SMALL, node, TrainerFacts(free_name="free"))
    assert (made.environment.variables["TRAIN_RESUME"], made.environment.variables["TRAIN_RUN_NAME"]) == ("auto", name)
    assert next(one.value for one in made.decisions if one.key == "resume") == "auto"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (NODES, "TRAIN_RUN_NAME: not set."),
        (RESTARTS | {"TRAIN_RESUME": "off"}, "TRAIN_RESUME=off: restarted ranks resume from the run's own"),
        (RESTARTS | {"TRAIN_CHECKPOINT_EVERY": "0"}, "TRAIN_CHECKPOINT_EVERY=0: restarted ranks need"),
    ],
)
def test_run_that_cannot_resume_raises(environ: dict[str, str], said: str) -> None:
    refusal(
        plan_trainer,
        make_test_plan(make_machine(4), environ),
        read_train_settings(environ, {}),
        SMALL,
        make_machine(4),
        match=said,
    )


@pytest.mark.parametrize(
    ("more", "ranks", "refused"),
    [
        ({}, 1, False),
        ({"TRAIN_SYNTHETIC_SHAPE": "3x9999x9999"}, 1, True),
        ({"TRAIN_SYNTHETIC_IMAGES": "1000000", "TRAIN_SYNTHETIC_SHAPE": "3x64x64"}, 1, False),
        ({"TRAIN_SYNTHETIC_IMAGES": "1000000", "TRAIN_SYNTHETIC_SHAPE": "3x64x64"}, 2, True),
    ],
)
def test_synthetic_set_larger_than_memory_is_refused(more: dict[str, str], ranks: int, refused: bool) -> None:
    environ = {"TRAIN_DATASET": "synthetic", **more}
    node = replace(make_machine(4), container=SHM, memory_bytes=64 << 30)
    facts = inspect_dataset(read_train_settings(environ, {}).values)
    problem = r"TRAIN_DATASET=synthetic: loading it takes .* this node has 64\.0 GiB" if refused else ""
    check_memory_refusal(environ, facts, ranks, node, problem)


@pytest.mark.parametrize(("ranks", "said"), [(2, "optimizer over 2 ranks"), (1, "one rank holds all")])
def test_fsdp_uses_all_ranks_and_disables_ipex(ranks: int, said: str) -> None:
    decisions = {one.key: one for one in planned(FSDP, SMALL, ranks).decisions}
    assert said in decisions["parallelism"].text
    assert decisions["ipex"].value == "off"


def test_trainer_flags_become_variables_of_ranks() -> None:
    made = planned({"TRAIN_SEED": "3"}, SMALL, flags={"TRAIN_EPOCHS": "5"})
    assert made.environment.variables["TRAIN_EPOCHS"] == "5"
    assert "TRAIN_SEED" not in made.environment.variables


@pytest.mark.parametrize(
    ("environ", "ranks", "said"),
    [
        ({"TRAIN_BATCH_SIZE": "3"}, 4, "TRAIN_BATCH_SIZE=3: too small for 4 ranks x 1 micro-batches"),
        ({"TRAIN_BATCH_SIZE": "7", "TRAIN_GRAD_ACCUM_STEPS": "2"}, 4, "set at least 8"),
        (
            {"TRAIN_DATA_SOURCE": "stream"},
            1,
            "TRAIN_DATA_SOURCE=stream: only imagefolder, csv and shards can be streamed",
        ),
        ({"TRAIN_EPOCHS": "3", "TRAIN_STEPS": "5"}, 1, "TRAIN_EPOCHS=3 and TRAIN_STEPS=5 both set the length of"),
        (
            {"TRAIN_IMAGE_SIZE": "32"},
            1,
            "TRAIN_IMAGE_SIZE=32: only imagefolder, csv and shards resize images, and TRAIN_DATASET",
        ),
        ({"TRAIN_PRUNE_RATIO": "0.5", "TRAIN_EPOCHS": "1"}, 1, "TRAIN_PRUNE_WARMUP=1: no epoch of TRAIN_EPOCHS=1"),
        ({"TRAIN_MAX_MINUTES": "5", "TRAIN_CHECKPOINT_EVERY": "0"}, 1, "TRAIN_MAX_MINUTES=5: needs a checkpoint"),
        (
            FSDP | {"TRAIN_PRUNE_RATIO": "0.5"},
            2,
            "TRAIN_PRUNE_RATIO=0.5 and TRAIN_PARALLELISM=fsdp contradict: pruning needs",
        ),
        (
            FSDP | {"TRAIN_DDP_FIND_UNUSED_PARAMETERS": "1"},
            2,
            "TRAIN_DDP_FIND_UNUSED_PARAMETERS=1 and TRAIN_PARALLELISM=fsdp contradict",
        ),
    ],
)
def test_untrainable_settings_raise(environ: dict[str, str], ranks: int, said: str) -> None:
    refusal(planned, environ, SMALL, ranks, match=said)


CROPS = {"TRAIN_TRANSFORMS": "imagenet"}


@pytest.mark.parametrize(
    ("environ", "is_resized", "source", "reason"),
    [
        (PETS | CROPS, True, "stream", "random resized crops are cut out of the files"),
        (PETS | CROPS, False, "memory", "100 images, 0 MiB decoded, once"),
        (PETS | CROPS | {"TRAIN_DATA_SOURCE": "memory"}, True, "memory", ""),
        ({"TRAIN_DATASET": "cifar10"} | CROPS, False, "memory", "100 images, 0 MiB decoded, once"),
    ],
)
def test_random_resized_crops_are_cut_out_of_files_that_shrink(
    environ: dict[str, str], is_resized: bool, source: str, reason: str
) -> None:
    made = planned(environ, DatasetInfo(100, (3, 32, 32), is_resized=is_resized))
    assert made.the_trainer().data_source == source
    (why,) = [one.reason for one in made.decisions if one.key == "data source"]
    assert reason in why


@pytest.mark.parametrize(
    ("has_kernel", "value", "why"),
    [
        (True, "compiled", "crops and resizes while it decodes"),
        (False, "Pillow", "the set-up found no C++ compiler or libjpeg headers"),
    ],
)
def test_plan_names_the_jpeg_decoder(has_kernel: bool, value: str, why: str) -> None:
    made = planned(PETS, DatasetInfo(100, (3, 32, 32), becomes="color", has_kernel=has_kernel))
    (found,) = [one for one in made.decisions if one.key == "JPEG decoder"]
    assert (found.value, found.reason) == (value, why)


@pytest.mark.parametrize(
    ("env", "warned"),
    [
        ({"TRAIN_FREEZE": "backbone"}, True),
        ({"TRAIN_FREEZE": "backbone", "TRAIN_WEIGHTS": "a.pth"}, False),
        ({"TRAIN_FREEZE": "backbone", "TRAIN_RESUME": "auto"}, False),
        ({}, False),
    ],
)
def test_frozen_layers_without_weights_are_named(env: dict[str, str], warned: bool) -> None:
    lines = warn_of_model(read_train_settings(env, {}), DatasetInfo(1, (1, 8, 8)), ModelReport())
    assert bool(lines) == warned
    assert all(line.startswith("TRAIN_FREEZE=backbone: the frozen layers keep their random weights") for line in lines)


def test_data_that_say_little_are_doubted() -> None:
    assert doubts(DatasetInfo(9, (1, 8, 8), classes=("a", "b"), shared=(0, 5))) == ()
    assert "3 of 5 test images" in doubts(DatasetInfo(9, (1, 8, 8), classes=("a", "b"), shared=(3, 5)))[0]
    assert doubts(DatasetInfo(9, (1, 8, 8), classes=("a",)))[0].startswith("there is 1 class")
    assert doubts(DatasetInfo(9, (1, 8, 8), classes=("a",)), ["a", "b"]) == ()  # of a model that knows others
    (line,) = doubts(DatasetInfo(9, (1, 8, 8), classes=("a", "b"), loose="photos"))
    assert line == "images in photos lie next to the classes' folders, and are not read. Move them."
    batches = DatasetInfo(99, (1, 8, 8), classes=("a", "b"), train_images=60)
    assert doubts(batches, left_out=29)[0].startswith("29 training images fill no batch, and each epoch leaves")
    assert doubts(batches, left_out=6) == ()
    (line,) = doubts(DatasetInfo(9, (1, 8, 8), classes=("a", "b"), task="multilabel", constant=("b",)))
    assert line.startswith("all images have the same b, so each answer is right.")
    (line,) = doubts(DatasetInfo(9, (1, 8, 8), classes=("a",), task="multilabel"), ["a", "c"])
    assert line.startswith("the data name no c, which counts as absent in each image.")
    (line,) = doubts(DatasetInfo(9, (1, 8, 8), classes=("a", "b"), task="regress", same_targets=True))
    assert line == "all test images have the same targets, so their score says nothing. Test others."


@pytest.mark.parametrize("name", ["weights", "teacher"])
def test_latest_is_followed_before_a_run_moves_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "latest").symlink_to("mine")
    assert settled_variables(train_settings({name: str(tmp_path / "latest")}), ModelReport()) == {
        f"TRAIN_{name.upper()}": str(tmp_path / "mine")
    }
    assert settled_variables(train_settings({name: str(tmp_path / "mine")}), ModelReport()) == {}


def test_link_of_an_index_stays(tmp_path: Path) -> None:
    """Hugging Face's cache has a folder of links to files that are called by their checksums, elsewhere."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / f"blob of {name}").touch()
        (tmp_path / name).symlink_to(f"blob of {name}")
    named = [train_settings(weights=str(tmp_path / name)) for name in ("model.safetensors", INDEX_FILE)]
    links = [settled_variables(settings, ModelReport()) for settings in named]
    assert links == [{"TRAIN_WEIGHTS": str(tmp_path / "blob of model.safetensors")}, {}]


def test_best_weights_that_are_not_kept_are_a_warning() -> None:
    settings = train_settings(checkpoint_every=0, val_split=0.2)
    assert "TRAIN_CHECKPOINT_EVERY=0 keeps no weights" in warn_of_data(settings, DatasetInfo(1, (1, 8, 8)))[0]
    assert not warn_of_data(train_settings(val_split=0.2), DatasetInfo(1, (1, 8, 8)))
