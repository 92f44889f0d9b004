"""The clock of a rank's GPU while it trains, from a recorded NVML, and on a real GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.machines import NVMLError
from train.report.cost import GpuClock, slow_gpus_text


class ClockNvml:
    """Answers as pynvml would for one GPU; `reasons` are NVML's bits."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1

    def __init__(self, clocks: list[int], reasons: int = 0, problem: str = "") -> None:
        self.clocks, self.reasons, self.problem = clocks, reasons, problem

    def nvmlInit(self) -> None:  # noqa: N802
        if self.problem:
            raise NVMLError(self.problem)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetMaxClockInfo(self, _: str, __: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetClockInfo(self, _: str, __: int) -> int:  # noqa: N802
        return self.clocks.pop(0)

    def nvmlDeviceGetUtilizationRates(self, _: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=90 - 15 * len(self.clocks), memory=5)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: str) -> int:  # noqa: N802
        return self.reasons


@pytest.fixture(autouse=True)
def gpu_with_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(uuid="1"))


@pytest.mark.parametrize(
    ("reasons", "said"),
    [(0x1, ""), (0x4, ""), (0x20, "temperature"), (0x60, "temperature"), (0x88, "hardware slowdown, power brake")],
)
def test_clock_is_the_median_and_faults_are_named(reasons: int, said: str) -> None:
    clock = GpuClock(torch.device("cpu"), ClockNvml([1900, 1200, 1300], reasons))
    for _ in range(3):
        clock.sample()
    assert clock.to_json() == {
        "gpu_clock_mhz": 1300, "gpu_max_clock_mhz": 1980, "gpu_utilization": 0.75, "gpu_slowed_by": said,
    }  # fmt: skip


def test_gpu_that_does_not_know_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NVMLError("not supported")

    monkeypatch.setattr(ClockNvml, "nvmlDeviceGetUtilizationRates", refuse)
    clock = GpuClock(torch.device("cpu"), ClockNvml([1200], 0x20))
    clock.sample()
    assert clock.to_json() == {"gpu_clock_mhz": 1200, "gpu_max_clock_mhz": 1980, "gpu_slowed_by": "temperature"}


def test_without_a_gpu_there_is_no_clock() -> None:
    for clock in (GpuClock(torch.device("cpu")), GpuClock(torch.device("cpu"), ClockNvml([], problem="no driver"))):
        clock.sample()
        assert clock.to_json() == {}


def rank(number: int, mhz: int, slowed_by: str = "") -> dict[str, Any]:
    return {
        "rank": number, "node": "n1", "gpu_clock_mhz": mhz, "gpu_max_clock_mhz": 1980, "gpu_slowed_by": slowed_by
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([rank(0, 1900), rank(1, 1850)], ""),
        ([rank(0, 1900), rank(1, 1900), rank(2, 1400)], "the GPU of rank 2 on n1 ran at 1,400 of 1,980 MHz"),
        (
            [rank(0, 1900), rank(1, 1890, "temperature")],
            "the GPU of rank 1 on n1 ran at 1,890 of 1,980 MHz (temperature)",
        ),
        ([{"rank": 0, "node": "n1"}], ""),
    ],
)
def test_slow_gpu_is_named(ranks: list[dict[str, Any]], text: str) -> None:
    assert slow_gpus_text(ranks) == text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_clock_of_a_real_gpu_is_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    clock = GpuClock(torch.device("cuda", 0))
    clock.sample()
    found = clock.to_json()
    assert 0 < found["gpu_clock_mhz"] <= found["gpu_max_clock_mhz"]
