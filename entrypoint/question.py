"""What a plan is made from: settings, machine, job, program and the environment they came with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from entrypoint.errors import shown
from entrypoint.job import Job
from entrypoint.machine import Machine
from entrypoint.nodes import Nodes
from entrypoint.plan import Decision, Plan, Program
from entrypoint.settings import LaunchSettings
from entrypoint.variables import Given

# A CPU counts as kept busy from 0.8 of its time on: below, its thread has enough of it. Of 120 plans each on two CPUs,
# beside nobody at most 0.16 was seen, beside one busy process 1.00 to 1.12, beside two 2.00 in all but two plans.
SURELY = 0.2


@dataclass(frozen=True)
class Starter:
    """A program that starts ranks on several nodes: its path, whose MPI it is, and the nodes with ranks on each.

    `mpi` is empty for srun; ranks of 0 are as many as on this node.
    """

    path: str
    mpi: str = ""
    hosts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Question:
    """What the plan is made from; `environ` is what the process was started with, less what a launcher put there.

    `backend_problem` says why the backend that was asked for cannot be used, empty where it can; `broken_preloads`
    are the files of a person's LD_PRELOAD that cannot be loaded, each with the reason. `substitutes` are variables that
    stand in for a home or a temporary folder that cannot be used, each with the reason; `environ` has them already.
    `nodes` are those on which an entrypoint each starts ranks; it is one where a launcher has started them. `starter`
    is what starts ranks on other nodes too, None where nothing does; `token` is a text that no other run here has.
    `before` is the plan of the run that is gone on with, None where one begins. The program may be given `most_ranks`
    on the CPU unasked: one, unless it is known to learn the same by several.
    """

    settings: Given[LaunchSettings]
    machine: Machine
    job: Job
    program: Program
    environ: Mapping[str, str]
    python: str = sys.executable
    backend_problem: str = ""
    broken_preloads: Mapping[str, str] = field(default_factory=dict)
    substitutes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=Nodes)
    starter: Starter | None = None
    token: str = ""
    before: Plan | None = None
    most_ranks: int = 1

    def why(self, field: str, reason: str) -> str:
        """Return the reason for a setting's value: the person's own words where they gave it."""
        return f"(yours) {self.settings.source[field]}" if self.given(field) else reason

    def own(self, name: str) -> Decision:
        """Return that a variable of the person's is left as it is."""
        value = shown(self.environ[name])
        return Decision(name, value, f"(yours) {name}={value}")

    def given(self, field: str) -> bool:
        """Tell whether a person chose this setting, and not `auto`."""
        return field in self.settings.source and getattr(self.settings.values, field) != "auto"

    def ranks_of_all(self, nproc: int) -> int:
        """Return the world size, where this node starts `nproc` ranks unless a launcher has started all."""
        return self.job.world_size if self.job.launcher else nproc * self.nodes.count

    @property
    def kept_busy(self) -> int:
        """How many CPUs others keep busy; a run that goes on takes what it began with, to end the same.

        0 on nodes that a scheduler grants, and where others start ranks here or elsewhere: they begin together, and
        would take each other for neighbours.
        """
        job = self.job
        if job.launcher or job.nodes or job.granted_cpus is not None or self.starter or self.nodes.count > 1:
            return 0
        if self.before:
            return self.before.neighbours or self.before.crowd
        return int(self.machine.kept_busy + SURELY)

    @property
    def bound_by_launcher(self) -> bool:
        """Tell whether the affinity mask is this rank's own, as srun and `mpirun --bind-to core` leave it."""
        return bool(self.job.binding) and len(self.machine.cpus) < self.machine.online_cpus
