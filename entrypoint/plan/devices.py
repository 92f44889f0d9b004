"""CPU or CUDA, which GPUs, how many ranks on them, and the backend between the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.machine.gpu_links import best_connected, describe_links
from entrypoint.machine.gpus import Gpu
from entrypoint.plan.core_assignment import cores_by_node
from entrypoint.plan.cpu_budget import compute_cpu_budget
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision


@dataclass(frozen=True)
class Devices:
    """Where the ranks compute: `gpus` are those used, in order of rank; `narrowed` says that not all visible are."""

    device: str
    nproc: int
    gpus: tuple[Gpu, ...]
    is_subset: bool
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()


def decide_devices(question: PlanInputs) -> Devices:
    """Decide device, GPUs and number of ranks; raises `Refused` for what the machine has not."""
    device, device_decision, warnings = decide_device(question)
    visible = question.machine.gpus if device == "cuda" else ()
    check_gpu_count(question, device)
    nproc, nproc_decision = decide_nproc(question, visible)
    wanted = question.settings.values.gpus
    count = min(nproc if wanted == "auto" else wanted, len(visible))
    if not count or count == len(visible):
        return Devices(device, nproc, visible, False, (device_decision, nproc_decision), warnings)
    gpus, gpus_decision = choose_gpus(question, visible, count)
    return Devices(device, nproc, gpus, True, (device_decision, gpus_decision, nproc_decision), warnings)


def decide_device(question: PlanInputs) -> tuple[str, Decision, tuple[str, ...]]:
    """CUDA where a GPU is visible that torch can use; asked for and absent is refused."""
    asked, gpus = question.settings.values.device, question.machine.gpus
    problem = find_gpu_problem(question)
    if asked == "cuda" and problem:
        raise UserError(
            f"{question.settings.sources['device']}: {problem}, or set LAUNCH_DEVICE=auto", ExitCode.MACHINE
        )
    if asked == "cpu" or problem:
        reason = f"{problem}" if problem and gpus else "no NVIDIA GPU is visible"
        warnings = (f"the GPU is not used: {problem}",) if problem and gpus and asked == "auto" else ()
        return "cpu", Decision("device", "cpu", question.why("device", reason)), warnings
    mig = ", a MIG device, and CUDA gives a process only one" if gpus[0].mig else ""
    reason = f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''} visible: {gpus[0].name}{mig}"
    return "cuda", Decision("device", "cuda", question.why("device", reason)), ()


def find_gpu_problem(question: PlanInputs) -> str:
    """Say why no GPU can be used and what to do, nothing where one can.

    A driver serves every CUDA of its own major version and older ones (CUDA compatibility guide).
    """
    machine = question.machine
    built_for, serves = machine.packages.torch_cuda, machine.driver.cuda
    if not machine.gpus:
        hidden = question.environ.get("CUDA_VISIBLE_DEVICES")
        cause = (
            f"CUDA_VISIBLE_DEVICES={printable(hidden)} names none" if hidden is not None else "no NVIDIA driver answers"
        )
        cause = f"NVML says: {machine.driver.problem}" if machine.driver.problem else cause
        return f"no GPU is visible ({cause}); in a container add --nv or --gpus all"
    if built_for == "":
        return f"torch {machine.packages.versions.get('torch', '')} is built for the CPU; use the CUDA image"
    if built_for and serves and int(serves.split(".")[0]) < int(built_for.split(".")[0]):
        return (
            f"the driver {machine.driver.version} serves CUDA up to {serves}, and torch is built for {built_for};"
            " update the driver, or use an image of an older CUDA"
        )
    return ""


def check_gpu_count(question: PlanInputs, device: str) -> None:
    """Refuse LAUNCH_GPUS where it cannot be, or says something else than the number of ranks."""
    values, source = question.settings.values, question.settings.sources
    if values.gpus == "auto":
        return
    if device != "cuda":
        why = find_gpu_problem(question) or f"{source['device']}; drop one of the two"
        raise UserError(f"{source['gpus']}: this run is on cpu: {why}", ExitCode.MACHINE)
    if values.gpus > len(question.machine.gpus):
        raise UserError(f"{source['gpus']}: only {len(question.machine.gpus)} are visible; lower it", ExitCode.MACHINE)
    if values.nproc_per_node not in ("auto", values.gpus):
        raise UserError(
            f"{source['gpus']} and {source['nproc_per_node']} say different things: a rank has one GPU; drop one of"
            " the two"
        )


def decide_nproc(question: PlanInputs, visible: tuple[Gpu, ...]) -> tuple[int, Decision]:
    """One rank a GPU; on CPU one a NUMA node; what a launcher has started already stands."""
    values, job = question.settings.values, question.job
    if job.launcher:
        return nproc_from_launcher(question, len(visible)), Decision(
            "ranks", str(job.local_world_size), f"{job.launcher} started them on this node"
        )
    if values.nproc_per_node != "auto":
        if visible and values.nproc_per_node > len(visible):
            raise UserError(
                f"{question.settings.sources['nproc_per_node']}: more ranks than the {len(visible)} visible GPUs; lower"
                " it, or set LAUNCH_DEVICE=cpu",
                ExitCode.MACHINE,
            )
        return values.nproc_per_node, Decision("ranks", str(values.nproc_per_node), question.why("nproc_per_node", ""))
    if question.nodes.nproc_per_node:
        nproc = question.nodes.nproc_per_node
        return nproc, Decision("ranks", str(nproc), f"on each node as {question.nodes.source} comes with it")
    if visible:
        nproc = len(visible) if values.gpus == "auto" else values.gpus
        return nproc, Decision("ranks", str(nproc), "one a GPU")
    return nproc_on_cpu(question)


def nproc_from_launcher(question: PlanInputs, gpus: int) -> int:
    """Return the ranks that a launcher has started here; refuses another number, and too few GPUs for them.

    A single visible GPU is each rank's own: srun --gpus-per-task shows every rank a different one.
    """
    asked, job = question.settings.values.nproc_per_node, question.job
    if asked not in ("auto", job.local_world_size):
        raise UserError(
            f"{question.settings.sources['nproc_per_node']}: contradicts {job.launcher}, which started"
            f" {job.local_world_size} ranks on this node; drop one of the two"
        )
    if 1 < gpus < job.local_world_size:
        raise UserError(
            f"{job.launcher} started {job.local_world_size} ranks on this node, which has {gpus} visible GPUs; start as"
            " many, or set LAUNCH_DEVICE=cpu",
            ExitCode.MACHINE,
        )
    return job.local_world_size


def nproc_on_cpu(question: PlanInputs) -> tuple[int, Decision]:
    """One rank a NUMA node, so that none reads memory of another, unless a node has far fewer cores or a limit bites.

    Ranks are equal: one of the smallest node's size would leave the rest of the others idle.
    """
    budget = compute_cpu_budget(question.machine, question.job, question.settings.values.core_type)
    sizes = [len(node) for node in cores_by_node(budget.cores)]
    if len(sizes) == 1:
        return 1, Decision("ranks", "1", "one rank with all cores: one NUMA node")
    if 2 * min(sizes) < max(sizes):
        return 1, Decision(
            "ranks", "1", f"one rank: the NUMA nodes differ too much ({min(sizes)} to {max(sizes)} cores)"
        )
    if budget.threads <= max(sizes):
        return 1, Decision("ranks", "1", f"one rank: the {budget.threads} threads allowed are no more than one node's")
    return len(sizes), Decision("ranks", str(len(sizes)), "one a NUMA node, so that none reads another's memory")


def choose_gpus(question: PlanInputs, visible: tuple[Gpu, ...], count: int) -> tuple[tuple[Gpu, ...], Decision]:
    """Return the best connected GPUs, and what connects them."""
    links = [gpu.links for gpu in visible]
    known = all(len(row) == len(visible) for row in links)
    chosen = best_connected(links, count) if known and len(visible) <= MAX_SEARCHED else tuple(range(count))
    how = f"the best connected: {describe_links(links, chosen)}" if known and count > 1 else "the first"
    names = ",".join(str(index) for index in chosen)
    yours = f"; {question.why('gpus', '')}" if question.given("gpus") else ""
    return tuple(visible[index] for index in chosen), Decision("gpus", names, how + yours)


# Every set is tried: 12,870 for 8 of 16, the most that one node has.
MAX_SEARCHED = 16


def decide_backend(question: PlanInputs, device: str, nproc: int) -> Decision:
    """NCCL is CUDA's, Gloo the CPU's; oneCCL and MPI where they are asked for and can be used."""
    asked = question.settings.values.backend
    if asked == "nccl" and device != "cuda":
        raise UserError(
            f"{question.settings.sources['backend']}: nccl needs a GPU for each rank, and this run is on {device};"
            " set LAUNCH_BACKEND=auto or gloo",
            ExitCode.MACHINE,
        )
    if question.backend_problem:
        raise UserError(f"{question.settings.sources['backend']}: {question.backend_problem}", ExitCode.MACHINE)
    backend = ("nccl" if device == "cuda" else "gloo") if asked == "auto" else asked
    ranks = question.world_size_for(nproc)
    alone = "; unused by a single rank" if ranks == 1 else ""
    return Decision("backend", backend, question.why("backend", f"the one for {device}{alone}"))
