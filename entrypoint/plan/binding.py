"""Which CPUs, memory and threads each local rank gets, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.core_assignment import assign_cores, assign_near_gpus, assign_threads, cpus_of
from entrypoint.plan.cpu_budget import CpuBudget, compute_cpu_budget
from entrypoint.plan.devices import Devices
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, RankPlan
from entrypoint.plan.runtime_libraries import THREAD_VARIABLES
from entrypoint.plan.shared_node import ReservedCpus, reserve_busy_cpus


@dataclass(frozen=True)
class BindingDecision:
    """The ranks; `spinning_is_costly` if a spinning thread takes time from another; `reserved_cpus` are left free."""

    ranks: tuple[RankPlan, ...]
    spinning_is_costly: bool
    reserved_cpus: int
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]


def decide_binding(question: PlanInputs, devices: Devices) -> BindingDecision:
    """Deal cores, memory and threads to the local ranks; raises `Refused` where there are too few cores."""
    budget = compute_cpu_budget(question.machine, question.job, question.settings.values.core_type, devices.nproc)
    check_core_count(question, budget, devices.nproc)
    if question.bound_by_launcher:
        cpus, fair, cores_decision = use_launcher_affinity(question, budget, devices.nproc)
        shared = False
    else:
        cpus, cores_decision = decide_cores(question, budget, devices)
        fair = assign_threads(budget.threads, cpus)
        shared = devices.nproc > len(budget.cores)
    reserved = reserve_busy_cpus(question, devices.device, budget, cpus, fair)
    threads, why, warnings = decide_threads(question, fair, reserved)
    nodes, memory_decision = decide_memory(question, cpus)
    ranks = tuple(
        RankPlan(rank, cpus[rank], threads[rank], gpu_index(devices, rank), nodes[rank])
        for rank in range(devices.nproc)
    )
    spread = f"{min(threads)}" if len(set(threads)) == 1 else f"{min(threads)} to {max(threads)}"
    decisions = (cores_decision, Decision("threads", spread, why), *memory_decision)
    return BindingDecision(
        ranks, shared or budget.is_limited, reserved.count, decisions, warnings + warn_srun_cpus_per_task(question)
    )


def gpu_index(devices: Devices, rank: int) -> int | None:
    """Return the index of a rank's GPU among those that its process sees, None on CPU."""
    return min(rank, len(devices.gpus) - 1) if devices.gpus else None


def check_core_count(question: PlanInputs, budget: CpuBudget, nproc: int) -> None:
    """Refuse more ranks than cores, unless sharing them is asked for."""
    most = min(len(budget.cores), budget.threads)
    if nproc <= most or question.settings.values.oversubscribe or question.bound_by_launcher:
        return
    asked = question.settings.sources.get("nproc_per_node", f"{nproc} ranks")
    raise UserError(
        f"{asked}: more ranks than cores: {budget.text}; lower it, or set LAUNCH_OVERSUBSCRIBE=1 to let them share",
        ExitCode.MACHINE,
    )


def use_launcher_affinity(
    question: PlanInputs, budget: CpuBudget, nproc: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], Decision]:
    """Return the mask that a launcher has given this rank, and how many threads fit in it.

    A mask wider than a rank's part of the node, as of `--bind-to socket`, is that of several ranks.
    """
    machine = question.machine
    cpus = cpus_of(budget.cores)
    ranks_within = max(1, round(nproc * len(machine.cpus) / machine.online_cpus))
    threads = max(1, budget.threads // ranks_within)
    why = f"{question.job.launcher} has bound this rank to them"
    if ranks_within > 1:
        why += f", and about {ranks_within} ranks share them"
    return (cpus,) * nproc, (threads,) * nproc, Decision("cores", format_cpu_list(cpus), why)


def decide_cores(
    question: PlanInputs, budget: CpuBudget, devices: Devices
) -> tuple[tuple[tuple[int, ...], ...], Decision]:
    """Deal the budget's cores to the ranks: near each rank's GPU where that can be, else by NUMA node."""
    near = (
        assign_near_gpus(budget.cores, [gpu.node for gpu in devices.gpus])
        if len(devices.gpus) == devices.nproc
        else None
    )
    cpus = tuple(cpus_of(share) for share in near or assign_cores(budget.cores, devices.nproc))
    if question.settings.values.cpu_binding == "none":
        return cpus, Decision("cores", "not bound", question.why("cpu_binding", ""))
    lists = list(dict.fromkeys(format_cpu_list(share) for share in cpus))
    dealt = " | ".join(lists[:8]) + (" | …" if len(lists) > 8 else "")
    if devices.nproc > len(budget.cores):
        return cpus, Decision("cores", dealt, f"{budget.text}; more ranks than cores, so all share")
    why = budget.text if len(budget.cores) < budget.threads else f"{budget.text}, one CPU a core"
    why += ", each rank's near its GPU" if near else ", dealt out disjoint" if devices.nproc > 1 else ""
    squeezed = question.machine.launcher_affinity
    if squeezed:
        why += f"; {question.job.launcher} had put this rank on {format_cpu_list(squeezed)}, unasked"
    return cpus, Decision("cores", dealt, why)


def decide_threads(
    question: PlanInputs, fair: tuple[int, ...], reserved: ReservedCpus
) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """Return threads for each rank, the reason, and a warning where a person asks for more than fits.

    `fair` is what fits without other processes; if the user sets nothing, it is less what is `reserved` for them.
    """
    own = user_thread_counts(question)
    asked = question.settings.values.threads
    written = question.settings.sources.get("threads", "")
    contradicting = [name for name, count in own.items() if asked not in ("auto", count)]
    if contradicting:
        name = contradicting[0]
        raise UserError(f"{written} and {name}={own[name]} say different things; unset one of them")
    if len(set(own.values())) > 1:
        both = " and ".join(f"{name}={count}" for name, count in own.items())
        raise UserError(f"{both} say different things, and torch takes MKL's; unset one of them")
    chosen = next(iter(own.values()), None) if asked == "auto" else asked
    if chosen is None:
        reason = f"less CPUs in use: {reserved.reason}" if reserved.reason else "the rank's share of the physical cores"
        return reserved.threads, reason, reserved.warnings
    name = next(iter(own), "")
    why = f"(yours) {name}={chosen}" if asked == "auto" else question.why("threads", "")
    if chosen <= min(fair):
        return (chosen,) * len(fair), why, ()
    warning = f"{chosen} threads a rank on {min(fair)} cores will wait for each other; {min(fair)} would fit"
    return (chosen,) * len(fair), why, (warning,)


def user_thread_counts(question: PlanInputs) -> dict[str, int]:
    """Return the numbers of threads that a person has set, by variable; raises `Refused` for no number."""
    found: dict[str, int] = {}
    for name in THREAD_VARIABLES:
        text = question.environ.get(name, "")
        if text and not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text, re.ASCII):
            raise UserError(f"{name}={printable(text)}: should be a whole number from 1; correct or unset it")
        if text:
            found[name] = int(text.split(",")[0])
    return found


def decide_memory(
    question: PlanInputs, cpus: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[int, ...], ...], tuple[Decision, ...]]:
    """Bind each rank's memory to the NUMA node that holds all of its CPUs, where there are several with memory."""
    machine, values = question.machine, question.settings.values
    if len(machine.memory_nodes) < 2 or values.cpu_binding == "none" or question.bound_by_launcher:
        return ((),) * len(cpus), ()
    node_of = {cpu.id: cpu.node for cpu in machine.cpus}
    nodes = tuple(tuple({node_of[cpu] for cpu in share}) for share in cpus)
    if values.memory_binding == "default":
        return ((),) * len(cpus), (Decision("memory", "default", question.why("memory_binding", "")),)
    bound = tuple(within if len(within) == 1 and within[0] in machine.memory_nodes else () for within in nodes)
    if not any(bound):
        return bound, (
            Decision("memory", "default", "a rank's cores lie on several NUMA nodes: first touch places it"),
        )
    where = format_cpu_list(tuple({node for within in bound for node in within}))
    policy = "bind" if values.memory_binding == "auto" else values.memory_binding
    why = question.why(
        "memory_binding",
        "each rank's to the NUMA node of its cores; LAUNCH_MEMORY_BINDING=preferred lets it spill over",
    )
    return bound, (Decision("memory", f"{policy} {where}", why),)


def warn_srun_cpus_per_task(question: PlanInputs) -> tuple[str, ...]:
    """Warn of a rank that srun left fewer CPUs than its part of the job's: since Slurm 22.05 it needs --cpus-per-task.

    Source: Slurm 22.05 release notes (srun no longer reads SLURM_CPUS_PER_TASK).
    """
    job, here = question.job, len(question.machine.cpus)
    if job.launcher != "srun" or not job.node_cpus or here * job.local_world_size >= job.node_cpus:
        return ()
    each = job.node_cpus // job.local_world_size
    return (
        f"srun left this rank {here} of the {job.node_cpus} CPUs that the job has here; write srun"
        f" --cpus-per-task={each}, or export SRUN_CPUS_PER_TASK={each} before it",
    )
