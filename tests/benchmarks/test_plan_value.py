"""What the plan is compared with: the machine's scenarios, the sweep's settings, and one row for real."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan_value.__main__ import Runner, ours, ours_and_peers, sweep, trainers
from benchmarks.plan_value.scenarios import SCENARIOS, mask_of_one, one_busy_cpu
from entrypoint.settings import read_launch_settings


def test_sweep_has_every_combination_once() -> None:
    every = sweep()
    assert len({one.name for one in every}) == len(every) >= 6
    for one in every:
        read_launch_settings({name: value for name, value in one.settings.items() if name.startswith("LAUNCH_")}, {})


def test_scenarios_limit_cpus_and_quota() -> None:
    with mask_of_one() as words:
        assert subprocess.run([*words, "nproc"], capture_output=True, text=True, check=True).stdout == "1\n"
    try:
        with SCENARIOS["quota of 1 CPU"]() as words:
            reported = subprocess.run([*words, "cat", "/proc/self/cgroup"], capture_output=True, text=True, check=True)
    except OSError as error:
        pytest.skip(f"needs a cgroup that it may make: {error}")
    assert "reference-training-" in reported.stdout


def test_busy_process_ends_with_its_scenario() -> None:
    busy = ("pgrep", "-P", str(os.getpid()), "-f", "while os.getppid")
    with one_busy_cpu():
        assert subprocess.run(busy, check=False, capture_output=True).returncode == 0
    assert subprocess.run(busy, check=False, capture_output=True).returncode == 1
    assert len(SCENARIOS) == 5


@pytest.mark.slow
@pytest.mark.launch
def test_runner_returns_rate_or_last_error_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAUNCH_RESERVE_CPUS", "0")  # else plans differ where suites run next to it between two of them
    first, two, *_ = ours_and_peers()
    by_hand = ours("by hand", {"LAUNCH_NPROC_PER_NODE": str(len(first.plan_parts(())[0]))})
    assert by_hand.plan_parts(()) == first.plan_parts(()) != two.plan_parts(())
    first.run(())
    assert first.median > 0, first.problem
    trainer = trainers(str(tmp_path))[0]
    trainer.settings = {**trainer.settings, "TRAIN_STEPS": "3"}
    trainer.run(())
    assert trainer.median > 0, trainer.problem
    broken: Runner = replace(first, settings={**first.settings, "LAUNCH_TREADS": "1"}, rates=[])
    broken.run(())
    assert broken.rates == []
    assert "LAUNCH_TREADS" in broken.problem
