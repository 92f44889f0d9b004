"""Compare a running rank with its plan, from inside the rank."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from msgspec import Struct

from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.machine.procfs import get_memory_nodes
from entrypoint.plan.model import Plan


class ObservedRank(Struct, frozen=True):
    """The observed state of a running rank.

    `cpus` are those of all its threads. `threads` is torch's thread count, None if unknown. `openmp` and `allocator`
    are the files of the active libraries, empty if none is known. `preloaded` are the plan's preloads that are mapped.
    `memory_nodes` are the NUMA nodes that its memory is bound to. `node` and `process` say where it runs.
    """

    rank: int
    local_rank: int
    cpus: tuple[int, ...]
    threads: int | None
    openmp: str
    preloaded: tuple[str, ...]
    allocator: str = ""
    memory_nodes: tuple[int, ...] = ()
    gpu: int | None = None
    node: str = ""
    process: int = 0


class DlInfo(ctypes.Structure):
    """The C library's Dl_info, which dladdr(3) fills in."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def compare_ranks(ranks: Sequence[ObservedRank]) -> tuple[str, ...]:
    """Return a line about the rank with the fewest threads where another one has more, empty for ranks on GPUs."""
    fewest, most = (choose(ranks, key=lambda rank: rank.threads or 0) for choose in (min, max))
    if fewest.threads == most.threads or fewest.gpu is not None:
        return ()
    return (
        f"rank {fewest.rank} on {fewest.node} computes with {fewest.threads} threads, and rank {most.rank} on"
        f" {most.node} with {most.threads}: all wait for the slowest."
        " Give each rank as many cores. On nodes other than mpirun's own, Open MPI 5 needs `mpirun --bind-to none`.",
    )


def observe_rank(plan: Plan) -> ObservedRank:
    """Observe this process; call it in the program's main thread before the first parallel work."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and plan.device == "cuda" and torch.cuda.is_initialized()
    return ObservedRank(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        cpus=cpus_of_process("self"),
        threads=torch.get_num_threads() if torch else None,
        openmp=symbol_provider("GOMP_parallel"),
        preloaded=mapped_libraries(plan.environment.preload, Path("/proc/self/maps").read_text()),
        allocator=symbol_provider("posix_memalign"),
        memory_nodes=get_memory_nodes(),
        gpu=torch.cuda.current_device() if torch is not None and cuda else None,
        node=socket.gethostname(),
        process=os.getpid(),
    )


def cpus_of_process(process: str) -> tuple[int, ...]:
    """Return the CPUs that any thread of a process may run on; pinned threads have a subset each."""
    threads = [int(path.name) for path in Path(f"/proc/{process}/task").iterdir()]
    allowed: set[int] = set()
    for thread in threads:
        with suppress(ProcessLookupError):  # the thread has exited
            allowed |= os.sched_getaffinity(thread)
    return tuple(sorted(allowed))


def mapped_libraries(preload: Iterable[str], maps: str) -> tuple[str, ...]:
    """Return the preloaded libraries that a process has mapped."""
    return tuple(path for path in preload if str(Path(path).resolve()) in maps)


def symbol_provider(function: str) -> str:
    """Return the file that a function resolves to in this process, empty where there is none.

    Where two OpenMP runtimes are mapped, only GOMP_parallel's shows which one runs: torch's parallel_info() and
    __config__ read the same either way. Of an allocator's functions ask for posix_memalign, which torch takes its
    memory by: malloc's address is the interpreter's own in an executable that is not position-independent, as
    Debian's is.
    """
    here = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(here, function), ctypes.c_void_p)
    except AttributeError:
        return ""
    info = DlInfo()
    return info.file.decode(errors="replace") if here.dladdr(address, ctypes.byref(info)) else ""


def compare_with_plan(plan: Plan, observed: ObservedRank) -> tuple[str, ...]:
    """Return one line for each difference, with the observed and the planned value."""
    planned = plan.ranks[observed.local_rank]
    bound = f"bound to node {format_cpu_list(observed.memory_nodes)}" if observed.memory_nodes else "not bound"
    differences = {
        f"runs on CPUs {format_cpu_list(observed.cpus)}, planned were {format_cpu_list(planned.cpus)}": (
            plan.binding.cpu_binding != "none" and observed.cpus != planned.cpus
        ),
        f"torch has {observed.threads} threads, planned were {planned.threads}": (
            observed.threads not in (None, planned.threads)
        ),
        f"memory is {bound}, planned was node {format_cpu_list(planned.memory_nodes)}": (
            planned.memory_nodes and observed.memory_nodes != planned.memory_nodes
        ),
        f"computes on GPU {observed.gpu}, planned was {planned.gpu}": observed.gpu not in (None, planned.gpu),
    }
    lines = [text for text, differs in differences.items() if differs]
    absent = [path for path in plan.environment.preload if path not in observed.preloaded]
    lines += [f"{path} was to be preloaded and is not loaded" for path in absent]
    for word, what, file in (("iomp5", "OpenMP runtime", observed.openmp), ("malloc", "allocator", observed.allocator)):
        wanted = next((path for path in plan.environment.preload if word in PurePath(path).name), "")
        if wanted and file and word not in PurePath(file).name:
            lines.append(f"the {what} in charge is {file}, planned was {wanted}")
    return tuple(f"rank {observed.rank}: {line}" for line in lines)
