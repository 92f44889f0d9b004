"""The GPUs that this process may use, asked of NVML; no driver is no error."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One visible GPU; `index` counts the visible ones, as CUDA does."""

    index: int
    uuid: str
    name: str
    memory_bytes: int


def read_gpus(root: Path, visible: str | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs under CUDA_VISIBLE_DEVICES (indices or UUIDs); none where there is no driver.

    NVML is only loaded where the driver's own file exists, since importing it costs 0.06 s.
    """
    if root != Path("/") or not (root / "proc/driver/nvidia/version").exists():
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = [describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    return select(tuple(found), chosen)


def describe(index: int) -> Gpu:
    """Return what NVML, already initialised, says of one device."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    return Gpu(index, uuid, name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))


def select(found: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order, stopping at the first unknown one.

    That is CUDA's own rule (CUDA C++ programming guide, environment variables).
    """
    if visible is None:
        return found
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        match = next((gpu for gpu in found if word and (word == str(gpu.index) or gpu.uuid.startswith(word))), None)
        if match is None:
            break
        chosen.append(Gpu(len(chosen), match.uuid, match.name, match.memory_bytes))
    return tuple(chosen)
