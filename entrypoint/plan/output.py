"""Decide what becomes of the ranks' output: shown with or without their numbers, and kept in files."""

from __future__ import annotations

from entrypoint.core.errors import UserError, printable
from entrypoint.machine.cpu_topology import parse_cpu_list
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, LauncherKind, OutputPlan, Source
from entrypoint.plan.remote_ranks import world_size_for

# What does the same where another launcher starts the ranks (their manuals).
OTHER_LAUNCHERS = {
    "srun": "srun --label --output=rank-%t.log",
    "Open MPI": "mpirun --tag-output --output-filename DIR",
    "mpirun": "mpirun's own options",
    "torchrun": "torchrun --log-dir=DIR --tee=3",
}
FIELDS = ("log_dir", "log_ranks", "log_prefix")


def decide_output(
    inputs: PlanInputs, launcher: LauncherKind, nproc: int
) -> tuple[OutputPlan, tuple[Decision, ...], tuple[str, ...]]:
    """Return what becomes of the output of ranks that the entrypoint starts, with its decisions and warnings.

    Another launcher relays its ranks' output itself; settings are then named as without effect. Raises `UserError` for
    ranks that do not exist, or whose output would be shown nowhere.
    """
    values, sources = inputs.settings.values, inputs.settings.sources
    given = [printable(sources[name]) for name in FIELDS if getattr(values, name)]
    if not given:
        return OutputPlan(), (), ()
    if launcher in (LauncherKind.RANK, LauncherKind.MPIRUN, LauncherKind.SRUN):
        name = inputs.job.launcher or str(launcher)
        hint = OTHER_LAUNCHERS.get(name, "its own options")
        return OutputPlan(), (), (f"{', '.join(given)}: no effect, {name} relays the ranks' output. Use {hint}.",)
    if values.log_ranks and not values.log_dir:
        raise UserError(
            f"{printable(sources['log_ranks'])}: the output of the other ranks would be lost. Set LAUNCH_LOG_DIR too."
        )
    ranks, world_size = parse_cpu_list(values.log_ranks), world_size_for(inputs, nproc)
    if values.log_ranks and max(ranks, default=world_size) >= world_size:
        source = printable(sources["log_ranks"])
        raise UserError(f"{source}: the job has ranks 0 to {world_size - 1}. Name some of these.")
    shown = f"shows rank {values.log_ranks}" if ranks else "shows all ranks"
    kept = f", keeps files in {printable(values.log_dir)}" if values.log_dir else ""
    decision = Decision(
        key="output", value="relayed", reason=f"{shown}{kept}", source=Source.USER, setting=", ".join(given)
    )
    return (
        OutputPlan(log_dir=values.log_dir, shown_ranks=tuple(sorted(set(ranks))), prefix=values.log_prefix),
        (decision,),
        (),
    )
