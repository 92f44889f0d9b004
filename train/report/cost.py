"""What a run costs: joules where counters can be read, hours of cores and GPUs, and money by a price an hour."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

# The kernel's counters of energy (docs: power/powercap), which many systems let root alone read.
POWERCAP = Path("/sys/class/powercap")
COST_FILE = "metrics.prom"
# What the summary says of the cost, with its text for the screen.
PARTS = {
    "core_hours": "{:,.3f} core hours",
    "gpu_hours": "{:,.3f} GPU hours",
    "cpu_utilization": "{:.0%} of the cores' time",
    "gpu_utilization": "{:.0%} of the GPUs' time",
    "joules": "{:,.0f} J of the nodes",
    "images_per_joule": "{:,.2f} images/J",
    "price": "{:,.4f} by TRAIN_PRICE_PER_HOUR",
}
# What else stands in the file for Prometheus' node exporter (its textfile collector).
EXPORTED = ("epochs", "train_seconds", "total_seconds", "images_per_second", "peak_share", "test_loss")


class EnergyMeter:
    """Adds up the joules of this rank's GPU, and with `reads_node` those of the node's packages and memory.

    Other processes on the node are in them. `joules` is None where no counter can be read.
    """

    def __init__(self, gpu: GpuClock, *, reads_node: bool, root: Path = POWERCAP) -> None:
        self.gpu, self.turns = gpu, dict(node_counters(root)) if reads_node else {}
        self.joules: float | None = None
        self.last: dict[str, float] = {}

    def sample(self) -> None:
        """Add what was used since the last sample, at most one turn of a counter."""
        for name, value, turn in (*self.node_joules(), *self.gpu_joules()):
            if name in self.last:
                self.joules = (self.joules or 0.0) + (value - self.last[name]) % turn
            self.last[name] = value

    def node_joules(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, joules and turn of each counter of the node that can be read."""
        for path, turn in self.turns.items():
            with suppress(OSError, ValueError):
                yield str(path), int(path.read_text()) / 1e6, turn

    def gpu_joules(self) -> Iterator[tuple[str, float, float]]:
        """Yield the joules of this rank's GPU since its driver was loaded (NVML, from Volta on)."""
        if self.gpu.handle is not None:
            with suppress(self.gpu.nvml.NVMLError):
                yield "gpu", self.gpu.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu.handle) / 1000, math.inf


def node_counters(root: Path) -> Iterator[tuple[Path, float]]:
    """Yield the file of each counter of a package or of memory, which no other one includes, and joules of a turn."""
    for zone in root.glob("intel-rapl:*"):
        with suppress(OSError, ValueError):
            if re.fullmatch(r"package-\d+|dram", (zone / "name").read_text().strip()):
                yield zone / "energy_uj", (int((zone / "max_energy_range_uj").read_text()) + 1) / 1e6


def summarize_cost(
    cores: int, gpus: int, joules: Sequence[float], seconds: float, images: int, price: float
) -> dict[str, float]:
    """Return the cost of a command of so many seconds and images on all ranks; what is not known is left out.

    `joules` are those of the ranks that know theirs. `price` is that of all nodes for an hour, 0 if unknown.
    """
    hours = seconds / 3600
    cost = {"core_hours": hours * cores, "gpu_hours": hours * gpus, "price": hours * price}
    if joules:
        cost |= {"joules": sum(joules), "images_per_joule": images / sum(joules) if sum(joules) else 0.0}
    return {name: round(value, 6) for name, value in cost.items() if value}


def cost_text(summary: Mapping[str, Any]) -> str:
    """Return the cost in one line, empty where neither energy nor a price is known."""
    if not {"joules", "price"} & summary.keys():
        return ""
    return ", ".join(text.format(summary[name]) for name, text in PARTS.items() if name in summary)


def prometheus_text(summary: Mapping[str, Any], run: str) -> str:
    """Return the numbers of a run as Prometheus' text format, which OpenMetrics extends."""
    escaped = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    names = [name for name in (*EXPORTED, f"test_{summary['score']}", *PARTS) if name in summary]
    return "".join(
        f'# TYPE reference_training_{name} gauge\nreference_training_{name}{{run="{escaped}"}} {summary[name]}\n'
        for name in names
    )


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
