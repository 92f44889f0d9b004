"""The CPUs that the ranks may use together: as properties over generated machines, and for real on this one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from entrypoint.job.detect import Job
from entrypoint.machine.cpu_topology import Cpu
from entrypoint.machine.detect import Machine
from entrypoint.plan.cpu_budget import CpuBudget, compute_cpu_budget
from tests.conftest import FUZZ_EXAMPLES as EXAMPLES, PYTHON, Entrypoint, needs_two_cores
from tests.strategies import KINDS, grants, machines


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(machines(), grants, KINDS, st.integers(1, 64))
def test_cpu_budget_has_whole_cores_physical_first(machine: Machine, job: Job, kind: str, nproc: int) -> None:
    budget = compute_cpu_budget(machine, job, kind, nproc)
    allowed = {cpu.id: cpu for cpu in machine.cpus}
    assigned = [cpu for core in budget.cores for cpu in core.cpus]
    assert len(set(assigned)) == len(assigned)
    assert set(assigned) <= set(allowed)
    places = Counter((allowed[cpu].socket, allowed[cpu].core) for cpu in assigned)
    assert kind == "logical" or set(places.values()) == {1}, "siblings only when asked"
    assert kind not in ("physical", "logical") or set(places) == {(cpu.socket, cpu.core) for cpu in machine.cpus}
    if kind == "logical":
        assert set(assigned) == set(allowed)
    limits = [limit for limit in (machine.quota_cpus, job.granted_cpus) if limit is not None]
    assert 1 <= budget.threads <= max(1, min([len(assigned), *limits]))


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(machines())
def test_efficiency_cores_are_used_only_if_ranks_need_them(machine: Machine) -> None:
    slow = {cpu.id for cpu in machine.cpus if cpu.efficiency}
    fast = {(cpu.socket, cpu.node, cpu.core) for cpu in machine.cpus if not cpu.efficiency}
    few = compute_cpu_budget(machine, Job(), "auto", max(1, len(fast)))
    assert not fast or not slow.intersection(cpu for core in few.cores for cpu in core.cpus)
    many = compute_cpu_budget(machine, Job(), "auto", len(fast) + 1)
    assert many.cores == compute_cpu_budget(machine, Job(), "physical").cores


def test_cpu_budget_text_names_each_limit() -> None:
    cpus = (Cpu(0, 0, 0, 0), Cpu(1, 1, 0, 0), Cpu(2, 2, 0, 0, efficiency=True), Cpu(8, 0, 0, 0))
    machine = Machine("m", "cpu", "vendor", cpus, 16, 1.5, 1 << 33)
    found: CpuBudget = compute_cpu_budget(machine, Job(granted_cpus=3), "auto")
    assert found.text == (
        "2 physical cores in the affinity mask (0-2,8), without 1 efficiency core (LAUNCH_CORE_TYPE=physical),"
        " cgroup limit 1.5 CPUs, Slurm grants 3 CPUs"
    )
    assert (found.threads, found.is_limited) == (1, True)
    siblings = compute_cpu_budget(replace(machine, quota_cpus=None), Job(), "logical")
    assert [core.cpus for core in siblings.cores] == [(0, 8), (1,), (2,)]
    assert "4 CPUs with hyper-threads" in siblings.text


MASK_OF_ONE = ("taskset", "-c", str(max(os.sched_getaffinity(0))))


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize(
    ("cpus", "masked", "cores", "threads", "waits"),
    [
        (None, False, 2, 2, None),
        (None, True, 1, 1, None),
        (1.0, False, 2, 1, "passive"),
        (1.5, False, 2, 1, "passive"),
        (0.5, True, 1, 1, "passive"),
        (64.0, False, 2, 2, None),
    ],
)
def test_cpu_budget_follows_mask_and_quota(
    entrypoint: Entrypoint,
    under_quota: Callable[[float], tuple[str, ...]],
    cpus: float | None,
    masked: bool,
    cores: int,
    threads: int,
    waits: str | None,
) -> None:
    two = ("taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:2])))
    command = (*(under_quota(cpus) if cpus else ()), *(MASK_OF_ONE if masked else two), PYTHON, "-m", "entrypoint")
    made = json.loads(entrypoint("plan", "--json", "--openmp=gnu", command=command).out)
    assert len(made["ranks"][0]["cpus"]) == cores
    assert made["ranks"][0]["threads"] == threads
    assert made["environment"]["variables"].get("OMP_WAIT_POLICY") == waits
    (why,) = (decision["reason"] for decision in made["decisions"] if decision["key"] == "cores")
    assert (f"cgroup limit {cpus:g} CPUs" in why) is True if cpus and cpus < cores else "limit" not in why
