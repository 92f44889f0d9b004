"""The plan: frozen values with a reason for each, which print, store and compare as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

# Carries the plan to the ranks and to the trainer, as JSON.
PLAN_VAR = "ENTRYPOINT_PLAN"
PLAN_VERSION = 2


class LauncherKind(StrEnum):
    """What starts the ranks: DIRECT is one child of the entrypoint, LOCAL several, RANK means they are started."""

    DIRECT = "direct"
    LOCAL = "local"
    TORCHRUN = "torchrun"
    MPIRUN = "mpirun"
    SRUN = "srun"
    RANK = "rank"


class Source(StrEnum):
    """Who made a decision: the planner, the user, or an earlier `entrypoint tune`."""

    AUTO = "auto"
    USER = "user"
    TUNED = "tuned"


SOURCE_LABELS = {Source.AUTO: "", Source.USER: "(set by you) ", Source.TUNED: "(tuned) "}


class Decision(Struct, frozen=True):
    """One decision: `setting` is how the user wrote it (`LAUNCH_THREADS=3`), empty if the planner decided."""

    key: str
    value: str
    reason: str
    source: Source = Source.AUTO
    setting: str = ""

    @property
    def text(self) -> str:
        """The reason for the user: who decided, by which setting, and why."""
        parts = "; ".join(part for part in (self.setting, self.reason) if part)
        return f"{SOURCE_LABELS[self.source]}{parts}"


def make_decision(key: str, value: str, reason: str, detail: str, setting: str) -> Decision:
    """Return a decision that the user's `setting` makes, or if that is empty the planner for `reason`.

    `detail` is said in either case.
    """
    if setting:
        return Decision(key=key, value=value, reason=detail, source=Source.USER, setting=setting)
    return Decision(key, value, "; ".join(part for part in (reason, detail) if part))


class RankPlan(Struct, frozen=True):
    """One rank on this node: the CPUs that it is bound to, its OpenMP threads, its GPU, its memory's NUMA nodes."""

    local_rank: int
    cpus: tuple[int, ...]
    threads: int
    gpu: int | None = None
    memory_nodes: tuple[int, ...] = ()


class Program(Struct, frozen=True):
    """What the ranks run: the built-in trainer (`train`), or the user's script or module."""

    kind: str
    argv: tuple[str, ...]


class NodePlan(Struct, frozen=True, kw_only=True):
    """How many nodes and ranks the job has. An elastic job continues with `min_nodes` of its `nnodes`."""

    nnodes: int = 1
    min_nodes: int = 1
    node_rank: int = 0
    nproc_per_node: int
    world_size: int
    max_restarts: int = 0


class RendezvousPlan(Struct, frozen=True, kw_only=True):
    """Where ranks of several nodes meet; empty where the launcher or the user says it.

    With `port_is_derived` the ranks' port comes from the job's id, and nobody has set another. `run_identity`
    distinguishes this run from others on the same nodes. `key_source` and `key_file` say where the job's key is.
    """

    master_addr: str = ""
    master_port: str = ""
    port_is_derived: bool = False
    timeout_s: int = 1800
    run_identity: str = ""
    key_source: str = "none"
    key_file: str = ""


class BindingPlan(Struct, frozen=True, kw_only=True):
    """What is pinned, the map of ranks on cores, and the CPUs left to other processes."""

    cpu_binding: str = "ranks"
    core_map: tuple[str, ...] = ()
    reserved_cpus: int = 0


class EnvironmentPlan(Struct, frozen=True, kw_only=True):
    """Variables of every rank, the names of the user's own that are kept, and the libraries to preload.

    Without `sets_rank` a single rank gets no RANK, WORLD_SIZE and the like.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    user_set: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    sets_rank: bool = True


class OutputPlan(Struct, frozen=True, kw_only=True):
    """What becomes of the ranks' output: a folder for files, ranks to show (empty: all), and if lines name them."""

    log_dir: str = ""
    shown_ranks: tuple[int, ...] = ()
    prefix: bool = False


class TrainerPlan(Struct, frozen=True, kw_only=True):
    """What only the built-in trainer reads; `ipex_packs` is IPEX with packed weights and a fused update.

    `normalization` is mean and standard deviation of each channel from 0 to 1, None for the training images' own.
    `doubts` say why the accuracy will mean little; the end of the run repeats them.
    """

    data_source: str
    num_workers: int
    image_shape: tuple[int, int, int]
    precision: str
    use_ipex: bool
    saves_checkpoints: bool
    ipex_packs: bool = False
    winograd: bool = False
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    doubts: tuple[str, ...] = ()


class Plan(Struct, frozen=True, kw_only=True):
    """Everything that a launch does on this node; `machine` describes the node in a line.

    `prominent_warning` is the one of the warnings that is also the first and the last line of a run, if there is one.
    """

    version: int = PLAN_VERSION
    launcher: LauncherKind
    nodes: NodePlan
    rendezvous: RendezvousPlan = field(default_factory=RendezvousPlan)
    ranks: tuple[RankPlan, ...]
    binding: BindingPlan = field(default_factory=BindingPlan)
    environment: EnvironmentPlan = field(default_factory=EnvironmentPlan)
    device: str
    backend: str
    collective_timeout_s: int = 1800
    grace_period_s: int = 30
    program: Program
    command: tuple[str, ...]
    trainer: TrainerPlan | None = None
    output: OutputPlan = field(default_factory=OutputPlan)
    decisions: tuple[Decision, ...] = ()
    warnings: tuple[str, ...] = ()
    prominent_warning: str = ""
    machine: str = ""

    @property
    def uses_elastic_rendezvous(self) -> bool:
        """Whether the agents of several nodes number the ranks together, again after each loss."""
        nodes = self.nodes
        return nodes.nnodes > 1 and (nodes.max_restarts > 0 or nodes.min_nodes < nodes.nnodes)

    def decision(self, key: str) -> Decision | None:
        """Return the decision of a key, None where there is none."""
        return next((one for one in self.decisions if one.key == key), None)

    def the_trainer(self) -> TrainerPlan:
        """Return the trainer's part; raises ValueError for the plan of a user's script."""
        if self.trainer is None:
            raise ValueError("the plan has no trainer")
        return self.trainer

    def with_trainer(
        self, trainer: TrainerPlan, decisions: tuple[Decision, ...], warnings: tuple[str, ...] = ()
    ) -> Plan:
        """Return the plan with the trainer's part added."""
        return replace(
            self,
            trainer=trainer,
            decisions=self.decisions + decisions,
            warnings=self.warnings + warnings,
        )

    def with_variables(self, variables: Mapping[str, str]) -> Plan:
        """Return the plan with more variables for every rank."""
        environment = replace(self.environment, variables={**self.environment.variables, **variables})
        return replace(self, environment=environment)

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON, the keys in the order of the fields."""
        return json.dumps(msgspec.to_builtins(self), indent=indent)  # unlike msgspec's, it takes any environment's text

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` wrote; raises ValueError for other text."""
        return msgspec.convert(json.loads(text), Plan)
