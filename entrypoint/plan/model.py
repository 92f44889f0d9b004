"""What a plan is: frozen values with a reason for each, that print, store and compare as they are."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# Carries the plan from the node stage to the ranks and to the trainer, as JSON.
PLAN_VAR = "ENTRYPOINT_PLAN"
MAX_PLAIN_BYTES = 64 << 10
ZLIB_PREFIX = "zlib:"


@dataclass(frozen=True)
class Decision:
    """One thing decided, and why."""

    what: str
    value: str
    why: str


@dataclass(frozen=True)
class RankPlan:
    """One process of this node: the CPUs that it is bound to, its OpenMP threads, its GPU, its memory's NUMA nodes."""

    local_rank: int
    cpus: tuple[int, ...]
    threads: int
    gpu: int | None = None
    memory_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """What the ranks become: our trainer (`train`), or a person's own script or module."""

    kind: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that a launch does on this node; `training` holds what only our trainer reads.

    `min_nodes` of the `nnodes` are enough to go on with when others are lost. Where the master's port is ours to choose
    (`port_moves`), the ranks take the next one if it is taken. `reserved_cpus` are left free for other processes.
    """

    launcher: str
    backend: str
    device: str
    nnodes: int
    nproc_per_node: int
    ranks: tuple[RankPlan, ...]
    environment: Mapping[str, str]
    yours: tuple[str, ...]
    bind: str
    memory_policy: str
    preload: tuple[str, ...]
    program: Program
    command: tuple[str, ...]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    node: str = ""
    map: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: str = ""
    rendezvous_timeout_s: int = 1800
    fail_timeout_s: int = 1800
    grace_s: int = 30
    max_restarts: int = 0
    min_nodes: int = 1
    port_moves: bool = False
    reserved_cpus: int = 0

    @property
    def uses_elastic_rendezvous(self) -> bool:
        """Tell whether the agents of several nodes number the ranks together, anew after each loss."""
        return self.nnodes > 1 and (self.max_restarts > 0 or self.min_nodes < self.nnodes)

    def with_training(
        self, training: Mapping[str, Any], decisions: tuple[Decision, ...], warnings: tuple[str, ...] = ()
    ) -> Plan:
        """Return the plan with the trainer's own part added."""
        return replace(
            self,
            training=dict(training),
            decisions=self.decisions + decisions,
            warnings=self.warnings + warnings,
        )

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON, the keys in the order of the fields."""
        return json.dumps(asdict(self), indent=indent)

    def to_variable(self) -> str:
        """Return the plan as an environment variable holds it: packed where it is long.

        Linux takes 128 KiB in one variable, which over a thousand ranks would fill.
        """
        text = self.to_json()
        return text if len(text) <= MAX_PLAIN_BYTES else ZLIB_PREFIX + b64encode(zlib.compress(text.encode())).decode()

    @staticmethod
    def from_variable(text: str) -> Plan:
        """Return the plan that `to_variable` wrote; raises ValueError, KeyError or TypeError for other text."""
        if not text.startswith(ZLIB_PREFIX):
            return Plan.from_json(text)
        try:
            return Plan.from_json(zlib.decompress(b64decode(text.removeprefix(ZLIB_PREFIX))).decode())
        except zlib.error as error:
            raise ValueError(str(error)) from None

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that `to_json` wrote; raises ValueError, KeyError or TypeError for other text."""
        data = json.loads(text)
        data["ranks"] = tuple(
            RankPlan(**{**rank, "cpus": tuple(rank["cpus"]), "memory_nodes": tuple(rank["memory_nodes"])})
            for rank in data["ranks"]
        )
        data["program"] = Program(data["program"]["kind"], tuple(data["program"]["argv"]))
        data["decisions"] = tuple(Decision(**decision) for decision in data["decisions"])
        for name in ("yours", "preload", "command", "warnings", "map"):
            data[name] = tuple(data[name])
        return Plan(**data)
