"""Samples the clock and the utilization of a rank's GPU while it trains, and why it is slow, from NVML."""

from __future__ import annotations

from contextlib import suppress
from statistics import fmean, median
from typing import Any

import torch

# Reasons for a lower clock (nvml.h, nvmlClocksThrottleReasons) that mean a fault of the machine.
FAULTS = {
    0x08: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature",
    0x80: "power brake",
}
# A GPU with a lower clock than this share of the others' median is named.
SLOW_SHARE = 0.9


class GpuClock:
    """The clocks of a GPU in MHz, one for each log line, how busy it was, and the faults that slowed it.

    `nvml` is pynvml, or what answers in its place. A MIG device and a missing driver have no clock.
    """

    def __init__(self, device: torch.device, nvml: Any = None) -> None:
        self.samples: list[int] = []
        self.busy_percent: list[int] = []
        self.faults: set[str] = set()
        self.max_mhz = 0
        self.nvml = nvml
        self.handle: Any = None
        if device.type != "cuda" and nvml is None:
            return
        if nvml is None:
            import pynvml

            self.nvml = pynvml
        with suppress(self.nvml.NVMLError):
            self.nvml.nvmlInit()
            self.handle = self.nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            self.max_mhz = self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)

    def sample(self) -> None:
        """Read the clock, where there is one."""
        if self.handle is None:
            return
        with suppress(self.nvml.NVMLError):
            self.samples.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
            reasons = self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
            self.faults |= {name for bit, name in FAULTS.items() if reasons & bit}
            self.busy_percent.append(self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu)  # some GPUs have none

    def to_json(self) -> dict[str, Any]:
        """Return the median clock, the highest one that the GPU has, how busy it was if known, and the faults.

        Empty without a GPU.
        """
        if not self.samples:
            return {}
        return {
            "gpu_clock_mhz": round(median(self.samples)),
            "gpu_max_clock_mhz": self.max_mhz,
            **({"gpu_utilization": round(fmean(self.busy_percent) / 100, 4)} if self.busy_percent else {}),
            "gpu_slowed_by": ", ".join(sorted(self.faults)),
        }


def slow_gpus_text(ranks: list[dict[str, Any]]) -> str:
    """Return which rank's GPU had a fault, or the lowest clock by far; empty if all are alike."""
    clocked = [one for one in ranks if one.get("gpu_clock_mhz")]
    if not clocked:
        return ""
    usual = median(one["gpu_clock_mhz"] for one in clocked)
    slow = [one for one in clocked if one.get("gpu_slowed_by") or one["gpu_clock_mhz"] < SLOW_SHARE * usual]
    if not slow:
        return ""
    worst = min(slow, key=lambda one: int(one["gpu_clock_mhz"]))
    why = f" ({worst['gpu_slowed_by']})" if worst.get("gpu_slowed_by") else ""
    where = f"the GPU of rank {worst['rank']} on {worst['node']}"
    return f"{where} ran at {worst['gpu_clock_mhz']:,} of {worst.get('gpu_max_clock_mhz') or 0:,} MHz{why}"
