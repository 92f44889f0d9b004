"""The variables of the ranks: whose they are, and what of the host's is kept out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.job.detect import Job
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan, Program
from entrypoint.plan.planner import make_plan
from entrypoint.settings import read_launch_settings
from tests.factories import SCRIPT, make_machine, make_test_plan, reason_for


def plan_in(container: str, environ: Mapping[str, str], broken: Mapping[str, str] | None = None) -> Plan:
    node = make_machine(4)
    node = replace(node, container=replace(node.container, engine=container))
    settings = read_launch_settings({}, {})
    return make_plan(PlanInputs(settings, node, Job(), SCRIPT, environ, "python", broken_preloads=broken or {}))


@pytest.mark.parametrize(
    ("container", "environ", "value"),
    [
        ("Apptainer", {}, "1"),
        ("Apptainer", {"PYTHONNOUSERSITE": "x"}, "x"),
        ("Docker", {}, None),
        ("", {}, None),
    ],
)
def test_environment_ignores_apptainer_host_home(container: str, environ: dict[str, str], value: str | None) -> None:
    assert plan_in(container, environ).environment.variables.get("PYTHONNOUSERSITE") == value


@pytest.mark.parametrize(("container", "reported"), [("Apptainer", True), ("Docker", False), ("", False)])
def test_environment_warns_of_host_pythonpath(container: str, reported: bool) -> None:
    warnings = plan_in(container, {"PYTHONPATH": "/home/me/lib"}).warnings
    assert any(line.startswith("PYTHONPATH=/home/me/lib comes from the host") for line in warnings) is reported


BROKEN = {"/host/liby.so": "cannot be read (No such file or directory)"}
PRELOAD = {"LD_PRELOAD": "/host/liby.so:/opt/libx.so"}


def test_environment_missing_preload_raises() -> None:
    with pytest.raises(
        UserError, match=r"LD_PRELOAD=/host/liby.so:/opt/libx.so: /host/liby.so cannot be read"
    ) as error:
        plan_in("", PRELOAD, BROKEN)
    assert error.value.code == ExitCode.MACHINE


def test_host_preload_missing_in_apptainer_is_dropped_and_named() -> None:
    made = plan_in("Apptainer", PRELOAD, BROKEN)
    assert made.environment.variables["LD_PRELOAD"] == "/opt/libx.so"
    assert reason_for(made, "LD_PRELOAD").startswith("the host's, without what the image lacks: /host/liby.so")


TWO = {"LAUNCH_NPROC_PER_NODE": "2"}
TOGETHER = [
    ("several ranks on CPUs", TWO, {}, Job(), "true"),
    ("a rank among a launcher's", {}, {}, Job("Open MPI", 1, 2, 1, 2), "true"),
    ("one rank, which trains alone", {}, {}, Job(), None),
    ("what a user says", TWO, {"ACCELERATE_USE_CPU": "no"}, Job(), "no"),
]


@pytest.mark.parametrize(
    ("settings", "environ", "job", "value"), [case[1:] for case in TOGETHER], ids=[case[0] for case in TOGETHER]
)
def test_accelerate_variables_let_cpu_ranks_train_together(
    settings: dict[str, str], environ: dict[str, str], job: Job, value: str | None
) -> None:
    inputs = PlanInputs(read_launch_settings(settings, {}), make_machine(4), job, SCRIPT, environ, "python")
    assert make_plan(inputs).environment.variables.get("ACCELERATE_USE_CPU") == value
    trains = make_plan(replace(inputs, program=Program("train", ("python", "-m", "train"))))
    assert "ACCELERATE_USE_CPU" not in trains.environment.variables


def test_accelerate_use_cpu_is_not_set_with_gpus() -> None:
    made = make_test_plan(make_machine(4, gpus=2))
    assert made.nodes.nproc_per_node == 2
    assert "ACCELERATE_USE_CPU" not in made.environment.variables


def test_openmp_variable_set_by_user_is_shown_as_user_set() -> None:
    made = plan_in("", {"OMP_PROC_BIND": "spread", "OMP_SCHEDULE": "dynamic"})
    assert reason_for(made, "OMP_PROC_BIND") == "(set by you) OMP_PROC_BIND=spread"
    assert reason_for(made, "OMP_SCHEDULE") == "(set by you) OMP_SCHEDULE=dynamic"
    assert made.environment.variables["OMP_SCHEDULE"] == "dynamic"
    assert "OMP_PROC_BIND" not in made.environment.variables, "left as it is"
