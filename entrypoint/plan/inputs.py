"""What a plan is made from: settings, machine, job, program and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from msgspec import Struct, field as data_field

from entrypoint.core.errors import printable
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.job.detect import Job
from entrypoint.job.job_key import KeySource
from entrypoint.job.launchers import LauncherBinding
from entrypoint.job.node_group import NodeGroup
from entrypoint.machine.detect import Machine
from entrypoint.machine.interpreter import Interpreter
from entrypoint.plan.model import Decision, Plan, Program, Source, make_decision
from entrypoint.settings import LaunchSettings

# A CPU counts as busy from 0.8 of its time on; below that a thread on it still gets enough time.
BUSY_ROUNDING = 0.2


class RemoteLauncher(Struct, frozen=True):
    """A program that starts ranks on several nodes: its path, whose MPI it is, and the nodes with ranks on each.

    `mpi` is empty for srun, `major` the version of Open MPI. 0 ranks mean as many as on this node.
    """

    path: str
    mpi: str = ""
    hosts: tuple[tuple[str, int], ...] = ()
    major: int = 0


class PlanInputs(Struct, frozen=True):
    """What a plan is made from.

    `environ` is the environment of the process, without what a launcher put there.
    `backend_problem` says why the requested backend cannot be used, empty if it can.
    `broken_preloads` are files of the user's LD_PRELOAD that cannot be loaded, each with the reason.
    `dir_fallbacks` are variables that replace an unusable home or temporary folder, each with the reason.
    `node_group` are the nodes on each of which an entrypoint starts ranks; one if a launcher has started them.
    `remote_launcher` starts ranks on other nodes too, None if nothing does. `run_token` is unique to this run.
    `run_identity` distinguishes the run from others on the same nodes; it is the same on all nodes. `key_source` says
    where the job's key is.
    `foreign_variable` is another launcher's variable that the user's script reads, empty if there is none.
    `previous` is the plan of the run that is resumed, None for a new run.
    """

    settings: ParsedSettings[LaunchSettings]
    machine: Machine
    job: Job
    program: Program
    environ: Mapping[str, str]
    python: str = sys.executable
    interpreter: Interpreter = Interpreter()
    backend_problem: str = ""
    broken_preloads: Mapping[str, str] = data_field(default_factory=dict)
    dir_fallbacks: Mapping[str, tuple[str, str]] = data_field(default_factory=dict)
    node_group: NodeGroup = data_field(default_factory=NodeGroup)
    remote_launcher: RemoteLauncher | None = None
    run_token: str = ""
    run_identity: str = ""
    key_source: KeySource = data_field(default_factory=KeySource)
    previous: Plan | None = None
    foreign_variable: str = ""

    def decide(self, field: str, key: str, value: str, reason: str, detail: str = "") -> Decision:
        """Return a decision that a setting makes if the user chose one, else the planner for `reason`.

        `detail` is said in either case.
        """
        setting = self.settings.sources[field] if self.is_set_by_user(field) else ""
        return make_decision(key, value, reason, detail, setting)

    def user_decision(self, name: str) -> Decision:
        """Return that a variable of the user's is kept as it is."""
        value = printable(self.environ[name])
        return Decision(key=name, value=value, reason="", source=Source.USER, setting=f"{name}={value}")

    def is_set_by_user(self, field: str) -> bool:
        """Return whether the user chose this setting, other than `auto`."""
        return field in self.settings.sources and self.settings.values.value(field) != "auto"

    @property
    def busy_cpus(self) -> int:
        """How many CPUs other processes keep busy.

        0 on nodes that a scheduler allocated, and where a launcher starts ranks: they start together and would count
        each other.
        """
        job = self.job
        scheduled = bool(job.hostnames) or job.granted_cpus is not None
        if job.launcher or scheduled or self.remote_launcher or self.node_group.nnodes > 1:
            return 0
        return int(self.machine.busy_cpus + BUSY_ROUNDING)

    @property
    def bound_by_launcher(self) -> bool:
        """Whether the affinity mask is this rank's own, as srun and `mpirun --bind-to core` set it."""
        return self.job.cpu_binding != LauncherBinding.NONE and len(self.machine.cpus) < self.machine.online_cpus
