"""The trainer's part of the plan: how data reaches the model, decided before any process starts."""

from __future__ import annotations

from dataclasses import replace

from entrypoint.checks import second_number
from entrypoint.errors import Exit, Refused
from entrypoint.machine import Machine
from entrypoint.plan import Decision, Plan
from entrypoint.variables import Given
from train.settings import PREFIX, TrainSettings
from train.survey import Facts

# Decoded images may take this share of the memory that the job may use; the rest is the model's and the cache's.
MEMORY_SHARE = 0.25
# Batches that each loader worker has ready in /dev/shm: its two prefetched ones and the one that it makes.
PREFETCHED = 3
# What of /dev/shm they may take; Gloo and NCCL put their own buffers there.
SHM_SHARE = 0.5


def plan_training(plan: Plan, given: Given[TrainSettings], facts: Facts, machine: Machine, free_name: str = "") -> Plan:
    """Return the plan with feed and workers decided, and the trainer's flags passed on as variables.

    `free_name` is one that no run has yet, for a run that must be named. Raises `Refused` where a batch has fewer
    images than there are ranks and parts to share them.
    """
    settings = given.values
    ranks = plan.world_size
    if settings.batch_size < ranks * settings.accumulate:
        raise Refused(
            f"TRAIN_BATCH_SIZE={settings.batch_size}: too few for {ranks} ranks x {settings.accumulate} parts;"
            f" it is shared among all ranks, so it must be at least {ranks * settings.accumulate}"
        )
    feed, feed_decision = decide_feed(given, facts, machine.memory_bytes)
    workers, workers_decision = decide_workers(given, plan, facts, feed, machine.surroundings.shm_bytes)
    flags = given.as_variables(PREFIX, flags_only=True)
    again, again_decision = decide_going_on(given, plan, free_name)
    precision = decide_precision(given, plan.device, machine)
    ipex = decide_ipex(given, plan.device, machine, facts)
    decided = replace(plan, environment={**plan.environment, **flags, **again})
    return decided.with_training(
        {
            "feed": feed,
            "workers": workers,
            "shape": list(facts.shape),
            "precision": precision.value,
            "ipex": ipex.value == "on",
        },
        (
            Decision("batch", str(settings.batch_size), batch_reason(given, ranks)),
            feed_decision,
            workers_decision,
            precision,
            ipex,
            *again_decision,
        ),
    )


def decide_going_on(
    given: Given[TrainSettings], plan: Plan, free_name: str
) -> tuple[dict[str, str], tuple[Decision, ...]]:
    """Where ranks may be started again they go on from the run's own last checkpoint; return the variables for it.

    Over several nodes the run must be named, since each node would name it otherwise; raises `Refused` there.
    """
    if not plan.max_restarts:
        return {}, ()
    values = given.values
    if values.resume != "auto" and "resume" in given.source:
        raise Refused(
            f"{given.source['resume']}: with restarts a run goes on from its own last checkpoint; set TRAIN_RESUME=auto"
            " and TRAIN_RUN_NAME"
        )
    if not values.run_name and plan.nnodes > 1:
        raise Refused("TRAIN_RUN_NAME is not set: ranks that are started again on several nodes find their run by it")
    if not values.checkpoint_every:
        raise Refused("TRAIN_CHECKPOINT_EVERY=0: ranks that are started again go on from checkpoints; set 1 or more")
    why = "ranks that are started again go on from the run's last checkpoint"
    return {f"{PREFIX}RESUME": "auto", f"{PREFIX}RUN_NAME": values.run_name or free_name}, (
        Decision("resume", "auto", why),
    )


def batch_reason(given: Given[TrainSettings], ranks: int) -> str:
    """Say how a batch is shared, and whose choice its size was."""
    share = "" if ranks == 1 else f"images a step over all ranks, about {given.values.batch_size // ranks} each"
    own = f"(yours) {given.source['batch_size']}" if "batch_size" in given.source else ""
    return "; ".join(part for part in (own, share) if part) or "images a step"


def decide_feed(given: Given[TrainSettings], facts: Facts, memory_bytes: int) -> tuple[str, Decision]:
    """Keep small sets in memory as bytes, stream large ones through loader workers."""
    size = f"{'' if facts.counted_all else 'over '}{facts.images:,} images, {facts.bytes / 2**20:,.0f} MiB decoded"
    asked, streamable = given.values.feed, given.values.dataset == "imagefolder"
    if asked == "stream" and not streamable:
        raise Refused(
            f"{given.source['feed']}: only imagefolder can be streamed; {given.values.dataset} is held in memory"
        )
    if asked != "auto":
        return asked, Decision("feed", asked, f"(yours) {given.source['feed']}; {size}")
    fits = facts.counted_all and facts.bytes <= memory_bytes * MEMORY_SHARE
    if not streamable or fits:
        return "memory", Decision("feed", "memory", f"{size}: decoded once, fed in whole batches")
    return "stream", Decision("feed", "stream", f"{size}: over a quarter of memory, so decoded as they are needed")


def decide_workers(
    given: Given[TrainSettings], plan: Plan, facts: Facts, feed: str, shm_bytes: int
) -> tuple[int, Decision]:
    """Loader workers of each rank: none where nothing is left to decode, no more than /dev/shm can serve.

    Raises `Refused` where more are asked for: a worker that finds /dev/shm full dies of SIGBUS.
    """
    asked = given.values.workers
    if feed == "memory":
        return 0, Decision("workers", "0", "batches are cut from memory, which needs none")
    channels, height, width = facts.shape
    each_bytes = PREFETCHED * given.values.batch_size * channels * height * width  # a worker on every rank
    fitting = int(shm_bytes * SHM_SHARE) // each_bytes
    room = f"/dev/shm has {shm_bytes / 2**20:,.0f} MiB, and a worker on each rank needs {each_bytes / 2**20:,.0f} MiB"
    if asked != "auto":
        if asked > fitting:
            raise Refused(
                f"{given.source['workers']}: {room}; lower it to {fitting}, or start with a larger --shm-size",
                Exit.MACHINE,
            )
        return asked, Decision("workers", str(asked), f"(yours) {given.source['workers']}")
    workers = min(rank.threads for rank in plan.ranks)
    if workers > fitting:
        return fitting, Decision("workers", str(fitting), f"{room}; start with a larger --shm-size for {workers}")
    return workers, Decision("workers", str(workers), "one a thread of the rank, decoding while it computes")


# What computes in bfloat16 itself: AVX-512's and AMX's instructions, Arm's extension, and NVIDIA's GPUs from Ampere on.
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
BF16_CAPABILITY = 80


def decide_precision(given: Given[TrainSettings], device: str, machine: Machine) -> Decision:
    """On auto, bf16 where the hardware has units for it; elsewhere it is emulated, and up to 14 times slower.

    fp32 stays the default: rounded to bf16, runs of one seed on one and on two ranks part sooner.
    """
    unit = bf16_unit(device, machine)
    if given.values.precision == "auto":
        why = f"{unit}; weights stay fp32" if unit else "no unit computes in bf16, and emulating it is slow"
        return Decision("precision", "bf16" if unit else "fp32", why)
    if "precision" in given.source:
        return Decision("precision", given.values.precision, f"(yours) {given.source['precision']}")
    hint = f"; TRAIN_PRECISION=auto would take bf16: {unit}" if unit else ""
    return Decision("precision", given.values.precision, f"the default{hint}")


def bf16_unit(device: str, machine: Machine) -> str:
    """Say what computes in bfloat16 itself, nothing where nothing does."""
    if device == "cuda":
        least = min(gpu.capability for gpu in machine.gpus)
        return f"the GPU has compute capability {least / 10:.1f}" if least >= BF16_CAPABILITY else ""
    flag = next((flag for flag in BF16_FLAGS if flag in machine.cpu_flags), None)
    return f"the CPU has {flag}" if flag else ""


IPEX = "intel_extension_for_pytorch"
# Its import takes 5 s in every rank: what it can gain of a shorter run is less. Values are pixels times channels.
IPEX_PAYS_FROM_VALUES = 400_000_000


def decide_ipex(given: Given[TrainSettings], device: str, machine: Machine, facts: Facts) -> Decision:
    """On auto, only with AMX and for a run that pays its import back; asked for and unusable is refused.

    On AVX-512 it gained nothing for the CNN and up to a sixth for ResNet-18, on AVX2 it was slower (1.26 times).
    """
    asked = given.values.ipex
    problem = ipex_problem(device, machine)
    if asked == "on" and problem:
        raise Refused(f"{given.source['ipex']}: {problem}; set TRAIN_IPEX=auto", Exit.MACHINE)
    if asked != "auto":
        return Decision("ipex", asked, f"(yours) {given.source['ipex']}")
    if problem:
        return Decision("ipex", "off", problem)
    if "amx_bf16" not in machine.cpu_flags:
        return Decision("ipex", "off", "it gains little or nothing on a CPU without AMX")
    if facts.bytes * given.values.epochs < IPEX_PAYS_FROM_VALUES:
        return Decision("ipex", "off", "the run is too short to pay its import of 5 s back")
    return Decision("ipex", "on", "the CPU has AMX, and the run pays its import of 5 s back")


def ipex_problem(device: str, machine: Machine) -> str:
    """Say why Intel's extension cannot be used, nothing where it can: it goes with one minor version of torch."""
    versions = machine.packages.versions
    if device != "cpu":
        return "Intel's extension is for CPUs"
    if IPEX not in versions:
        return "Intel's extension is not installed"
    if second_number(versions[IPEX]) != second_number(versions.get("torch", "")):
        return f"Intel's extension {versions[IPEX]} does not go with torch {versions.get('torch')}"
    return ""
