"""oneCCL's variables in the plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from entrypoint.job.detect import Job
from entrypoint.job.launchers import LauncherBinding
from entrypoint.machine.backends import OneCcl
from tests.factories import make_machine, make_test_plan

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
