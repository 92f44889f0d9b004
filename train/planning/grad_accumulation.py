"""`TRAIN_GRAD_ACCUM_STEPS=auto`: as few micro-batches as the memory of a rank allows.

A child process measures what one image of training keeps for the backward pass, and what the weights take.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Decision, Plan, Source
from train.data.dataset_info import DatasetInfo
from train.planning.model_report import ModelReport
from train.planning.model_size import USABLE_SHARE
from train.settings import TrainSettings

GIB = 1 << 30
# What torch itself takes.
BASE_BYTES = GIB
# Gradients of activations and the workspaces of kernels come on top of what the backward pass keeps.
WORKSPACE_FACTOR = 1.5
VARIABLE = "TRAIN_GRAD_ACCUM_STEPS"


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank has for its micro-batch, and what one image and the model take; 0 available if unknown."""

    available: int
    fixed: int
    per_image: int

    @property
    def most_images(self) -> int:
        """The largest micro-batch that fits."""
        return max(0, self.available - self.fixed) // max(1, int(self.per_image * WORKSPACE_FACTOR))

    def needed_gib(self, images: int) -> float:
        """Return the GiB that a micro-batch of so many images takes."""
        return (self.fixed + images * self.per_image * WORKSPACE_FACTOR) / GIB


def rank_memory(plan: Plan, dataset: DatasetInfo, machine: Machine, report: ModelReport) -> RankMemory:
    """Return the memory of a rank: of its GPU, or its share of the node's; decoded images count as kept there."""
    if plan.device == "cuda":
        memory = min((gpu.memory_bytes for gpu in machine.gpus), default=0)
        available = int(memory * USABLE_SHARE) - BASE_BYTES - min(dataset.bytes, memory // 4)
    else:
        memory, ranks = machine.memory_bytes, len(plan.ranks)
        available = (int(memory * USABLE_SHARE) - min(dataset.bytes, memory // 4)) // ranks - BASE_BYTES
    return RankMemory(max(0, available) if memory else 0, report.fixed_bytes, report.bytes_per_image)


def with_accumulation(
    given: ParsedSettings[TrainSettings], plan: Plan, dataset: DatasetInfo, machine: Machine, report: ModelReport
) -> tuple[ParsedSettings[TrainSettings], Plan]:
    """Return settings and plan with the number of micro-batches for `auto`; ranks get it as a variable.

    Raises `UserError` where not even one image fits.
    """
    settings, ranks = given.values, plan.nodes.world_size
    share = -(-settings.batch_size // ranks)
    memory = rank_memory(plan, dataset, machine, report)
    steps = 1
    text = "the memory of this node is unknown"
    if memory.available:
        there = memory.available / GIB
        text = f"{share} images of a rank take about {memory.needed_gib(share):,.1f} GiB of {there:,.1f} GiB"
        if not memory.most_images:
            raise UserError(
                f"{given.sources['grad_accum_steps']}: training on one image takes about {memory.needed_gib(1):,.1f}"
                f" GiB, and a rank has {there:,.1f} GiB. Take a smaller model or smaller images.",
                ExitCode.MACHINE,
            )
        steps = min(-(-share // memory.most_images), share)
    values = msgspec.structs.replace(settings, grad_accum_steps=steps)
    decision = Decision("micro-batches", str(steps), text, Source.USER, given.sources["grad_accum_steps"])
    plan = replace(plan.with_variables({VARIABLE: str(steps)}), decisions=(*plan.decisions, decision))
    return replace(given, values=values), plan
