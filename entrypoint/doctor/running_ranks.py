"""`entrypoint verify`: inspects the ranks that run on this node through /proc."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path, PurePath

from msgspec import Struct

from entrypoint.core.errors import UserError, one_line
from entrypoint.hang.stacks import NoStacksError, read_python_stacks, stacks_text
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.machine.procfs import ROOT, ancestors, get_memory_nodes, read_lines, state_of, state_text
from entrypoint.machine.shared_libraries import split_ld_preload
from entrypoint.plan.model import PLAN_VAR, Plan
from entrypoint.rank.verify import ObservedRank, compare_with_plan, cpus_of_process, mapped_libraries
from entrypoint.supervise.monitor import PROCESS_NAME as MONITOR

# A process of another user may have any text there.
RANK_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


class RunningRank(Struct, frozen=True):
    """A rank's observed state, and a line for each difference from its plan."""

    observed: ObservedRank
    differences: tuple[str, ...]


def verify_running(processes: tuple[int, ...] = ()) -> tuple[RunningRank, ...]:
    """Return the ranks of these processes, by default all of this user; raises `UserError` for none."""
    ranks = find_ranks(processes, "verify")
    running: list[RunningRank] = []
    for process in sorted(ranks, key=int):
        with nullcontext() if processes else suppress(UserError):  # one that the user did not name may have exited
            running.append(inspect_rank(process, ranks[process]))
    if not running:
        raise no_ranks("verify")
    return tuple(running)


def find_ranks(processes: tuple[int, ...], command: str) -> dict[str, dict[str, str]]:
    """Return process id and environment of these ranks, by default of all of this user.

    Raises `UserError` if a process is no rank, or if there is none; `command` is the one that asks.
    """
    chosen = {str(process) for process in processes}
    found = {process: environ for process, environ in iter_rank_processes() if not chosen or process in chosen}
    missing = sorted(chosen - set(found))
    if missing:
        raise UserError(
            f"{command}: process {missing[0]} is not a rank that the entrypoint started, or belongs to another user"
        )
    # Processes that a rank forks (loader workers, compilers) inherit its variables.
    ranks = {
        process: environ for process, environ in found.items() if found.keys().isdisjoint(ancestors(ROOT, process))
    }
    if not ranks:
        raise no_ranks(command)
    return ranks


def rank_number(environ: Mapping[str, str]) -> int:
    """Return the rank that a process has by its environment, -1 for one that is no number."""
    return int(environ["RANK"]) if RANK_NUMBER.fullmatch(environ["RANK"]) else -1


def no_ranks(command: str) -> UserError:
    """Return the error of a command that needs running ranks."""
    return UserError(f"{command}: no rank started by the entrypoint runs here; start one, or name its process")


def iter_rank_processes() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield process id and environment of every readable process with a plan and a rank."""
    for folder in (ROOT / "proc").iterdir():
        if folder.name.isdecimal():
            try:
                if (folder / "comm").read_text().strip() == MONITOR:  # the parent of a rank
                    continue
                items = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # another user's, or exited
                continue
            pairs = (os.fsdecode(item).partition("=") for item in items if b"=" in item)
            environ = {name: value for name, _, value in pairs}
            if PLAN_VAR in environ and "RANK" in environ:
                yield folder.name, environ


def inspect_rank(process: str, environ: dict[str, str]) -> RunningRank:
    """Return what one rank uses; the library that is preloaded first is the active one. Raises `UserError`."""
    try:
        plan = Plan.from_json(environ[PLAN_VAR])
        maps = (ROOT / f"proc/{process}/maps").read_text()
        seen = ObservedRank(
            rank=rank_number(environ),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            cpus=cpus_of_process(process),
            threads=None,
            openmp=active_library(("libiomp5", "libgomp"), environ, maps),
            preloaded=mapped_libraries(plan.environment.preload, maps),
            allocator=active_library(("malloc",), environ, maps),
            memory_nodes=get_memory_nodes(process),
            node=socket.gethostname(),
            process=int(process),
        )
        return RunningRank(seen, compare_with_plan(plan, seen))
    except (OSError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"verify: process {process} cannot be inspected ({one_line(error)})") from None


def active_library(words: tuple[str, ...], environ: dict[str, str], maps: str) -> str:
    """Return the first preloaded and mapped library with one of the words in its name, else any mapped one."""
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    real = [str(Path(file).resolve()) for file in split_ld_preload(environ.get("LD_PRELOAD", ""))]
    for file in [*(file for file in real if file in mapped), *sorted(mapped)]:
        if any(word in PurePath(file).name for word in words):
            return file
    return ""


def describe(running: RunningRank) -> list[str]:
    """Return a line about a rank, and a line for each difference from its plan."""
    seen = running.observed
    memory = f", memory of node {format_cpu_list(seen.memory_nodes)}" if seen.memory_nodes else ""
    openmp = one_line(PurePath(seen.openmp).name) or "none loaded"
    allocator = one_line(PurePath(seen.allocator).name) or "the system's"
    line = (
        f"rank {seen.rank}  process {seen.process}  CPUs {format_cpu_list(seen.cpus)}{memory}"
        f"  OpenMP {openmp}  allocator {allocator}"
    )
    return [line, *(f"  warning: {one_line(difference)}" for difference in running.differences)]


class RankStacks(Struct, frozen=True, order=True):
    """The stacks of a rank, empty where there are none; `state` says why."""

    rank: int
    process: int
    stacks: str
    state: str = ""


def stacks_of_ranks(processes: tuple[int, ...] = ()) -> tuple[RankStacks, ...]:
    """Return the stacks of these ranks, by default of all of this user, in the order of ranks; raises `UserError`."""
    ranks = find_ranks(processes, "stacks")
    return tuple(sorted(inspect(int(process), rank_number(environ)) for process, environ in ranks.items()))


def inspect(process: int, rank: int) -> RankStacks:
    """Return the stacks of one rank."""
    try:
        return RankStacks(rank, process, read_python_stacks(process))
    except NoStacksError as error:
        return RankStacks(rank, process, "", str(error))


def describe_stacks(rank: RankStacks) -> str:
    """Return the text about one rank."""
    title = f"rank {rank.rank}  process {rank.process}"
    if not rank.stacks:
        return f"{title}  {rank.state}{hint(rank.process)}"
    return stacks_text(title, rank.stacks)


def hint(process: int) -> str:
    """Return what the user may do about a process that gives no stacks, and where in the kernel it waits."""
    state = state_of(process)
    if state == "T":
        return f": no stack can come. `kill -CONT {process}` lets it go on."
    waits = "".join(read_lines(ROOT / f"proc/{process}/wchan")) if state == "D" else ""
    return f", in {waits}" if waits not in ("", "0") and state_text(process) else ""
