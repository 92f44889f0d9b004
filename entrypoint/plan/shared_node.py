"""Fewer threads where other processes keep CPUs of this node busy."""

from __future__ import annotations

from msgspec import Struct

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.plan.cpu_budget import CpuBudget, group_by_core
from entrypoint.plan.inputs import PlanInputs


class ReservedCpus(Struct, frozen=True, kw_only=True):
    """CPUs that are left free for other processes: `count` of them, the threads of each rank, and the reason."""

    count: int
    threads: tuple[int, ...]
    reason: str = ""
    warnings: tuple[str, ...] = ()


def reserve_busy_cpus(
    inputs: PlanInputs,
    device: str,
    budget: CpuBudget,
    cpus: tuple[tuple[int, ...], ...],
    max_threads: tuple[int, ...],
) -> ReservedCpus:
    """Return the threads of each rank, at most `max_threads`, after CPUs are reserved for other processes.

    OpenMP splits loops into equal parts and waits for the slowest thread, so one busy CPU slows down a whole rank.
    If more than half of the CPUs are busy, fewer threads do not help. A resumed run on as many cores keeps the threads
    of its plan, because other threads round differently. Raises `UserError` where the user reserves all CPUs of a rank.
    """
    requested = inputs.settings.values.reserve_cpus
    previous = inputs.previous
    same_cores = previous and [len(rank.cpus) for rank in previous.ranks] == [len(share) for share in cpus]
    if requested == "auto" and previous and same_cores and device == "cpu":
        threads = tuple(min(rank.threads, most) for rank, most in zip(previous.ranks, max_threads, strict=True))
        reason = "" if threads == max_threads else "same as in the run being resumed"
        return ReservedCpus(count=previous.binding.reserved_cpus, threads=threads, reason=reason)
    busy = inputs.busy_cpus if requested == "auto" else requested
    machine = inputs.machine
    # Other processes use the cores without a rank first.
    busy_cores = max(0, busy - len(group_by_core(machine.cpus, siblings=False)) + len(budget.cores))
    per_rank = -(-busy_cores // len(cpus))
    smallest = min(map(len, cpus))
    threads = tuple(min(most, len(share) - per_rank) for most, share in zip(max_threads, cpus, strict=True))
    if threads == max_threads:  # as under a CPU limit
        return ReservedCpus(count=busy, threads=max_threads)
    if requested == "auto" and device != "cpu":
        return ReservedCpus(count=0, threads=max_threads)
    used = f"other processes use {machine.busy_cpus:.1f} of {len(machine.cpus)} CPUs"
    if requested == "auto" and 2 * per_rank > smallest:
        hint = f"{used}; run `entrypoint tune` to find the fastest number of threads"
        return ReservedCpus(count=0, threads=max_threads, warnings=(hint,))
    if per_rank >= smallest:
        raise UserError(
            f"{inputs.settings.sources['reserve_cpus']}: leaves no CPU to a rank that has {smallest}. Lower it.",
            ExitCode.MACHINE,
        )
    reason = inputs.settings.sources["reserve_cpus"] if inputs.is_set_by_user("reserve_cpus") else used
    return ReservedCpus(count=busy, threads=threads, reason=f"less: {reason}")
