"""Undo default settings of launchers: Open MPI's binding to one core, torchrun's single thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import PurePath

from msgspec.structs import replace

from entrypoint.core.errors import UserError
from entrypoint.job.detect import Job
from entrypoint.job.launchers import LauncherBinding, mpirun_binding
from entrypoint.machine.procfs import ROOT, ancestors, command_words, read_lines

# The names in /proc/PID/comm of the MPI processes that fork the ranks of a node.
MPI_PROCESSES = (
    "mpirun",
    "mpirun.openmpi",
    "orterun",
    "orted",
    "prterun",
    "prted",
    "prte",
    "mpiexec",
    "mpiexec.hydra",
    "hydra_pmi_proxy",
)
# Set in Ray's workers.
RAY_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID")


def effective_affinity(job: Job) -> tuple[frozenset[int], Job, tuple[int, ...]]:
    """Return the CPUs that this process may use, the job with its final binding, and the launcher's default binding.

    By default Open MPI binds a rank of several threads to one core. Under taskset that core may be outside of the
    mask. The plan replaces such a default binding, and the ranks share the launcher's own mask. A binding by the user
    or the scheduler is kept. A binding is also kept if /proc hides the launcher.
    """
    own = frozenset(os.sched_getaffinity(0))
    if job.cpu_binding != LauncherBinding.LAUNCHER_DEFAULT:
        return own, job, ()
    launcher, binding = find_mpi_launcher()
    launchers = frozenset(os.sched_getaffinity(int(launcher))) if launcher else own
    if launcher is None or (binding == LauncherBinding.USER and own != launchers):
        return own, replace(job, cpu_binding=LauncherBinding.USER), ()
    unbound = replace(job, cpu_binding=LauncherBinding.NONE)
    return launchers, unbound, tuple(sorted(own)) if own != launchers else ()


def find_mpi_launcher() -> tuple[str | None, LauncherBinding | None]:
    """Return the id of the MPI process that forked this rank, and the binding that its command line asks for.

    On other nodes Open MPI 5 starts `prted`, whose command line does not have mpirun's options: then the binding
    counts as requested, and `compare_ranks` names the slowest.
    """
    child = "self"
    for process in ancestors(ROOT):
        name = "".join(read_lines(ROOT / f"proc/{process}/comm"))
        if name in MPI_PROCESSES:
            if name == "prted":
                return process, LauncherBinding.USER
            return process, mpirun_binding(options_before(command_words(process), command_words(child)))
        child = process
    return None, None


def options_before(words: list[str], program: list[str]) -> list[str]:
    """Return the words of a launcher's command line before those of the program that it starts."""
    names = {PurePath(word).name for word in program[:2]}
    return list(takewhile(lambda word: PurePath(word).name not in names, words))


def check_launcher_variables(job: Job) -> None:
    """Raise `UserError` if an MPI launcher started this process without its variables.

    Each rank would then run as rank 0 of 1, and all would write to one folder (singularity#5118).
    """
    if job.launcher:
        return
    names = ("".join(read_lines(ROOT / f"proc/{process}/comm")) for process in ancestors(ROOT))
    name = next((name for name in names if name in MPI_PROCESSES), None)
    if name:
        raise UserError(
            f"{name} started this process, but no launcher's variables are here: each rank would believe that it is"
            " rank 0 of 1. Pass the environment on (not apptainer --cleanenv, env -i), and use an mpirun of Open MPI,"
            " MPICH, Intel MPI or MVAPICH; to start ranks of its own, set LAUNCH_LAUNCHER=local or direct"
        )


def drop_thread_default(environ: Mapping[str, str], job: Job) -> dict[str, str]:
    """Return the environment without the OMP_NUM_THREADS that torchrun, PBS or Ray itself set."""
    without = {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
    return without if is_thread_default(environ, job) else dict(environ)


def is_thread_default(environ: Mapping[str, str], job: Job) -> bool:
    """Return whether OMP_NUM_THREADS comes from PBS, Ray or torchrun, and not from the user.

    PBS Professional sets all CPUs of the chunk for each process, unless `ompthreads` is asked for (qsub(1B)): with two
    ranks on a node they would count every core twice. Ray sets 1 in each worker of one CPU (its page on configuring
    it). torchrun sets 1 if the variable is not set (torch/distributed/run.py). The agent's initial environment shows
    whether the user set it. If /proc hides that environment, the variable counts as set by the user.
    """
    threads = environ.get("OMP_NUM_THREADS", "")
    by_pbs = bool(threads and environ.get("PBS_ENVIRONMENT")) and threads == environ.get("NCPUS")
    by_ray = threads == "1" and any(environ.get(name) for name in RAY_VARIABLES)
    if by_pbs or by_ray:
        return True
    for process in ancestors(ROOT) if threads and job.launcher == "torchrun" else ():
        command = "".join(read_lines(ROOT / f"proc/{process}/cmdline"))
        if "torchrun" in command or "torch.distributed.run" in command:
            started_with = "\n".join(read_lines(ROOT / f"proc/{process}/environ"))
            return bool(started_with) and "OMP_NUM_THREADS=" not in started_with
    return False
