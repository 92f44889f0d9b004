"""When torch's flight recorder is set up, and where it writes. It has not run here, as that needs two GPUs."""

from __future__ import annotations

import pytest

from entrypoint.plan.environment import FLIGHT_RECORDER_VARIABLES as VARIABLES
from tests.factories import make_machine, make_test_plan, reason_for

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
