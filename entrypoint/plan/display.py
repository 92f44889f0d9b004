"""The plan as text that a person reads: the machine, then each decision with its reason."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby
from string import ascii_lowercase, digits

from entrypoint.machine.detect import Machine
from entrypoint.plan.core_assignment import cores_by_node
from entrypoint.plan.cpu_budget import group_by_core
from entrypoint.plan.model import Plan, RankPlan


def plan_lines(plan: Plan, *, command: bool = False, only: str = "") -> list[str]:
    """Return the plan's lines, or of the decisions `only` one; with `command` also what would be executed."""
    rows = [(one.what, one.value, one.why) for one in plan.decisions if only in ("", one.what)]
    what_width = max(len(what) for what, _, _ in rows)
    value_width = min(24, max(len(value) for _, value, _ in rows))
    lines = [f"plan: {plan.node}"]
    lines += [f"  {line}" for line in plan.map if not only]
    lines += [f"  {what:<{what_width}}  {value:<{value_width}}  {why}".rstrip() for what, value, why in rows]
    lines += [f"  warning: {warning}" for warning in plan.warnings]
    if command:
        lines.append(f"  would run: {shlex.join(plan.command)}")
        if plan.command != plan.program.argv:
            lines.append(f"  each rank: {shlex.join(plan.program.argv)}")
    return lines


RANK_SYMBOLS = digits + ascii_lowercase


FREE_CORE, SHARED_CORE = ".", "*"


MAX_LINE_CORES = 64


MAX_RUNS = 12


def core_map(machine: Machine, ranks: Sequence[RankPlan]) -> tuple[str, ...]:
    """Return a line for each NUMA node: the rank of each of its allowed cores, `.` for none and `*` for several.

    Ranks beyond 35, and nodes of over 64 cores, are shown as runs: `36 x8` is eight cores of rank 36. A machine
    of a single core needs no map.
    """
    cores = group_by_core(machine.cpus, siblings=True)
    if len(cores) < 2:
        return ()
    owners: dict[int, list[int]] = {}
    for rank in ranks:
        for cpu in rank.cpus:
            owners.setdefault(cpu, []).append(rank.local_rank)
    lines = []
    for node in cores_by_node(cores):
        held = [sorted({rank for cpu in core.cpus for rank in owners.get(cpu, ())}) for core in node]
        if len(node) <= MAX_LINE_CORES and len(ranks) <= len(RANK_SYMBOLS):
            cells = "".join(
                FREE_CORE if not who else SHARED_CORE if len(who) > 1 else RANK_SYMBOLS[who[0]] for who in held
            )
        else:
            words = [FREE_CORE if not who else SHARED_CORE if len(who) > 1 else str(who[0]) for who in held]
            runs = [f"{word} x{len(list(run))}" for word, run in groupby(words)]
            cells = " ".join(runs if len(runs) <= MAX_RUNS else (*runs[: MAX_RUNS - 2], "…", runs[-1]))
        place = node[0].place
        gpus = ",".join(str(gpu.index) for gpu in machine.gpus if gpu.node == place[1])
        lines.append(f"socket {place[0]} node {place[1]}: {cells}" + (f"  GPU {gpus}" if gpus else ""))
    return tuple(lines)
