"""The trainer's part of the plan: feed, workers, and flags that travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.errors import Exit, Refused
from entrypoint.packages import Packages
from entrypoint.plan import Plan
from entrypoint.surroundings import Surroundings
from tests.entrypoint.test_planner import machine, plan
from train.planning import plan_training
from train.settings import read_train_settings
from train.survey import Facts

SHM = Surroundings(shm_bytes=4 << 30)
PETS = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "/pets"}
SMALL, LARGE = Facts(60_000, (3, 32, 32)), Facts(200_000, (3, 224, 224), counted_all=False)


def planned(environ: Mapping[str, str], facts: Facts, ranks: int = 1, flags: Mapping[str, str] | None = None) -> Plan:
    base = plan(machine(4), {"LAUNCH_NPROC_PER_NODE": str(ranks)})
    return plan_training(base, read_train_settings(environ, flags or {}), facts, replace(machine(4), surroundings=SHM))


@pytest.mark.parametrize(
    ("environ", "facts", "feed", "workers"),
    [
        ({}, Facts(1797, (1, 8, 8)), "memory", 0),
        (PETS, SMALL, "memory", 0),
        (PETS, LARGE, "stream", 2),
        (PETS, Facts(20_000, (3, 224, 224)), "stream", 2),
        (PETS | {"TRAIN_FEED": "stream"}, SMALL, "stream", 2),
        (PETS | {"TRAIN_FEED": "stream", "TRAIN_WORKERS": "7"}, SMALL, "stream", 7),
        (PETS | {"TRAIN_FEED": "memory"}, LARGE, "memory", 0),
    ],
)
def test_small_sets_are_held_in_memory_and_large_ones_streamed(
    environ: dict[str, str], facts: Facts, feed: str, workers: int
) -> None:
    made = planned(environ, facts, ranks=2)
    assert (made.training["feed"], made.training["workers"]) == (feed, workers)
    reasons = {decision.what: decision.why for decision in made.decisions}
    assert ("(yours)" in reasons["feed"]) is ("TRAIN_FEED" in environ)


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
def test_ranks_that_may_be_started_again_know_their_run(environ: dict[str, str], name: str) -> None:
    base = plan(machine(4), environ)
    node = replace(machine(4), surroundings=SHM)
    made = plan_training(base, read_train_settings(environ, {}), SMALL, node, free_name="free")
    assert (made.environment["TRAIN_RESUME"], made.environment["TRAIN_RUN_NAME"]) == ("auto", name)
    assert next(one.value for one in made.decisions if one.what == "resume") == "auto"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (NODES, "TRAIN_RUN_NAME is not set: ranks that are started again on several nodes"),
        (RESTARTS | {"TRAIN_RESUME": "off"}, "TRAIN_RESUME=off: with restarts a run goes on from its own"),
        (RESTARTS | {"TRAIN_CHECKPOINT_EVERY": "0"}, "TRAIN_CHECKPOINT_EVERY=0: ranks that are started again"),
    ],
)
def test_a_run_that_could_not_go_on_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(Refused, match=said):
        plan_training(plan(machine(4), environ), read_train_settings(environ, {}), SMALL, machine(4))


def test_flags_travel_to_the_ranks_as_variables() -> None:
    made = planned({"TRAIN_SEED": "3"}, SMALL, flags={"epochs": "5"})
    assert made.environment["TRAIN_EPOCHS"] == "5"
    assert "TRAIN_SEED" not in made.environment


@pytest.mark.parametrize(
    ("environ", "ranks", "said"),
    [
        ({"TRAIN_BATCH_SIZE": "3"}, 4, "TRAIN_BATCH_SIZE=3: too few for 4 ranks x 1 parts"),
        ({"TRAIN_BATCH_SIZE": "7", "TRAIN_ACCUMULATE": "2"}, 4, "it must be at least 8|must be at least 8"),
        ({"TRAIN_FEED": "stream"}, 1, "TRAIN_FEED=stream: only imagefolder can be streamed"),
    ],
)
def test_what_cannot_be_fed_is_refused(environ: dict[str, str], ranks: int, said: str) -> None:
    with pytest.raises(Refused, match=said):
        planned(environ, SMALL, ranks)


def test_the_settings_table_and_the_environment_agree(tmp_path: Path) -> None:
    given = read_train_settings({"TRAIN_DATA_DIR": str(tmp_path)}, {})
    assert given.values.data_dir == tmp_path


@pytest.mark.parametrize(
    ("environ", "flags", "precision", "why"),
    [
        ({}, (), "fp32", "the default"),
        ({}, ("avx512_bf16",), "fp32", "the default; TRAIN_PRECISION=auto would take bf16: the CPU has avx512_bf16"),
        ({"TRAIN_PRECISION": "auto"}, ("avx512_bf16",), "bf16", "the CPU has avx512_bf16; weights stay fp32"),
        ({"TRAIN_PRECISION": "auto"}, ("amx_bf16", "avx512_bf16"), "bf16", "the CPU has amx_bf16; weights stay fp32"),
        ({"TRAIN_PRECISION": "auto"}, ("avx512f",), "fp32", "no unit computes in bf16, and emulating it is slow"),
        ({"TRAIN_PRECISION": "bf16"}, (), "bf16", "(yours) TRAIN_PRECISION=bf16"),
    ],
)  # fmt: skip
def test_bf16_is_taken_on_auto_only_where_the_cpu_computes_in_it(
    environ: dict[str, str], flags: tuple[str, ...], precision: str, why: str
) -> None:
    node = replace(machine(4), cpu_flags=flags)
    made = plan_training(plan(node), read_train_settings(environ, {}), SMALL, node)
    assert made.training["precision"] == precision
    assert {decision.what: decision.why for decision in made.decisions}["precision"] == why


@pytest.mark.parametrize(("capability", "precision"), [(70, "fp32"), (80, "bf16"), (90, "bf16")])
def test_bf16_is_taken_on_auto_from_ampere_on(capability: int, precision: str) -> None:
    node = machine(4, gpus=1)
    node = replace(node, gpus=tuple(replace(gpu, capability=capability) for gpu in node.gpus))
    made = plan_training(plan(node), read_train_settings({"TRAIN_PRECISION": "auto"}, {}), SMALL, node)
    assert made.training["precision"] == precision


AMX, VNNI = ("amx_bf16", "avx512f"), ("avx512_bf16", "avx512f")
FITS = {"torch": "2.8.0", "intel_extension_for_pytorch": "2.8.0"}
MISFITS = {"torch": "2.13.0", "intel_extension_for_pytorch": "2.8.0"}


@pytest.mark.parametrize(
    ("environ", "flags", "versions", "ipex", "why"),
    [
        ({}, AMX, FITS, True, "the CPU has AMX, and the run pays its import of 5 s back"),
        ({"TRAIN_EPOCHS": "1"}, AMX, FITS, False, "the run is too short to pay its import of 5 s back"),
        ({}, VNNI, FITS, False, "it gains little or nothing on a CPU without AMX"),
        ({}, AMX, {"torch": "2.8.0"}, False, "Intel's extension is not installed"),
        ({}, AMX, MISFITS, False, "Intel's extension 2.8.0 does not go with torch 2.13.0"),
        ({"TRAIN_IPEX": "on"}, (), FITS, True, "(yours) TRAIN_IPEX=on"),
        ({"TRAIN_IPEX": "off"}, AMX, FITS, False, "(yours) TRAIN_IPEX=off"),
    ],
)
def test_intels_extension_is_taken_on_auto_only_where_it_gains(
    environ: dict[str, str], flags: tuple[str, ...], versions: dict[str, str], ipex: bool, why: str
) -> None:
    node = replace(machine(4), cpu_flags=flags, packages=Packages(versions))
    made = plan_training(plan(machine(4)), read_train_settings(environ, {}), SMALL, node)
    assert made.training["ipex"] is ipex
    assert {decision.what: decision.why for decision in made.decisions}["ipex"] == why


@pytest.mark.parametrize(("versions", "said"), [({}, "is not installed"), (MISFITS, "does not go with torch 2.13.0")])
def test_intels_extension_asked_for_and_unusable_is_refused(versions: dict[str, str], said: str) -> None:
    node = replace(machine(4), packages=Packages(versions))
    with pytest.raises(Refused, match=f"TRAIN_IPEX=on: Intel's extension .*{said}; set TRAIN_IPEX=auto") as error:
        plan_training(plan(machine(4)), read_train_settings({"TRAIN_IPEX": "on"}, {}), SMALL, node)
    assert error.value.code == Exit.MACHINE


STREAM = PETS | {"TRAIN_FEED": "stream", "TRAIN_BATCH_SIZE": "256"}


def test_workers_are_no_more_than_shm_can_serve() -> None:
    node = replace(machine(4), surroundings=Surroundings(shm_bytes=64 << 20))
    made = plan_training(plan(node), read_train_settings(STREAM, {}), Facts(100, (3, 32, 32)), node)
    assert made.training["workers"] == 4
    crowded = plan_training(plan(node), read_train_settings(STREAM, {}), Facts(100, (3, 96, 96)), node)
    assert crowded.training["workers"] == 1
    (why,) = (decision.why for decision in crowded.decisions if decision.what == "workers")
    assert why == "/dev/shm has 64 MiB, and a worker on each rank needs 20 MiB; start with a larger --shm-size for 4"
    with pytest.raises(Refused, match=r"TRAIN_WORKERS=3: /dev/shm has 64 MiB.*; lower it to 1, or start with") as error:
        plan_training(
            plan(node), read_train_settings(STREAM | {"TRAIN_WORKERS": "3"}, {}), Facts(100, (3, 96, 96)), node
        )
    assert error.value.code == Exit.MACHINE
