"""Environment variables of every rank of this node; the user's own are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.network import is_loopback_name
from entrypoint.job.launchers import Family
from entrypoint.machine.backends import transport_variables
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.machine.shared_libraries import split_ld_preload
from entrypoint.plan.devices import Devices
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, RankPlan
from entrypoint.plan.remote_ranks import world_size_for
from entrypoint.plan.runtime_libraries import AFFINITY_VARIABLES

# Of torch's flight recorder, which writes each rank's last NCCL collectives when one times out.
# The names of torch 2.8 and later, and the older ones that it still reads, with a warning in each rank.
OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
FLIGHT_RECORDER_VARIABLES = (*OLD_NAMES, "TORCH_NCCL_DUMP_ON_TIMEOUT")
# What a user sets of oneCCL's workers is an allocation of their own (the book's map); ours would undo it.
OWN_WORKERS = ("CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY")
# A CPU in GOMP_CPU_AFFINITY or OMP_PLACES; what follows `:` is a count or a step, what follows `-` the end of a range
# (libgomp drops those that are not there).
NAMED_CPU = re.compile(r"(?<![\d:(-])\d{1,5}")

# Standard variables that the plan sets unless the user has set them.
USER_OVERRIDABLE = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_SCHEDULE",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "KMP_USE_YIELD",
    *AFFINITY_VARIABLES,
    "MALLOC_CONF",
    "GLIBC_TUNABLES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "CUDA_DEVICE_ORDER",
    "PYTHONNOUSERSITE",
    "ACCELERATE_USE_CPU",
    "I_MPI_ROOT",
    "FI_PROVIDER_PATH",
    "CCL_ATL_TRANSPORT",
    "CCL_WORKER_OFFLOAD",
    "CCL_YIELD",
    "CCL_WORKER_COUNT",
    "CCL_WORKER_AFFINITY",
    "CCL_LOG_LEVEL",
    *FLIGHT_RECORDER_VARIABLES,
)


def decide_environment(
    inputs: PlanInputs, devices: Devices, ranks: tuple[RankPlan, ...], runtime: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, str], tuple[Decision, ...]]:
    """Return variables for every rank of this node, and a decision for each that needs a reason."""
    wanted: dict[str, tuple[str, str]] = {}
    if inputs.program.kind == "train":  # its run folder records how to repeat the run, flags included
        flags = inputs.settings.as_variables(flags_only=True)
        wanted |= {name: (value, "") for name, value in flags.items()}
    if len({rank.threads for rank in ranks}) == 1:
        wanted["OMP_NUM_THREADS"] = (str(ranks[0].threads), "")
    wanted |= {**runtime, **cuda_variables(inputs, devices), **network_variables(inputs, ranks)}
    wanted |= oneccl_variables(inputs, ranks)
    wanted |= flight_recorder_variables(inputs, devices)
    if inputs.program.kind != "train" and devices.device == "cpu" and world_size_for(inputs, devices.nproc) > 1:
        # accelerate 1.15, state.py: ranks without a GPU each count as the only one unless this is set.
        wanted["ACCELERATE_USE_CPU"] = ("true", "else Hugging Face accelerate trains each rank alone")
    if inputs.machine.container.engine == "Apptainer" and not inputs.machine.container.image:
        wanted["PYTHONNOUSERSITE"] = ("1", "ignore packages of the host's ~/.local")
    wanted |= drop_broken_preloads(inputs)
    wanted |= inputs.dir_fallbacks
    environment: dict[str, str] = {}
    decisions: list[Decision] = []
    for name, (value, reason) in wanted.items():
        own = inputs.environ.get(name) if name in USER_OVERRIDABLE else None
        environment[name] = own or value
        if reason:
            text = printable(value) or "unset"
            decisions.append(inputs.user_decision(name) if own else Decision(name, text, reason))
    explained = {name for name, (_, reason) in wanted.items() if reason}
    refuse_foreign_cpus(inputs)
    refuse_missing_interface(inputs, world_size_for(inputs, devices.nproc))
    own_affinity = [name for name in AFFINITY_VARIABLES if inputs.environ.get(name) and name not in explained]
    decisions += [inputs.user_decision(name) for name in own_affinity]
    return environment, tuple(decisions)


def refuse_foreign_cpus(inputs: PlanInputs) -> None:
    """Raise `UserError` for a CPU of GNU's or OpenMP's variable that is not this process's: threads would share one."""
    allowed = {cpu.id for cpu in inputs.machine.cpus}
    for name in () if inputs.remote_launcher else ("GOMP_CPU_AFFINITY", "OMP_PLACES"):
        text = inputs.environ.get(name, "")
        foreign = sorted({int(cpu) for cpu in NAMED_CPU.findall(text)} - allowed)
        if foreign:
            raise UserError(
                f"{name}={printable(text)}: CPU {foreign[0]} is none of the {len(allowed)} that this process may use."
                f" Unset it, or name some of {format_cpu_list(tuple(allowed))}."
            )


def refuse_missing_interface(inputs: PlanInputs, world_size: int) -> None:
    """Raise `UserError` for a Gloo interface that this node does not have, if its ranks meet others."""
    text, known = inputs.environ.get("GLOO_SOCKET_IFNAME", ""), inputs.machine.interfaces
    missing = next((name for name in text.split(",") if name and name not in known), "")
    if missing and known and world_size > 1 and not inputs.remote_launcher:
        raise UserError(
            f"GLOO_SOCKET_IFNAME={printable(text)}: this node has no interface {printable(missing)}. Unset it, or name"
            f" one of {', '.join(known)}.",
            ExitCode.MACHINE,
        )


def network_variables(inputs: PlanInputs, ranks: tuple[RankPlan, ...]) -> dict[str, tuple[str, str]]:
    """Return the network interface of the ranks, where this node or the platform decides it."""
    wanted: dict[str, tuple[str, str]] = {}
    if inputs.job.on_one_node and inputs.node_group.nnodes == 1 and is_master_here(inputs):
        wanted |= local_master_override(inputs)
        if len(ranks) > 1:
            wanted["GLOO_SOCKET_IFNAME"] = ("lo", "all ranks are on this node")
    if inputs.node_group.interface:
        platform = f"the interface that {inputs.node_group.source.partition('=')[0]}'s platform names"
        reason = "MASTER_ADDR is a loopback address" if inputs.node_group.interface == "lo" else platform
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        wanted |= dict.fromkeys(names, (inputs.node_group.interface, reason))
    return wanted


def is_master_here(inputs: PlanInputs) -> bool:
    """Return whether the ranks meet on this node for certain: the entrypoint starts them, or MASTER_ADDR names it.

    A launcher's MASTER_ADDR may also be a service name that leads here. Then no interface is chosen.
    """
    name = inputs.environ.get("MASTER_ADDR", "")
    own = inputs.machine.hostname
    here = not name or is_loopback_name(name) or name.partition(".")[0] == own.partition(".")[0]
    return here or not inputs.job.launcher


def local_master_override(inputs: PlanInputs) -> dict[str, tuple[str, str]]:
    """Return a local MASTER_ADDR where all ranks are on this node and the user's variable names another host.

    That name may not even resolve (Kubernetes, before the pod is ready).
    """
    own = inputs.environ.get("MASTER_ADDR", "127.0.0.1")
    if inputs.job.launcher or inputs.remote_launcher or not own or is_loopback_name(own):
        return {}
    return {"MASTER_ADDR": ("127.0.0.1", f"all ranks are on this node, not at {printable(own)}")}


def cuda_variables(inputs: PlanInputs, devices: Devices) -> dict[str, tuple[str, str]]:
    """Return how CUDA selects the GPUs: by UUID if not all visible ones are used.

    CUDA counts the fastest first and NVML by bus, so on mixed nodes an index alone is ambiguous.
    """
    own = inputs.environ.get("CUDA_VISIBLE_DEVICES")
    if 0 < len(devices.gpus) < len(inputs.machine.gpus):
        among = f", among your CUDA_VISIBLE_DEVICES={printable(own)}" if own else ""
        uuids = ",".join(gpu.uuid for gpu in devices.gpus)
        return {"CUDA_VISIBLE_DEVICES": (uuids, f"the GPUs chosen above{among}")}
    if len(devices.gpus) > 1 and own is None:
        return {"CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "CUDA counts GPUs as nvidia-smi does")}
    return {}


def drop_broken_preloads(inputs: PlanInputs) -> dict[str, tuple[str, str]]:
    """Return LD_PRELOAD without the host's files that an Apptainer image lacks; elsewhere raise `UserError`.

    The loader would skip them with a line for each process that nobody reads.
    """
    if not inputs.broken_preloads:
        return {}
    own = inputs.environ["LD_PRELOAD"]
    file, problem = next(iter(inputs.broken_preloads.items()))
    more = len(inputs.broken_preloads) - 1
    text = f"{printable(file)} {problem}" + (f" (and {more} more)" if more else "")
    if inputs.machine.container.engine != "Apptainer":
        raise UserError(f"LD_PRELOAD={printable(own)}: {text}. Correct or unset it.", ExitCode.MACHINE)
    rest = ":".join(file for file in split_ld_preload(own) if file not in inputs.broken_preloads)
    return {"LD_PRELOAD": (rest, f"the host's, without what the image lacks: {text}")}


def warn_host_leaks(inputs: PlanInputs) -> tuple[str, ...]:
    """Warn of variables that Apptainer passes in from the host and that may break another project's image.

    This project's images let in only what is meant for them (`--env`).
    """
    if inputs.machine.container.engine != "Apptainer" or inputs.machine.container.image:
        return ()
    return tuple(
        f"{name}={printable(inputs.environ[name])} comes from the host. If it is not meant for the image, unset it or"
        " use --cleanenv."
        for name in ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")
        if inputs.environ.get(name)
    )


def flight_recorder_variables(inputs: PlanInputs, devices: Devices) -> dict[str, tuple[str, str]]:
    """Return the variables, each with its reason; none unless several ranks exchange data by NCCL."""
    values = inputs.settings.values
    if devices.device != "cuda" or values.backend not in ("auto", "nccl") or world_size_for(inputs, devices.nproc) == 1:
        return {}
    where = printable(values.log_dir) or "~/.cache/torch"
    wanted = {
        # As many as torch's own documentation recommends.
        "TORCH_FR_BUFFER_SIZE": ("2000", "each rank remembers its last collectives"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": (
            "1",
            f"a collective that times out is written to {where}; `torchfrtrace` reads it",
        ),
    }
    if values.log_dir:
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = (f"{values.log_dir}/nccl_trace_rank_", "next to the output of the ranks")
    return {name: value for name, value in wanted.items() if not inputs.environ.get(OLD_NAMES.get(name, ""))}


def oneccl_variables(inputs: PlanInputs, ranks: tuple[RankPlan, ...]) -> dict[str, tuple[str, str]]:
    """Return oneCCL's variables, each with its reason; none unless the backend is ccl.

    oneCCL has a worker thread per rank that spins on a core. It gets a core of its own where the threads leave one,
    else the rank's own threads do the work (oneCCL's manual: CCL_WORKER_OFFLOAD, CCL_YIELD, CCL_WORKER_AFFINITY).
    """
    if inputs.settings.values.backend != "ccl":
        return {}
    starter = inputs.remote_launcher.mpi if inputs.remote_launcher else ""
    by_hydra = inputs.job.family == Family.HYDRA or starter == "hydra"
    wanted = transport_variables(inputs.machine.oneccl, {}, by_hydra=by_hydra)
    wanted["CCL_LOG_LEVEL"] = ("error", "its warnings are a line or more for each rank")
    workers_of_user = {name: (inputs.environ[name], "") for name in OWN_WORKERS if inputs.environ.get(name)}
    if workers_of_user:
        return wanted | workers_of_user
    spare = all(len(rank.cpus) > rank.threads for rank in ranks)
    if spare and not inputs.bound_by_launcher and inputs.settings.values.cpu_binding != "none":
        workers = ",".join(str(rank.cpus[-1]) for rank in ranks)
        wanted["CCL_WORKER_COUNT"] = ("1", "one worker thread per rank")
        wanted["CCL_WORKER_AFFINITY"] = (workers, "a core per rank that its threads leave free")
    else:
        wanted["CCL_WORKER_OFFLOAD"] = ("0", "the ranks fill the cores: no worker threads")
        wanted["CCL_YIELD"] = ("sched_yield", "waiting threads leave the core to others")
    return wanted
