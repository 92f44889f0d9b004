"""bf16 is measured once on a machine that has it, and the result is kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.cli.build_plan import bf16_speedup, read_speedup
from entrypoint.job.detect import Job
from entrypoint.machine.cpu_topology import Cpu
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.planner import make_plan
from tests.factories import make_machine, plan_inputs
from train.planning import compute
from train.planning.compute import measure_bf16
from train.settings import read_train_settings

AUTO = {"TRAIN_PRECISION": "auto"}


def inputs_of(environ: dict[str, str], flags: tuple[str, ...] = ("avx512_bf16",), job: Job | None = None) -> PlanInputs:
    own = sorted(os.sched_getaffinity(0))
    machine = replace(make_machine(len(own)), cpus=tuple(Cpu(cpu, cpu, 0, 0) for cpu in own), cpu_flags=flags)
    return plan_inputs(machine, environ, job)


def speedup(environ: dict[str, str], **more: object) -> float | None:
    inputs = inputs_of(environ, **more)  # type: ignore[arg-type]
    return bf16_speedup(read_train_settings(environ, {}).values, make_plan(inputs), inputs)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What the next measurements find."""
    results: list[float | None] = []
    monkeypatch.setattr("train.planning.compute.measure_bf16", lambda *_: results.pop(0))
    return results


def test_result_is_kept_for_the_next_run(tmp_path: Path, trials: list[float | None]) -> None:
    environ = AUTO | {"HOME": str(tmp_path)}
    trials += [1.7]
    assert speedup(environ) == speedup(environ) == 1.7
    (kept,) = (tmp_path / ".cache/reference-training/tuned").glob("precision-*.json")
    assert json.loads(kept.read_text())["bf16_speedup"] == 1.7
    trials += [2.0]
    assert speedup(environ | {"LAUNCH_THREADS": "1"}) in (1.7, 2.0), "other threads are another measurement"


def test_failed_measurement_is_not_repeated(tmp_path: Path, trials: list[float | None]) -> None:
    environ = AUTO | {"HOME": str(tmp_path)}
    trials += [None, 1.5]
    assert [speedup(environ), speedup(environ)] == [None, None]


@pytest.mark.parametrize(
    ("environ", "more"),
    [
        ({}, {}),
        ({"TRAIN_PRECISION": "bf16"}, {}),
        (AUTO, {"flags": ()}),
        (AUTO | {"LAUNCH_TUNING_STORE": "off"}, {}),
        (AUTO, {"job": Job(launcher="srun", world_size=2, local_world_size=2)}),
    ],
)
def test_nothing_is_measured_unless_it_decides(
    tmp_path: Path, trials: list[float | None], environ: dict[str, str], more: dict[str, object]
) -> None:
    trials += [9.0]
    assert speedup({"HOME": str(tmp_path)} | environ, **more) is None
    assert trials == [9.0]


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("{}", 0o600),
        ("[", 0o600),
        ('{"bf16_speedup": "x"}', 0o600),
        ('{"bf16_speedup": NaN}', 0o600),
        ('{"bf16_speedup": Infinity}', 0o600),
        ('{"bf16_speedup": -1}', 0o600),
        ('{"bf16_speedup": 9}', 0o666),
    ],
)
def test_file_that_says_nothing_is_passed_over(tmp_path: Path, text: str, mode: int) -> None:
    path = tmp_path / "precision-x.json"
    path.write_text(text)
    path.chmod(mode)
    assert read_speedup(path) is None


@pytest.mark.launch
def test_measurement_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    # A CPU without bf16 computes it a hundred times slower.
    smaller = compute.TRIAL.replace("randn(64,", "randn(4,").replace("(64,)", "(4,)")
    monkeypatch.setattr(compute, "TRIAL", smaller)
    cpus = sorted(os.sched_getaffinity(0))
    measured = measure_bf16(len(cpus), cpus, sys.executable)
    assert measured is not None
    assert 0.001 < measured < 1000
    assert measure_bf16(1, [9999], sys.executable) is None, "no such CPU"
