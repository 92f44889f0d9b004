"""The variables that every rank of this node gets, whose they are, and what of the host's is kept out."""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.machine.shared_libraries import split_ld_preload
from entrypoint.plan.devices import Devices
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, RankPlan
from entrypoint.plan.runtime_libraries import AFFINITY_VARIABLES

# Standard variables of others that the plan would set, and leaves alone where a person has set them.
USER_OVERRIDABLE = (
    *(
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "OMP_SCHEDULE",
        "GOMP_SPINCOUNT",
        "KMP_BLOCKTIME",
        "KMP_USE_YIELD",
    ),
    *AFFINITY_VARIABLES,
    *(
        "MALLOC_CONF",
        "GLIBC_TUNABLES",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "CUDA_DEVICE_ORDER",
        "PYTHONNOUSERSITE",
    ),
    "ACCELERATE_USE_CPU",
)
# accelerate 1.15, state.py: ranks that were given no GPU and not told so each take themselves for the only one.
ACCELERATE_REASON = "Hugging Face's accelerate trains on each rank alone without it"


def decide_environment(
    question: PlanInputs, devices: Devices, ranks: tuple[RankPlan, ...], runtime: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, str], tuple[Decision, ...]]:
    """Return variables for every rank of this node; a person's own are kept and said to be theirs."""
    wanted: dict[str, tuple[str, str]] = {}
    if question.program.kind == "train":  # its run folder tells how to repeat the run, flags included
        flags = question.settings.as_variables(flags_only=True)
        wanted |= {name: (value, "") for name, value in flags.items()}
    if len({rank.threads for rank in ranks}) == 1:
        wanted["OMP_NUM_THREADS"] = (str(ranks[0].threads), "")
    wanted |= {**runtime, **cuda_variables(question, devices)}
    if len(ranks) > 1 and question.job.on_one_node and question.nodes.count == 1:
        wanted["GLOO_SOCKET_IFNAME"] = ("lo", "all ranks are on this node, whatever its name resolves to")
        wanted |= local_master_override(question)
    if question.program.kind != "train" and devices.device == "cpu" and question.world_size_for(devices.nproc) > 1:
        wanted["ACCELERATE_USE_CPU"] = ("true", ACCELERATE_REASON)
    if question.nodes.interface:
        why = f"the network that {question.nodes.source.partition('=')[0]}'s platform names"
        wanted |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), (question.nodes.interface, why))
    if question.machine.surroundings.container == "Apptainer" and not question.machine.surroundings.image:
        wanted["PYTHONNOUSERSITE"] = ("1", "~/.local is the host's: its packages are kept out of the image's")
    wanted |= drop_broken_preloads(question)
    wanted |= question.dir_fallbacks
    environment: dict[str, str] = {}
    decisions: list[Decision] = []
    for name, (value, why) in wanted.items():
        own = question.environ.get(name) if name in USER_OVERRIDABLE else None
        environment[name] = own or value
        if why:
            decisions.append(question.own(name) if own else Decision(name, printable(value) or "unset", why))
    ours = {name for name, (_, why) in wanted.items() if why}
    decisions += [question.own(name) for name in AFFINITY_VARIABLES if question.environ.get(name) and name not in ours]
    return environment, tuple(decisions)


def local_master_override(question: PlanInputs) -> dict[str, tuple[str, str]]:
    """Return where the ranks that we start on this node alone meet, where a person or a platform names another place.

    That is here whatever it names; a name may not even resolve (Kubernetes, before the pod is ready).
    """
    own = question.environ.get("MASTER_ADDR", "127.0.0.1")
    if question.job.launcher or question.starter or own in ("", "127.0.0.1", "localhost"):
        return {}
    return {"MASTER_ADDR": ("127.0.0.1", f"all ranks are on this node, and need not look for {printable(own)}")}


def cuda_variables(question: PlanInputs, devices: Devices) -> dict[str, tuple[str, str]]:
    """Return how CUDA is told the GPUs: by UUID where not all visible ones are used.

    CUDA counts the fastest first and NVML by bus, so on mixed nodes an index alone is ambiguous.
    """
    own = question.environ.get("CUDA_VISIBLE_DEVICES")
    if devices.is_subset:
        of_yours = f", of (yours) CUDA_VISIBLE_DEVICES={printable(own)}" if own else ""
        uuids = ",".join(gpu.uuid for gpu in devices.gpus)
        return {"CUDA_VISIBLE_DEVICES": (uuids, f"the GPUs chosen above{of_yours}")}
    if len(devices.gpus) > 1 and own is None:
        return {"CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "CUDA counts GPUs as nvidia-smi does")}
    return {}


def drop_broken_preloads(question: PlanInputs) -> dict[str, tuple[str, str]]:
    """Return LD_PRELOAD without the host's files that are not in an Apptainer image; elsewhere refuse them.

    The loader would go on without them, with a line for each process that nobody reads.
    """
    if not question.broken_preloads:
        return {}
    own = question.environ["LD_PRELOAD"]
    file, problem = next(iter(question.broken_preloads.items()))
    more = len(question.broken_preloads) - 1
    told = f"{printable(file)} {problem}" + (f" (and {more} more)" if more else "")
    if question.machine.surroundings.container != "Apptainer":
        raise UserError(f"LD_PRELOAD={printable(own)}: {told}; correct or unset it", ExitCode.MACHINE)
    rest = ":".join(file for file in split_ld_preload(own) if file not in question.broken_preloads)
    return {"LD_PRELOAD": (rest, f"the host's, without what is not in the image: {told}")}


def warn_host_leaks(question: PlanInputs) -> tuple[str, ...]:
    """Warn of what Apptainer passes in from the host and that may break the packages of an image that is not ours.

    Ours let in only what is meant for them (`--env`).
    """
    if question.machine.surroundings.container != "Apptainer" or question.machine.surroundings.image:
        return ()
    return tuple(
        f"{name}={printable(question.environ[name])} comes from the host; if it is not meant for the image, unset it"
        " or start with --cleanenv"
        for name in ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")
        if question.environ.get(name)
    )
