"""`entrypoint stacks`: the stacks of all threads of the ranks that run on this node."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from entrypoint.doctor.running_ranks import find_ranks, rank_number
from entrypoint.hang.stacks import NoStacksError, find_py_spy, read_native_stacks, read_python_stacks, stacks_text
from entrypoint.machine.procfs import ROOT, read_lines, state_of, state_text


class RankStacks(Struct, frozen=True):
    """The stacks of a rank, empty where there are none; `state` says why, `note` why native ones are missing."""

    rank: int
    process: int
    stacks: str
    state: str = ""
    note: str = ""


def stacks_of_ranks(processes: tuple[int, ...] = ()) -> tuple[RankStacks, ...]:
    """Return the stacks of these ranks, by default of all of this user, in the order of ranks; raises `UserError`."""
    ranks = find_ranks(processes, "stacks")
    py_spy = find_py_spy()
    order = sorted(ranks, key=lambda process: (rank_number(ranks[process]), int(process)))
    return tuple(inspect(int(process), ranks[process], py_spy) for process in order)


def inspect(process: int, environ: Mapping[str, str], py_spy: str | None) -> RankStacks:
    """Return the stacks of one rank: by py-spy with the native ones if it may, else Python's alone."""
    rank, note = rank_number(environ), "py-spy is not installed"
    if py_spy:
        try:
            return RankStacks(rank, process, read_native_stacks(py_spy, process))
        except NoStacksError as error:
            note = str(error)
    try:
        return RankStacks(rank, process, read_python_stacks(process), note=f"no native stacks: {note}")
    except NoStacksError as error:
        return RankStacks(rank, process, "", str(error))


def describe(rank: RankStacks) -> str:
    """Return the text about one rank."""
    title = f"rank {rank.rank}  process {rank.process}"
    if not rank.stacks:
        return f"{title}  {rank.state}{hint(rank.process)}"
    return stacks_text(f"{title}  {rank.note}".rstrip(), rank.stacks)


def hint(process: int) -> str:
    """Return what the user may do about a process that gives no stacks, and where in the kernel it waits."""
    state = state_of(process)
    if state == "T":
        return f": no stack can come. `kill -CONT {process}` lets it go on."
    waits = "".join(read_lines(ROOT / f"proc/{process}/wchan")) if state == "D" else ""
    return f", in {waits}" if waits not in ("", "0") and state_text(process) else ""
