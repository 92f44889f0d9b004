"""What a run costs: counters of energy as the kernel and NVML give them, hours, and money by a price."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import Entrypoint
from tests.train.given import SMALL, TWO_RANKS_WHERE_THEY_FIT, epochs_of
from train.report.cost import EnergyMeter, GpuClock, cost_text, prometheus_text, summarize_cost

Counter = Callable[[str, int], None]
TURN_UJ = 262_143_328_850
NO_GPU = GpuClock(torch.device("cpu"))


@pytest.fixture
def counters(tmp_path: Path) -> Path:
    """Return the tree of a node with two packages (Linux 6.12 on two Xeons)."""
    for zone, name in (
        ("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "dram"), ("intel-rapl:0:1", "core"),
        ("intel-rapl:1", "package-1"), ("intel-rapl:2", "psys"),
    ):  # fmt: skip
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text(f"{TURN_UJ}\n")
        (tmp_path / zone / "energy_uj").write_text("1000000\n")
    return tmp_path


def use(root: Path, **microjoules: int) -> None:
    for zone in root.iterdir():
        more = microjoules.get((zone / "name").read_text().strip().replace("-", ""), 0)
        value = int((zone / "energy_uj").read_text()) + more
        (zone / "energy_uj").write_text(f"{value % (TURN_UJ + 1)}\n")


def test_packages_and_memory_are_added_up_over_turns(counters: Path) -> None:
    meter = EnergyMeter(NO_GPU, reads_node=True, root=counters)
    meter.sample()
    assert meter.joules is None
    use(counters, package0=50_000_000, package1=30_000_000, dram=5_000_000, core=40_000_000, psys=200_000_000)
    meter.sample()
    assert meter.joules == pytest.approx(85)
    use(counters, package0=TURN_UJ - 10_000_000)
    meter.sample()
    assert meter.joules == pytest.approx(85 + TURN_UJ / 1e6 - 10)


def test_what_cannot_be_read_is_absent(counters: Path) -> None:
    for zone in ("intel-rapl:0", "intel-rapl:0:0"):
        (counters / zone / "energy_uj").unlink()
    (counters / "intel-rapl:1/energy_uj").write_text("")
    others = EnergyMeter(NO_GPU, reads_node=False, root=counters)
    for meter in (EnergyMeter(NO_GPU, reads_node=True, root=counters), others):
        meter.sample()
        meter.sample()
        assert meter.joules is None
    cost = summarize_cost(8, 0, [], 1800, 900, 0)
    assert cost == {"core_hours": 4.0}
    assert cost_text(cost) == ""


class Nvml:
    """NVML with one counter; a MIG device or an old GPU has none."""

    class NVMLError(Exception):
        """Its error."""

    def __init__(self) -> None:
        self.millijoules: int | None = 5_000

    def nvmlDeviceGetTotalEnergyConsumption(self, _: object) -> int:  # noqa: N802  # its name
        """Return the counter."""
        if self.millijoules is None:
            raise self.NVMLError
        return self.millijoules


def test_gpu_has_a_counter_of_its_own(tmp_path: Path) -> None:
    nvml = Nvml()
    meter = EnergyMeter(SimpleNamespace(nvml=nvml, handle=1), reads_node=True, root=tmp_path)  # type: ignore[arg-type]
    for millijoules in (5_000, 7_500, None, 9_000):
        nvml.millijoules = millijoules
        meter.sample()
    assert meter.joules == 4


def test_cost_of_all_ranks() -> None:
    cost = summarize_cost(12, 3, [300.0, 100.0], 3600, 2000, 3)
    assert cost == {"core_hours": 12, "gpu_hours": 3, "joules": 400, "images_per_joule": 5, "price": 3}
    line = "12.000 core hours, 3.000 GPU hours, 400 J of the nodes, 5.00 images/J, 3.0000 by TRAIN_PRICE_PER_HOUR"
    assert cost_text(cost) == line


def test_file_is_prometheus_text() -> None:
    text = prometheus_text({"score": "mAP", "test_mAP": 61.5, "epochs": 3, "joules": 9.5}, 'a"b\\c')
    for line in text.splitlines():
        assert re.fullmatch(r'# TYPE \w+ gauge|\w+\{run="a\\"b\\\\c"\} [\d.]+', line), line
    assert "reference_training_test_mAP{" in text


METERED_MODEL = """
import math, time
from torch import nn
from train.report import cost

cost.EnergyMeter.node_joules = lambda meter: [("a", 10 * time.monotonic(), math.inf)]

def make(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.mark.launch
def test_run_says_what_it_cost(entrypoint: Entrypoint) -> None:
    """The model's module stands for a kernel that lets its counters be read."""
    (entrypoint.folder / "metered.py").write_text(METERED_MODEL)
    env = SMALL | TWO_RANKS_WHERE_THEY_FIT | {"TRAIN_RUN_NAME": "run", "TRAIN_PRICE_PER_HOUR": "3600"}
    more = {"TRAIN_MODEL": "metered:make", "TRAIN_EPOCHS": "3", "TRAIN_TENSORBOARD": "0"}
    result = entrypoint.succeed("train", env=env | more)
    summary = entrypoint.summary("run")
    assert summary["price"] == pytest.approx(summary["total_seconds"], rel=1e-3)
    assert "core_hours" in summary
    assert 0 < summary["cpu_utilization"] < 1.1
    assert "gpu_hours" not in summary
    assert re.search(r"^cost +.*by TRAIN_PRICE_PER_HOUR$", result.out, re.M)
    text = (entrypoint.folder / "runs/run/metrics.prom").read_text()
    assert f'reference_training_price{{run="run"}} {json.dumps(summary["price"])}\n' in text
    joules = [line["joules"] for line in epochs_of(entrypoint, "run")]
    assert len(joules) == 3
    assert joules == sorted(joules)
    assert 0 < joules[0] < joules[-1] <= summary["joules"]
