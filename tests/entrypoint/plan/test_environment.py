"""The variables of the ranks: whose they are, and what of the host's is kept out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.job.detect import Job
from entrypoint.job.launchers import LauncherBinding
from entrypoint.machine.backends import OneCcl
from entrypoint.plan.environment import FLIGHT_RECORDER_VARIABLES as VARIABLES
from entrypoint.plan.model import Plan, Program
from entrypoint.plan.planner import make_plan
from tests.conftest import refusal
from tests.factories import make_machine, make_test_plan, plan_inputs, reason_for


def plan_in(container: str, environ: Mapping[str, str], broken: Mapping[str, str] | None = None) -> Plan:
    node = make_machine(4)
    node = replace(node, container=replace(node.container, engine=container))
    return make_plan(plan_inputs(node, environ, broken_preloads=broken or {}))


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


@pytest.mark.parametrize(
    ("asked", "nproc", "missing"),
    [("eth0", 2, ""), ("eth0,lo", 2, ""), ("ib0", 1, ""), ("ib0", 2, "ib0"), ("lo,ib0", 2, "ib0")],
)
def test_interface_that_is_not_here_is_refused(asked: str, nproc: int, missing: str) -> None:
    node = replace(make_machine(4), interfaces=("eth0", "lo"))
    environ = {"GLOO_SOCKET_IFNAME": asked, "LAUNCH_NPROC_PER_NODE": str(nproc)}
    if missing:
        said = f"this node has no interface {missing}. Unset it, or name one of eth0, lo."
        refusal(make_test_plan, node, environ, match=said, code=ExitCode.MACHINE)
    else:
        assert make_test_plan(node, environ).environment.variables.get("GLOO_SOCKET_IFNAME", asked) == asked


@pytest.mark.parametrize(("container", "reported"), [("Apptainer", True), ("Docker", False), ("", False)])
def test_environment_warns_of_host_pythonpath(container: str, reported: bool) -> None:
    warnings = plan_in(container, {"PYTHONPATH": "/home/me/lib"}).warnings
    assert any(line.startswith("PYTHONPATH=/home/me/lib comes from the host") for line in warnings) is reported


BROKEN = {"/host/liby.so": "cannot be read (No such file or directory)"}
PRELOAD = {"LD_PRELOAD": "/host/liby.so:/opt/libx.so"}


def test_environment_missing_preload_raises() -> None:
    refusal(
        plan_in,
        "",
        PRELOAD,
        BROKEN,
        match=r"LD_PRELOAD=/host/liby.so:/opt/libx.so: /host/liby.so cannot be read",
        code=ExitCode.MACHINE,
    )


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
    inputs = replace(plan_inputs(make_machine(4), settings, job), environ=environ)
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


@pytest.mark.parametrize(
    ("name", "text", "cpu"),
    [
        ("GOMP_CPU_AFFINITY", "0 90", 90),
        ("GOMP_CPU_AFFINITY", "90-91,0", 90),
        ("GOMP_CPU_AFFINITY", "0 3 1-2 2-90:2", None),  # the end of a range is cut
        ("OMP_PLACES", "{0},{90}", 90),
        ("OMP_PLACES", "{0,1}:2:90", None),
        ("OMP_PLACES", "cores(90)", None),
    ],
)
def test_cpu_that_is_not_there_is_refused(name: str, text: str, cpu: int | None) -> None:
    """libgomp drops it unsaid, and two threads share a core."""
    if cpu is None:
        assert reason_for(plan_in("", {name: text}), name) == f"(set by you) {name}={text}"
    else:
        refusal(plan_in, "", {name: text}, match=rf"^{name}=.*: CPU {cpu} is none of the \d+ that this process may use")


NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")


@pytest.mark.parametrize(
    ("gpus", "environ", "expected"),
    [
        (2, {}, dict(zip(NAMES, ("2000", "1"), strict=True))),
        (2, {"LAUNCH_BACKEND": "nccl"}, dict(zip(NAMES, ("2000", "1"), strict=True))),
        (2, {"TORCH_FR_BUFFER_SIZE": "7"}, dict(zip(NAMES, ("7", "1"), strict=True))),
        (2, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        (2, {"LAUNCH_BACKEND": "gloo"}, {}),
        (2, {"LAUNCH_DEVICE": "cpu", "LAUNCH_NPROC_PER_NODE": "2"}, {}),
        (1, {}, {}),
    ],
)
def test_flight_recorder_is_for_ranks_with_nccl(gpus: int, environ: dict[str, str], expected: dict[str, str]) -> None:
    made = make_test_plan(make_machine(4, gpus=gpus), environ)
    assert {name: value for name, value in made.environment.variables.items() if name in VARIABLES} == expected


def test_flight_recorder_writes_into_log_folder() -> None:
    made = make_test_plan(make_machine(4, gpus=2), {"LAUNCH_LOG_DIR": "/logs"})
    assert made.environment.variables["TORCH_FR_DUMP_TEMP_FILE"] == "/logs/nccl_trace_rank_"
    assert "is written to /logs" in reason_for(made, "TORCH_NCCL_DUMP_ON_TIMEOUT")


NODE = replace(make_machine(8), oneccl=OneCcl("/p", "/p/prov"))
CCL = {"LAUNCH_BACKEND": "ccl", "LAUNCH_NPROC_PER_NODE": "2"}
NO_WORKER = {"CCL_WORKER_OFFLOAD": "0", "CCL_YIELD": "sched_yield"}
TRANSPORT = {"I_MPI_ROOT": "/p", "FI_PROVIDER_PATH": "/p/prov", "CCL_LOG_LEVEL": "error"}
OFI = {"CCL_ATL_TRANSPORT": "ofi"}


def chosen(environ: dict[str, str], job: Job | None = None) -> dict[str, str]:
    variables = make_test_plan(NODE, environ, job).environment.variables
    return {name: value for name, value in variables.items() if name.startswith(("CCL_", "I_MPI_", "FI_"))}


@pytest.mark.parametrize(
    ("environ", "job", "expected"),
    [
        (CCL, None, {**TRANSPORT, "CCL_ATL_TRANSPORT": "ofi", **NO_WORKER}),
        (
            CCL | {"LAUNCH_THREADS": "3"},
            None,
            {**TRANSPORT, "CCL_ATL_TRANSPORT": "ofi", "CCL_WORKER_COUNT": "1", "CCL_WORKER_AFFINITY": "3,7"},
        ),
        (
            CCL | {"LAUNCH_THREADS": "3", "LAUNCH_CPU_BINDING": "none"},
            None,
            TRANSPORT | {"CCL_ATL_TRANSPORT": "ofi", **NO_WORKER},
        ),
        ({"LAUNCH_BACKEND": "ccl"}, Job("Open MPI", 0, 2, 0, 2), {**TRANSPORT, **OFI, **NO_WORKER}),
        ({"LAUNCH_BACKEND": "ccl"}, Job("hydra (MPICH, Intel MPI)", 0, 2, 0, 2), {**TRANSPORT, **NO_WORKER}),
        (
            CCL | {"CCL_WORKER_COUNT": "2", "CCL_WORKER_AFFINITY": "2,3,6,7", "CCL_LOG_LEVEL": "warn"},
            None,
            TRANSPORT | OFI | {"CCL_WORKER_COUNT": "2", "CCL_WORKER_AFFINITY": "2,3,6,7", "CCL_LOG_LEVEL": "warn"},
        ),
        (
            {"LAUNCH_BACKEND": "ccl"},
            Job("srun", 0, 2, 0, 2, cpu_binding=LauncherBinding.USER),
            {**TRANSPORT, "CCL_ATL_TRANSPORT": "ofi", **NO_WORKER},
        ),
        (
            CCL | {"CCL_YIELD": "pause"},
            None,
            {**TRANSPORT, "CCL_ATL_TRANSPORT": "ofi", **NO_WORKER, "CCL_YIELD": "pause"},
        ),
        ({"LAUNCH_NPROC_PER_NODE": "2"}, None, {}),
    ],
)
def test_ccl_gets_its_transport_and_a_place_for_its_worker(
    environ: dict[str, str], job: Job | None, expected: dict[str, str]
) -> None:
    assert chosen(environ, job) == expected


def test_every_variable_of_ccl_is_shown_with_its_reason() -> None:
    made = make_test_plan(NODE, CCL | {"CCL_YIELD": "pause"})
    reasons = {one.key: one.text for one in made.decisions}
    assert reasons["CCL_ATL_TRANSPORT"] == "no mpirun of Intel's or MPICH's starts the ranks"
    assert reasons["CCL_WORKER_OFFLOAD"] == "the ranks fill the cores: no worker threads"
    assert reasons["CCL_YIELD"] == "(set by you) CCL_YIELD=pause"
    assert {"I_MPI_ROOT", "FI_PROVIDER_PATH"} <= set(reasons)
