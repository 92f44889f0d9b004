"""What a plan is made of: the environment, the machine and the job of this command."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from entrypoint.cli.parser import CommandLine, Invocation
from entrypoint.core.errors import UserError, printable, refuse_if
from entrypoint.core.process import module_command
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.core.user_dirs import apply_fallbacks, why_not_writable
from entrypoint.job.allocation import ALLOCATION_VAR, read_allocation, with_allocation
from entrypoint.job.detect import Job, detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.job.job_key import SECRET_FILE_VAR, find_key_source
from entrypoint.job.launcher_quirks import check_launcher_variables, drop_thread_default, effective_affinity
from entrypoint.job.launchers import Family
from entrypoint.job.node_group import NodeGroup
from entrypoint.job.run_identity import identify_run, train_words, with_run_id
from entrypoint.launch.remote import find_remote_launcher
from entrypoint.machine.backends import find_backend_problem
from entrypoint.machine.cpu_load import other_busy_cpus, take_sample
from entrypoint.machine.detect import detect_machine
from entrypoint.machine.interpreter import PTH_FILE, Interpreter, find_interpreter
from entrypoint.machine.procfs import parent_name
from entrypoint.machine.shared_libraries import find_broken_preloads
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Program
from entrypoint.rank.refusal import Place, place_in_job, refuse
from entrypoint.settings import LaunchSettings, read_launch_settings

# How long a load is looked at again before cores are left to it.
AGAIN_S = 1.0


def read_plan_inputs(invocation: Invocation, *, counts_load: bool) -> PlanInputs:
    """Return the inputs of a command's plan; raises `UserError`.

    With `counts_load` the CPUs that other processes keep busy count. The trials of `tune` use the plan as it is.
    """
    command, environ = invocation.command, invocation.environ
    fallbacks = apply_fallbacks(environ, make=command.launches)
    environ = {**environ, **{name: value for name, (value, _) in fallbacks.items()}}
    allocation = read_allocation(environ)
    job = with_run_id(with_allocation(detect_job(environ, parent_name()), allocation, socket.gethostname()))
    if listed := allocation.to_variable():
        environ = {**environ, ALLOCATION_VAR: listed}
    with telling_other_nodes(command, job, environ):
        settings = read_launch_settings(environ, command.flags)
        inputs = detect_plan_inputs(command, settings, job, drop_thread_default(environ, job))
    inputs = replace(inputs, dir_fallbacks=fallbacks)
    if not counts_load:
        return inputs
    busy = other_busy_cpus(invocation.load)
    loaded = replace(inputs, machine=replace(inputs.machine, busy_cpus=busy))
    if not loaded.busy_cpus or settings.values.reserve_cpus != "auto":
        return loaded
    # A burst must not cost a run its cores. Meanwhile this process needs no CPU that another one would wait for.
    again = take_sample()
    time.sleep(AGAIN_S)
    return replace(inputs, machine=replace(inputs.machine, busy_cpus=other_busy_cpus(again)))


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
    problem = why_not_writable(Path(settings.values.log_dir)) if settings.values.log_dir else ""
    refuse_if(
        {
            f"{printable(settings.sources.get('log_dir', ''))}: cannot be written to ({problem}). Name a folder that"
            " you may write to.": problem
        }
    )
    mask, settled, launcher_affinity = effective_affinity(job)
    interpreter = Interpreter()
    if command.program and command.program.kind != "notebook" and command.program.argv[0] == sys.executable:
        interpreter = find_interpreter(settings.values.python, settings.sources.get("python", ""), environ)
    has_hook = any(interpreter.prefix.glob(f"lib/python3*/*-packages/{PTH_FILE}"))
    interpreter = replace(interpreter, has_hook=has_hook)
    machine = detect_machine(affinity=mask, environment=interpreter.prefix)
    machine = replace(machine, launcher_affinity=launcher_affinity)
    # Once on a node: the backend's probe starts two processes that import torch.
    backend = settings.values.backend if job.local_rank == 0 else "auto"
    identity = run_identity_of(command, job, environ)
    starter = find_remote_launcher(settings.values, job, nodes.nnodes, environ)
    by_hydra = job.family == Family.HYDRA or (starter is not None and starter.mpi == "hydra")
    return PlanInputs(
        settings=settings,
        machine=machine,
        job=settled,
        program=program_of(command, interpreter),
        interpreter=interpreter,
        environ=environ,
        backend_problem=find_backend_problem(backend, sys.executable, machine.oneccl, environ, by_hydra=by_hydra),
        broken_preloads=find_broken_preloads(environ.get("LD_PRELOAD", "")),
        node_group=nodes,
        remote_launcher=starter,
        run_token=f"{socket.gethostname()}-{os.getpid()}",
        run_identity=identity,
        key_source=find_key_source(environ, settings.values.secret_file, identity),
        foreign_variable=find_foreign_variable(command.program, environ),
    )


def program_of(command: CommandLine, interpreter: Interpreter) -> Program:
    """Return the program that the ranks run: the trainer, or the user's own by its interpreter."""
    program = command.program
    if program is None:
        return Program("train", module_command("train"))
    return (
        replace(program, argv=(interpreter.path, *program.argv[1:])) if interpreter.path != sys.executable else program
    )


@contextmanager
def telling_other_nodes(command: CommandLine, job: Job, environ: Mapping[str, str]) -> Iterator[None]:
    """Tell the job's other nodes of an error before this one starts its ranks; they would wait for it."""
    try:
        yield
    except UserError as error:
        refuse(place_of_command(command, job, environ) if command.launches else None, error)


def place_of_command(command: CommandLine, job: Job, environ: Mapping[str, str]) -> Place | None:
    """Return where this process stands in a job of several nodes, None if nothing here can say it."""
    group = NodeGroup()
    with suppress(UserError):  # settings that cannot be read do not say that there are nodes
        settings = read_launch_settings(environ, command.flags)
        environ = {**environ, SECRET_FILE_VAR: settings.values.secret_file}
        group = detect_node_group(settings, environ, job)
        if group.nnodes > 1 and settings.values.max_restarts not in ("auto", 0):
            return None  # the agents take a port of their own, and wait for each other
    return place_in_job(job, group, environ, run_identity_of(command, job, environ))


def run_identity_of(command: CommandLine, job: Job, environ: Mapping[str, str]) -> str:
    """Return what distinguishes this run from others on the same nodes."""
    words = command.program.argv[1:] if command.program else train_words(environ, command.flags)
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


def is_first_rank_here(inputs: PlanInputs) -> bool:
    """Return whether the first rank of the job, which writes and resumes, runs on this node."""
    return inputs.job.rank == 0 and inputs.node_group.node_rank == 0 and inputs.remote_launcher is None
