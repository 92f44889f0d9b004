"""The tuner for real: scripts of known speed, the trainer, a stop in between, and the plan afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoint.job.detect import Job
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Program
from entrypoint.settings import read_launch_settings
from entrypoint.tune import search
from entrypoint.tune.search import Search
from entrypoint.tune.trial import TrialSpec
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, needs_two_cores, script
from tests.factories import make_machine, make_test_plan

pytestmark = [pytest.mark.launch, needs_two_cores]

# Its speed is known: two ranks with a thread are twice as fast as one rank with two, and three times where they float.
SPEEDS = """
    import os, time
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fast = ranks + (ranks > 1 and len(os.sched_getaffinity(0)) > 1)
    if os.environ.get("RANK", "0") == "0":
        for step in range(1000):
            time.sleep(0.01)
            print(f"step {step}: {1000 * fast:,} images/s", flush=True)
"""
FIXED = {"LAUNCH_OPENMP": "gnu", "LAUNCH_ALLOCATOR": "system", "OMP_WAIT_POLICY": "passive", "TUNE_SECONDS": "0.1"}
ONE = {"LAUNCH_NPROC_PER_NODE": "1", "LAUNCH_THREADS": "1", "LAUNCH_CPU_BINDING": "ranks"}


def stored_results(entrypoint: Entrypoint) -> list[Path]:
    """Return the files of results."""
    return list((entrypoint.home / ".cache/reference-training").glob("tuned/*"))


def names_file(command_line: Path, file: Path) -> bool:
    """Return whether a process has a file on its command line."""
    try:
        return str(file).encode() in command_line.read_bytes()
    except OSError:  # it has ended
        return False


@pytest.mark.slow
def test_tune_stores_fastest_layout_for_later_plans(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    result = entrypoint("tune", "run", file, env=FIXED | {"TUNE_METRIC": r"([0-9,]+) images/s"})
    assert result.code == 0, result.err
    last = result.out.splitlines()[-1]
    assert "3.00 times the untuned plan's: the best of 5 plans tried" in last
    assert re.search(r"trial +\d+ +\S+  LAUNCH_NPROC_PER_NODE=2 LAUNCH_THREADS=1 LAUNCH_CPU_BINDING=none\n", result.err)
    made = entrypoint.plan("run", file, env=FIXED)
    assert made["nodes"]["nproc_per_node"] == 2
    decisions = {one["key"]: one for one in made["decisions"]}
    for key, setting in (("ranks", "LAUNCH_NPROC_PER_NODE=2"), ("cores", "LAUNCH_CPU_BINDING=none")):
        assert (decisions[key]["source"], decisions[key]["setting"]) == ("tuned", setting)
    assert last in decisions["tuned"]["reason"]
    assert entrypoint.plan("run", file, env=FIXED | {"LAUNCH_TUNING_STORE": "off"})["nodes"]["nproc_per_node"] == 1


def test_stopped_search_ends_its_trial_and_stores_nothing(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    process = subprocess.Popen(
        [PYTHON, "-m", "entrypoint", "tune", "run", str(file)],
        cwd=entrypoint.folder,
        env={**clean_environment(), **FIXED, "TUNE_METRIC": r"([0-9,]+) images/s", "HOME": str(entrypoint.home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "trial   1" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LAUNCH_LIMIT_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert stored_results(entrypoint) == []
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if names_file(path, file)] == []


@pytest.mark.slow
def test_script_without_metric_is_timed_and_trainer_has_a_rate(
    entrypoint: Entrypoint,
) -> None:
    file = script(entrypoint.folder, "short.py", "pass")
    assert entrypoint("tune", "run", file, env=FIXED | ONE).code == 0
    (why,) = [
        one["reason"] for one in entrypoint.plan("run", file, env=FIXED | ONE)["decisions"] if one["key"] == "tuned"
    ]
    assert re.search(r"untuned one, \d{4}-\d\d-\d\d; LAUNCH_TUNING_STORE=off ignores it$", why), why
    result = entrypoint("tune", "train", env=FIXED | ONE | {"TRAIN_EPOCHS": "1"})
    assert result.code == 0, result.err
    assert "images/s" in result.err
    assert result.out.splitlines()[-1].startswith("no plan of 1 tried was faster than the untuned one")
    assert not (entrypoint.folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (["run", "x.py"], {"TUNE_METRIC": "("}, 2, "TUNE_METRIC=(: no pattern"),
        (["run", "x.py"], {"TUNE_METRIC": "a"}, 2, "TUNE_METRIC=a: needs one group. Put it around"),
        (["run", "x.py"], {"LAUNCH_TUNING_STORE": "off"}, 2, "LAUNCH_TUNING_STORE=off: results cannot be stored"),
        (["run", "x.py"], {"TUNE_METRICS": "a"}, 2, "TUNE_METRICS=a: no such variable. Did you mean TUNE_METRIC?"),
        (["run", "x.py"], {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 2, "Run it outside srun and mpirun"),
        (["run", "x.py"], {"LAUNCH_NPROC_PER_NODE": "1"}, 2, "tune: no plan gave a rate: NameError: name 'boom'"),
        (["--minutes=no", "run", "x.py"], {}, 2, "--minutes=no: not a number above 0"),
    ],
)
def test_tune_unusable_input_fails_with_one_line(
    entrypoint: Entrypoint, words: list[str], env: dict[str, str], code: int, said: str
) -> None:
    (entrypoint.folder / "x.py").write_text("boom\n")
    result = entrypoint("tune", *words, env=FIXED | env)
    assert result.code == code, result.err
    assert [line for line in result.error_lines if said in line], result.err


LEAVES = """
    import subprocess, time
    subprocess.Popen(["sleep", "987"])
    for _ in range(4):
        print("1 x", flush=True)
        time.sleep(0.1)
"""


def test_trial_leaves_no_process(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "leaves.py", LEAVES)
    entrypoint("tune", "run", file, env=FIXED | ONE | {"TUNE_METRIC": "(1) x"})
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if os.access(path, os.R_OK) and path.read_bytes() == b"sleep\x00987\x00"
    ]
    assert left == []


def test_tune_out_of_time_stores_nothing(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    env = FIXED | {"TUNE_METRIC": r"([0-9,]+) images/s", "TUNE_MINUTES": "0.001"}
    result = entrypoint("tune", "run", file, env=env)
    assert result.code in (0, 2), result.err
    assert result.code == 2 or result.out.endswith("Nothing is stored. Raise TUNE_MINUTES.\n")
    assert stored_results(entrypoint) == []


LAYOUT = {"LAUNCH_NPROC_PER_NODE": "1", "LAUNCH_THREADS": "1"}
PASSIVE = {**LAYOUT, "OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize(("trials", "best"), [(10**6, PASSIVE), (20, LAYOUT)])
def test_stage_without_time_does_not_undo_the_stage_before(
    trials: int, best: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Search(TrialSpec((), {}, 1.0), time.monotonic() + 100)

    def measure(_: TrialSpec, variables: Mapping[str, str]) -> float:
        if running.trials >= trials:
            running.deadline = 0.0
        return 1.0 + (variables.get("LAUNCH_THREADS") == "1") + (variables.get("OMP_WAIT_POLICY") == "passive")

    monkeypatch.setattr(search, "run_trial", measure)
    machine = make_machine(2)
    inputs = PlanInputs(read_launch_settings({}, {}), machine, Job(), Program("script", ("python", "x.py")), {})
    finalists = search.find_fastest(running, inputs, make_test_plan(machine))
    assert search.is_gain(finalists)
    assert finalists[0].variables == best
