"""What `entrypoint tune` has found, kept for this machine and program, and how a later plan takes it up."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entrypoint.core.errors import UserError, printable
from entrypoint.core.user_dirs import user_cache_dir
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, Plan, Source
from entrypoint.settings import read_launch_settings

VERSION = 1
# Keys of the stored file, which have the names of 0.1 so that its results are read.
RESULT_KEY = "verdict"  # codespell:ignore
BUSY_CPUS_KEY = "beside"  # codespell:ignore
# Settings of the launcher that change no speed.
NOT_SPEED_SETTINGS = (
    "quiet",
    "tuning_store",
    "rendezvous_timeout_s",
    "collective_timeout_s",
    "grace_period_s",
    "max_restarts",
)
# Variables of others that change it; LAUNCH_* and TRAIN_* are distinguished by their own rules.
SPEED_VARIABLES = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_"),
    *("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES"),
)


@dataclass(frozen=True)
class TunedPlan:
    """The variables of the best plan, empty where the untuned one is as good, and the evidence in a few words."""

    variables: Mapping[str, str]
    evidence: str
    path: Path


def machine_program_key(inputs: PlanInputs, training: Mapping[str, Any]) -> str:
    """Return what names this program on this machine: two alike have the same, whatever their host is called.

    `training` are the trainer's settings that bear on speed; of a user's script its words and content count.
    """
    machine = inputs.machine
    seats = [(cpu.socket, cpu.node, cpu.core) for cpu in machine.cpus]
    places = {seat: number for number, seat in enumerate(dict.fromkeys(seats))}
    values = inputs.settings.values
    known = {
        "version": VERSION,
        "cpu": machine.cpu_model,
        "seats": [places[seat] for seat in seats],
        "nodes": [(socket, node) for socket, node, _ in seats],
        "limits": (machine.quota_cpus, machine.memory_bytes >> 30, inputs.job.granted_cpus),
        "gpus": [gpu.name for gpu in machine.gpus],
        "torch": machine.packages.versions.get("torch", ""),
        "libraries": sorted(library.name for library in machine.libraries if library.path),
        "given": {
            name: str(getattr(values, name)) for name in inputs.settings.sources if name not in NOT_SPEED_SETTINGS
        },
        "environ": {name: value for name, value in inputs.environ.items() if name.startswith(SPEED_VARIABLES)},
        "program": list(inputs.program.argv[1:]),
        "content": [content_of(word) for word in inputs.program.argv[1:2]],
        "training": dict(training),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:20]


def content_of(word: str) -> str:
    """Return the digest of the file that a word names, nothing where it names none."""
    path = Path(word)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def store_dir(inputs: PlanInputs) -> Path | None:
    """Return the folder with what was found: the user's cache folder or the one asked for, None for `off`."""
    asked = inputs.settings.values.tuning_store
    if asked != "auto":
        return None if asked == "off" else Path(asked)
    cache = user_cache_dir(inputs.environ)
    return cache / "tuned" if cache else None


def load(inputs: PlanInputs, training: Callable[[], Mapping[str, Any]]) -> TunedPlan | None:
    """Return what was found for this machine and program, None where nothing was or where others start the ranks.

    `training` gives the trainer's settings for `signature`; it is not asked where nothing is kept, since it looks at
    the data.
    """
    folder = store_dir(inputs)
    if not folder or not os.path.isdir(folder) or not is_tunable(inputs):  # noqa: PTH112  # no error for odd names
        return None
    path = folder / f"{machine_program_key(inputs, training())}.json"
    try:
        result = json.loads(path.read_text())[RESULT_KEY]
        if not result:
            return None
        return TunedPlan(dict(result["variables"]), str(result["evidence"]), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: cannot be read ({printable(error)}); remove it, or set LAUNCH_TUNING_STORE=off"
        ) from None


def is_tunable(inputs: PlanInputs) -> bool:
    """Tell whether this process alone decides on the ranks: no launcher has, and there are no other nodes."""
    return not inputs.job.launcher and inputs.node_group.nnodes == 1 and inputs.remote_launcher is None


def apply_tuning(inputs: PlanInputs, tuned: TunedPlan, flags: Mapping[str, str]) -> PlanInputs:
    """Return the inputs as if a user had set what was found; `flags` are the launcher's own.

    What was measured stands, whatever others keep busy now.
    """
    environ = {**tuned.variables, **inputs.environ}
    machine = replace(inputs.machine, busy_cpus=0.0)
    return replace(inputs, environ=environ, settings=read_launch_settings(environ, flags), machine=machine)


def annotate(plan: Plan, tuned: TunedPlan) -> Plan:
    """Return the plan with the evidence, and with each decision that the tuning made marked as tuned."""
    settings = {f"{name}={value}" for name, value in tuned.variables.items()}
    decisions = tuple(
        replace(one, source=Source.TUNED) if one.source == Source.USER and one.setting in settings else one
        for one in plan.decisions
    )
    variables = "".join(f"{name}={value} " for name, value in tuned.variables.items())
    reason = f"{variables}{tuned.evidence}; LAUNCH_TUNING_STORE=off ignores it"
    decision = Decision("tuned", "yes" if variables else "no", reason)
    user_set = tuple(name for name in plan.environment.user_set if name not in tuned.variables)
    environment = replace(plan.environment, user_set=user_set)
    return replace(plan, decisions=(*decisions, decision), environment=environment)


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a finding whole; raises `UserError` where there is no room or no right to."""
    from entrypoint.core.atomic_files import atomic_write_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"{path.parent}: cannot be written ({error.strerror}); name a folder that can with LAUNCH_TUNING_STORE"
        ) from None
