"""The trainer's part of the plan of `entrypoint evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable, refuse_if
from entrypoint.core.files import is_folder
from entrypoint.core.packages import require_extra
from entrypoint.core.settings_base import ParsedSettings, rules_of
from entrypoint.core.user_dirs import why_not_writable
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Decision, Plan, TrainerPlan, make_decision
from train.data.dataset_info import DatasetInfo
from train.planning.compute import decide_precision
from train.planning.export_formats import INT8_FILE
from train.planning.image_sizes import check_image_sizes, decide_image_sizes, image_sizes
from train.planning.loading import decide_images, decide_workers, doubts
from train.planning.model_report import ModelReport
from train.planning.techniques import decide_model, needed_setting
from train.planning.trained_run import average_file, read_trained_run
from train.settings import TrainSettings


def plan_evaluation(
    given: ParsedSettings[TrainSettings],
    plan: Plan,
    dataset: DatasetInfo,
    machine: Machine,
    ask_model: Callable[[], ModelReport] = ModelReport,
    known: Sequence[str] = (),
) -> Plan:
    """Return the plan of an evaluation, which trains nothing and writes no run folder.

    `ask_model` has a child process build the model, for a size that only the model itself can refuse. `known` are the
    model's classes.
    """
    settings = given.values
    check_new_model(given, plan)
    check_image_sizes(given, dataset)
    if image_sizes(settings.data, dataset.shape).other_shapes:
        ask_model()
    source = "stream" if settings.data.reads_files else "memory"
    workers, workers_decision = decide_workers(given, plan, source)
    precision = decide_precision(given, plan.device, machine)
    trainer = TrainerPlan(
        data_source=source,
        num_workers=workers,
        image_shape=dataset.shape,
        precision=precision.value,
        use_ipex=False,
        saves_checkpoints=False,
    )
    int8: tuple[Decision, ...] = ()
    if settings.run.max_loss is not None:
        limit = f"at most {settings.run.max_loss:g} points below the model's score"
        int8 = (make_decision("int8", INT8_FILE, "", limit, given.sources["max_loss"]),)
    decisions = (
        make_decision("evaluate", settings.run.evaluate, "", "trains nothing", given.sources["evaluate"]),
        decide_model(given),
        *int8,
        *decide_images(dataset),
        *decide_image_sizes(given, dataset),
        workers_decision,
        precision,
    )
    plan = replace(plan, warnings=(*plan.warnings, *unused_by_evaluation(given), *doubts(dataset, known)))
    return plan.with_variables(given.as_variables(flags_only=True)).with_trainer(trainer, decisions)


def unused_by_evaluation(given: ParsedSettings[TrainSettings]) -> tuple[str, ...]:
    """Return a line with the settings of the user that only training uses, and one for each other without effect."""
    rules, defaults = rules_of(TrainSettings), TrainSettings()
    changed = {
        field: printable(source)
        for field, source in sorted(given.sources.items())
        if given.values.value(field) != defaults.value(field)
    }
    of_training = [source for field, source in changed.items() if rules[field].evaluate == "unused"]
    listed = f"{', '.join(of_training)} {'has' if len(of_training) == 1 else 'have'}"
    lines = [f"{listed} no effect: evaluate trains nothing"] if of_training else []
    needed = {field: needed_setting(given.values, rules[field].needs) for field in changed}
    others = (field for field, why in needed.items() if why and rules[field].evaluate != "unused")
    return (*lines, *(f"{changed[field]} has no effect: {needed[field]}" for field in others))


def check_new_model(given: ParsedSettings[TrainSettings], plan: Plan) -> None:
    """Raise `UserError` if no other model can be made here, by one rank, into its folder, with its own data."""
    settings = given.values
    if settings.run.tests_only:
        return
    verb = "average" if settings.run.average else "quantize"
    if verb == "quantize":
        require_extra("onnx", verb)
    ranks, data = plan.nodes.world_size, given.sources.get("data_dir")
    refuse_if(
        {
            f"{verb}: one rank computes, and this job has {ranks}. Start one.": ranks > 1,
            f"{data}: {verb} takes the data of the run, to train and to test. Unset it.": data,
        }
    )
    trained = read_trained_run(settings.run.evaluate, "TRAIN_EVALUATE", settings.network.model)
    folder = average_file(trained).parent if settings.run.average else trained.weights.parent
    if why := why_not_writable(folder):
        raise UserError(f"{verb}: {printable(folder)} cannot be written ({why}). Copy the model to another folder.")
    for path in settings.run.average.split(",") if settings.run.average else ():
        runs = (trained, read_trained_run(path, "TRAIN_AVERAGE", settings.network.model))
        facts = [
            (run.classes, run.normalization.mean, run.normalization.scale, run.normalization.outputs.mean)
            for run in runs
        ]
        if facts[0] != facts[1]:
            raise UserError(
                f"TRAIN_AVERAGE={printable(path)}: has other classes, or another normalization, than the first model."
                " Leave it out."
            )


def check_result_file(file: Path | None, variable: str) -> None:
    """Raise `UserError` if a result cannot be written where the user wants it."""
    if file is None:
        return
    why = why_not_writable(file.parent) if is_folder(file.parent) else "no such folder"
    if why:
        raise UserError(f"{variable}={printable(file)}: cannot be written ({why}). Name another file.")
