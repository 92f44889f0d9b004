"""Read Slurm's variables: tasks, CPUs and nodes, its lists of nodes, and the numbers of any launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from math import prod

from entrypoint.core.errors import UserError, printable


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a whole number; raises `UserError` naming it where it is none."""
    text = environ.get(name) or str(default)
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise UserError(f"{name}={printable(text)}: not a whole number; a launcher sets it, so unset it if you did")
    return int(text)


def expand_per_node_count(name: str, text: str, node: int) -> int:
    """Return a node's number of `2(x3),1`, the form of srun(1), the last one beyond its end; raises `UserError`."""
    count, after = 0, 0
    for group in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", group, re.ASCII)
        if not match:
            raise UserError(f"{name}={printable(text)}: cannot be read; expected a form like 2(x3),1")
        if after <= node:
            count = int(match[1])
        after += int(match[2] or 1)
    return count


def value_for_this_node(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return this node's number of the first list that is set, None where none is; raises `UserError`."""
    name = next((name for name in names if environ.get(name)), None)
    return None if name is None else expand_per_node_count(name, environ[name], number(environ, "SLURM_NODEID", 0))


# The step of salloc's shell with LaunchParameters=use_interactive_step (slurm.h: SLURM_INTERACTIVE_STEP).
INTERACTIVE_STEP = 0xFFFFFFFA


def is_interactive_step(environ: Mapping[str, str], parent: str) -> bool:
    """Return whether this step is a user's shell, as by `salloc` or `srun --pty bash`.

    `srun --pty entrypoint …` starts the program itself: then the parent process is Slurm's step daemon. Raises
    `UserError` for a task of `srun --pty` other than the first, which alone has a terminal.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if step == str(INTERACTIVE_STEP):
        return True
    if not step or not environ.get("SLURM_PTY_PORT") or parent == "slurmstepd":
        return False
    if number(environ, "SLURM_PROCID", 0) > 0:
        raise UserError(
            f"SLURM_PROCID={environ['SLURM_PROCID']}: srun --pty started this process, and gives a terminal to task 0"
            " alone. Use srun without --pty."
        )
    return True


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a step, as a batch script has it."""
    own = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_CPU_BIND_TYPE")
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_STEP") and name not in own}


def slurm_step(environ: Mapping[str, str]) -> str:
    """Return the id of this step, empty outside one; a job may have several at once."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else ""


def slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the tasks of this step on this node, None if Slurm's variables do not tell.

    Raises `UserError` for fewer tasks than nodes, which srun never starts: a size did not get here.
    """
    here = value_for_this_node(environ, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    tasks, nodes = number(environ, "SLURM_NTASKS", 1), number(environ, "SLURM_STEP_NUM_NODES", 0)
    if nodes > tasks:
        raise UserError(
            f"SLURM_STEP_NUM_NODES={nodes}: srun started tasks on {nodes} nodes, and SLURM_NTASKS says {tasks}. Set"
            " SLURM_NTASKS to their number."
        )
    return here or tasks_by_totals(tasks, nodes) or (1 if tasks == 1 else None)


def tasks_by_totals(tasks: int, nodes: int) -> int | None:
    """Return the tasks on each node where their numbers in the whole job determine it, else None."""
    return {1: tasks, tasks: 1}.get(nodes)


def granted_cpus(environ: Mapping[str, str]) -> int | None:
    """Return the CPUs that Slurm grants to what runs on this node, a step or the batch script; None outside a job.

    A cluster without confinement by cgroups or affinity leaves the mask whole: then only this shows it.
    """
    cpus = number(environ, "SLURM_CPUS_ON_NODE", 0) if environ.get("SLURM_JOB_ID") else 0
    return cpus if cpus > 0 else None


def job_cpus(environ: Mapping[str, str]) -> int | None:
    """Return the CPUs that the whole job has on this node; None outside a job."""
    return value_for_this_node(environ, ("SLURM_JOB_CPUS_PER_NODE",)) if environ.get("SLURM_JOB_ID") else None


def slurm_nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the step's nodes, outside a step those of the job's, in order; none outside a job."""
    names = ("SLURM_STEP_NODELIST",) if environ.get("SLURM_STEP_ID") else ()
    name = next((name for name in (*names, "SLURM_JOB_NODELIST") if environ.get(name)), "")
    return expand_hostlist(environ[name], name) if name and environ.get("SLURM_JOB_ID") else ()


# No cluster has more; a list that says so is a mistake, not work for minutes.
MOST_NODES = 1_000_000
# `01-03` or `7`, and one pattern of a list: letters, and lists of such numbers in brackets.
NUMBERS = "[0-9]{1,18}(?:-[0-9]{1,18})?"
PATTERN = rf"(?:[A-Za-z0-9._-]|\[{NUMBERS}(?:,{NUMBERS})*\])+"


def expand_hostlist(text: str, what: str = "node list") -> tuple[str, ...]:
    """Return the names of a list like `node[01-03,7],gpu-[1-2]-ib[0,3],login`, in its order (slurm.conf(5)).

    Raises `UserError` with `what` where the list cannot be read.
    """
    if not re.fullmatch(f"{PATTERN}(?:,{PATTERN})*", text):
        raise UserError(f"{what}={printable(text)}: cannot be read; expected a form like node[01-03,7]")
    names: list[str] = []
    for pattern in re.findall(PATTERN, text):
        parts = [expand_numbers(what, part) for part in re.split(r"[\[\]]", pattern)[1::2]]
        if len(names) + prod(map(len, parts)) > MOST_NODES:
            raise UserError(f"{what}: more than {MOST_NODES:,} nodes")
        form = re.sub(r"\[.*?\]", "{}", pattern)
        names += (form.format(*numbers) for numbers in product(*parts))
    return tuple(names)


def expand_numbers(what: str, text: str) -> list[str]:
    """Return the numbers of `01-03,7`, as wide as the first of each range; raises `UserError`."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= MOST_NODES:
            raise UserError(f"{what}: the range {part} runs backwards, or has more than {MOST_NODES:,} nodes")
        numbers += (str(int(first) + index).zfill(len(first)) for index in range(count))
    return numbers
