"""Variables of oneCCL: its transport, and where its worker threads run."""

from __future__ import annotations

from entrypoint.machine.oneccl import transport_variables
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import RankPlan

MPI_LAUNCHERS = ("Open MPI", "hydra (MPICH, Intel MPI)", "MVAPICH")


def oneccl_variables(inputs: PlanInputs, ranks: tuple[RankPlan, ...]) -> dict[str, tuple[str, str]]:
    """Return oneCCL's variables, each with its reason; none unless the backend is ccl.

    oneCCL has a worker thread per rank that spins on a core. It gets a core of its own where the threads leave one,
    else the rank's own threads do the work (oneCCL's manual: CCL_WORKER_OFFLOAD, CCL_YIELD, CCL_WORKER_AFFINITY).
    """
    if inputs.settings.values.backend != "ccl":
        return {}
    by_mpi = inputs.job.launcher in MPI_LAUNCHERS or bool(inputs.remote_launcher and inputs.remote_launcher.mpi)
    wanted = transport_variables(inputs.machine.oneccl, {}, started_by_mpi=by_mpi)
    spare = all(len(rank.cpus) > rank.threads for rank in ranks)
    if spare and not inputs.bound_by_launcher and inputs.settings.values.cpu_binding != "none":
        workers = ",".join(str(rank.cpus[-1]) for rank in ranks)
        wanted["CCL_WORKER_COUNT"] = ("1", "one worker thread per rank")
        wanted["CCL_WORKER_AFFINITY"] = (workers, "a core per rank that its threads leave free")
    else:
        wanted["CCL_WORKER_OFFLOAD"] = ("0", "the ranks fill the cores: no worker threads")
        wanted["CCL_YIELD"] = ("sched_yield", "waiting threads leave the core to others")
    return wanted
