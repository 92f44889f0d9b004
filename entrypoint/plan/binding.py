"""Which CPUs, memory and threads each local rank gets, and why."""

from __future__ import annotations

import re

from msgspec import Struct

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.cpu_budget import (
    CpuBudget,
    assign_cores,
    assign_near_gpus,
    assign_threads,
    compute_cpu_budget,
    cpus_of,
    group_by_core,
)
from entrypoint.plan.devices import Devices
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, RankPlan, Source
from entrypoint.plan.remote_ranks import starts_ranks_here
from entrypoint.plan.runtime_libraries import THREAD_VARIABLES

# No OpenMP program gets more threads, whatever else is set (OpenMP 5.2, 21.1.8).
THREAD_LIMIT = "OMP_THREAD_LIMIT"


class BindingDecision(Struct, frozen=True):
    """The ranks; `spinning_is_costly` if a spinning thread takes time from another; `reserved_cpus` are left free."""

    ranks: tuple[RankPlan, ...]
    spinning_is_costly: bool
    reserved_cpus: int
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]


def decide_binding(inputs: PlanInputs, devices: Devices) -> BindingDecision:
    """Assign cores, memory and threads to the local ranks; raises `UserError` where there are too few cores."""
    budget = compute_cpu_budget(inputs.machine, inputs.job, inputs.settings.values.core_type, devices.nproc)
    check_core_count(inputs, budget, devices.nproc)
    if inputs.bound_by_launcher:
        cpus, max_threads, cores_decision = use_launcher_affinity(inputs, budget, devices.nproc)
        shared = False
    else:
        cpus, cores_decision = decide_cores(inputs, budget, devices)
        max_threads = assign_threads(budget.threads, cpus)
        shared = devices.nproc > len(budget.cores)
    reserved = reserve_busy_cpus(inputs, devices.device, budget, cpus, max_threads)
    threads, threads_decision, warnings = decide_threads(inputs, max_threads, reserved)
    memory_nodes, memory_decisions = decide_memory(inputs, cpus)
    ranks = tuple(
        RankPlan(
            local_rank=rank,
            cpus=cpus[rank],
            threads=threads[rank],
            # If the launcher shows a rank fewer GPUs than there are ranks, those that see the same ones take turns.
            gpu=rank % len(devices.gpus) if devices.gpus else None,
            memory_nodes=memory_nodes[rank],
        )
        for rank in range(devices.nproc)
    )
    return BindingDecision(
        ranks=ranks,
        spinning_is_costly=shared or budget.is_limited,
        reserved_cpus=reserved.count,
        decisions=(cores_decision, threads_decision, *memory_decisions),
        warnings=warnings + warn_srun_cpus_per_task(inputs),
    )


def check_core_count(inputs: PlanInputs, budget: CpuBudget, nproc: int) -> None:
    """Raise `UserError` for more ranks than cores, unless LAUNCH_OVERSUBSCRIBE allows it."""
    most = min(len(budget.cores), budget.threads)
    if nproc <= most or inputs.settings.values.oversubscribe or inputs.bound_by_launcher:
        return
    if not starts_ranks_here(inputs):
        return
    from_platform = nproc == inputs.node_group.nproc_per_node
    default = f"PET_NPROC_PER_NODE={nproc}" if from_platform else f"{nproc} ranks"
    source = inputs.settings.sources.get("nproc_per_node", default)
    raise UserError(
        f"{source}: more ranks than cores: {budget.text}. Lower it, or set LAUNCH_OVERSUBSCRIBE=1 to share cores.",
        ExitCode.MACHINE,
    )


def use_launcher_affinity(
    inputs: PlanInputs, budget: CpuBudget, nproc: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], Decision]:
    """Return the CPUs that a launcher has bound this rank to, and how many threads fit on them.

    If they are more than a rank's share of the node, as with `--bind-to socket`, several ranks share them.
    """
    machine = inputs.machine
    cpus = cpus_of(budget.cores)
    ranks_within = max(1, round(nproc * len(machine.cpus) / machine.online_cpus))
    threads = max(1, budget.threads // ranks_within)
    reason = f"bound by {inputs.job.launcher}"
    if ranks_within > 1:
        reason += f"; about {ranks_within} ranks share them"
    return (cpus,) * nproc, (threads,) * nproc, Decision("cores", format_cpu_list(cpus), reason)


def decide_cores(
    inputs: PlanInputs, budget: CpuBudget, devices: Devices
) -> tuple[tuple[tuple[int, ...], ...], Decision]:
    """Assign the budget's cores to the ranks: near each rank's GPU if possible, else by NUMA node."""
    gpu_nodes = [gpu.node for gpu in devices.gpus]
    near_gpus = assign_near_gpus(budget.cores, gpu_nodes) if len(gpu_nodes) == devices.nproc else None
    cpus = tuple(cpus_of(share) for share in near_gpus or assign_cores(budget.cores, devices.nproc))
    if inputs.settings.values.cpu_binding == "none":
        return cpus, inputs.decide("cpu_binding", "cores", "not bound", "")
    lists = list(dict.fromkeys(format_cpu_list(share) for share in cpus))
    value = " | ".join(lists[:8]) + (" | …" if len(lists) > 8 else "")
    if devices.nproc > len(budget.cores):
        return cpus, Decision("cores", value, f"{budget.text}; more ranks than cores: shared")
    reason = budget.text if len(budget.cores) < budget.threads else f"{budget.text}, one CPU per core"
    reason += "; near each rank's GPU" if near_gpus else "; disjoint" if devices.nproc > 1 else ""
    overridden = inputs.machine.launcher_affinity
    if overridden:
        reason += f"; {inputs.job.launcher}'s default binding to CPUs {format_cpu_list(overridden)} is overridden"
    return cpus, Decision("cores", value, reason)


def decide_threads(
    inputs: PlanInputs, max_threads: tuple[int, ...], reserved: ReservedCpus
) -> tuple[tuple[int, ...], Decision, tuple[str, ...]]:
    """Return the threads of each rank, the decision, and a warning where the user asks for more than fit.

    `max_threads` is what fits without other processes. If the user sets nothing, it is less the `reserved` CPUs.
    """
    requested = inputs.settings.values.threads
    choices = {f"{name}={count}": count for name, count in user_thread_counts(inputs, THREAD_VARIABLES).items()}
    if requested != "auto":
        choices = {inputs.settings.sources["threads"]: requested, **choices}
    setting, chosen = next(iter(choices.items()), ("", None))
    limit = user_thread_counts(inputs, (THREAD_LIMIT,)).get(THREAD_LIMIT)
    other = next((text for text, count in choices.items() if count != chosen), "")
    if chosen and limit and limit < chosen:
        other = f"{THREAD_LIMIT}={limit}"
    if other:
        raise UserError(f"{setting} and {other} contradict. Unset one of them.")
    if chosen is None and limit and limit < min(reserved.threads):
        setting, chosen = f"{THREAD_LIMIT}={limit}", limit
    if chosen is None:
        threads = reserved.threads
        text = f"{min(threads)}" if len(set(threads)) == 1 else f"{min(threads)} to {max(threads)}"
        reason = reserved.reason or "the rank's share of the physical cores"
        return threads, Decision("threads", text, reason), reserved.warnings
    decision = Decision(key="threads", value=str(chosen), reason="", source=Source.USER, setting=setting)
    if chosen <= min(max_threads):
        return (chosen,) * len(max_threads), decision, ()
    warning = f"{chosen} threads per rank on {min(max_threads)} cores will wait for each other; {min(max_threads)} fit"
    return (chosen,) * len(max_threads), decision, (warning,)


def user_thread_counts(inputs: PlanInputs, names: tuple[str, ...]) -> dict[str, int]:
    """Return the numbers of threads that the user has set, by variable; raises `UserError` for anything else."""
    found: dict[str, int] = {}
    for name in names:
        text = inputs.environ.get(name, "")
        if text and not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text, re.ASCII):
            raise UserError(f"{name}={printable(text)}: not a whole number from 1. Correct or unset it.")
        if text:
            found[name] = int(text.split(",")[0])
    return found


def decide_memory(
    inputs: PlanInputs, cpus: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[int, ...], ...], tuple[Decision, ...]]:
    """Bind each rank's memory to the NUMA node of its CPUs, if several nodes have memory."""
    machine, values = inputs.machine, inputs.settings.values
    if len(machine.memory_nodes) < 2 or values.cpu_binding == "none" or inputs.bound_by_launcher:
        return ((),) * len(cpus), ()
    node_of = {cpu.id: cpu.node for cpu in machine.cpus}
    nodes = tuple(tuple({node_of[cpu] for cpu in share}) for share in cpus)
    bound = tuple(within if len(within) == 1 and within[0] in machine.memory_nodes else () for within in nodes)
    if not any(bound):
        return bound, (Decision("memory", "default", "a rank spans NUMA nodes: first touch places memory"),)
    where = format_cpu_list(tuple({node for within in bound for node in within}))
    return bound, (Decision("memory", f"bind {where}", "each rank's to the NUMA node of its cores"),)


def warn_srun_cpus_per_task(inputs: PlanInputs) -> tuple[str, ...]:
    """Warn of a rank that srun gave fewer CPUs than its share: since Slurm 22.05 srun needs --cpus-per-task.

    Source: Slurm 22.05 release notes (srun no longer reads SLURM_CPUS_PER_TASK).
    """
    job, here = inputs.job, len(inputs.machine.cpus)
    if job.launcher != "srun" or not job.node_cpus or here * job.local_world_size >= job.node_cpus:
        return ()
    each = job.node_cpus // job.local_world_size
    return (
        f"srun gave this rank {here} of the {job.node_cpus} CPUs that the job has on this node."
        f" Use srun --cpus-per-task={each}, or export SRUN_CPUS_PER_TASK={each} before it.",
    )


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
