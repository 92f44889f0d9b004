"""The results of `entrypoint tune`, stored per machine and program, and how a later plan applies them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from entrypoint.core.errors import UserError, one_line, printable
from entrypoint.core.files import is_folder, open_regular, working_folder
from entrypoint.core.settings_base import rules_of
from entrypoint.core.user_dirs import user_cache_dir, why_not_trusted
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, Plan, Source
from entrypoint.settings import LaunchSettings, read_launch_settings

RANKS, THREADS = "LAUNCH_NPROC_PER_NODE", "LAUNCH_THREADS"
OPENMP, ALLOCATOR, BIND = "LAUNCH_OPENMP", "LAUNCH_ALLOCATOR", "LAUNCH_CPU_BINDING"
VERSION = 3
# What candidates differ in, and the form of their values: no path, which could name a library.
TUNED_VARIABLES = frozenset({RANKS, THREADS, OPENMP, ALLOCATOR, BIND, "KMP_BLOCKTIME", "OMP_WAIT_POLICY"})
# Letters of what a plan says of a result.
MAX_EVIDENCE = 400
# A result has a few hundred bytes.
MAX_RESULT_BYTES = 1 << 20
TUNED_VALUE = re.compile(r"[a-z0-9-]{1,20}", re.ASCII)
# Other variables that affect speed. LAUNCH_* and TRAIN_* have rules of their own.
SPEED_VARIABLES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
)


class TunedPlan(Struct, frozen=True):
    """The variables of the best plan, empty if the untuned one is as fast, and the evidence in a few words.

    `not_used` says why a stored result is passed over, empty if it is used.
    """

    variables: Mapping[str, str]
    evidence: str
    path: str = ""
    not_used: str = ""


def machine_program_key(inputs: PlanInputs, training: Mapping[str, Any]) -> str:
    """Return the key of this program on this machine, equal for equal machines whatever their host name is.

    `training` are the trainer's settings that affect speed. For a user's script its command line counts.
    """
    import hashlib  # loads OpenSSL; most plans have no results to look for

    machine, words = inputs.machine, inputs.program.argv
    seats = [(cpu.socket, cpu.node, cpu.core) for cpu in machine.cpus]
    places = {seat: number for number, seat in enumerate(dict.fromkeys(seats))}
    values, rules = inputs.settings.values, rules_of(LaunchSettings)
    known = {
        "version": VERSION,
        "cpu": machine.cpu_model,
        "seats": [places[seat] for seat in seats],
        "nodes": [(socket, node) for socket, node, _ in seats],
        "limits": (machine.quota_cpus, machine.memory_bytes >> 30, inputs.job.granted_cpus),
        "gpus": [gpu.name for gpu in machine.gpus],
        "torch": machine.packages.versions.get("torch", ""),
        "libraries": sorted(library.name for library in machine.libraries if library.path),
        "given": {name: str(values.value(name)) for name in inputs.settings.sources if rules[name].speed},
        "environ": {name: value for name, value in inputs.environ.items() if name.startswith(SPEED_VARIABLES)},
        "program": {
            **dict.fromkeys(("script", "notebook"), (os.path.realpath(words[1]), *words[2:])),  # by whatever name
            "module": (*words[1:], str(working_folder())),
        }.get(inputs.program.kind, words[1:]),
        "training": dict(training),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:20]


def store_dir(inputs: PlanInputs) -> Path | None:
    """Return the folder of results: the configured one or one in the user's cache folder, None for `off`."""
    configured = inputs.settings.values.tuning_store
    if configured != "auto":
        return None if configured == "off" else Path(configured)
    cache = user_cache_dir(inputs.environ)
    return cache / "tuned" if cache else None


def load(inputs: PlanInputs, training: Callable[[], Mapping[str, Any]]) -> TunedPlan | None:
    """Return the result for this machine and program, None if there is none or another launcher starts the ranks.

    A result that cannot be read or that another user could have written is passed over, and so is one that sets what
    tuning does not set: a variable such as LD_PRELOAD would run code of the user who wrote it.
    `training` returns the trainer's settings for the key. It reads the data set, so it is not called without a folder.
    """
    folder = store_dir(inputs)
    if not folder or not is_folder(folder) or not is_tunable(inputs):
        return None
    path = folder / f"{machine_program_key(inputs, training())}.json"
    try:
        stored = msgspec.json.decode(read_owned(path), type=TunedPlan)
        check_variables(stored.variables)
        return TunedPlan(stored.variables, one_line(stored.evidence)[:MAX_EVIDENCE], str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, UserError) as error:
        return TunedPlan({}, "", str(path), printable(error))


def read_owned(path: Path) -> str:
    """Return the text of a file that this user or root alone can have written; raises OSError, and ValueError."""
    with os.fdopen(open_regular(path, os.O_NOFOLLOW)) as file:
        status = os.fstat(file.fileno())
        if problem := why_not_trusted(status):
            raise ValueError(problem)
        return file.read(MAX_RESULT_BYTES)


def check_variables(variables: Mapping[str, str]) -> None:
    """Raise ValueError if variables are not those of a tuning result, and `UserError` if no setting takes a value."""
    for name, value in variables.items():
        if name not in TUNED_VARIABLES or not TUNED_VALUE.fullmatch(value):
            raise ValueError(f"it sets {printable(name)}={printable(value)}, which tuning does not")
    read_launch_settings(variables, {})


def is_tunable(inputs: PlanInputs) -> bool:
    """Return whether this process alone decides on the ranks: no launcher has, and there are no other nodes."""
    return not inputs.job.launcher and inputs.node_group.nnodes == 1 and inputs.remote_launcher is None


def apply_tuning(inputs: PlanInputs, tuned: TunedPlan, flags: Mapping[str, str]) -> PlanInputs:
    """Return the inputs as if the user had set the tuned variables; `flags` are the launcher's own.

    The current load of other processes is ignored, because the tuned plan has been measured.
    """
    environ = {**tuned.variables, **inputs.environ}
    machine = replace(inputs.machine, busy_cpus=0.0)
    return replace(inputs, environ=environ, settings=read_launch_settings(environ, flags), machine=machine)


def annotate(plan: Plan, tuned: TunedPlan) -> Plan:
    """Return the plan with the evidence, and with the tuned decisions marked as tuned; or why they are not used."""
    if tuned.not_used:
        note = f"{tuned.path}: a stored tuning result is not used ({tuned.not_used}). Remove it and tune again."
        return replace(plan, warnings=(*plan.warnings, note))
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
    """Write a result atomically; raises `UserError` if the disk is full or the folder is not writable."""
    from entrypoint.core.files import atomic_write_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(content, indent=2) + "\n")
        path.chmod(0o644)  # whatever the umask: a result that others can write is not used
    except OSError as error:
        raise UserError(
            f"{one_line(path.parent)}: cannot be written ({error.strerror}). Name another folder with"
            " LAUNCH_TUNING_STORE."
        ) from None
