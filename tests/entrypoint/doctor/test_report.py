"""The doctor on this machine, as a user runs it."""

from __future__ import annotations

import json
import sys
import threading
import venv
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.doctor.report import (
    PTH_FILE,
    check_end_of_life,
    check_imports,
    check_installation,
    check_libraries,
    format_report,
    within_limit,
)
from entrypoint.machine.shared_libraries import Library
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Program
from entrypoint.plan.preflight import Check, preflight_checks
from tests.conftest import Entrypoint, script
from tests.factories import make_machine, plan_inputs


@pytest.mark.launch
def test_doctor_json_has_every_check(entrypoint: Entrypoint) -> None:
    result = entrypoint.succeed("doctor", "--json")
    checks = json.loads(result.out)
    assert [set(check) for check in checks] == [{"what", "state", "seen", "advice"}] * len(checks)
    assert {
        *("topology", "/dev/shm", "locked memory", "NVIDIA driver", "torch", "plan", "tcmalloc"),
        *("intel", "torch.compile", "TRAIN_OUTPUT_DIR", "TRAIN_CACHE_DIR"),
        "import torch",
    } <= {check["what"] for check in checks}
    (torch,) = (check for check in checks if check["what"] == "import torch")
    assert torch["state"] == "ok"
    assert torch["seen"][0].isdigit()


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({}, []),
        ({"name": "cuda", "end_of_life": ""}, []),
        ({"name": "cpu-intel", "end_of_life": "torch 2.8.0 gets no more fixes"}, ["torch 2.8.0 gets no more fixes"]),
    ],
)
def test_doctor_warns_of_an_image_without_fixes(image: dict[str, str], said: list[str]) -> None:
    node = make_machine(4)
    node = replace(node, container=replace(node.container, image=image))
    inputs = plan_inputs(node, program=Program("none", ()))
    checks = list(check_end_of_life(inputs))
    assert [check.seen for check in checks] == said
    assert all(check.state == "warning" and "image cpu" in check.advice for check in checks)


@pytest.mark.slow
@pytest.mark.launch
def test_doctor_failures_have_a_remedy_and_exit_code_3(entrypoint: Entrypoint) -> None:
    (entrypoint.folder / "file").write_text("")
    result = entrypoint("doctor", env={"TRAIN_OUTPUT_DIR": "file/runs", "LAUNCH_NPROC_PER_NODE": "4000"})
    assert result.code == 3
    failures = [line for line in result.out.splitlines() if line.startswith("FAILURE")]
    assert len(failures) == 2
    assert "LAUNCH_NPROC_PER_NODE=4000: more ranks than cores" in failures[0]
    assert "file/runs cannot be written to; bind a folder there, or set TRAIN_OUTPUT_DIR to another" in failures[1]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("code", "state", "seen"),
    [
        ("__version__ = '2.8.0'", "ok", "2.8.0"),
        ("import os; os.exit(127)", "failure", "AttributeError: module 'os' has no attribute 'exit'"),
        ("import os; os._exit(9)", "failure", "the interpreter ended with code 9"),
    ],
)
def test_check_imports_broken_package_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, state: str, seen: str
) -> None:
    # -I leaves PYTHONPATH out, so the stand-in is put into an interpreter of its own.
    venv.create(tmp_path / "venv", symlinks=True)
    monkeypatch.delenv("PYTHONHOME", raising=False)
    script(next(tmp_path.glob("venv/lib/python3*/site-packages")), "torch.py", code)
    checks = list(check_imports(str(tmp_path / "venv/bin/python")))
    assert (checks[0].what, checks[0].state, checks[0].seen) == ("import torch", state, seen)
    assert len(checks) == (1 if "ended" in seen else 5), "the others are tried all the same"


def test_format_report_puts_advice_after_result() -> None:
    assert format_report([Check("a", "ok", "b"), Check("cc", "warning", "d", "e")], as_json=False) == (
        "ok       a   b\nwarning  cc  d; e"
    )


def inputs_with(*libraries: Library) -> PlanInputs:
    return plan_inputs(replace(make_machine(4), libraries=libraries), program=Program("run", ("python", "x.py")))


def test_missing_library_is_absent() -> None:
    found, missing = Library("tcmalloc", "/lib/t.so", "found in /lib"), Library("jemalloc", None, "not in /lib")
    checks = {check.what: check.state for check in check_libraries(inputs_with(found, missing))}
    assert checks == {"tcmalloc": "ok", "jemalloc": "absent", "intel": "absent"}


def test_missing_gpu_driver_image_and_torch_are_absent() -> None:
    states = {check.what: check.state for check in preflight_checks(inputs_with())}
    assert {what for what, state in states.items() if state == "absent"} == {"NVIDIA driver", "image", "torch"}


def test_check_without_an_answer_does_not_hold_up_the_others() -> None:
    def hang() -> list[Check]:
        threading.Event().wait()
        return []

    (check,) = within_limit("installation", hang, 0.1)
    assert (check.what, check.state, check.seen) == ("installation", "failure", "not done after 0 s")
    assert list(within_limit("image", lambda: [Check("image", "ok", "x")], 5)) == [Check("image", "ok", "x")]
    with pytest.raises(ZeroDivisionError):
        list(within_limit("image", lambda: [Check("image", "ok", str(1 // 0))], 5))


def test_clean_environment_has_no_warning(tmp_path: Path) -> None:
    (tmp_path / PTH_FILE).touch()
    assert list(check_installation({}, tmp_path)) == []


def test_what_may_mislead_is_named(tmp_path: Path) -> None:
    (tmp_path / "entrypoint").mkdir()
    script(tmp_path / "entrypoint", "__init__.py", "")
    (tmp_path / "active/bin").mkdir(parents=True)
    (tmp_path / "active/bin/python").symlink_to(sys.executable)
    checks = list(check_installation({"VIRTUAL_ENV": str(tmp_path / "active")}, tmp_path))
    assert [check.what for check in checks] == ["package entrypoint", "interpreter", PTH_FILE]
    assert f"{tmp_path}/entrypoint/__init__.py" in checks[0].seen
    assert f"{tmp_path}/active/bin/python, the active environment" in checks[1].seen
    assert {check.state for check in checks} == {"warning"}
