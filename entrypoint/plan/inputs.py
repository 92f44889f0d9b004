"""What a plan is made from: settings, machine, job, program and the environment they came with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from entrypoint.core.errors import printable
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.job.detect import Job
from entrypoint.job.node_group import NodeGroup
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Decision, Program, RankPlan
from entrypoint.settings import LaunchSettings

# A CPU counts as kept busy from 0.8 of its time on: below, its thread has enough of it. Of 120 plans each on two CPUs,
# beside nobody at most 0.16 was seen, beside one busy process 1.00 to 1.12, beside two 2.00 in all but two plans.
BUSY_ROUNDING = 0.2


@dataclass(frozen=True)
class RemoteLauncher:
    """A program that starts ranks on several nodes: its path, whose MPI it is, and the nodes with ranks on each.

    `mpi` is empty for srun; ranks of 0 are as many as on this node.
    """

    path: str
    mpi: str = ""
    hosts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """What the plan of a run being resumed had: its ranks on this node, and the CPUs reserved for other processes."""

    ranks: tuple[RankPlan, ...]
    reserved_cpus: int = 0


@dataclass(frozen=True)
class PlanInputs:
    """What the plan is made from; `environ` is what the process was started with, less what a launcher put there.

    `backend_problem` says why the backend that was asked for cannot be used, empty where it can; `broken_preloads`
    are the files of a person's LD_PRELOAD that cannot be loaded, each with the reason. `substitutes` are variables that
    stand in for a home or a temporary folder that cannot be used, each with the reason; `environ` has them already.
    `nodes` are those on which an entrypoint each starts ranks; it is one where a launcher has started them. `starter`
    is what starts ranks on other nodes too, None where nothing does; `token` is a text that no other run here has.
    `previous` is what the plan of a resumed run had, None for a new run.
    """

    settings: ParsedSettings[LaunchSettings]
    machine: Machine
    job: Job
    program: Program
    environ: Mapping[str, str]
    python: str = sys.executable
    backend_problem: str = ""
    broken_preloads: Mapping[str, str] = field(default_factory=dict)
    dir_fallbacks: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    nodes: NodeGroup = field(default_factory=NodeGroup)
    starter: RemoteLauncher | None = None
    token: str = ""
    previous: PreviousRun | None = None

    def why(self, field: str, reason: str) -> str:
        """Return the reason for a setting's value: the person's own words where they gave it."""
        return f"(yours) {self.settings.sources[field]}" if self.given(field) else reason

    def own(self, name: str) -> Decision:
        """Return that a variable of the person's is left as it is."""
        value = printable(self.environ[name])
        return Decision(name, value, f"(yours) {name}={value}")

    def given(self, field: str) -> bool:
        """Tell whether a person chose this setting, and not `auto`."""
        return field in self.settings.sources and getattr(self.settings.values, field) != "auto"

    def world_size_for(self, nproc: int) -> int:
        """Return the world size, where this node starts `nproc` ranks unless a launcher has started all."""
        return self.job.world_size if self.job.launcher else nproc * self.nodes.count

    @property
    def busy_cpus(self) -> int:
        """How many CPUs other processes keep busy.

        0 on nodes that a scheduler allocated, and where a launcher starts ranks: they start together and would count
        each other.
        """
        job = self.job
        if job.launcher or job.nodes or job.granted_cpus is not None or self.starter or self.nodes.count > 1:
            return 0
        return int(self.machine.busy_cpus_measured + BUSY_ROUNDING)

    @property
    def bound_by_launcher(self) -> bool:
        """Tell whether the affinity mask is this rank's own, as srun and `mpirun --bind-to core` leave it."""
        return bool(self.job.binding) and len(self.machine.cpus) < self.machine.online_cpus
