"""The tuner for real: scripts of known speed, the trainer, a stop in between, and the plan afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from entrypoint.tune.candidates import BASELINE, Candidate
from entrypoint.tune.search import Best, more_certain
from entrypoint.tune.store import RESULT_KEY
from entrypoint.tune.successive_halving import ComparisonResult
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, needs_two_cores, script
from tools.busy_processes import busy_processes

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


def findings(entrypoint: Entrypoint) -> dict[str, object]:
    (path,) = (entrypoint.home / ".cache/reference-training/tuned").iterdir()
    found: dict[str, object] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_tune_stores_fastest_layout_for_later_plans(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    result = entrypoint("tune", "run", file, env=FIXED | {"TUNE_METRIC": r"([0-9,]+) images/s"})
    assert result.code == 0, result.err
    assert "many small ranks are faster than one wide one, as the book's table 9.2 has it" in result.out
    last = result.out.splitlines()[-1]
    assert "3 times the untuned plan's: the best of 4 plans tried" in last.replace("3.00", "3")
    made = entrypoint.plan("run", file, env=FIXED)
    assert made["nodes"]["nproc_per_node"] == 2
    decisions = {one["key"]: one for one in made["decisions"]}
    for key, setting in (("ranks", "LAUNCH_NPROC_PER_NODE=2"), ("cores", "LAUNCH_CPU_BINDING=none")):
        assert (decisions[key]["source"], decisions[key]["setting"]) == ("tuned", setting)
    assert last in decisions["tuned"]["reason"]
    assert entrypoint.plan("run", file, env=FIXED | {"LAUNCH_TUNING_STORE": "off"})["nodes"]["nproc_per_node"] == 1


@pytest.mark.slow
def test_tune_interrupted_search_resumes(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    env = FIXED | {"TUNE_METRIC": r"([0-9,]+) images/s"}
    process = subprocess.Popen(
        [PYTHON, "-m", "entrypoint", "tune", "run", str(file)],
        cwd=entrypoint.folder,
        env={**clean_environment(), **env, "HOME": str(entrypoint.home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "trial   4" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LAUNCH_LIMIT_S)
    assert process.returncode == 130
    assert err.endswith("entrypoint: stopped; run the same command to resume\n")
    assert "Traceback" not in err
    assert findings(entrypoint)["verdict"] is None  # codespell:ignore
    assert entrypoint.plan("run", file, env=FIXED)["nodes"]["nproc_per_node"] == 1
    result = entrypoint("tune", "run", file, env=env)
    assert result.code == 0, result.err
    assert "trial   4" not in result.err
    assert "trial   5" in result.err


@pytest.mark.slow
def test_script_without_metric_is_timed_and_trainer_has_a_rate(
    entrypoint: Entrypoint,
) -> None:
    file = script(entrypoint.folder, "short.py", "pass")
    cpus = sorted(os.sched_getaffinity(0))
    with busy_processes(cpus):
        assert entrypoint("tune", "run", file, env=FIXED | ONE).code == 0
    (why,) = [
        one["reason"] for one in entrypoint.plan("run", file, env=FIXED | ONE)["decisions"] if one["key"] == "tuned"
    ]
    found = re.search(r", while other processes used ([0-9.]+) of (\d+) CPUs; LAUNCH_TUNING_STORE=off ignores it$", why)
    assert found, why
    assert float(found[1]) > 0.8 * len(cpus)
    assert int(found[2]) == len(cpus)
    result = entrypoint("tune", "train", env=FIXED | ONE | {"TRAIN_COMPILE": "off", "TRAIN_EPOCHS": "1"})
    assert result.code == 0, result.err
    assert "images/s" in result.err
    assert result.out.splitlines()[-1].startswith("no plan of 1 tried was faster than the untuned one")
    assert not (entrypoint.folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (["run", "x.py"], {"TUNE_METRIC": "("}, 2, "TUNE_METRIC=(: no pattern"),
        (["run", "x.py"], {"TUNE_METRIC": "a"}, 2, "TUNE_METRIC=a: needs one group, around the number"),
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


def test_tune_lower_metric_can_be_better(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "steps.py", "for _ in range(4): print('a step took 0.25 s', flush=True)")
    env = FIXED | ONE | {"TUNE_METRIC": "took ([0-9.]+) s", "TUNE_LOWER": "1"}
    result = entrypoint("tune", "run", file, env=env)
    assert result.code == 0, result.err
    assert re.search(r"^ +4 +1\.00 .* as planned$", result.out, re.MULTILINE), result.out


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


def test_tune_out_of_time_without_a_winner_continues_later(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    env = FIXED | {"TUNE_METRIC": r"([0-9,]+) images/s"}
    result = entrypoint("tune", "run", file, env=env | {"TUNE_MINUTES": "0.001"})
    assert result.code in (0, 2), result.err
    if result.code == 0:
        assert result.out.splitlines()[-1].endswith("time is up; run the same command to continue")
    found = findings(entrypoint)
    assert found[RESULT_KEY] is None, "else the next search would begin again from the start"
    trials = len(found["trials"])  # type: ignore[arg-type]
    assert trials
    again = entrypoint("tune", "run", file, env=env | {"TUNE_MINUTES": "0.001"})
    assert again.code == 0, again.err
    assert len(findings(entrypoint)["trials"]) >= trials  # type: ignore[arg-type]
    assert "(set by you)" not in entrypoint("plan", "run", file, env=FIXED).out.split("ranks")[1].splitlines()[0]


ONE_THREAD = Candidate.from_variables({"LAUNCH_NPROC_PER_NODE": "1", "LAUNCH_THREADS": "1"})
PASSIVE = ONE_THREAD.with_variables({"OMP_WAIT_POLICY": "passive"})
TOLD_APART = ComparisonResult(ONE_THREAD, (), {ONE_THREAD: [2.0] * 5, BASELINE: [1.0] * 5})
NOT_YET = ComparisonResult(
    PASSIVE, (ONE_THREAD, BASELINE), {PASSIVE: [2.1], ONE_THREAD: [2.0] * 6, BASELINE: [1.0] * 6}
)
REFINED = ComparisonResult(PASSIVE, (ONE_THREAD,), {PASSIVE: [2.1] * 5, ONE_THREAD: [2.0] * 6, BASELINE: [1.0] * 6})
ONLY_UNTUNED = ComparisonResult(BASELINE, (), {BASELINE: [1.0] * 6})  # time was up after its first trial
NO_GAIN = ComparisonResult(BASELINE, (ONE_THREAD,), {ONE_THREAD: [1.0] * 5, BASELINE: [1.0] * 5})


@pytest.mark.parametrize(
    ("before", "later", "kept"),
    [
        (TOLD_APART, REFINED, REFINED),
        (TOLD_APART, NOT_YET, TOLD_APART),
        (TOLD_APART, None, TOLD_APART),
        (TOLD_APART, ONLY_UNTUNED, TOLD_APART),
        (NO_GAIN, ONLY_UNTUNED, ONLY_UNTUNED),
        (NO_GAIN, NOT_YET, NOT_YET),
    ],
)
def test_interrupted_stage_does_not_undo_the_stage_before(before: Best, later: Best | None, kept: Best) -> None:
    assert more_certain(before, later) is kept
