"""How fast bf16 is on this machine: measured once, and kept in the folder of tuning results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.core.console import log
from entrypoint.core.errors import UserError, one_line
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.tune.store import is_tunable, read_owned, save, store_dir

if TYPE_CHECKING:
    from train.settings import TrainSettings

SPEEDUP_KEY = "bf16_speedup"
# Kept for a measurement that failed, which would fail again.
FAILED = 0.0


def bf16_speedup(settings: TrainSettings, plan: Plan, inputs: PlanInputs) -> float | None:
    """Return how many times as fast as fp32 bf16 is here, None where nobody asks or it is not to be measured.

    Ranks that a launcher started, and nodes of a job, must decide alike, so they go by the CPU's flags.
    """
    from train.planning.compute import hardware_support, measure_bf16

    folder = store_dir(inputs)
    asked = settings.precision == "auto" and not settings.evaluate and plan.device == "cpu"
    if not asked or not hardware_support("bf16", "cpu", inputs.machine) or not is_tunable(inputs) or not folder:
        return None
    import hashlib  # loads OpenSSL

    # What distinguishes measurements: CPU, torch, and the CPUs of a rank.
    machine, first = inputs.machine, plan.ranks[0]
    facts = (machine.cpu_model, machine.packages.versions.get("torch", ""), first.threads, len(first.cpus))
    path = folder / f"precision-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]}.json"
    kept = read_speedup(path)
    if kept is None:
        log("measuring bf16 on this CPU, once")
        kept = measure_bf16(first.threads, first.cpus, inputs.python) or FAILED
        try:
            save(path, {SPEEDUP_KEY: kept, "cpu": machine.cpu_model})
        except UserError as error:
            log(f"note: {one_line(error)} bf16 is measured again in the next run.")
    return kept or None


def read_speedup(path: Path) -> float | None:
    """Return the measurement in a file; None for no file, and for one that says nothing or may be another user's."""
    try:
        value = float(json.loads(read_owned(path))[SPEEDUP_KEY])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if FAILED <= value < math.inf else None
