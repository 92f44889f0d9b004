"""Undo default settings of launchers: Open MPI's binding to one core, torchrun's single thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from entrypoint.core.errors import UserError
from entrypoint.job.detect import Job, LauncherBinding
from entrypoint.machine.procfs import ROOT, ancestors, read_lines

# The names in /proc/PID/comm of the MPI processes that fork the ranks of a node.
MPI_PROCESSES = (
    "mpirun",
    "mpirun.openmpi",
    "orterun",
    "orted",
    "prterun",
    "prted",
    "mpiexec",
    "mpiexec.hydra",
    "hydra_pmi_proxy",
)


def effective_affinity(job: Job) -> tuple[frozenset[int], Job, tuple[int, ...]]:
    """Return the CPUs that this process may use, the job with its final binding, and the launcher's default binding.

    By default Open MPI binds a rank of several threads to one core. Under taskset that core may be outside of the
    mask. The plan replaces such a default binding, and the ranks share the launcher's own mask. A binding by the user
    or the scheduler is kept. A binding is also kept if /proc hides the launcher.
    """
    own = frozenset(os.sched_getaffinity(0))
    if job.cpu_binding != LauncherBinding.LAUNCHER_DEFAULT:
        return own, job, ()
    names = {process: "".join(read_lines(ROOT / f"proc/{process}/comm")) for process in ancestors(ROOT)}
    launcher = next((process for process, name in names.items() if name in MPI_PROCESSES), None)
    if launcher is None:
        return own, replace(job, cpu_binding=LauncherBinding.USER), ()
    unbound = replace(job, cpu_binding=LauncherBinding.NONE)
    launchers = frozenset(os.sched_getaffinity(int(launcher)))
    return launchers, unbound, tuple(sorted(own)) if own != launchers else ()


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


def drop_torchrun_thread_default(environ: Mapping[str, str], job: Job) -> dict[str, str]:
    """Return the environment without the OMP_NUM_THREADS that torchrun itself set.

    torchrun sets 1 if the variable is not set (torch/distributed/run.py). The agent's initial environment shows
    whether the user set it. If /proc hides that environment, the variable counts as set by the user.
    """
    if job.launcher != "torchrun" or "OMP_NUM_THREADS" not in environ:
        return dict(environ)
    for process in ancestors(ROOT):
        command = "".join(read_lines(ROOT / f"proc/{process}/cmdline"))
        if "torchrun" in command or "torch.distributed.run" in command:
            started_with = "\n".join(read_lines(ROOT / f"proc/{process}/environ"))
            if started_with and "OMP_NUM_THREADS=" not in started_with:
                return {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
            break
    return dict(environ)
