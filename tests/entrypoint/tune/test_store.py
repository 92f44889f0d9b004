"""What was found: whose it is, where it is kept, and how a plan takes it up and says so."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.job.detect import Job
from entrypoint.machine.cpu_topology import Cpu
from entrypoint.machine.detect import Machine
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Program
from entrypoint.plan.planner import make_plan
from entrypoint.tune.search import ALLOCATOR, BIND, OPENMP, RANKS, THREADS
from entrypoint.tune.store import (
    TunedPlan,
    annotate,
    apply_tuning,
    check_variables,
    load,
    machine_program_key,
    save,
    store_dir,
)
from tests.factories import make_machine, plan_inputs

SCRIPT = Program("script", ("python", "x.py", "--big"))
FOUND = {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def inputs(
    environ: Mapping[str, str] | None = None, node: Machine | None = None, program: Program = SCRIPT
) -> PlanInputs:
    return plan_inputs(node or make_machine(2), environ, program=program)


def other_ids() -> Machine:
    return replace(make_machine(2), hostname="node7", cpus=(Cpu(4, 4, 0, 0), Cpu(5, 5, 0, 0)))


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (inputs(node=other_ids()), True),
        (inputs({"LAUNCH_QUIET": "1", "HOME": "/x", "MASTER_PORT": "1"}), True),
        (inputs(node=make_machine(3)), False),
        (inputs(node=make_machine(2, quota=1.0)), False),
        (inputs({"LAUNCH_ALLOCATOR": "system"}), False),
        (inputs({"OMP_NUM_THREADS": "1"}), False),
        (inputs(program=Program("script", ("python", "x.py"))), False),
        (inputs(program=Program("script", ("python", str(Path("x.py").absolute()), "--big"))), True),
        (inputs(program=Program("script", ("python", "other/x.py", "--big"))), False),
    ],
)
def test_machine_program_key_equal_machines_share_results(one: PlanInputs, same: bool) -> None:
    assert (machine_program_key(one, {}) == machine_program_key(inputs(), {})) is same


@pytest.mark.parametrize("words", [("module", "-m", "train"), ("script", "x.py"), ("notebook", "x.ipynb")])
def test_program_of_another_folder_has_another_key(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    module = inputs(program=Program(words[0], ("python", *words[1:])))
    here = machine_program_key(module, {})
    monkeypatch.chdir("/")
    assert machine_program_key(module, {}) != here


def test_changed_training_has_another_key() -> None:
    assert machine_program_key(inputs(), {"batch_size": 1}) != machine_program_key(inputs(), {"batch_size": 2})


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/h"}, "/h/.cache/reference-training/tuned"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/c"}, "/c/reference-training/tuned"),
        ({"LAUNCH_TUNING_STORE": "/kept"}, "/kept"),
        ({"LAUNCH_TUNING_STORE": "off", "HOME": "/h"}, None),
        ({}, None),
    ],
)
def test_store_dir_is_cache_or_configured_folder(environ: dict[str, str], folder: str | None) -> None:
    assert store_dir(inputs(environ)) == (Path(folder) if folder else None)


def kept(folder: Path, text: str) -> PlanInputs:
    asked = inputs({"LAUNCH_TUNING_STORE": str(folder)})
    (folder / f"{machine_program_key(asked, {})}.json").write_text(text)
    return asked


def loaded(asked: PlanInputs) -> TunedPlan:
    """Return the result that is stored for a plan."""
    tuned = load(asked, dict)
    assert tuned
    return tuned


def test_apply_tuning_sets_plan_and_marks_decisions(tmp_path: Path) -> None:
    asked = kept(tmp_path, json.dumps({"variables": FOUND, "evidence": "twice as fast"}))
    tuned = loaded(asked)
    applied = apply_tuning(replace(asked, machine=replace(asked.machine, busy_cpus=1.0)), tuned, {})
    assert make_plan(applied).binding.reserved_cpus == 0, "what was measured stands"
    made = annotate(make_plan(applied), tuned)
    assert (made.nodes.nproc_per_node, made.ranks[0].threads) == (2, 1)
    assert applied.environ["OMP_WAIT_POLICY"] == "passive"
    reported = {one.key: one.text for one in made.decisions}
    assert reported["ranks"] == "(tuned) LAUNCH_NPROC_PER_NODE=2"
    assert reported["threads"].startswith("(tuned) LAUNCH_THREADS=1")
    assert reported["tuned"].endswith("OMP_WAIT_POLICY=passive twice as fast; LAUNCH_TUNING_STORE=off ignores it")
    assert "OMP_WAIT_POLICY" not in made.environment.user_set


@pytest.mark.parametrize("text", ["", "{", "[]", '{"variables": 5}'])
def test_unreadable_result_is_named_and_passed_over(tmp_path: Path, text: str) -> None:
    asked = kept(tmp_path, text)
    tuned = loaded(asked)
    (warning,) = [one for one in annotate(make_plan(asked), tuned).warnings if "tuning result" in one]
    assert re.match(r"/.*\.json: a stored tuning result is not used \(.+\)\. Remove it and tune again\.$", warning)


def test_load_under_launcher_returns_none(tmp_path: Path) -> None:
    asked = kept(tmp_path, json.dumps({"variables": FOUND, "evidence": ""}))
    assert load(replace(asked, job=Job(launcher="srun", world_size=2)), dict) is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LD_PRELOAD": "/tmp/evil.so"}, "it sets LD_PRELOAD="),
        ({"PYTHONSTARTUP": "/x"}, "it sets PYTHONSTARTUP="),
        ({"MY_VAR": "planted"}, "it sets MY_VAR="),
        ({"LAUNCH_QUIET": "1"}, "it sets LAUNCH_QUIET="),
        ({"LAUNCH_HOSTS": "evil"}, "it sets LAUNCH_HOSTS="),
        ({"TRAIN_RESUME": "x"}, "it sets TRAIN_RESUME="),
        ({**FOUND, "PATH": "/evil"}, "it sets PATH="),
        ({"LAUNCH_OPENMP": "/tmp/evil.so"}, "it sets LAUNCH_OPENMP=/tmp/evil.so"),
        ({"OMP_WAIT_POLICY": "active\nx"}, r"it sets OMP_WAIT_POLICY=active\nx"),
    ],
)
def test_result_sets_only_what_tuning_sets(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    asked = kept(tmp_path, json.dumps({"variables": variables, "evidence": ""}))
    tuned = loaded(asked)
    assert dict(tuned.variables) == {}
    (warning,) = [one for one in annotate(make_plan(asked), tuned).warnings if "tuning result" in one]
    assert said in warning


def test_every_variable_of_a_candidate_can_be_stored() -> None:
    words = {OPENMP: "gnu", ALLOCATOR: "jemalloc", BIND: "threads", "OMP_WAIT_POLICY": "active"}
    check_variables({RANKS: "1", THREADS: "1", "KMP_BLOCKTIME": "200", **words})


def spoil_by_mode(path: Path) -> None:
    path.chmod(0o664)


def spoil_by_owner(path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, to give a file to another user")
    os.chown(path, 4001, 4001)


@pytest.mark.parametrize(
    ("spoil", "said"), [(spoil_by_mode, "other users can write it"), (spoil_by_owner, "it belongs to user 4001")]
)
def test_result_of_another_user_is_passed_over(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    asked = kept(tmp_path, json.dumps({"variables": FOUND, "evidence": ""}))
    (path,) = tmp_path.glob("*.json")
    spoil(path)
    tuned = loaded(asked)
    assert (dict(tuned.variables), tuned.not_used) == ({}, said)


def test_result_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    asked = kept(tmp_path, "{}")
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    os.mkfifo(path)
    tuned = loaded(asked)
    assert "Not a regular file" in tuned.not_used


def test_saved_result_is_used_whatever_the_umask(tmp_path: Path) -> None:
    asked = kept(tmp_path, "{}")
    (path,) = tmp_path.glob("*.json")
    before = os.umask(0)
    try:
        save(path, {"variables": FOUND, "evidence": "twice as fast"})
    finally:
        os.umask(before)
    tuned = loaded(asked)
    assert (dict(tuned.variables), tuned.not_used) == (FOUND, "")


def test_value_that_no_setting_takes_names_the_result(tmp_path: Path) -> None:
    tuned = loaded(kept(tmp_path, json.dumps({"variables": {"LAUNCH_ALLOCATOR": "evil"}, "evidence": "fast"})))
    assert (dict(tuned.variables), Path(tuned.path).parent) == ({}, tmp_path)
    assert tuned.not_used.startswith("LAUNCH_ALLOCATOR=evil: no such allocator.")


def test_evidence_is_printable(tmp_path: Path) -> None:
    tuned = loaded(kept(tmp_path, json.dumps({"variables": FOUND, "evidence": "fast \x1b[31m"})))
    assert "\x1b" not in tuned.evidence
