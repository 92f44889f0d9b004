"""Makes the plan of a command line: detects machine and job, and adds the trainer's part."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from entrypoint.cli.parser import CommandLine
from entrypoint.cli.precision_trial import bf16_speedup
from entrypoint.core.errors import UserError, printable
from entrypoint.core.paths import working_folder
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.core.user_dirs import user_cache_dir, why_not_writable
from entrypoint.job.detect import Job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.job.job_key import find_key_source
from entrypoint.job.launcher_quirks import check_launcher_variables, effective_affinity
from entrypoint.job.node_group import NodeGroup
from entrypoint.job.run_identity import identify_run, train_words
from entrypoint.launch.remote import find_remote_launcher, with_remote_command
from entrypoint.machine.comm_backends import find_backend_problem
from entrypoint.machine.compile_backends import find_compile_problem
from entrypoint.machine.container import volatile_place
from entrypoint.machine.detect import Machine, detect_machine
from entrypoint.machine.procfs import ROOT
from entrypoint.machine.shared_libraries import find_broken_preloads
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan, Program
from entrypoint.plan.planner import make_plan
from entrypoint.rank.refusal import Place, place_in_job, refuse
from entrypoint.settings import LaunchSettings, read_launch_settings
from entrypoint.tune.store import TunedPlan, apply_tuning, load

if TYPE_CHECKING:
    from train.data.dataset_info import DatasetInfo
    from train.planning.model_report import ModelReport
    from train.settings import TrainSettings


def detect_plan_inputs(
    command: CommandLine, settings: ParsedSettings[LaunchSettings], job: Job, environ: Mapping[str, str]
) -> PlanInputs:
    """Read the machine, and test what no file shows."""
    nodes = detect_node_group(settings, environ, job)
    if settings.values.launcher == "auto" and nodes.nnodes == 1:
        check_launcher_variables(job)
    if job.starts_ranks_itself(settings.values):  # then this task is the node's, and its ranks are still to be started
        job = Job(
            job_id=job.job_id,
            granted_cpus=job.granted_cpus,
            node_cpus=job.node_cpus,
            hostnames=job.hostnames,
            master_addr=job.master_addr,
            scheduler=job.scheduler,
        )
    check_log_dir(settings)
    mask, settled, launcher_affinity = effective_affinity(job)
    machine = replace(detect_machine(affinity=mask), launcher_affinity=launcher_affinity)
    # Once on a node: the backend's probe starts two processes that import torch.
    backend = settings.values.backend if job.local_rank == 0 else "auto"
    identity = run_identity_of(command, job, environ)
    return PlanInputs(
        settings,
        machine,
        settled,
        # -I: the trainer uses the packages installed with it, whatever PYTHONPATH, ~/.local or this folder hold.
        command.program or Program("train", (sys.executable, "-I", "-m", "train")),
        environ,
        backend_problem=find_backend_problem(backend, sys.executable, machine.oneccl, environ),
        broken_preloads=find_broken_preloads(environ.get("LD_PRELOAD", "")),
        node_group=nodes,
        remote_launcher=find_remote_launcher(settings.values, job, nodes.nnodes, environ),
        run_token=f"{socket.gethostname()}-{os.getpid()}",
        run_identity=identity,
        key_source=find_key_source(environ, settings.values.secret_file, identity),
        foreign_variable=find_foreign_variable(command.program, environ),
    )


def check_log_dir(settings: ParsedSettings[LaunchSettings]) -> None:
    """Raise `UserError` if the folder of the ranks' output cannot be written to."""
    problem = why_not_writable(Path(settings.values.log_dir)) if settings.values.log_dir else ""
    if problem:
        source = printable(settings.sources["log_dir"])
        raise UserError(f"{source}: cannot be written to ({problem}). Name a folder that you may write to.")


@contextmanager
def telling_other_nodes(command: CommandLine, job: Job, environ: Mapping[str, str]) -> Iterator[None]:
    """Tell the job's other nodes of an error before this one starts its ranks; they would wait for it."""
    try:
        yield
    except UserError as error:
        refuse(place_of_command(command, job, environ) if command.launches else None, error)


def place_of_command(command: CommandLine, job: Job, environ: Mapping[str, str]) -> Place | None:
    """Return where this process stands in a job of several nodes, None if nothing here can say it."""
    group, secret_file = NodeGroup(), ""
    with suppress(UserError):  # settings that cannot be read do not say that there are nodes
        settings = read_launch_settings(environ, command.launch_flags)
        secret_file = settings.values.secret_file
        group = detect_node_group(settings, environ, job)
        if group.nnodes > 1 and settings.values.max_restarts not in ("auto", 0):
            return None  # the agents take a port of their own, and wait for each other
    place = place_in_job(job, group, environ, run_identity_of(command, job, environ))
    return replace(place, secret_file=secret_file) if place else None


def run_identity_of(command: CommandLine, job: Job, environ: Mapping[str, str]) -> str:
    """Return what distinguishes this run from others on the same nodes."""
    words = command.program.argv[1:] if command.program else train_words(environ, command.train_flags)
    return identify_run(job, environ, tuple(words))


# Variables of MPI launchers and srun that scripts read to find their rank, and that the entrypoint does not set.
FOREIGN_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
MAX_SCRIPT_BYTES = 1 << 20


def find_foreign_variable(program: Program | None, environ: Mapping[str, str]) -> str:
    """Return the first variable of another launcher that the user's script names and nobody has set."""
    if program is None or program.kind not in ("script", "notebook"):
        return ""
    try:
        with Path(program.argv[1]).open(errors="replace") as file:
            text = file.read(MAX_SCRIPT_BYTES)
    except OSError:  # a folder with __main__.py
        return ""
    if "LOCAL_RANK" in text.replace("_LOCAL_RANK", "") or '"RANK"' in text or "'RANK'" in text:
        return ""  # it reads torchrun's variables too
    return next((name for name in FOREIGN_VARIABLES if name in text and not environ.get(name)), "")


def apply_saved_tuning(command: CommandLine, inputs: PlanInputs) -> tuple[PlanInputs, TunedPlan | None]:
    """Return the inputs with the tuning results for this program and machine, where the user set nothing else."""
    tuned = load(inputs, lambda: settings_affecting_speed(command, inputs))
    if tuned is None or tuned.not_used:
        return inputs, tuned
    return apply_tuning(inputs, tuned, command.launch_flags), tuned


def settings_affecting_speed(command: CommandLine, inputs: PlanInputs) -> Mapping[str, Any]:
    """Return the trainer's settings that change the time of a step, as JSON types; none for a user's script."""
    if command.program is not None:
        return {}
    from train.data.dataset_info import inspect_dataset
    from train.settings import read_train_settings

    values = read_train_settings(inputs.environ, command.train_flags).values
    return {**values.speed_relevant(), "shape": inspect_dataset(values).shape}


def build_plan(command: CommandLine, inputs: PlanInputs) -> Plan:
    """Return the plan; for the built-in trainer with the part that its data and settings decide."""
    if command.program is not None:
        return with_remote_command(make_plan(inputs), inputs)
    return with_remote_command(plan_trainer(command, inputs), inputs)


def plan_trainer(command: CommandLine, inputs: PlanInputs) -> Plan:
    """Return the plan of the built-in trainer."""
    from train.acceleration.winograd_file import find_winograd
    from train.data.dataset_info import inspect_dataset
    from train.planning.recipes import with_recipe
    from train.planning.run_lookup import new_run_dir, previous_run
    from train.planning.trained_run import with_trained_settings
    from train.planning.trainer_plan import plan_trainer
    from train.settings import read_train_settings

    if working_folder() is None:
        raise UserError("The working folder was removed, and torch cannot be loaded in it. Change to another folder.")
    given = read_train_settings(inputs.environ, command.train_flags)
    given, trained, adopted = with_trained_settings(given) if given.values.evaluate else (given, None, {})
    facts = inspect_dataset(given.values)
    if trained and given.values.reads_files:
        is_given = given.values.image_size != "auto"  # the size of evaluation may be another one
        shape = (trained.shape[0], *facts.shape[1:]) if is_given else trained.shape
        facts = facts.with_shape(shape)
    inputs = replace(inputs, previous=previous_run(given.values))
    training, plan = with_recipe(given, make_plan(inputs), facts.shape)
    plan = plan.with_variables(adopted)
    writes_none = command.command == "tune" or trained  # the trials of `tune` have their own folder
    problem = () if writes_none else check_output_dir(given, inputs)
    plan = replace(plan, warnings=(*problem, *plan.warnings))
    free_name = new_run_dir(training.values.output_dir, training.values).name if plan.nodes.max_restarts else ""
    no_compile = compile_problem(training.values, plan.device, inputs)
    return plan_trainer(
        plan,
        training,
        facts,
        inputs.machine,
        free_name=free_name,
        compile_problem=no_compile,
        ask_model=lambda: model_report(training, plan, facts, inputs),
        reads_resume=is_first_rank_here(inputs),
        bf16_speedup=bf16_speedup(training.values, plan, inputs),
        winograd_kernel=find_winograd() is not None,
    )


def model_report(
    given: ParsedSettings[TrainSettings], plan: Plan, facts: DatasetInfo, inputs: PlanInputs
) -> ModelReport:
    """Return what the model and its weights are, where only a child process with torch can say it."""
    from train.planning.image_sizes import image_sizes, model_input_shape
    from train.planning.model_report import ModelQuestion, ask_about_model, known_report, needs_report, portable

    shape = model_input_shape(given.values, facts.shape)
    if not needs_report(given, shape):
        return known_report(given.values)
    recipe = {name: text for name, text in plan.environment.variables.items() if name.startswith("TRAIN_")}
    question = ModelQuestion(
        shape=shape,
        classes=tuple(map(portable, facts.classes)),
        other_shapes=image_sizes(given.values, facts.shape).other_shapes,
        memory_bytes=rank_memory_bytes(plan, inputs.machine),
    )
    versions, cache = inputs.machine.packages.versions, user_cache_dir(inputs.environ)
    return ask_about_model(given, recipe, question, inputs.python, versions, cache)


def rank_memory_bytes(plan: Plan, machine: Machine) -> int:
    """Return the memory of a rank's GPU, or a rank's share of this node's; 0 if unknown."""
    if plan.device == "cuda":
        return min((gpu.memory_bytes for gpu in machine.gpus), default=0)
    return machine.memory_bytes // len(plan.ranks)


def check_output_dir(given: ParsedSettings[TrainSettings], inputs: PlanInputs) -> tuple[str, ...]:
    """Return a warning if rank 0 cannot write its run's folder here, or not for long.

    Raises `UserError` if it cannot and the user named the folder. By default the folder is in the current one, and a
    plan may be made anywhere.
    """
    if not is_first_rank_here(inputs):
        return ()
    folder = given.values.output_dir
    why = why_not_writable(folder)
    source = given.sources.get("output_dir", f"TRAIN_OUTPUT_DIR={folder}")
    if not why:
        place = volatile_place(ROOT, folder)
        target = printable(str(folder.absolute()))
        advice = f"Bind a folder there: docker run -v $PWD/runs:{target}, or apptainer run --bind $PWD/runs:{target}."
        line = f"{printable(source)}: is in {place}, and its files are lost with the container. {advice}"
        return (line,) if place else ()
    line = f"{printable(source)}: cannot be written ({why}). Set it to a writable folder."
    if "output_dir" in given.sources:
        raise UserError(line)
    return (line,)


def is_first_rank_here(inputs: PlanInputs) -> bool:
    """Return whether the first rank of the job, which writes and resumes, runs on this node."""
    return inputs.job.rank == 0 and inputs.node_group.node_rank == 0 and inputs.remote_launcher is None


def compile_problem(settings: TrainSettings, device: str, inputs: PlanInputs) -> str:
    """Return why the backend of torch.compile cannot be used, empty if it can or if nothing is compiled."""
    if settings.compile == "off":
        return ""
    versions = inputs.machine.packages.versions
    return find_compile_problem(settings.compile_backend, device, versions, inputs.python)


def planner_for(command: CommandLine, inputs: PlanInputs) -> Callable[[], Plan]:
    """Return a function that makes the plan, for checks that report why it fails."""
    return lambda: build_plan(command, inputs)


def run_folders(command: CommandLine, inputs: PlanInputs) -> list[tuple[str, Path]]:
    """Return the folders that a run of the trainer writes to, by the settings that name them."""
    from train.data.cache import cache_folder
    from train.settings import read_train_settings

    training = read_train_settings(inputs.environ, command.train_flags).values
    return [("TRAIN_OUTPUT_DIR", training.output_dir), ("TRAIN_CACHE_DIR", cache_folder(training.cache_dir))]
