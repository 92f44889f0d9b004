"""The trainer's part of the plan: how data reaches the model, decided before any process starts."""

from __future__ import annotations

from dataclasses import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Decision, Plan
from train.data.dataset_info import DatasetInfo
from train.planning.compute import decide_compiling, decide_ipex, decide_precision
from train.settings import TrainSettings

# Decoded images may take this share of the memory that the job may use; the rest is the model's and the cache's.
MEMORY_SHARE = 0.25
# Batches that each loader worker has in /dev/shm beside its prefetched ones.
IN_FLIGHT_BATCHES = 1
# What of /dev/shm they may take; Gloo and NCCL put their own buffers there.
SHM_SHARE = 0.5


def plan_trainer(
    plan: Plan,
    given: ParsedSettings[TrainSettings],
    facts: DatasetInfo,
    machine: Machine,
    *,
    free_name: str = "",
    compile_problem: str = "",
) -> Plan:
    """Return the plan with feed and workers decided, and the trainer's flags passed on as variables.

    `free_name` is one that no run has yet, for a run that must be named. `compile_problem` says why the backend of
    torch.compile cannot be used. Raises `Refused` where a batch has fewer
    images than there are ranks and parts to share them.
    """
    settings = given.values
    ranks = plan.world_size
    check_contradictions(given, plan)
    if settings.batch_size < ranks * settings.grad_accum_steps:
        raise UserError(
            f"TRAIN_BATCH_SIZE={settings.batch_size}: too few for {ranks} ranks x {settings.grad_accum_steps} parts;"
            f" it is shared among all ranks, so it must be at least {ranks * settings.grad_accum_steps}"
        )
    feed, feed_decision = decide_data_source(given, facts, machine.memory_bytes)
    workers, workers_decision = decide_workers(given, plan, facts, feed, machine.surroundings.shm_bytes)
    flags = given.as_variables(flags_only=True)
    again, again_decision = plan_resume(given, plan, free_name)
    precision = decide_precision(given, plan.device, machine)
    compiling = decide_compiling(given, compile_problem)
    ipex = decide_ipex(given, plan.device, machine)
    decided = replace(plan, environment={**plan.environment, **flags, **again})
    return decided.with_training(
        {
            "feed": feed,
            "workers": workers,
            "shape": list(facts.shape),
            "precision": precision.value,
            "ipex": ipex.value == "on",
            "saves": settings.checkpoint_every > 0,
        },
        (
            Decision("batch", str(settings.batch_size), batch_reason(given, ranks)),
            feed_decision,
            workers_decision,
            precision,
            compiling,
            ipex,
            *decide_sharding(given, ranks),
            *again_decision,
        ),
    )


def check_contradictions(given: ParsedSettings[TrainSettings], plan: Plan) -> None:
    """Raise `Refused` for settings that do not go with each other, or with the plan's device."""
    settings = given.values
    if settings.pin_memory is True and plan.device != "cuda":
        raise UserError(f"{given.sources['pin_memory']}: there is no GPU to copy to; set TRAIN_PIN_MEMORY=auto")
    if settings.steps and "epochs" in given.sources:
        raise UserError(f"{given.sources['epochs']} and {given.sources['steps']} both say how long to train; drop one")
    if settings.image_size != "auto" and settings.dataset != "imagefolder":
        raise UserError(
            f"{given.sources['image_size']}: only imagefolder's pictures are resized, and TRAIN_DATASET is"
            f" {settings.dataset}; unset it"
        )
    if settings.prune_ratio and not settings.steps and settings.prune_warmup >= settings.epochs:
        raise UserError(
            f"TRAIN_PRUNE_WARMUP={settings.prune_warmup}: all of TRAIN_EPOCHS={settings.epochs}; lower it, so that the"
            " pruned model is trained on"
        )
    if settings.max_minutes is not None and not settings.checkpoint_every:
        raise UserError(
            f"{given.sources['max_minutes']}: a run that ends so goes on from a checkpoint, and"
            " TRAIN_CHECKPOINT_EVERY=0"
            " leaves none; set 1"
        )
    check_fsdp_settings(given)
    if settings.ddp_static_graph and settings.grad_accum_steps > 1 and plan.world_size > 1:
        raise UserError(
            f"{given.sources['ddp_static_graph']} and {given.sources['grad_accum_steps']} contradict each other: a"
            " step's parts are"
            " not alike, only the last one is shared among ranks; drop one of the two"
        )


# What of other settings does not go with weights spread over the ranks, and why.
FSDP_INCOMPATIBLE = {
    "prune_ratio": (0.0, "a model is cut whole; prune it in a run without"),
    "ddp_static_graph": (False, "it is told to DDP, which does not run"),
    "ddp_find_unused_parameters": (False, "it is told to DDP, which does not run"),
    "gradient_compression": ("off", "it is a hook of DDP's, which does not run"),
}


def check_fsdp_settings(given: ParsedSettings[TrainSettings]) -> None:
    """Raise `Refused` for settings that do not go with FSDP."""
    settings = given.values
    if settings.parallelism == "ddp":
        return
    for field, (off, why) in FSDP_INCOMPATIBLE.items():
        if getattr(settings, field) != off:
            raise UserError(f"{given.sources[field]} and {given.sources['parallelism']} contradict each other: {why}")


def decide_sharding(given: ParsedSettings[TrainSettings], ranks: int) -> tuple[Decision, ...]:
    """Say over how many ranks the model is spread, where that is asked for."""
    if given.values.parallelism == "ddp":
        return ()
    over = f"over {ranks} ranks" if ranks > 1 else "one rank has all"
    why = f"(yours) {given.sources['parallelism']}: weights, gradients and optimizer {over}; filters are contiguous"
    return (Decision("shard", "fsdp", why),)


def plan_resume(
    given: ParsedSettings[TrainSettings], plan: Plan, free_name: str
) -> tuple[dict[str, str], tuple[Decision, ...]]:
    """Where ranks may be started again they go on from the run's own last checkpoint; return the variables for it.

    Over several nodes the run must be named, since each node would name it otherwise; raises `Refused` there.
    """
    if not plan.max_restarts:
        return {}, ()
    values = given.values
    if values.resume != "auto" and "resume" in given.sources:
        raise UserError(
            f"{given.sources['resume']}: with restarts a run goes on from its own last checkpoint; set"
            " TRAIN_RESUME=auto"
            " and TRAIN_RUN_NAME"
        )
    if not values.run_name and plan.nnodes > 1:
        raise UserError("TRAIN_RUN_NAME is not set: ranks that are started again on several nodes find their run by it")
    if not values.checkpoint_every:
        raise UserError("TRAIN_CHECKPOINT_EVERY=0: ranks that are started again go on from checkpoints; set 1 or more")
    why = "ranks that are started again go on from the run's last checkpoint"
    return {"TRAIN_RESUME": "auto", "TRAIN_RUN_NAME": values.run_name or free_name}, (Decision("resume", "auto", why),)


def batch_reason(given: ParsedSettings[TrainSettings], ranks: int) -> str:
    """Say how a batch is shared, and whose choice its size was."""
    share = "" if ranks == 1 else f"images a step over all ranks, about {given.values.batch_size // ranks} each"
    own = f"(yours) {given.sources['batch_size']}" if "batch_size" in given.sources else ""
    return "; ".join(part for part in (own, share) if part) or "images a step"


def decide_data_source(
    given: ParsedSettings[TrainSettings], facts: DatasetInfo, memory_bytes: int
) -> tuple[str, Decision]:
    """Keep small sets in memory as bytes, stream large ones through loader workers."""
    size = f"{'' if facts.counted_all else 'over '}{facts.images:,} images, {facts.bytes / 2**20:,.0f} MiB decoded"
    asked, streamable = given.values.data_source, given.values.dataset == "imagefolder"
    if asked == "stream" and not streamable:
        raise UserError(
            f"{given.sources['data_source']}: only imagefolder can be streamed; {given.values.dataset} is held in"
            " memory"
        )
    if asked != "auto":
        return asked, Decision("feed", asked, f"(yours) {given.sources['data_source']}; {size}")
    fits = facts.counted_all and facts.bytes <= memory_bytes * MEMORY_SHARE
    if not streamable or fits:
        return "memory", Decision("feed", "memory", f"{size}: decoded once, fed in whole batches")
    return "stream", Decision("feed", "stream", f"{size}: over a quarter of memory, so decoded as they are needed")


def decide_workers(
    given: ParsedSettings[TrainSettings], plan: Plan, facts: DatasetInfo, feed: str, shm_bytes: int
) -> tuple[int, Decision]:
    """Loader workers of each rank: none where nothing is left to decode, no more than /dev/shm can serve.

    Raises `Refused` where more are asked for: a worker that finds /dev/shm full dies of SIGBUS.
    """
    asked = given.values.num_workers
    if feed == "memory":
        return 0, Decision("workers", "0", "batches are cut from memory, which needs none")
    channels, height, width = facts.shape
    ahead = given.values.prefetch_factor + IN_FLIGHT_BATCHES
    each_bytes = ahead * given.values.batch_size * channels * height * width  # a worker on every rank
    fitting = int(shm_bytes * SHM_SHARE) // each_bytes
    room = f"/dev/shm has {shm_bytes / 2**20:,.0f} MiB, and a worker on each rank needs {each_bytes / 2**20:,.0f} MiB"
    if asked != "auto":
        if asked > fitting:
            raise UserError(
                f"{given.sources['num_workers']}: {room}; lower it to {fitting}, or start with a larger --shm-size",
                ExitCode.MACHINE,
            )
        return asked, Decision("workers", str(asked), f"(yours) {given.sources['num_workers']}")
    workers = min(rank.threads for rank in plan.ranks)
    if workers > fitting:
        return fitting, Decision("workers", str(fitting), f"{room}; start with a larger --shm-size for {workers}")
    return workers, Decision("workers", str(workers), "one a thread of the rank, decoding while it computes")
