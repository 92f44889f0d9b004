"""Device, GPUs, number of ranks, and the backend for collectives."""

from __future__ import annotations

from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError, count_text, printable, refuse_if
from entrypoint.machine.gpus import Gpu, best_connected, describe_links
from entrypoint.plan.cpu_budget import compute_cpu_budget, cores_by_node
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, make_decision
from entrypoint.plan.remote_ranks import ranks_on_first_host, ranks_per_host, world_size_for


class Devices(Struct, frozen=True):
    """Where the ranks compute: `gpus` in order of rank."""

    device: str
    nproc: int
    gpus: tuple[Gpu, ...]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()


def decide_devices(inputs: PlanInputs) -> Devices:
    """Decide device, GPUs and number of ranks; raises `UserError` for what the machine lacks."""
    device, device_decision, warnings = decide_device(inputs)
    visible = inputs.machine.gpus if device == "cuda" else ()
    nproc, nproc_decision = decide_nproc(inputs, visible)
    count = min(nproc, len(visible))
    if 1 < len(visible) < nproc:
        warnings += (
            f"{inputs.job.launcher} shows this rank {len(visible)} GPUs of a node with {nproc} ranks."
            " Use --gpus-per-task=1 if NCCL reports a duplicate GPU.",
        )
    gpus, gpu_decisions = visible, tuple[Decision, ...]()
    if count and count != len(visible):
        gpus, gpus_decision = choose_gpus(visible, count)
        gpu_decisions = (gpus_decision,)
    return Devices(
        device=device,
        nproc=nproc,
        gpus=gpus,
        decisions=(device_decision, *gpu_decisions, nproc_decision),
        warnings=warnings,
    )


def decide_device(inputs: PlanInputs) -> tuple[str, Decision, tuple[str, ...]]:
    """CUDA if torch can use a visible GPU; raises `UserError` where the user asks for CUDA and it cannot."""
    requested, gpus = inputs.settings.values.device, inputs.machine.gpus
    problem = find_gpu_problem(inputs)
    if requested == "cuda" and problem:
        raise UserError(f"{inputs.settings.sources['device']}: {problem}, or set LAUNCH_DEVICE=auto.", ExitCode.MACHINE)
    if requested == "cpu" or problem:
        reason = problem if problem and gpus else "no NVIDIA GPU is visible"
        warnings = (f"the GPU is not used: {problem}",) if problem and gpus and requested == "auto" else ()
        return "cpu", inputs.decide("device", "device", "cpu", reason), warnings
    mig = ", a MIG device, and CUDA gives a process only one" if gpus[0].mig else ""
    reason = f"{count_text(len(gpus), 'GPU')} visible: {gpus[0].name}{mig}"
    return "cuda", inputs.decide("device", "device", "cuda", reason), ()


def find_gpu_problem(inputs: PlanInputs) -> str:
    """Return why no GPU can be used and what to do, empty if one can.

    A driver serves every CUDA of its own major version and older ones (CUDA compatibility guide).
    """
    machine = inputs.machine
    built_for, serves = machine.packages.torch_cuda, machine.driver.cuda
    if not machine.gpus:
        hidden = inputs.environ.get("CUDA_VISIBLE_DEVICES")
        cause = (
            f"CUDA_VISIBLE_DEVICES={printable(hidden)} names none" if hidden is not None else "no NVIDIA driver answers"
        )
        cause = f"NVML reports: {machine.driver.problem}" if machine.driver.problem else cause
        return f"no GPU is visible ({cause}). In a container add --nv or --gpus all"
    if built_for == "":
        return f"torch {machine.packages.versions.get('torch', '')} is built for the CPU. Use the CUDA image"
    if built_for and serves and int(serves.split(".")[0]) < int(built_for.split(".")[0]):
        return (
            f"the driver {machine.driver.version} supports CUDA up to {serves}, and torch is built for {built_for}."
            " Update the driver, or use an image of an older CUDA"
        )
    return ""


def decide_nproc(inputs: PlanInputs, visible: tuple[Gpu, ...]) -> tuple[int, Decision]:
    """One rank per GPU, on CPU one per NUMA node; as many as a launcher has started."""
    values, job = inputs.settings.values, inputs.job
    if job.launcher:
        nproc = nproc_from_launcher(inputs, len(visible))
        return nproc, Decision("ranks", str(nproc), f"started by {job.launcher} on this node")
    remote = ranks_on_first_host(inputs)
    if remote:
        hosts = ranks_per_host(inputs, remote)
        each = ", ".join(f"{name}:{count}" for name, count in hosts[:3]) + (", …" if len(hosts) > 3 else "")
        total = str(world_size_for(inputs, remote))
        return remote, make_decision("ranks", total, f"the batch job's tasks: {each}", "", hosts_setting(inputs))
    if values.nproc_per_node != "auto":
        if visible and values.nproc_per_node > len(visible):
            raise UserError(
                f"{inputs.settings.sources['nproc_per_node']}: more ranks than the"
                f" {count_text(len(visible), 'visible GPU')}. Lower it, or set LAUNCH_DEVICE=cpu.",
                ExitCode.MACHINE,
            )
        return values.nproc_per_node, inputs.decide("nproc_per_node", "ranks", str(values.nproc_per_node), "")
    if inputs.node_group.nproc_per_node and (visible or not is_kubeflow_default(inputs)):
        nproc = inputs.node_group.nproc_per_node
        return nproc, Decision("ranks", str(nproc), f"PET_NPROC_PER_NODE={nproc}")
    if visible:
        return len(visible), Decision("ranks", str(len(visible)), "one per GPU")
    nproc, decision = nproc_on_cpu(inputs)
    if inputs.node_group.nproc_per_node:
        reason = f"PET_NPROC_PER_NODE={inputs.node_group.nproc_per_node}, one per CPU, is Kubeflow's default"
        decision = replace(decision, reason=reason)
    return nproc, decision


def hosts_setting(inputs: PlanInputs) -> str:
    """Return how the user wrote LAUNCH_HOSTS, empty without it."""
    return inputs.settings.sources.get("hosts", "") if inputs.settings.values.hosts else ""


def is_kubeflow_default(inputs: PlanInputs) -> bool:
    """Return whether PET_NPROC_PER_NODE is Kubeflow's own default on a CPU node: one rank per CPU of the pod.

    Kubeflow Trainer sets the pod's CPU limit, rounded up, if numProcPerNode is `auto` and no GPU is requested
    (pkg/runtime/framework/plugins/torch/torch.go).
    """
    count, machine = inputs.node_group.nproc_per_node, inputs.machine
    limit = ceil(machine.quota_cpus) if machine.quota_cpus else 0
    return (count or 0) > 1 and count in (limit, len(machine.cpus), machine.online_cpus)


def nproc_from_launcher(inputs: PlanInputs, gpus: int) -> int:
    """Return the ranks that a launcher has started here; raises `UserError` for another number, or too few GPUs.

    A single visible GPU is each rank's own: srun --gpus-per-task shows every rank a different one. srun
    --gpu-bind=closest shows a rank those of its socket, which it shares with the other ranks there.
    """
    requested, job = inputs.settings.values.nproc_per_node, inputs.job
    if requested not in ("auto", job.local_world_size):
        raise UserError(
            f"{inputs.settings.sources['nproc_per_node']}: {job.launcher} started"
            f" {count_text(job.local_world_size, 'rank')} on this node. Drop one of the two."
        )
    # srun may show each rank different GPUs, and then sets this for each task (srun(1), --gpu-bind).
    has_own = job.launcher == "srun" and bool(inputs.environ.get("CUDA_VISIBLE_DEVICES"))
    if 1 < gpus < job.local_world_size and not has_own:
        raise UserError(
            f"{job.launcher} started {job.local_world_size} ranks on this node, which has {gpus} visible GPUs."
            " Start as many, or set LAUNCH_DEVICE=cpu.",
            ExitCode.MACHINE,
        )
    return job.local_world_size


def nproc_on_cpu(inputs: PlanInputs) -> tuple[int, Decision]:
    """One rank per NUMA node, unless a node has far fewer cores than another or a CPU limit is lower than one node.

    Ranks are equal, so the smallest node would leave cores of the others idle.
    """
    budget = compute_cpu_budget(inputs.machine, inputs.job, inputs.settings.values.core_type)
    sizes = [len(node) for node in cores_by_node(budget.cores)]
    if len(sizes) == 1:
        return 1, Decision("ranks", "1", "one rank with all cores: one NUMA node")
    if 2 * min(sizes) < max(sizes):
        reason = f"one rank: NUMA nodes have {min(sizes)} to {max(sizes)} cores"
        return 1, Decision("ranks", "1", reason)
    if budget.threads <= max(sizes):
        return 1, Decision("ranks", "1", f"one rank: the CPU limit ({budget.threads}) fits in one NUMA node")
    return len(sizes), Decision("ranks", str(len(sizes)), "one per NUMA node, for local memory")


def choose_gpus(visible: tuple[Gpu, ...], count: int) -> tuple[tuple[Gpu, ...], Decision]:
    """Return the best connected GPUs, and what connects them."""
    links = [gpu.links for gpu in visible]
    known = all(len(row) == len(visible) for row in links)
    chosen = best_connected(links, count) if known and len(visible) <= MAX_SEARCHED else tuple(range(count))
    how = f"the best connected: {describe_links(links, chosen)}" if known and count > 1 else "the first"
    names = ",".join(str(index) for index in chosen)
    return tuple(visible[index] for index in chosen), Decision("gpus", names, how)


# Every set is tried: 12,870 for 8 of 16 GPUs.
MAX_SEARCHED = 16


def decide_backend(inputs: PlanInputs, device: str, nproc: int) -> Decision:
    """NCCL on CUDA, Gloo on CPU; oneCCL and MPI if the user asks for them and they can be used."""
    requested = inputs.settings.values.backend
    source = inputs.settings.sources.get("backend")
    refuse_if(
        {
            f"{source}: nccl needs a GPU for each rank, and this run is on {device}. Set LAUNCH_BACKEND=auto or"
            " gloo.": (requested == "nccl" and device != "cuda"),
            f"{source}: {inputs.backend_problem}": inputs.backend_problem,
        },
        ExitCode.MACHINE,
    )
    backend = ("nccl" if device == "cuda" else "gloo") if requested == "auto" else requested
    unused = "; unused by a single rank" if world_size_for(inputs, nproc) == 1 else ""
    endless = backend in ("ccl", "mpi") and inputs.program.kind != "train"
    detail = "a collective of the script has no time limit" if endless else ""
    return inputs.decide("backend", "backend", backend, f"the default on {device}{unused}", detail)
