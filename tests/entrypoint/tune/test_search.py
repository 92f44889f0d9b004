"""The tuner: its contest of plans, and for real with scripts of known speed, a stop, and the plan afterwards."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from entrypoint.tune import search
from entrypoint.tune.search import ROUNDS, Candidate, Search, is_gain
from entrypoint.tune.trial import TrialSpec
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, needs_two_cores, script
from tests.factories import make_machine, make_test_plan, plan_inputs
from tests.processes import wait_until

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


@pytest.mark.launch
@needs_two_cores
@pytest.mark.slow
def test_tune_stores_fastest_layout_for_later_plans(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    result = entrypoint.succeed("tune", "run", file, env=FIXED | {"TUNE_METRIC": r"([0-9,]+) images/s"})
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


@pytest.mark.launch
@needs_two_cores
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
    assert process.returncode == 143
    assert err.endswith("entrypoint: error: tune: stopped by SIGTERM, and nothing is stored.\n")
    assert "Traceback" not in err
    assert stored_results(entrypoint) == []
    # What was killed is there until the kernel has ended it.
    wait_until(lambda: not [path for path in Path("/proc").glob("[0-9]*/cmdline") if names_file(path, file)])


@pytest.mark.launch
@needs_two_cores
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
    result = entrypoint.succeed("tune", "train", env=FIXED | ONE | {"TRAIN_EPOCHS": "1"})
    assert "images/s" in result.err
    assert result.out.splitlines()[-1].startswith("no plan of 1 tried was faster than the untuned one")
    assert not (entrypoint.folder / "runs").exists()


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (["run", "x.py"], {"TUNE_METRIC": "("}, 2, "TUNE_METRIC=(: no pattern"),
        (["run", "x.py"], {"TUNE_METRIC": "a"}, 2, "TUNE_METRIC=a: needs one group. Put it around"),
        (["run", "x.py"], {"LAUNCH_TUNING_STORE": "off"}, 2, "LAUNCH_TUNING_STORE=off: results cannot be stored"),
        (["run", "x.py"], {"TUNE_METRICS": "a"}, 2, "TUNE_METRICS=a: no such variable. Did you mean TUNE_METRIC?"),
        (["run", "x.py"], {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 2, "Run it outside srun and mpirun"),
        (["run", "x.py"], {"LAUNCH_NPROC_PER_NODE": "1"}, 2, "tune: no plan gave a rate: NameError: name 'boom'"),
        (
            ["run", "x.py"],
            {"LAUNCH_TUNING_STORE": "x.py"},
            2,
            "x.py: cannot be written (Not a directory). Name another",
        ),
        (
            ["--seconds=99", "--minutes=1", "run", "x.py"],
            {},
            2,
            "--seconds=99: one trial takes longer than --minutes=1",
        ),
        (["train"], {"TRAIN_DATASET": "synthetic", "TUNE_METRIC": "(a)"}, 2, "TUNE_METRIC=(a): has no effect, as the"),
        (["--tuning-store=", "run", "x.py"], {}, 2, "--tuning-store=: names nothing. Name a path, or leave it out."),
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


@pytest.mark.launch
@needs_two_cores
def test_trial_leaves_no_process(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "leaves.py", LEAVES)
    entrypoint("tune", "run", file, env=FIXED | ONE | {"TUNE_METRIC": "(1) x"})
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if os.access(path, os.R_OK) and path.read_bytes() == b"sleep\x00987\x00"
    ]
    assert left == []


@pytest.mark.launch
@needs_two_cores
def test_tune_out_of_time_stores_nothing(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "speeds.py", SPEEDS)
    env = FIXED | {"TUNE_METRIC": r"([0-9,]+) images/s", "TUNE_MINUTES": "0.001"}
    result = entrypoint("tune", "run", file, env=env)
    assert result.code in (0, 2), result.err
    assert result.code == 2 or result.out.endswith("Nothing is stored. Raise TUNE_MINUTES.\n")
    assert stored_results(entrypoint) == []


LAYOUT = {"LAUNCH_NPROC_PER_NODE": "1", "LAUNCH_THREADS": "1"}
PASSIVE = {**LAYOUT, "OMP_WAIT_POLICY": "passive"}


@pytest.mark.launch
@needs_two_cores
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
    inputs = plan_inputs(make_machine(2))
    finalists = search.find_fastest(running, inputs, make_test_plan(make_machine(2)))
    assert search.is_gain(finalists)
    assert finalists[0].variables == best


FIELD = {"": 100.0, "a": 120.0, "b": 90.0, "c": 60.0, "d": 40.0, "e": 80.0, "f": 70.0, "g": 30.0}
SPEC = TrialSpec((), {}, 1.0)


def plans(speeds: Mapping[str, float]) -> list[dict[str, str]]:
    """Return plans by their names; the untuned one has none."""
    return [{"NAME": name} for name in speeds if name]


class Machine:
    """A machine whose speed wanders for all alike, and flickers for each; a speed of 0 cannot run."""

    def __init__(self, speeds: Mapping[str, float], noise: float = 0.0, seed: int = 0) -> None:
        self.speeds, self.noise, self.random = speeds, noise, random.Random(seed)
        self.drift, self.turns = 1.0, Counter[str]()

    def run(self, _spec: TrialSpec, variables: Mapping[str, str]) -> float | str:
        name = variables.get("NAME", "")
        self.turns[name] += 1
        self.drift *= self.random.uniform(0.95, 1.05)
        return self.speeds[name] * self.drift * self.random.gauss(1, self.noise) or "it fell over"


def compared(patch: pytest.MonkeyPatch, machine: Machine) -> list[Candidate]:
    """Return the finalists of a machine's plans."""
    patch.setattr(search, "run_trial", machine.run)
    return Search(SPEC, time.monotonic() + 100).compare(plans(machine.speeds))


def test_fastest_of_noisy_plans_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    contests = [compared(monkeypatch, Machine(FIELD, 0.03, seed)) for seed in range(100)]
    assert sum(one[0].variables == {"NAME": "a"} and is_gain(one) for one in contests) >= 90


def test_equal_plan_is_rarely_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    contests = [compared(monkeypatch, Machine({"": 100.0, "a": 100.0}, 0.03, seed)) for seed in range(200)]
    assert sum(map(is_gain, contests)) <= 20


def test_slow_plans_run_once_and_the_untuned_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(FIELD | {"": 20.0}, 0.01)
    assert compared(monkeypatch, machine)[0].variables == {"NAME": "a"}
    assert machine.turns == {**dict.fromkeys("cdefg", 1), **dict.fromkeys(("", "a", "b"), ROUNDS + 1)}


@pytest.mark.parametrize(("speeds", "best"), [({"": 0.0, "b": 1.0}, "b"), ({"": 1.0, "b": 0.0}, "")])
def test_plan_that_cannot_run_is_named_and_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], speeds: dict[str, float], best: str
) -> None:
    machine = Machine(speeds)
    finalists = compared(monkeypatch, machine)
    assert (finalists[0].variables.get("NAME", ""), is_gain(finalists)) == (best, bool(best))
    assert sum(machine.turns.values()) == ROUNDS + 2
    failed = next(name for name, speed in speeds.items() if not speed)
    assert f"cannot run  {f'NAME={failed}' if failed else 'as planned'}: it fell over\n" in capsys.readouterr().err


def test_plan_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"": 0.0, "a": 0.0})
    monkeypatch.setattr(search, "run_trial", machine.run)
    running = Search(SPEC, time.monotonic() + 100)
    assert [running.compare(plans(machine.speeds)) for _ in range(2)] == [[], []]
    assert machine.turns == {"": 1, "a": 1}


def test_contest_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(FIELD)
    monkeypatch.setattr(search, "run_trial", machine.run)
    with pytest.raises(TimeoutError):
        Search(SPEC, time.monotonic()).compare(plans(FIELD))
    assert not machine.turns


@pytest.mark.parametrize(
    ("ours", "theirs", "so"),
    [
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], True),
        ([2, 2, 2, 2, 0], [1, 1, 1, 1, 1], False),
        ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], False),
    ],
)
def test_gain_is_one_of_every_turn(ours: Sequence[float], theirs: Sequence[float], so: bool) -> None:
    assert is_gain([Candidate({"NAME": "a"}, [0, *ours]), Candidate({}, [9, *theirs])]) is so
