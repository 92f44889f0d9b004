"""What launchers put on a rank that nobody asked for: Open MPI's squeeze to one core, torchrun's single thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from entrypoint.core.errors import UserError
from entrypoint.job.detect import Job
from entrypoint.machine.procfs import ROOT, ancestors, read_lines

# The process of each MPI that forks the ranks of a node, as /proc/PID/comm has it.
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
    """Return the CPUs that this process may use, the job with its binding settled, and what it was squeezed to.

    Open MPI binds a rank of several threads to one core unless told otherwise, on every node to the same one, and
    under taskset to one outside of the mask. Where nobody asked for that, the launcher's own mask is what the ranks
    share, and each is bound anew by the plan.
    A person's or a scheduler's binding stands, and so does one whose launcher /proc does not show.
    """
    own = frozenset(os.sched_getaffinity(0))
    if job.binding != "default":
        return own, job, ()
    names = {process: "".join(read_lines(ROOT / f"proc/{process}/comm")) for process in ancestors(ROOT)}
    launcher = next((process for process, name in names.items() if name in MPI_PROCESSES), None)
    if launcher is None:
        return own, replace(job, binding="asked"), ()
    unbound = replace(job, binding="")
    launchers = frozenset(os.sched_getaffinity(int(launcher)))
    return launchers, unbound, tuple(sorted(own)) if own != launchers else ()


def check_launcher_variables(job: Job) -> None:
    """Raise `UserError` where an MPI's launcher started this process and none of its variables came along.

    Each rank would believe that it is alone, and all would train the same on one folder (singularity#5118).
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
    """Return the environment without the OMP_NUM_THREADS that torchrun itself put there.

    torchrun sets 1 where nobody has set any (torch/distributed/run.py). The agent's own environment, as it was
    started, tells the two apart; where /proc hides it, the variable counts as a person's.
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
