"""Makes the plan: a pure function of settings, machine and job, with a reason for each decision."""

from __future__ import annotations

import sys

from msgspec.structs import replace

from entrypoint.core.errors import UserError, count_text, printable, refuse_if
from entrypoint.job.node_group import START_TIME_VAR, check_master, parse_port, port_from_job_id
from entrypoint.job.slurm import number
from entrypoint.job.unclaimed import unclaimed_rank_variables
from entrypoint.machine.detect import describe_machine
from entrypoint.machine.interpreter import PTH_FILE
from entrypoint.plan.binding import BindingDecision, decide_binding
from entrypoint.plan.devices import decide_backend, decide_devices, hosts_setting
from entrypoint.plan.display import core_map
from entrypoint.plan.environment import USER_OVERRIDABLE, decide_environment, warn_host_leaks
from entrypoint.plan.inputs import PlanInputs, RemoteLauncher
from entrypoint.plan.key_decision import decide_job_key, decide_key_source, warn_of_one_node
from entrypoint.plan.model import (
    BindingPlan,
    Decision,
    EnvironmentPlan,
    LauncherKind,
    NodePlan,
    Plan,
    RendezvousPlan,
    Source,
)
from entrypoint.plan.preflight import preflight_checks
from entrypoint.plan.remote_ranks import world_size_for
from entrypoint.plan.restarts import agent_command, decide_output, decide_restarts
from entrypoint.plan.runtime_libraries import choose_runtime


def make_plan(inputs: PlanInputs) -> Plan:
    """Decide everything for this node; the same inputs give the same plan.

    Raises `UserError` for what the machine cannot do (code 3) and for settings that contradict (code 2).
    """
    values, checks = inputs.settings.values, preflight_checks(inputs)
    devices = decide_devices(inputs)
    binding = decide_binding(inputs, devices)
    backend = decide_backend(inputs, devices.device, devices.nproc)
    restarts, restart_decisions = decide_restarts(inputs)
    launcher, launcher_decision = decide_launcher(inputs, devices.nproc, restarts)
    runtime = choose_runtime(inputs, spinning_is_costly=binding.spinning_is_costly)
    variables, variable_decisions = decide_environment(inputs, devices, binding.ranks, runtime.environment)
    output, output_decisions, output_warnings = decide_output(inputs, launcher, devices.nproc)
    plan = Plan(
        launcher=launcher,
        nodes=plan_nodes(inputs, devices.nproc, restarts),
        rendezvous=plan_rendezvous(inputs),
        ranks=binding.ranks,
        binding=plan_binding(inputs, binding),
        environment=EnvironmentPlan(
            variables=variables,
            user_set=tuple(name for name in USER_OVERRIDABLE if inputs.environ.get(name)),
            preload=runtime.preload,
            sets_rank=sets_rank_variables(inputs, devices.nproc),
        ),
        device=devices.device,
        backend=backend.value,
        collective_timeout_s=collective_timeout_s(inputs),
        grace_period_s=values.grace_period_s,
        output=output,
        program=inputs.program,
        command=inputs.program.argv,
        decisions=(
            *decide_place(inputs),
            *devices.decisions,
            *binding.decisions,
            backend,
            launcher_decision,
            *restart_decisions,
            *output_decisions,
            *runtime.decisions,
            *variable_decisions,
        ),
        warnings=(
            *(check.line for check in checks if check.state == "warning"),
            *devices.warnings,
            *binding.warnings,
            *runtime.warnings,
            *output_warnings,
            *warn_of_one_node(inputs),
            *warn_unused_variables(inputs, devices.nproc),
            *warn_host_leaks(inputs),
            *warn_without_hook(inputs, devices.nproc),
        ),
        prominent_warning=next((check.line for check in checks if check.is_prominent), ""),
        machine=describe_machine(inputs.machine),
    )
    return replace(plan, command=agent_command(plan, inputs)) if launcher == LauncherKind.TORCHRUN else plan


def plan_nodes(inputs: PlanInputs, nproc: int, restarts: int) -> NodePlan:
    """Return how many nodes and ranks the job has."""
    group = inputs.node_group
    return NodePlan(
        nnodes=group.nnodes,
        min_nodes=group.min_nodes or group.nnodes,
        node_rank=group.node_rank,
        nproc_per_node=nproc,
        world_size=world_size_for(inputs, nproc),
        max_restarts=restarts,
    )


def plan_binding(inputs: PlanInputs, binding: BindingDecision) -> BindingPlan:
    """Return what is pinned, and how memory is bound."""
    values = inputs.settings.values
    return BindingPlan(
        cpu_binding="ranks" if values.cpu_binding == "auto" else values.cpu_binding,
        core_map=core_map(inputs.machine, binding.ranks),
        reserved_cpus=binding.reserved_cpus,
    )


def sets_rank_variables(inputs: PlanInputs, nproc: int) -> bool:
    """Return whether ranks get RANK, WORLD_SIZE and the like; raises `UserError` if LAUNCH_ENV=none cannot be."""
    if inputs.settings.values.env != "none":
        return True
    source, ranks = inputs.settings.sources["env"], world_size_for(inputs, nproc)
    is_trainer = inputs.program.kind == "train"
    refuse_if(
        {
            f"{source}: {ranks} ranks find each other by RANK and WORLD_SIZE. Start one rank, or unset it.": ranks > 1,
            f"{source}: is for a script of your own, and the trainer reads the variables. Unset it.": is_trainer,
        }
    )
    return False


def plan_rendezvous(inputs: PlanInputs) -> RendezvousPlan:
    """Return where ranks of several nodes meet; raises `UserError` where MASTER_ADDR is no host."""
    group = inputs.node_group
    if group.nnodes > 1 or inputs.job.world_size > 1 or inputs.remote_launcher:
        for name in filter(None, (inputs.environ.get("MASTER_ADDR"), group.master_addr)):
            check_master(name)
    user_port = group.port if group.nnodes > 1 else inputs.environ.get("MASTER_PORT", "")
    key_source, key_file = decide_key_source(inputs)
    return RendezvousPlan(
        master_addr=group.master_addr or inputs.job.master_addr,
        master_port=rendezvous_port(inputs),
        port_is_derived=not user_port,
        timeout_s=inputs.settings.values.rendezvous_timeout_s,
        run_identity=inputs.run_identity,
        key_source=key_source,
        key_file=key_file,
    )


def collective_timeout_s(inputs: PlanInputs) -> int:
    """Return how many seconds a collective may take: less over several nodes, where a node can be lost."""
    requested = inputs.settings.values.collective_timeout_s
    if requested != "auto":
        return requested
    return 60 if inputs.node_group.nnodes > 1 or not inputs.job.on_one_node else 1800


def decide_place(inputs: PlanInputs) -> tuple[Decision, ...]:
    """Return on which of the nodes this is, who may join them, and which Python runs the script."""
    return (*decide_nodes(inputs), *decide_job_key(inputs), *decide_interpreter(inputs))


def decide_interpreter(inputs: PlanInputs) -> tuple[Decision, ...]:
    """Return the Python of a script that is not run by the launcher's own, with its torch."""
    interpreter, torch = inputs.interpreter, inputs.machine.packages.versions.get("torch")
    if interpreter.path == sys.executable:
        return ()
    version = f"torch {torch}" if torch else "no torch"
    source, setting = (Source.USER, interpreter.reason) if interpreter.asked else (Source.AUTO, "")
    reason = version if interpreter.asked else f"{interpreter.reason}; {version}"
    return (Decision("python", printable(interpreter.path), reason, source, setting),)


def decide_nodes(inputs: PlanInputs) -> tuple[Decision, ...]:
    """Return this node's place among several on each of which an entrypoint was started."""
    group = inputs.node_group
    if group.nnodes == 1:
        return ()
    value = f"{group.min_nodes}:{group.nnodes}" if group.min_nodes else str(group.nnodes)
    place = f"this is node {group.node_rank}; node 0 is {group.master_addr}"
    if group.source in inputs.settings.sources.values():
        return (Decision(key="nodes", value=value, reason=place, source=Source.USER, setting=group.source),)
    return (Decision("nodes", value, f"{group.source}; {place}"),)


def rendezvous_port(inputs: PlanInputs) -> str:
    """Return the port at the master on which several nodes meet, empty where there is one.

    Raises `UserError` where what was set for it is no port.
    """
    for text in filter(None, (inputs.node_group.port, inputs.environ.get("MASTER_PORT", ""))):
        parse_port(text)
    return inputs.node_group.port or (str(port_from_job_id(inputs.job.job_id)) if inputs.node_group.nnodes > 1 else "")


def decide_launcher(inputs: PlanInputs, nproc: int, restarts: int) -> tuple[LauncherKind, Decision]:
    """Never nest launchers: a process that a launcher started becomes its rank.

    Only torchrun's agent restarts ranks of several nodes; it imports torch before the first rank starts.
    Raises `UserError` where LAUNCH_LAUNCHER=direct is to start several ranks.
    """
    job = inputs.job
    check_launcher_setting(inputs)
    if job.launcher:
        reason = f"rank {job.rank} of {job.world_size}, started by {job.launcher}"
        return LauncherKind.RANK, Decision("launcher", "rank", reason)
    if inputs.remote_launcher:
        return decide_remote_launcher(inputs, inputs.remote_launcher)
    requested = inputs.settings.values.launcher
    if requested == "direct" and nproc > 1:
        source = inputs.settings.sources["launcher"]
        raise UserError(f"{source}: starts one rank, not {nproc}. Set LAUNCH_NPROC_PER_NODE=1.")
    nnodes = inputs.node_group.nnodes
    uses_agent = requested == "torchrun" or (restarts and nnodes > 1)
    kind = LauncherKind.TORCHRUN if uses_agent else LauncherKind.LOCAL
    if nnodes > 1:
        return kind, Decision("launcher", kind, f"starts {nproc} of the {nproc * nnodes} ranks on this node")
    if nproc == 1 and requested not in ("local", "torchrun") and not restarts:
        return LauncherKind.DIRECT, inputs.decide("launcher", "launcher", "direct", "one rank, started as a child")
    what = "restarts failed ranks" if restarts else "children of the entrypoint, without importing torch"
    return kind, inputs.decide("launcher", "launcher", kind, f"{nproc} rank{'s' * (nproc > 1)}; {what}")


# The values of LAUNCH_LAUNCHER that agree with a launcher which has already started this rank.
SAME_LAUNCHER = {"torchrun": "torchrun", "srun": "srun"}


def check_launcher_setting(inputs: PlanInputs) -> None:
    """Raise `UserError` for LAUNCH_HOSTS without mpirun, and for settings of a launcher in a rank that one started.

    The ranks of a launcher that the entrypoint itself started have them too (START_TIME_VAR).
    """
    job, values, sources = inputs.job, inputs.settings.values, inputs.settings.sources
    nodes, other = inputs.node_group, sources.get("launcher") or sources.get("nnodes") or "the environment"
    by_hand = nodes.nnodes > 1 and nodes.source in sources.values()
    if job.launcher is None:
        has_mpirun = inputs.remote_launcher and inputs.remote_launcher.mpi
        refuse_if(
            {
                f"{sources.get('hosts')}: only mpirun uses it, and {other} starts no mpirun. Drop one of the two.": (
                    values.hosts and not has_mpirun
                ),
                f"{other} and {nodes.source} contradict: with several nodes, each starts its own ranks. Drop one of the"
                " two.": by_hand and values.launcher in ("direct", "mpirun", "srun"),
            }
        )
    if inputs.environ.get(START_TIME_VAR) or job.launcher is None:
        return
    agrees = values.launcher in ("auto", SAME_LAUNCHER.get(job.launcher, "mpirun"))
    alone = values.launcher == "direct" and job.world_size == 1
    setting = sources.get("hosts", "") if values.hosts else "" if agrees or alone else sources.get("launcher", "")
    if setting:
        raise UserError(
            f"{setting}: {job.launcher} has already started this process as rank {job.rank} of {job.world_size}."
            " Unset it, or start the entrypoint once."
        )


def decide_remote_launcher(inputs: PlanInputs, launcher: RemoteLauncher) -> tuple[LauncherKind, Decision]:
    """Return the decision for mpirun or srun, which starts ranks on other nodes too."""
    kind = LauncherKind.MPIRUN if launcher.mpi else LauncherKind.SRUN
    detail = f"{launcher.path}; each rank makes its own plan"
    if inputs.settings.values.hosts and not inputs.is_set_by_user("launcher"):
        setting = inputs.settings.sources["hosts"]
        return kind, Decision(key="launcher", value=kind, reason=detail, source=Source.USER, setting=setting)
    return kind, inputs.decide(
        "launcher", "launcher", kind, f"the batch job has {len(inputs.job.hostnames)} nodes", detail
    )


def warn_without_hook(inputs: PlanInputs, nproc: int) -> tuple[str, ...]:
    """Warn of a Python that lacks what keeps a rank from aborting at its end: 1 of 12 jobs of two ranks was lost."""
    has_torch = "torch" in inputs.machine.packages.versions
    if world_size_for(inputs, nproc) == 1 or inputs.interpreter.has_hook or not has_torch:
        return ()
    python = printable(inputs.interpreter.path)
    return (f"{python} has no {PTH_FILE}, so some torch versions may abort at their end. Install the wheel there.",)


def warn_unused_variables(inputs: PlanInputs, nproc: int) -> tuple[str, ...]:
    """Name what says that there are several ranks, where the user's settings or the batch job say otherwise."""
    job, environ = inputs.job, inputs.environ
    if job.launcher or inputs.node_group.nnodes > 1:
        return ()
    lines = []
    setting = inputs.settings.sources["launcher"] if inputs.is_set_by_user("launcher") else hosts_setting(inputs)
    if setting and not environ.get("SLURM_JOB_ID"):
        unused = list(unclaimed_rank_variables(environ))
        if inputs.settings.values.launcher == "direct" and environ.get("PET_NPROC_PER_NODE", "1") != "1":
            unused.append(f"PET_NPROC_PER_NODE={printable(environ['PET_NPROC_PER_NODE'])}")
        why = "starts all ranks" if inputs.remote_launcher else "starts ranks on this node alone"
        lines += [f"{', '.join(unused)}: not used, {setting} {why}"] if unused else []
    if inputs.remote_launcher:
        return tuple(lines)
    start = "Start the ranks by flux run" if job.scheduler == "Flux" else "Bind that file"
    tasks = number(environ, "SLURM_NTASKS", 1) if environ.get("SLURM_JOB_ID") else 1
    unused_here = {
        f"{job.hidden_hosts}: does not tell the hosts here, so any other nodes of this {job.scheduler} job are not"
        f" used. {start}, or set LAUNCH_HOSTS.": job.hidden_hosts,
        f"{inputs.settings.sources.get('python')}: has no effect, the trainer runs by the launcher's own Python": (
            inputs.program.kind == "train" and inputs.is_set_by_user("python")
        ),
        f"the script reads {inputs.foreign_variable}, which this launcher does not set; if it needs it, use --launcher"
        " mpirun, or RANK and WORLD_SIZE in the script": inputs.foreign_variable,
        f"SLURM_NTASKS={tasks}: not used, this run starts {count_text(nproc, 'rank')}. Set"
        f" LAUNCH_NPROC_PER_NODE={tasks} for {tasks}, or ask for CPUs by --cpus-per-task.": (
            tasks not in (1, nproc) and not inputs.is_set_by_user("nproc_per_node")
        ),
    }
    return (*lines, *(line for line, holds in unused_here.items() if holds))
