"""The decisions: a pure function from settings, machine and job to a plan with a reason for each."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from entrypoint.errors import Exit, Refused, shown
from entrypoint.job import Job
from entrypoint.machine import Machine
from entrypoint.plan import Decision, Plan, Program, Rank
from entrypoint.runtime import decide_runtime
from entrypoint.settings import PREFIX, LaunchSettings
from entrypoint.shares import share_cpus, share_threads
from entrypoint.topology import format_cpu_list
from entrypoint.variables import Given

# Standard variables of others that the plan would set, and leaves alone where a person has set them.
STANDARD = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "MALLOC_CONF", "GLOO_SOCKET_IFNAME")

RUNTIME_REASONS = {
    "OMP_WAIT_POLICY": "cores are shared or rationed: a thread that spins takes another's time",
    "KMP_BLOCKTIME": "cores are shared or rationed: a thread that spins takes another's time",
    "MALLOC_CONF": "jemalloc for large tensors that live long",
}


@dataclass(frozen=True)
class Question:
    """What the plan is made from; `environ` is what the process was started with."""

    settings: Given[LaunchSettings]
    machine: Machine
    job: Job
    program: Program
    environ: Mapping[str, str]
    python: str = sys.executable

    def why(self, field: str, reason: str) -> str:
        """Return the reason for a setting's value: the person's own words where they gave it."""
        written = self.settings.source.get(field)
        return f"(yours) {written}" if written and getattr(self.settings.values, field) != "auto" else reason


def make_plan(question: Question) -> Plan:
    """Decide everything for this node; the same question gives the same plan.

    Raises `Refused` for what the machine cannot do (exit 3) and for settings that contradict (exit 2).
    """
    device, device_decision = decide_device(question)
    nproc, nproc_decision = decide_nproc(question, device)
    check_cores(question, nproc)
    ranks, rank_decisions, warnings = decide_ranks(question, device, nproc)
    backend, backend_decision = decide_backend(question, device, nproc)
    launcher, launcher_decision = decide_launcher(question, nproc)
    runtime = decide_runtime(
        question.settings, question.machine, question.environ.get("LD_PRELOAD", ""), spinning_costs(question, nproc)
    )
    environment, environment_decisions = decide_environment(question, ranks, runtime.environment)
    yours = tuple(name for name in STANDARD if question.environ.get(name))
    return Plan(
        launcher=launcher,
        backend=backend,
        device=device,
        nnodes=1,
        nproc_per_node=nproc,
        ranks=ranks,
        environment=environment,
        yours=yours,
        bind=question.settings.values.bind,
        preload=runtime.preload,
        program=question.program,
        command=command(question, launcher, nproc),
        decisions=(
            device_decision,
            nproc_decision,
            *rank_decisions,
            backend_decision,
            launcher_decision,
            *runtime.decisions,
            *environment_decisions,
        ),
        warnings=question.machine.assumed + warnings,
        node=describe_node(question.machine),
    )


def decide_device(question: Question) -> tuple[str, Decision]:
    """CUDA where a GPU is visible; asked for and absent is refused."""
    asked, gpus = question.settings.values.device, question.machine.gpus
    if asked == "cuda" and not gpus:
        hidden = question.environ.get("CUDA_VISIBLE_DEVICES")
        cause = f"CUDA_VISIBLE_DEVICES={shown(hidden)} names none" if hidden is not None else "no NVIDIA driver answers"
        raise Refused(
            f"LAUNCH_DEVICE=cuda: no GPU is visible ({cause}); in a container add --nv or --gpus all, or set"
            " LAUNCH_DEVICE=auto",
            Exit.MACHINE,
        )
    device = "cuda" if gpus and asked != "cpu" else "cpu"
    reason = f"{len(gpus)} GPUs visible: {gpus[0].name}" if gpus else "no NVIDIA GPU is visible"
    return device, Decision("device", device, question.why("device", reason))


def decide_nproc(question: Question, device: str) -> tuple[int, Decision]:
    """One rank a GPU, one on CPU; what a launcher has started already stands."""
    asked, job = question.settings.values.nproc_per_node, question.job
    if job.launcher:
        if asked not in ("auto", job.local_world_size):
            raise Refused(
                f"{question.settings.source['nproc_per_node']}: contradicts {job.launcher}, which started"
                f" {job.local_world_size} ranks on this node; drop one of the two"
            )
        return job.local_world_size, Decision(
            "ranks", str(job.local_world_size), f"{job.launcher} started them on this node"
        )
    gpus = len(question.machine.gpus)
    if asked == "auto":
        nproc = gpus if device == "cuda" else 1
        return nproc, Decision("ranks", str(nproc), "one a GPU" if device == "cuda" else "one rank with all cores")
    if device == "cuda" and asked > gpus:
        raise Refused(
            f"{question.settings.source['nproc_per_node']}: more ranks than the {gpus} visible GPUs; lower it, or"
            " set LAUNCH_DEVICE=cpu",
            Exit.MACHINE,
        )
    return asked, Decision("ranks", str(asked), question.why("nproc_per_node", ""))


def check_cores(question: Question, nproc: int) -> None:
    """Refuse more ranks than cores, unless sharing them is asked for."""
    machine = question.machine
    if nproc <= machine.budget_cores or question.settings.values.oversubscribe or bound_by_launcher(question):
        return
    asked = question.settings.source.get("nproc_per_node", f"{nproc} ranks")
    grant = describe_budget(machine)
    raise Refused(
        f"{asked}: more ranks than cores: {grant}; lower it, or set LAUNCH_OVERSUBSCRIBE=1 to let them share",
        Exit.MACHINE,
    )


def bound_by_launcher(question: Question) -> bool:
    """Tell whether the affinity mask is already this one rank's own, as Open MPI and srun leave it."""
    machine, job = question.machine, question.job
    return job.launcher not in (None, "torchrun") and len(machine.cpus) < machine.online_cpus


def decide_ranks(
    question: Question, device: str, nproc: int
) -> tuple[tuple[Rank, ...], tuple[Decision, ...], tuple[str, ...]]:
    """Deal cores and threads to the local ranks."""
    machine, settings = question.machine, question.settings.values
    if bound_by_launcher(question):
        cpus: tuple[tuple[int, ...], ...] = (tuple(cpu.id for cpu in machine.cpus),) * nproc
        fair = (machine.budget_cores,) * nproc
        binding = Decision("cores", format_cpu_list(cpus[0]), f"{question.job.launcher} has bound this rank to them")
    else:
        cpus = share_cpus(machine, nproc)
        fair = share_threads(machine, cpus)
        lists = list(dict.fromkeys(format_cpu_list(share) for share in cpus))
        dealt = " | ".join(lists[:8]) + (" | …" if len(lists) > 8 else "")
        binding = Decision("cores", dealt if settings.bind else "not bound", binding_reason(question, nproc))
    threads, why, warnings = decide_threads(question, fair)
    spread = f"{min(threads)}" if len(set(threads)) == 1 else f"{min(threads)} to {max(threads)}"
    ranks = tuple(Rank(rank, cpus[rank], threads[rank], rank if device == "cuda" else None) for rank in range(nproc))
    return ranks, (binding, Decision("threads", spread, why)), warnings


def binding_reason(question: Question, nproc: int) -> str:
    """Say where the cores come from."""
    if not question.settings.values.bind:
        return question.why("bind", "")
    budget = describe_budget(question.machine)
    if nproc > len(question.machine.physical_cores):
        return f"{budget}; more ranks than cores, so all share"
    return f"{budget}, one CPU a core" + (", dealt out disjoint" if nproc > 1 else "")


def decide_threads(question: Question, fair: tuple[int, ...]) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """Return threads for each rank, the reason, and a warning where a person asks for more than fits."""
    asked = question.settings.values.threads
    own = question.environ.get("OMP_NUM_THREADS", "")
    if own and not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", own, re.ASCII):
        raise Refused(f"OMP_NUM_THREADS={shown(own)}: should be a whole number from 1; correct or unset it")
    theirs = int(own.split(",")[0]) if own else None
    if asked != "auto" and theirs not in (None, asked):
        written = question.settings.source["threads"]
        raise Refused(f"{written} and OMP_NUM_THREADS={own} say different things; unset one of them")
    chosen = theirs if asked == "auto" else asked
    if chosen is None:
        return fair, "the rank's share of the physical cores", ()
    why = f"(yours) OMP_NUM_THREADS={own}" if asked == "auto" else question.why("threads", "")
    too_many = (
        (f"{chosen} threads a rank on {min(fair)} cores will wait for each other; {min(fair)} would fit",)
        if chosen > min(fair)
        else ()
    )
    return (chosen,) * len(fair), why, too_many


def decide_backend(question: Question, device: str, nproc: int) -> tuple[str, Decision]:
    """NCCL needs a GPU a rank; Gloo is the CPU's."""
    asked = question.settings.values.backend
    if asked == "nccl" and device != "cuda":
        raise Refused(
            f"{question.settings.source['backend']}: nccl needs a GPU for each rank, and this run is on {device};"
            " set LAUNCH_BACKEND=auto or gloo",
            Exit.MACHINE,
        )
    backend = ("nccl" if device == "cuda" else "gloo") if asked == "auto" else asked
    alone = "; unused by a single rank" if nproc == 1 and question.job.world_size == 1 else ""
    return backend, Decision("backend", backend, question.why("backend", f"the one for {device}{alone}"))


def decide_launcher(question: Question, nproc: int) -> tuple[str, Decision]:
    """Never nest: what a launcher started becomes its rank; one rank needs no launcher."""
    job = question.job
    if job.launcher:
        return "rank", Decision("launcher", "rank", f"this is rank {job.rank} of {job.world_size} by {job.launcher}")
    if nproc == 1:
        return "direct", Decision("launcher", "direct", "one rank needs none, and torchrun would cost seconds")
    return "torchrun", Decision("launcher", "torchrun", f"starts and watches {nproc} ranks on this node")


def spinning_costs(question: Question, nproc: int) -> bool:
    """Tell whether a thread that spins while it waits takes time from another: shared cores, or a quota."""
    machine = question.machine
    shared = nproc > len(machine.physical_cores) and not bound_by_launcher(question)
    return shared or (machine.quota_cpus is not None and machine.quota_cpus < len(machine.physical_cores))


def decide_environment(
    question: Question, ranks: tuple[Rank, ...], runtime: Mapping[str, str]
) -> tuple[dict[str, str], tuple[Decision, ...]]:
    """Variables for every rank of this node; a person's own are kept and said to be theirs."""
    wanted: dict[str, tuple[str, str]] = {}
    if question.program.kind == "train":  # its run folder tells how to repeat the run, flags included
        flags = question.settings.as_variables(PREFIX, flags_only=True)
        wanted |= {name: (value, "") for name, value in flags.items()}
    if len({rank.threads for rank in ranks}) == 1:
        wanted["OMP_NUM_THREADS"] = (str(ranks[0].threads), "")
    wanted |= {name: (value, RUNTIME_REASONS[name]) for name, value in runtime.items()}
    if len(ranks) > 1 and question.job.on_one_node:
        wanted["GLOO_SOCKET_IFNAME"] = ("lo", "all ranks are on this node, whatever its name resolves to")
    environment: dict[str, str] = {}
    decisions: list[Decision] = []
    for name, (value, why) in wanted.items():
        own = question.environ.get(name)
        environment[name] = own or value
        if why:
            decisions.append(Decision(name, shown(own or value), f"(yours) {name}={shown(own)}" if own else why))
    return environment, tuple(decisions)


def command(question: Question, launcher: str, nproc: int) -> tuple[str, ...]:
    """Return what the launch executes: the program itself, or torchrun's agent over our rank stage."""
    if launcher != "torchrun":
        return question.program.argv
    # -I keeps the user's folder and PYTHONPATH out of the launcher; the program itself starts as it asks to.
    return (
        *(question.python, "-I", "-m", "entrypoint.torchrun"),
        *("--nnodes=1", f"--nproc-per-node={nproc}", "--standalone", "--local-addr=127.0.0.1"),
        *("--max-restarts=0", "--no-python"),
        *(question.python, "-I", "-m", "entrypoint", "rank"),
    )


def describe_budget(machine: Machine) -> str:
    """Say in a few words what this process may use, and what limits it."""
    cores = len(machine.physical_cores)
    text = f"{cores} physical core{'s' if cores != 1 else ''} allowed"
    if len(machine.cpus) < machine.online_cpus:
        text += f" by the affinity mask ({format_cpu_list(tuple(cpu.id for cpu in machine.cpus))})"
    if machine.quota_cpus is not None and machine.quota_cpus < cores:
        text += f", and the cgroup's quota is {machine.quota_cpus:g} CPUs"
    return text


def describe_node(machine: Machine) -> str:
    """Say the machine in one line."""
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    memory = f"{machine.memory_bytes / 2**30:.1f} GiB" if machine.memory_bytes else "memory unknown"
    return (
        f"{machine.hostname}: {machine.cpu_model}, {len(machine.cpus)} of {machine.online_cpus} CPUs"
        f" ({len(machine.physical_cores)} physical cores), {memory}, {gpus}"
    )
