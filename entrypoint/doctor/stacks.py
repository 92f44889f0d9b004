"""`entrypoint stacks`: the stacks of all threads of the ranks that run on this node."""

from __future__ import annotations

from msgspec import Struct

from entrypoint.doctor.running_ranks import find_ranks, rank_number
from entrypoint.hang.stacks import NoStacksError, read_python_stacks, stacks_text
from entrypoint.machine.procfs import ROOT, read_lines, state_of, state_text


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


def describe(rank: RankStacks) -> str:
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
