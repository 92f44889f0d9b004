"""Variables of torch's flight recorder, which writes each rank's last NCCL collectives when one times out."""

from __future__ import annotations

from entrypoint.core.errors import printable
from entrypoint.plan.devices import Devices
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.remote_ranks import world_size_for

# Collectives that each rank remembers, as torch's own documentation recommends.
REMEMBERED = "2000"
# The names of torch 2.8 and later, and the older ones that it still reads, with a warning in each rank.
OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
VARIABLES = (*OLD_NAMES, "TORCH_NCCL_DUMP_ON_TIMEOUT")


def flight_recorder_variables(inputs: PlanInputs, devices: Devices) -> dict[str, tuple[str, str]]:
    """Return the variables, each with its reason; none unless several ranks exchange data by NCCL."""
    values = inputs.settings.values
    if devices.device != "cuda" or values.backend not in ("auto", "nccl") or world_size_for(inputs, devices.nproc) == 1:
        return {}
    where = printable(values.log_dir) or "~/.cache/torch"
    wanted = {
        "TORCH_FR_BUFFER_SIZE": (REMEMBERED, "each rank remembers its last collectives"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": (
            "1",
            f"a collective that times out is written to {where}; `torchfrtrace` reads it",
        ),
    }
    if values.log_dir:
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = (f"{values.log_dir}/nccl_trace_rank_", "next to the output of the ranks")
    return {name: value for name, value in wanted.items() if not inputs.environ.get(OLD_NAMES.get(name, ""))}
