"""The decisions put together: a pure function from settings, machine and job to a plan with a reason for each."""

from __future__ import annotations

from dataclasses import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.job.ports import parse_port, port_from_job_id
from entrypoint.machine.detect import Machine
from entrypoint.plan.binding import decide_binding
from entrypoint.plan.devices import decide_backend, decide_devices
from entrypoint.plan.display import core_map
from entrypoint.plan.environment import USER_OVERRIDABLE, decide_environment, warn_host_leaks
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, Plan
from entrypoint.plan.preflight import Check, preflight_checks
from entrypoint.plan.restarts import agent_command, decide_restarts
from entrypoint.plan.runtime_libraries import choose_runtime


def make_plan(question: PlanInputs) -> Plan:
    """Decide everything for this node; the same question gives the same plan.

    Raises `Refused` for what the machine cannot do (exit 3) and for settings that contradict (exit 2).
    """
    values, warnings = question.settings.values, collect_warnings(preflight_checks(question))
    nodes = decide_nodes(question)
    devices = decide_devices(question)
    binding = decide_binding(question, devices)
    backend = decide_backend(question, devices.device, devices.nproc)
    restarts, restarts_decision = decide_restarts(question)
    launcher, launcher_decision = decide_launcher(question, devices.nproc, restarts)
    runtime = choose_runtime(question, binding.spinning_is_costly)
    environment, environment_decisions = decide_environment(question, devices, binding.ranks, runtime.environment)
    plan = Plan(
        launcher=launcher,
        backend=backend.value,
        device=devices.device,
        nnodes=question.nodes.count,
        nproc_per_node=devices.nproc,
        ranks=binding.ranks,
        environment=environment,
        yours=tuple(name for name in USER_OVERRIDABLE if question.environ.get(name)),
        bind="ranks" if values.cpu_binding == "auto" else values.cpu_binding,
        memory_policy="bind" if values.memory_binding == "auto" else values.memory_binding,
        preload=runtime.preload,
        program=question.program,
        command=question.program.argv,
        decisions=(
            *nodes,
            *devices.decisions,
            *binding.decisions,
            backend,
            launcher_decision,
            *restarts_decision,
            *runtime.decisions,
            *environment_decisions,
        ),
        warnings=warnings + devices.warnings + binding.warnings + runtime.warnings + warn_host_leaks(question),
        node=describe_node(question.machine),
        world_size=question.world_size_for(devices.nproc),
        node_rank=question.nodes.rank,
        master_addr=question.nodes.master or question.job.master,
        master_port=rendezvous_port(question),
        rendezvous_timeout_s=values.rendezvous_timeout_s,
        fail_timeout_s=(60 if question.nodes.count > 1 or not question.job.on_one_node else 1800)
        if values.collective_timeout_s == "auto"
        else values.collective_timeout_s,
        grace_s=values.grace_period_s,
        max_restarts=restarts,
        port_moves=not (question.nodes.port if question.nodes.count > 1 else question.environ.get("MASTER_PORT")),
        min_nodes=question.nodes.fewest or question.nodes.count,
        map=core_map(question.machine, binding.ranks),
        reserved_cpus=binding.reserved_cpus,
    )
    return replace(plan, command=agent_command(plan, question)) if launcher == "torchrun" else plan


def decide_nodes(question: PlanInputs) -> tuple[Decision, ...]:
    """Tell this node's place among several on each of which an entrypoint was started."""
    nodes = question.nodes
    if nodes.count == 1:
        return ()
    yours = "(yours) " if nodes.source in question.settings.sources.values() else ""
    why = f"{yours}{nodes.source}, this is number {nodes.rank}, number 0 is {nodes.master}"
    return (Decision("nodes", f"{nodes.fewest}:{nodes.count}" if nodes.fewest else str(nodes.count), why),)


def rendezvous_port(question: PlanInputs) -> str:
    """Return the port at the master on which several nodes meet, empty where there is one.

    Raises `Refused` where what was set for it is no port.
    """
    for text in filter(None, (question.nodes.port, question.environ.get("MASTER_PORT", ""))):
        parse_port(text)
    return question.nodes.port or (str(port_from_job_id(question.job.id)) if question.nodes.count > 1 else "")


def collect_warnings(checks: tuple[Check, ...]) -> tuple[str, ...]:
    """Return the warnings of the checks; raises `Refused` for a failure."""
    failures = [check.line for check in checks if check.state == "failure"]
    if failures:
        raise UserError("\n".join(failures), ExitCode.MACHINE)
    return tuple(check.line for check in checks if check.state == "warning")


def decide_launcher(question: PlanInputs, nproc: int, restarts: int) -> tuple[str, Decision]:
    """Never nest: what a launcher started becomes its rank; one rank needs no launcher unless it is to restart.

    Only torchrun's agent starts ranks again; it imports torch before the first of them may begin.
    """
    job = question.job
    if job.launcher:
        return "rank", Decision("launcher", "rank", f"this is rank {job.rank} of {job.world_size} by {job.launcher}")
    nnodes = question.nodes.count
    if question.starter:
        name, yours = ("mpirun" if question.starter.mpi else "srun"), question.why("launcher", "")
        why = yours or (
            question.settings.sources["hosts"]
            if question.settings.values.hosts
            else f"the batch job has {len(question.job.nodes)} nodes"
        )
        return name, Decision("launcher", name, f"{why}; {question.starter.path} starts the ranks, each plans anew")
    asked = question.settings.values.launcher
    if asked == "direct" and nproc > 1:
        raise UserError(
            f"{question.settings.sources['launcher']}: starts one rank, not {nproc}; set LAUNCH_NPROC_PER_NODE=1"
        )
    name = "torchrun" if restarts or asked == "torchrun" else "local"
    if nnodes > 1:
        why = f"starts and watches this node's ranks, {nproc} of {nproc * nnodes}; the others' meet them at MASTER_ADDR"
        return name, Decision("launcher", name, why)
    if nproc == 1 and asked not in ("local", "torchrun") and not restarts:
        return "direct", Decision("launcher", "direct", "one rank needs none")
    again = ", again where one fails" if restarts else ", seconds sooner than torchrun would" if name == "local" else ""
    why = question.why("launcher", f"starts and watches {nproc} rank{'s' if nproc > 1 else ''} on this node{again}")
    return name, Decision("launcher", name, why)


def describe_node(machine: Machine) -> str:
    """Say the machine in one line."""
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    memory = f"{machine.memory_bytes / 2**30:.1f} GiB" if machine.memory_bytes else "memory unknown"
    cores = len({(cpu.socket, cpu.core) for cpu in machine.cpus})
    nodes = len({(cpu.socket, cpu.node) for cpu in machine.cpus})
    numa = f", {nodes} NUMA nodes" if nodes > 1 else ""
    return (
        f"{machine.hostname}: {machine.cpu_model}, {len(machine.cpus)} of {machine.online_cpus} CPUs"
        f" ({cores} physical core{'s' if cores != 1 else ''}{numa}), {memory}, {gpus}"
    )
