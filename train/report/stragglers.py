"""Where a rank's training time goes, how long threads wait for a CPU, and which rank or node the others wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from entrypoint.machine.cpu_load import read_run_delays
from train.report.cost import slow_gpus_text

# Smaller costs are as likely noise.
MIN_REPORTED_PERCENT = 3.0


@dataclass
class StepMeter:
    """Seconds of a rank's training loop: in all, for data, of the main thread's CPU, and of its waiting for a CPU.

    Saving checkpoints and the first step are left out. Of the waiting for a CPU, loading has its share of the time.
    A rank that waits in an exchange does not compute, so what is left of the time is the waiting. This holds for
    exchanges on the CPU; with a GPU the main thread runs ahead of it. `data_cpu_s` is the CPU time within `data_s`.
    """

    seconds: float = 0.0
    data_s: float = 0.0
    data_cpu_s: float = 0.0
    cpu_s: float = 0.0
    cpu_wait_s: float = 0.0
    steps: int = 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time of this block as loading of data."""
        began, cpu = time.perf_counter(), time.thread_time()
        yield
        self.data_s += time.perf_counter() - began
        self.data_cpu_s += time.thread_time() - cpu

    def start(self) -> tuple[float, float, float]:
        """Return the clocks at the start of some steps."""
        delays = read_run_delays(thread=str(os.getpid()))  # of the main thread, none if the kernel does not count it
        return time.perf_counter(), time.thread_time(), sum(delays.values()) / 1e9

    def add(self, began: tuple[float, float, float], steps: int) -> tuple[float, float, float]:
        """Add the steps since `began`, and return the clocks at the start of the next ones."""
        now = self.start()
        self.seconds += now[0] - began[0]
        self.cpu_s += now[1] - began[1]
        self.cpu_wait_s += now[2] - began[2]
        self.steps += steps
        return now

    @property
    def exchange_s(self) -> float:
        """Return the seconds that the rank waited in exchanges."""
        in_steps = 1 - self.data_s / self.seconds if self.seconds else 1.0
        computing = self.cpu_s - self.data_cpu_s + self.cpu_wait_s * in_steps
        return max(0.0, self.seconds - self.data_s - computing)


@dataclass(frozen=True)
class RankTimes:
    """What a rank measured, and where it ran."""

    rank: int
    node: str
    meter: StepMeter
    measures_exchange: bool
    gpu: dict[str, Any] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Return the seconds in which the others may have waited for this rank."""
        return self.meter.seconds - self.meter.exchange_s if self.measures_exchange else self.meter.data_s

    def to_json(self) -> dict[str, Any]:
        """Return the times of a step, in milliseconds; None for what is not measured on this device."""
        meter, steps = self.meter, max(1, self.meter.steps)

        def milliseconds(seconds: float) -> float:
            return round(1000 * seconds / steps, 4)

        exchange = milliseconds(meter.exchange_s) if self.measures_exchange else None
        return {
            "rank": self.rank,
            "node": self.node,
            "step_ms": milliseconds(meter.seconds),
            "data_ms": milliseconds(meter.data_s),
            "exchange_wait_ms": exchange,
            "cpu_wait_ms": milliseconds(meter.cpu_wait_s),
            **self.gpu,
        }


def summarize(ranks: Sequence[RankTimes]) -> dict[str, Any] | None:
    """Return the times of each rank, the slowest rank and node, and what they cost; None without other ranks.

    The cost is the share of a step (percent) that would be saved if the slowest were as fast as the median of the
    others.
    """
    if len(ranks) < 2 or not all(one.meter.steps for one in ranks):
        return None
    seconds = max(one.meter.seconds for one in ranks)
    by_node: dict[str, list[float]] = {}
    for one in ranks:
        by_node.setdefault(one.node, []).append(one.busy_s)
    nodes = {node: sum(times) / len(times) for node, times in by_node.items()}
    slowest = max(ranks, key=lambda one: one.busy_s)
    others = [one.busy_s for one in ranks if one is not slowest]
    node = max(nodes, key=lambda name: nodes[name])
    other_nodes = [busy for name, busy in nodes.items() if name != node]
    return {
        "ranks": [one.to_json() for one in ranks],
        "slowest_rank": slowest.rank,
        "slowest_rank_node": slowest.node,
        "slowest_rank_cost_percent": cost_percent(slowest.busy_s, others, seconds),
        "slowest_node": node if other_nodes else None,
        "slowest_node_cost_percent": cost_percent(nodes[node], other_nodes, seconds) if other_nodes else None,
    }


def cost_percent(slowest_s: float, others_s: Sequence[float], seconds: float) -> float:
    """Return the share of the time that the slowest takes more than the median of the others, in percent."""
    return round(100 * max(0.0, slowest_s - median(others_s)) / seconds, 1) if seconds else 0.0


def stragglers_text(found: dict[str, Any] | None) -> str:
    """Return a line about the slowest rank or node and the slowest GPU, empty if they are like the others."""
    if not found:
        return ""
    return "; ".join(text for text in (slowest_text(found), slow_gpus_text(found["ranks"])) if text)


def slowest_text(found: dict[str, Any]) -> str:
    """Return which rank or node is the slowest, empty if it costs little."""
    cost, node_cost = found["slowest_rank_cost_percent"], found["slowest_node_cost_percent"] or 0.0
    if node_cost >= MIN_REPORTED_PERCENT:
        return f"node {found['slowest_node']} is the slowest and costs {node_cost:.0f} % of a step"
    if cost < MIN_REPORTED_PERCENT:
        return ""
    where = f"rank {found['slowest_rank']} on {found['slowest_rank_node']}"
    return f"{where} is the slowest and costs {cost:.0f} % of a step"


# Smaller shares are not reported.
MIN_REPORTED_SHARE = 0.2


class CpuWaitMeter:
    """CPU wait times since this meter was created."""

    def __init__(self) -> None:
        self.began, self.before = time.monotonic(), read_run_delays()

    def share(self) -> float:
        """Return the share of the time since then that the thread which waited longest has waited, 0 to 1."""
        longest = max((wait - self.before.get(thread, 0) for thread, wait in read_run_delays().items()), default=0)
        return min(1.0, longest / 1e9 / (time.monotonic() - self.began))


def cpu_wait_text(share: float) -> str:
    """Return a text about the wait share, or an empty text if the share is small."""
    if share < MIN_REPORTED_SHARE:
        return ""
    return (
        f"{100 * share:.0f} % of the time threads waited for a CPU (other processes or a CPU limit);"
        " try `entrypoint tune`"
    )
