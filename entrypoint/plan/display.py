"""The plan as text: the machine, the ranks on its cores, and each decision with its reason."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from itertools import groupby
from string import ascii_lowercase, digits

from msgspec import Struct

from entrypoint.core.errors import count_text
from entrypoint.machine.detect import Machine
from entrypoint.plan.cpu_budget import cores_by_node, group_by_core
from entrypoint.plan.model import Plan, RankPlan, Source

# Where no terminal says how wide it is.
DEFAULT_COLUMNS = 100
# Reasons that would have less room are on lines of their own.
MIN_REASON_COLUMNS = 32
BOLD, YELLOW, PLAIN = "\033[1m", "\033[33m", "\033[0m"
# Longer values are cut; `plan --json` has them whole.
MAX_VALUE_COLUMNS = 24
# What people look for first, and what they look for if there are several ranks.
FIRST_DECISIONS = (
    "device", "nodes", "ranks", "threads", "python", "dataset", "model", "weights", "optimizer", "batch", "images",
    "precision", "resume", "chosen on", "evaluate",
)  # fmt: skip
OF_SEVERAL = ("cores", "memory", "backend", "launcher", "job key", "parallelism")
RANK_SYMBOLS = digits + ascii_lowercase
FREE_CORE, SHARED_CORE = ".", "*"
# Nodes of more cores, and more runs of cores of one rank, are shortened.
MAX_LINE_CORES = 64
MAX_RUNS = 12


class Layout(Struct, frozen=True):
    """The columns of a line, whether colors are shown, and whether decisions that matter less are."""

    columns: int = DEFAULT_COLUMNS
    color: bool = False
    verbose: bool = True


PLAIN_LAYOUT = Layout()


def plan_lines(
    plan: Plan,
    layout: Layout = PLAIN_LAYOUT,
    *,
    command: bool = False,
    only: str = "",
) -> list[str]:
    """Return the plan's lines in a layout, or those of the decision `only`; no word is broken.

    With `command` the command lines follow, which may be longer.
    """
    columns, color = layout.columns, layout.color
    decisions = [one for one in plan.decisions if only in ("", one.key)]
    first = {*FIRST_DECISIONS, *(OF_SEVERAL if plan.nodes.world_size > 1 else ())}
    looked_for = [one for one in decisions if one.key in first or one.source != Source.AUTO]
    shown_ones = decisions if layout.verbose or only else looked_for
    hidden = len(decisions) - len(shown_ones)
    rows = [(one.key, one.value, one.text) for one in shown_ones]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(MAX_VALUE_COLUMNS, max(len(value) for _, value, _ in rows))
    lines = wrap_words(f"plan: {plan.machine}", columns, "  ")
    lines += [f"  {line}" for line in plan.binding.core_map if not only]
    for key, value, text in rows:
        shown = value if len(value) <= value_width else f"{value[: value_width - 1]}…"
        start = f"  {key:<{key_width}}  {shown:<{value_width}}  "
        lines += colored(wrap_after(start, text, columns), key, BOLD, color=color)
    if hidden:
        lines.append(f"  --verbose shows {count_text(hidden, 'more decision')}")
    for warning in plan.warnings:
        lines += colored(wrap_after("  warning: ", warning, columns), "warning:", YELLOW, color=color)
    if command:
        lines.append(f"  would run: {shlex.join(plan.command)}")
        if plan.command != plan.program.argv:
            lines.append(f"  each rank: {shlex.join(plan.program.argv)}")
    return lines


def wrap_words(text: str, columns: int, indent: str = "") -> list[str]:
    """Return a text in lines of at most so many columns; a longer word, such as a path, has a longer line."""
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def wrap_after(start: str, text: str, columns: int) -> list[str]:
    """Return a text in lines of so many columns, the first after `start`, the others below its end if there is room."""
    if columns - len(start) < MIN_REASON_COLUMNS and len(start) + len(text) > columns:
        return [start.rstrip(), *(f"      {line}" for line in wrap_words(text, columns - 6))]
    first, *others = wrap_words(text, columns - len(start)) or [""]
    return [f"{start}{first}".rstrip(), *(f"{' ' * len(start)}{line}" for line in others)]


def colored(lines: list[str], word: str, style: str, *, color: bool) -> list[str]:
    """Return lines with the first `word` in a color or bold, if there is `color`."""
    return [lines[0].replace(word, f"{style}{word}{PLAIN}", 1), *lines[1:]] if color else lines


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
        is_short = len(node) <= MAX_LINE_CORES and len(ranks) <= len(RANK_SYMBOLS)
        names = RANK_SYMBOLS if is_short else range(len(ranks))
        marks = [FREE_CORE if not who else SHARED_CORE if len(who) > 1 else str(names[who[0]]) for who in held]
        runs = [f"{mark} x{len(list(run))}" for mark, run in groupby(marks)]
        shortened = runs if len(runs) <= MAX_RUNS else (*runs[: MAX_RUNS - 2], "…", runs[-1])
        cells = "".join(marks) if is_short else " ".join(shortened)
        place = node[0].numa_node
        gpus = ",".join(str(gpu.index) for gpu in machine.gpus if gpu.node == place[1])
        lines.append(f"socket {place[0]} node {place[1]}: {cells}" + (f"  GPU {gpus}" if gpus else ""))
    return tuple(lines)
