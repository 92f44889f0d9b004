"""Makes the plan of a command line, with the trainer's part where it trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from entrypoint.cli.parser import CommandLine
from entrypoint.cli.plan_inputs import is_first_rank_here
from entrypoint.core.errors import UserError, count_text, printable
from entrypoint.core.packages import require_extra
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.core.user_dirs import user_cache_dir, why_not_writable
from entrypoint.job.job_key import read_secret_file
from entrypoint.launch.remote import with_remote_command
from entrypoint.machine.backends import find_compile_problem
from entrypoint.machine.container import volatile_place
from entrypoint.machine.procfs import ROOT
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, Plan, Source
from entrypoint.plan.planner import make_plan

if TYPE_CHECKING:
    from train.data.dataset_info import DatasetInfo
    from train.planning.model_report import ModelReport
    from train.settings import TrainSettings


def settings_affecting_speed(command: CommandLine, inputs: PlanInputs) -> Mapping[str, Any]:
    """Return the trainer's settings that change the time of a step, as JSON types; none for a user's script."""
    if command.program is not None:
        return {}
    require_extra("train", command.command)
    from train.data.dataset_info import inspect_dataset
    from train.settings import read_train_settings

    values = read_train_settings(inputs.environ, command.flags).values
    if values.run.evaluate:  # the run's own settings say how its data are read, and nothing was tuned for them
        return values.speed_relevant()
    return {**values.speed_relevant(), "shape": inspect_dataset(values, launches=command.launches).shape}


def build_plan(command: CommandLine, inputs: PlanInputs) -> Plan:
    """Return the plan; for the built-in trainer with the part that its data and settings decide.

    Raises `UserError` for a file that cannot be the job's key.
    """
    plan = build_trainer_plan(command, inputs) if command.program is None else make_plan(inputs)
    if plan.rendezvous.key_source == "file":
        read_secret_file(plan.rendezvous.key_file)
    return with_remote_command(plan, inputs)


def build_trainer_plan(command: CommandLine, inputs: PlanInputs) -> Plan:
    """Return the plan of the built-in trainer."""
    require_extra("train", "train")
    from dataclasses import replace as replace_fields  # costs a start 5 ms, and `run` needs none

    from train.data.dataset_info import inspect_dataset
    from train.kernels.library import find_kernel
    from train.models.weights_origin import weights_at_hand
    from train.planning.recipes import with_recipe
    from train.planning.run_selection import new_run_dir, previous_run
    from train.planning.trained_run import with_resumed_settings, with_trained_settings
    from train.planning.trainer_plan import TrainerFacts, plan_trainer
    from train.settings import read_train_settings

    asked = read_train_settings(inputs.environ, command.flags)
    asked, trained, adopted = with_trained_settings(asked) if asked.values.run.evaluate else (asked, None, {})
    asked, resumed, decisions = with_resumed_settings(asked, inputs.environ, command.flags)
    writes_none = command.command == "tune" or trained is not None  # the trials of `tune` have their own folder
    if not writes_none and asked.url("output_dir"):
        asked, decision = plan_storage(asked, inputs)
        decisions += (decision,)
    launches = command.launches and command.command != "doctor"
    facts = inspect_dataset(asked.values, launches=launches)
    if trained:
        trained.order_of(facts.classes, "TRAIN_DATA_DIR")
        is_asked = asked.values.data.image_size != "auto"  # the size of evaluation may be another one
        shape = (trained.shape[0], *facts.shape[1:]) if is_asked else trained.shape
        facts = replace_fields(facts, shape=shape) if asked.values.data.reads_files else facts
    inputs = replace(inputs, previous=previous_run(asked.values.run))
    at_hand = weights_at_hand(inputs.environ) if asked.values.data.reads_files else ()
    training, plan = with_recipe(asked, make_plan(inputs), facts, at_hand)
    if training.values.data.image_size != asked.values.data.image_size:
        facts = inspect_dataset(training.values, launches=launches)
    plan = replace(plan.with_variables(adopted | resumed), decisions=plan.decisions + decisions)
    problem = () if writes_none else check_output_dir(asked, inputs) + warn_of_other_ranks(plan, inputs.previous)
    plan = replace(plan, warnings=(*problem, *plan.warnings))
    free_name = new_run_dir(training.values.run.output_dir, training.values).name if plan.nodes.max_restarts else ""
    no_compile = compile_problem(training.values, plan.device, inputs)
    trainer_facts = TrainerFacts(
        free_name=free_name,
        compile_problem=no_compile,
        ask_model=lambda: model_report(training, plan, facts, inputs),
        reads_resume=is_first_rank_here(inputs),
        winograd_kernel=find_kernel("winograd") is not None,
        known=trained.classes if trained else (),
    )
    return plan_trainer(plan, training, facts, inputs.machine, trainer_facts)


def model_report(
    given: ParsedSettings[TrainSettings], plan: Plan, facts: DatasetInfo, inputs: PlanInputs
) -> ModelReport:
    """Return what the model and its weights are, where only a child process with torch can say it."""
    from train.planning.image_sizes import image_sizes
    from train.planning.model_report import ModelQuestion, ModelReport, ask_about_model, has_single_images, needs_report
    from train.setting_groups.optimization import DEFAULT_LR, SGD

    sizes, ranks = image_sizes(given.values.data, facts.shape), plan.nodes.world_size
    shape = sizes.train
    if not needs_report(given, shape, ranks):
        return ModelReport(default_lr=DEFAULT_LR.get(given.values.optim.optimizer.lower(), DEFAULT_LR[SGD]))
    recipe = {name: text for name, text in plan.environment.variables.items() if name.startswith("TRAIN_")}
    question = ModelQuestion(
        shape=shape,
        classes=facts.classes,
        other_shapes=sizes.other_shapes,
        memory_bytes=(
            min((gpu.memory_bytes for gpu in inputs.machine.gpus), default=0)
            if plan.device == "cuda"
            else inputs.machine.memory_bytes // len(plan.ranks)
        ),
        single_shapes=(shape, *sizes.smaller_shapes) if has_single_images(given.values, ranks) else (),
    )
    versions, cache = inputs.machine.packages.versions, user_cache_dir(inputs.environ)
    return ask_about_model(given, recipe, question, inputs.python, versions, cache)


def plan_storage(
    given: ParsedSettings[TrainSettings], inputs: PlanInputs
) -> tuple[ParsedSettings[TrainSettings], Decision]:
    """Return the settings with a folder that has what a plan needs of a run in storage, and where the run is copied to.

    Raises `UserError`.
    """
    from train.checkpoint.store import RunStore

    settings, source, url = given.values, given.sources["output_dir"], given.url("output_dir")
    looked_at = settings.run.output_dir.with_name(f"{settings.run.output_dir.name}-plan")
    if settings.run.resume not in ("auto", "off") and not settings.run.run_name:
        raise UserError(f"{printable(given.sources['resume'])}: set TRAIN_RUN_NAME too, the run's name in {url}.")
    if is_first_rank_here(inputs):
        store = RunStore(url, looked_at, source)
        if run := store.run_to_open(settings.run.run_name, settings.run.resume):
            store.read(run, tensors=False)
    reason = f"copied to {printable(settings.run.output_dir)}, each checkpoint uploaded while the run trains"
    decision = Decision("output", printable(url), reason, Source.USER, source)
    return replace(given, values=settings.with_values(output_dir=looked_at)), decision


def check_output_dir(given: ParsedSettings[TrainSettings], inputs: PlanInputs) -> tuple[str, ...]:
    """Return a warning if rank 0 cannot write its run's folder here, or not for long.

    Raises `UserError` if it cannot and the user named the folder. By default the folder is in the current one, and a
    plan may be made anywhere.
    """
    if not is_first_rank_here(inputs):
        return ()
    folder = given.values.run.output_dir
    why = why_not_writable(folder)
    source = given.sources.get("output_dir", f"TRAIN_OUTPUT_DIR={folder}")
    if not why:
        place = "" if given.url("output_dir") else volatile_place(ROOT, folder)
        target = printable(str(folder.absolute()))
        advice = f"Bind a folder there: docker run -v $PWD/runs:{target}, or apptainer run --bind $PWD/runs:{target}."
        line = f"{printable(source)}: is in {place}, and its files are lost with the container. {advice}"
        return (line,) if place else ()
    line = f"{printable(source)}: cannot be written ({why}). Set it to a writable folder."
    if "output_dir" in given.sources:
        raise UserError(line)
    return (line,)


def warn_of_other_ranks(plan: Plan, previous: Plan | None) -> tuple[str, ...]:
    """Return a warning where a resumed run had another number of ranks, whose sums round in another order."""
    before, now = (one.nodes.world_size for one in (previous or plan, plan))
    text = f"the run had {count_text(before, 'rank')} before: with {now} its weights round differently"
    return (text,) if before != now else ()


def compile_problem(settings: TrainSettings, device: str, inputs: PlanInputs) -> str:
    """Return why the backend of torch.compile cannot be used, empty if it can or if nothing is compiled."""
    if settings.compute.compile == "off":
        return ""
    versions = inputs.machine.packages.versions
    return find_compile_problem(settings.compute.compile_backend, device, versions, inputs.python)


def run_folders(command: CommandLine, inputs: PlanInputs) -> list[tuple[str, Path]]:
    """Return the folders that a run of the trainer writes to, by the settings that name them."""
    from train.data.cache_folder import cache_folder
    from train.settings import read_train_settings

    training = read_train_settings(inputs.environ, command.flags).values
    return [("TRAIN_OUTPUT_DIR", training.run.output_dir), ("TRAIN_CACHE_DIR", cache_folder(training.data.cache_dir))]
