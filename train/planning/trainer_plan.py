"""The trainer's part of the plan: how data reaches the model, decided before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError, count_text, printable, refuse_if
from entrypoint.core.files import exists, resolve
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Decision, Plan, Source, TrainerPlan, make_decision
from train.data.dataset_info import DatasetInfo
from train.models.weights_origin import INDEX_ENDING
from train.planning.checks import (
    check_contradictions,
    check_shares,
    check_trainer_settings,
    images_to_train,
    steps_of_epoch,
)
from train.planning.compute import (
    decide_compiling,
    decide_ipex,
    decide_precision,
    decide_winograd,
    why_ipex_does_not_pack,
)
from train.planning.evaluation_plan import plan_evaluation
from train.planning.image_sizes import decide_image_sizes, model_input_shape
from train.planning.loading import decide_images, decide_normalization, decide_workers, doubts
from train.planning.model_report import ModelReport
from train.planning.recipes import warn_of_size
from train.planning.run_selection import check_resume
from train.planning.techniques import decide_techniques, decide_tensorboard, unused_settings
from train.settings import TrainSettings

# Decoded images may use this fraction of the job's memory; the rest is for the model and the page cache.
DECODED_SHARE = 0.25
# A class with so many times the images of another is worth a warning.
IMBALANCE = 10


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """What decides on the trainer's part of a plan besides settings, data set and machine.

    `free_name` is a run name that no run has yet, for a run that must have a name.
    `compile_problem` says why the backend of torch.compile cannot be used.
    `ask_model` has a child process build the model, for settings that only the model itself can answer.
    `reads_resume` says that a checkpoint to resume from is on this node.
    `winograd_kernel` says whether Winograd's convolution is compiled.
    `known` are the classes of a model that is evaluated.
    """

    free_name: str = ""
    compile_problem: str = ""
    ask_model: Callable[[], ModelReport] = ModelReport
    reads_resume: bool = True
    winograd_kernel: bool = False
    known: tuple[str, ...] = ()


NO_FACTS = TrainerFacts()


def plan_trainer(
    plan: Plan,
    given: ParsedSettings[TrainSettings],
    dataset: DatasetInfo,
    machine: Machine,
    facts: TrainerFacts = NO_FACTS,
) -> Plan:
    """Return the plan with the trainer's part, and the trainer's flags as variables; raises `UserError`."""
    settings, ranks = given.values, plan.nodes.world_size
    check_contradictions(given)
    if settings.run.evaluate:
        return plan_evaluation(given, plan, dataset, machine, facts.ask_model, facts.known)
    resume, resume_decisions = plan_resume(given, plan, facts.free_name)
    check_trainer_settings(given, dataset)
    if facts.reads_resume:
        named = {"resume": resume["TRAIN_RESUME"], "run_name": resume["TRAIN_RUN_NAME"]} if resume else {}
        check_resume(settings.with_values(**named), dataset)
    check_shares(settings.optim, ranks)
    check_memory(given, dataset, machine.memory_bytes, len(plan.ranks))
    source, source_decision = decide_data_source(given, dataset, machine.memory_bytes)
    workers, workers_decision = decide_workers(given, plan, source)
    precision = decide_precision(given, plan.device, machine)
    ipex = decide_ipex(given, plan.device, machine)
    winograd = decide_winograd(given, plan.device, machine, precision.value, has_kernel=facts.winograd_kernel)
    report = facts.ask_model()  # takes seconds, so what can be refused without it is refused before
    check_report(given, report, ranks)
    normalization, normalization_decision = decide_normalization(given, dataset.shape[0], source, report.normalization)
    trainer = TrainerPlan(
        data_source=source,
        num_workers=workers,
        image_shape=dataset.shape,
        precision=precision.value,
        use_ipex=ipex.value == "on",
        ipex_packs=ipex.value == "on" and not why_ipex_does_not_pack(settings, machine),
        winograd=any(one.value == "on" for one in winograd),
        saves_checkpoints=settings.run.checkpoint_every > 0,
        normalization=normalization,
        doubts=doubts(dataset, left_out=images_to_train(settings.data, dataset) % settings.optim.batch_size),
    )
    decisions = (
        *decide_techniques(given, dataset, report),
        decide_batch(given, ranks),
        *decide_images(dataset),
        *decide_image_sizes(given, dataset),
        source_decision,
        normalization_decision,
        workers_decision,
        precision,
        decide_compiling(given, facts.compile_problem, plan.environment.variables.get("TORCHINDUCTOR_CACHE_DIR", "")),
        ipex,
        *winograd,
        *decide_parallelism(given, ranks),
        *resume_decisions,
        *decide_tensorboard(settings),
    )
    epochs = settings.optim.total_epochs(steps_of_epoch(settings, dataset) or 1)
    unused = unused_settings(given, source, ranks, report, epochs)
    said = (*trainer.doubts, *warn_of_data(settings, dataset), *unused, *warn_of_model(given, dataset, report))
    variables = {**given.as_variables(flags_only=True), **resume, **settled_variables(settings, report)}
    return replace(plan, warnings=(*plan.warnings, *said)).with_variables(variables).with_trainer(trainer, decisions)


def warn_of_data(settings: TrainSettings, dataset: DatasetInfo) -> tuple[str, ...]:
    """Return a warning where the largest class has many times the images of the smallest, and nothing is done.

    And one where images choose the best weights, and none are kept.
    """
    lost = (
        ("TRAIN_CHECKPOINT_EVERY=0 keeps no weights, so the run ends with its last ones, not with the best",)
        if (settings.data.val_split or dataset.has_val) and not settings.run.checkpoint_every
        else ()
    )
    counts = dict(zip(dataset.classes, dataset.class_counts, strict=False))
    fewest, most = min(counts, key=counts.__getitem__, default=""), max(counts, key=counts.__getitem__, default="")
    is_handled = settings.optim.balance or settings.optim.class_weights
    if not counts or counts[most] <= IMBALANCE * counts[fewest] or is_handled:
        return lost
    return (
        *lost,
        f"class {printable(most)} has {counts[most]:,} images to train and {printable(fewest)} {counts[fewest]:,}, so"
        " the small ones are learned badly. Try TRAIN_BALANCE=1 or TRAIN_CLASS_WEIGHTS=auto.",
    )


def warn_of_model(given: ParsedSettings[TrainSettings], dataset: DatasetInfo, report: ModelReport) -> tuple[str, ...]:
    """Return a warning where layers are frozen that nothing was loaded into, and where too many weights are random.

    And one where images have another layout in memory than usual.
    """
    settings = given.values
    size = warn_of_size(given, dataset, model_input_shape(settings.data, dataset.shape), report.parameters)
    size += (
        ("TRAIN_CHANNELS_LAST=0 is used: the model has a `view` that needs it; `reshape` does not, and may be faster",)
        if report.needs_contiguous
        else ()
    )
    if not settings.network.freeze or settings.network.weights or settings.run.resume != "off":
        return size
    source = printable(given.sources.get("freeze", f"TRAIN_FREEZE={settings.network.freeze}"))
    return (*size, f"{source}: the frozen layers keep their random weights. Set TRAIN_WEIGHTS.")


def settled_variables(settings: TrainSettings, report: ModelReport) -> dict[str, str]:
    """Return the layout of images if the model needs it, and TRAIN_WEIGHTS and TRAIN_TEACHER without links.

    A run moves `runs/latest` to itself before it reads them. The link of an index stays: in Hugging Face's cache, it
    leads to a folder without the files that the index names.
    """
    named = {"TRAIN_WEIGHTS": Path(settings.network.weights), "TRAIN_TEACHER": Path(settings.optim.teacher)}
    links = {
        name: str(resolve(path))
        for name, path in named.items()
        if path.name and exists(path) and resolve(path) != path.absolute() and not path.name.endswith(INDEX_ENDING)
    }
    return {**links, **({"TRAIN_CHANNELS_LAST": "0"} if report.needs_contiguous else {})}


def check_report(given: ParsedSettings[TrainSettings], report: ModelReport, ranks: int) -> None:
    """Raise `UserError` for what the model does not allow.

    DDP would wait for parameters without a gradient. BatchNorm needs two values per channel, and models for larger
    images reduce small ones to one pixel.
    """
    settings = given.values
    model, steps = printable(settings.network.model), settings.optim.grad_accum_steps
    ignored = settings.compute.ddp_find_unused_parameters or settings.compute.parallelism != "ddp"
    refuse_if(
        {
            f"TRAIN_BATCH_SIZE={settings.optim.batch_size}: {model} needs 2 images per micro-batch, and {ranks} x"
            f" {steps} micro-batches leave some with 1 ({report.single_image_problem}). Set at least"
            f" {2 * ranks * steps}.": (report.single_image_problem),
            f"TRAIN_MODEL={model}: {printable(''.join(report.without_gradient[:1]))} gets no gradient, and DDP waits"
            " for it. Set TRAIN_DDP_FIND_UNUSED_PARAMETERS=1, or remove the layer.": (
                report.without_gradient and ranks > 1 and not ignored
            ),
            f"{given.sources.get('channels_last')}: the model has a `view` that this layout does not allow. Unset it,"
            " or use `reshape`.": report.needs_contiguous and "channels_last" in given.sources,
        }
    )


def decide_parallelism(given: ParsedSettings[TrainSettings], ranks: int) -> tuple[Decision, ...]:
    """Return over how many ranks FSDP shards the model, if the user asks for it."""
    if given.values.compute.parallelism == "ddp":
        return ()
    reason = f"shards weights, gradients and optimizer over {ranks} ranks" if ranks > 1 else "one rank holds all"
    return (Decision("parallelism", "fsdp", reason, Source.USER, given.sources["parallelism"]),)


def plan_resume(
    given: ParsedSettings[TrainSettings], plan: Plan, free_name: str
) -> tuple[dict[str, str], tuple[Decision, ...]]:
    """Return the variables by which restarted ranks resume from the run's last checkpoint.

    Over several nodes the run must have a name, because each node would choose another. Raises `UserError` there.
    """
    if not plan.nodes.max_restarts:
        return {}, ()
    values = given.values
    refuse_if(
        {
            f"{given.sources.get('resume')}: restarted ranks resume from the run's own last checkpoint. Set"
            " TRAIN_RESUME=auto and TRAIN_RUN_NAME.": values.run.resume != "auto" and "resume" in given.sources,
            "TRAIN_RUN_NAME: not set. Set it, so that restarted ranks on all nodes find their run.": (
                not values.run.run_name and plan.nodes.nnodes > 1
            ),
            "TRAIN_CHECKPOINT_EVERY=0: restarted ranks need a checkpoint. Set 1 or more.": (
                not values.run.checkpoint_every
            ),
        }
    )
    reason = "restarted ranks resume from the last checkpoint"
    return {"TRAIN_RESUME": "auto", "TRAIN_RUN_NAME": values.run.run_name or free_name}, (
        Decision("resume", "auto", reason),
    )


def decide_batch(given: ParsedSettings[TrainSettings], ranks: int) -> Decision:
    """Return the global batch size, and each rank's share of it."""
    size = given.values.optim.batch_size
    share = f"images per step, about {size // ranks} per rank" if ranks > 1 else "images per step"
    return make_decision("batch", str(size), "", share, given.sources.get("batch_size", ""))


def check_memory(given: ParsedSettings[TrainSettings], dataset: DatasetInfo, memory_bytes: int, ranks: int) -> None:
    """Raise `UserError` for a set that only memory can hold, if the ranks of this node have too little of it.

    `memory_bytes` is 0 if unknown.
    """
    needed = dataset.loading_bytes * ranks
    if memory_bytes and needed > memory_bytes:
        raise UserError(
            f"TRAIN_DATASET={given.values.data.dataset}: loading it takes {needed / 2**30:,.1f} GiB on"
            f" {count_text(ranks, 'rank')}, and this node has {memory_bytes / 2**30:,.1f} GiB. Lower"
            " TRAIN_SYNTHETIC_IMAGES or TRAIN_SYNTHETIC_SHAPE.",
            ExitCode.MACHINE,
        )


def decide_data_source(
    given: ParsedSettings[TrainSettings], dataset: DatasetInfo, memory_bytes: int
) -> tuple[str, Decision]:
    """Keep small datasets in memory as bytes, and stream large ones; raises `UserError` for what cannot be done."""
    size = f"{dataset.images:,} images, {dataset.bytes / 2**20:,.0f} MiB decoded"
    requested, can_stream = given.values.data.data_source, given.values.data.reads_files
    cuts_from_files = given.values.data.transforms == "imagenet" and can_stream and dataset.is_resized
    if requested == "stream" and not can_stream:
        raise UserError(
            f"{given.sources['data_source']}: only imagefolder, csv and shards can be streamed, and TRAIN_DATASET is"
            f" {given.values.data.dataset}. Unset it."
        )
    if requested != "auto":
        return requested, make_decision("data source", requested, "", size, given.sources.get("data_source", ""))
    if cuts_from_files:
        return "stream", Decision("data source", "stream", "random resized crops are cut out of the files")
    fits = dataset.bytes <= memory_bytes * DECODED_SHARE
    if not can_stream or fits:
        return "memory", Decision("data source", "memory", f"{size}, once")
    return "stream", Decision("data source", "stream", f"{size}: over a quarter of memory")
