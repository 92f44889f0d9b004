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
from entrypoint.plan.model import Decision, Plan
from entrypoint.settings import read_launch_settings

VERSION = 1
# Settings of the launcher that change no speed.
NOT_SPEED_SETTINGS = (
    "quiet",
    "tuning_store",
    "rendezvous_timeout_s",
    "collective_timeout_s",
    "grace_period_s",
    "max_restarts",
)
# Variables of others that change it; LAUNCH_* and TRAIN_* are told apart by their own rules.
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


def machine_program_key(question: PlanInputs, training: Mapping[str, Any]) -> str:
    """Return what names this program on this machine: two alike have the same, whatever their host is called.

    `training` are the trainer's settings that bear on speed; of a person's script its words and content count.
    """
    machine = question.machine
    seats = [(cpu.socket, cpu.node, cpu.core) for cpu in machine.cpus]
    places = {seat: number for number, seat in enumerate(dict.fromkeys(seats))}
    values = question.settings.values
    known = {
        "version": VERSION,
        "cpu": machine.cpu_model,
        "seats": [places[seat] for seat in seats],
        "nodes": [(socket, node) for socket, node, _ in seats],
        "limits": (machine.quota_cpus, machine.memory_bytes >> 30, question.job.granted_cpus),
        "gpus": [gpu.name for gpu in machine.gpus],
        "torch": machine.packages.versions.get("torch", ""),
        "libraries": sorted(library.name for library in machine.libraries if library.path),
        "given": {
            name: str(getattr(values, name)) for name in question.settings.sources if name not in NOT_SPEED_SETTINGS
        },
        "environ": {name: value for name, value in question.environ.items() if name.startswith(SPEED_VARIABLES)},
        "program": list(question.program.argv[1:]),
        "content": [content_of(word) for word in question.program.argv[1:2]],
        "training": dict(training),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:20]


def content_of(word: str) -> str:
    """Return the digest of the file that a word names, nothing where it names none."""
    path = Path(word)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def store_dir(question: PlanInputs) -> Path | None:
    """Return the folder with what was found: the user's cache folder or the one asked for, None for `off`."""
    asked = question.settings.values.tuning_store
    if asked != "auto":
        return None if asked == "off" else Path(asked)
    cache = user_cache_dir(question.environ)
    return cache / "tuned" if cache else None


def load(question: PlanInputs, training: Callable[[], Mapping[str, Any]]) -> TunedPlan | None:
    """Return what was found for this machine and program, None where nothing was or where others start the ranks.

    `training` gives the trainer's settings for `signature`; it is not asked where nothing is kept, since it looks at
    the data.
    """
    folder = store_dir(question)
    if not folder or not os.path.isdir(folder) or not is_tunable(question):  # noqa: PTH112  # no error for odd names
        return None
    path = folder / f"{machine_program_key(question, training())}.json"
    try:
        verdict = json.loads(path.read_text())["verdict"]
        if not verdict:
            return None
        return TunedPlan(dict(verdict["variables"]), str(verdict["evidence"]), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: cannot be read ({printable(error)}); remove it, or set LAUNCH_TUNING_STORE=off"
        ) from None


def is_tunable(question: PlanInputs) -> bool:
    """Tell whether this process alone decides on the ranks: no launcher has, and there are no other nodes."""
    return not question.job.launcher and question.nodes.count == 1 and question.starter is None


def apply_tuning(question: PlanInputs, tuned: TunedPlan, flags: Mapping[str, str]) -> PlanInputs:
    """Return the question as if a person had set what was found; `flags` are the launcher's own.

    What was measured stands, whatever others keep busy now.
    """
    environ = {**tuned.variables, **question.environ}
    machine = replace(question.machine, busy_cpus_measured=0.0)
    return replace(question, environ=environ, settings=read_launch_settings(environ, flags), machine=machine)


def annotate(plan: Plan, tuned: TunedPlan) -> Plan:
    """Return the plan with the evidence, and with `(tuned)` where it would take what was found for a person's own."""
    names = tuple(f"(yours) {name}={value}" for name, value in tuned.variables.items())
    decisions = tuple(
        replace(one, why=one.why.replace("(yours)", "(tuned)", 1)) if one.why.startswith(names) else one
        for one in plan.decisions
    )
    words = "".join(f"{name}={value} " for name, value in tuned.variables.items())
    said = Decision(
        "tuned", "yes" if words else "no", f"{words}{tuned.evidence}; LAUNCH_TUNING_STORE=off leaves it out"
    )
    yours = tuple(name for name in plan.yours if name not in tuned.variables)
    return replace(plan, decisions=(*decisions, said), yours=yours)


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write a finding whole; raises `Refused` where there is no room or no right to."""
    from entrypoint.core.atomic_files import atomic_write_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"{path.parent}: cannot be written ({error.strerror}); name a folder that can with LAUNCH_TUNING_STORE"
        ) from None
