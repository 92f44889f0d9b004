"""The CPUs that the ranks of this node may use together: affinity mask, CPU limit and scheduler, in whole cores."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from entrypoint.core.errors import count_text
from entrypoint.job.detect import Job
from entrypoint.machine.cpu_topology import Cpu, format_cpu_list
from entrypoint.machine.detect import Machine


class Core(Struct, frozen=True):
    """A physical core: its NUMA node (as socket and node), those of its CPUs that ranks are bound to, its L3 cache."""

    numa_node: tuple[int, int]
    cpus: tuple[int, ...]
    cache: int = -1


class CpuBudget(Struct, frozen=True):
    """`cores` in order of socket, NUMA node, L3 cache and core; `limit_cpus` caps the threads, None where nothing does.

    `text` says in a few words what it is and what limits it.
    """

    cores: tuple[Core, ...]
    limit_cpus: float | None
    text: str

    @property
    def threads(self) -> int:
        """How many threads may run at once without waiting, at least 1."""
        cpus = sum(len(core.cpus) for core in self.cores)
        return cpus if self.limit_cpus is None else max(1, min(cpus, int(self.limit_cpus)))

    @property
    def is_limited(self) -> bool:
        """Tell whether the limit is lower than what the cores could run."""
        return self.limit_cpus is not None and self.limit_cpus < sum(len(core.cpus) for core in self.cores)


def compute_cpu_budget(machine: Machine, job: Job, kind: str, nproc: int = 1) -> CpuBudget:
    """Return the budget for `nproc` ranks under LAUNCH_CORE_TYPE=`kind`.

    `performance` leaves a hybrid CPU's efficiency cores out, since OpenMP's equal parts would wait for them;
    `auto` does so unless the ranks outnumber the others. `logical` takes siblings too.
    """
    physical = group_by_core(machine.cpus, siblings=kind == "logical")
    slow = {cpu.id for cpu in machine.cpus if cpu.efficiency}
    fast = tuple(core for core in physical if not slow.intersection(core.cpus))
    left_out = kind == "performance" or (kind == "auto" and nproc <= len(fast))
    cores = fast if left_out and fast else physical
    limits = [float(cpus) for cpus in (machine.quota_cpus, job.granted_cpus) if cpus is not None]
    return CpuBudget(cores, min(limits, default=None), budget_text(machine, job, cores, len(physical) - len(cores)))


def group_by_core(cpus: Iterable[Cpu], *, siblings: bool) -> tuple[Core, ...]:
    """Return the physical cores of the CPUs, each with its first CPU, or with all of them."""
    members: dict[tuple[int, int, int, int], list[int]] = {}
    for cpu in cpus:
        members.setdefault((cpu.socket, cpu.node, cpu.cache, cpu.core), []).append(cpu.id)
    return tuple(
        Core(key[:2], tuple(sorted(ids) if siblings else [min(ids)]), key[2]) for key, ids in sorted(members.items())
    )


def budget_text(machine: Machine, job: Job, cores: tuple[Core, ...], excluded: int) -> str:
    """Return what the budget is and what limits it."""
    count, cpus = len(cores), sum(len(core.cpus) for core in cores)
    parts = [count_text(count, "physical core")]
    if len(machine.cpus) < machine.online_cpus:
        parts[0] += f" in the affinity mask ({format_cpu_list(tuple(cpu.id for cpu in machine.cpus))})"
    if cpus > count:
        parts.append(f"{cpus} CPUs with hyper-threads")
    if excluded:
        parts.append(f"without {count_text(excluded, 'efficiency core')} (LAUNCH_CORE_TYPE=physical)")
    if machine.quota_cpus is not None and machine.quota_cpus < cpus:
        parts.append(f"cgroup limit {machine.quota_cpus:g} CPUs")
    if job.granted_cpus is not None and job.granted_cpus < len(machine.cpus):
        parts.append(f"{job.scheduler} grants {job.granted_cpus} CPUs")
    return ", ".join(parts)
