"""Plans that need more memory than a node has."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.machine.detect import Machine
from tests.conftest import refusal
from tests.factories import make_machine, make_test_plan
from train.data.dataset_info import DatasetInfo
from train.planning.trainer_plan import plan_trainer
from train.settings import read_train_settings


def check_memory_refusal(
    environ: Mapping[str, str], facts: DatasetInfo, ranks: int, node: Machine, problem: str
) -> None:
    """Plan on a node, which refuses with a pattern, unless its memory is unknown; with an empty one it plans."""
    base = make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": str(ranks)})
    given = read_train_settings(environ, {})
    if not problem:
        plan_trainer(base, given, facts, node)
        return
    refusal(plan_trainer, base, given, facts, node, match=problem, code=ExitCode.MACHINE)
    plan_trainer(base, given, facts, replace(node, memory_bytes=0))  # unknown
