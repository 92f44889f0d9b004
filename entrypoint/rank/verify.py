"""What a rank really got, read from inside it after its program has started, against what was planned."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.machine.syscalls import get_memory_nodes
from entrypoint.plan.model import Plan


@dataclass(frozen=True)
class ObservedRank:
    """One rank as it runs.

    `cpus` are those of all its threads; torch's thread count is None where it is unknown. The files of the OpenMP
    runtime and of the allocator in use are empty where none is known. `preloads` are those of the plan that are
    mapped. The rest is the NUMA nodes that its memory is bound to, and its GPU.
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


class DlInfo(ctypes.Structure):
    """The C library's Dl_info, which dladdr(3) fills in."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def observe_rank(plan: Plan) -> ObservedRank:
    """Look at this process; call it in the program's main thread before the first parallel work."""
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
    )


def cpus_of_process(process: str) -> tuple[int, ...]:
    """Return the CPUs that any thread of a process may run on: pinned threads hold a part each."""
    threads = [int(path.name) for path in Path(f"/proc/{process}/task").iterdir()]
    allowed: set[int] = set()
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            allowed |= os.sched_getaffinity(thread)
    return tuple(sorted(allowed))


def mapped_libraries(preload: Iterable[str], maps: str) -> tuple[str, ...]:
    """Return those of the preloaded libraries that a process has mapped."""
    return tuple(path for path in preload if str(Path(path).resolve()) in maps)


def symbol_provider(function: str) -> str:
    """Return the file that a function resolves to in this process, empty where there is none.

    Where two OpenMP runtimes are mapped, only GOMP_parallel's tells which one runs: torch's parallel_info() and
    __config__ read the same either way. Of an allocator's functions ask for posix_memalign, which torch takes its
    memory by: malloc's address is the interpreter's own in an executable that is not position-independent, as
    Debian's is.
    """
    here = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(here, function), ctypes.c_void_p)
    except AttributeError:
        return ""
    found = DlInfo()
    return found.file.decode(errors="replace") if here.dladdr(address, ctypes.byref(found)) else ""


def compare_with_plan(plan: Plan, seen: ObservedRank) -> tuple[str, ...]:
    """Return one line for each thing that is not as planned, naming both."""
    planned = plan.ranks[seen.local_rank]
    lines: list[str] = []
    if plan.binding.cpu_binding != "none" and seen.cpus != planned.cpus:
        lines.append(f"runs on CPUs {format_cpu_list(seen.cpus)}, planned were {format_cpu_list(planned.cpus)}")
    if seen.threads is not None and seen.threads != planned.threads:
        lines.append(f"torch has {seen.threads} threads, planned were {planned.threads}")
    if planned.memory_nodes and seen.memory_nodes != planned.memory_nodes:
        nodes = format_cpu_list(seen.memory_nodes)
        found = f"bound to node {nodes}" if nodes else "not bound"
        lines.append(f"memory is {found}, planned was node {format_cpu_list(planned.memory_nodes)}")
    if seen.gpu is not None and seen.gpu != planned.gpu:
        lines.append(f"computes on GPU {seen.gpu}, planned was {planned.gpu}")
    absent = [path for path in plan.environment.preload if path not in seen.preloaded]
    lines += [f"{path} was to be preloaded and is not loaded" for path in absent]
    for word, what, file in (("iomp5", "OpenMP runtime", seen.openmp), ("malloc", "allocator", seen.allocator)):
        wanted = next((path for path in plan.environment.preload if word in PurePath(path).name), "")
        if wanted and file and word not in PurePath(file).name:
            lines.append(f"the {what} in charge is {file}, planned was {wanted}")
    return tuple(f"rank {seen.rank}: {line}" for line in lines)
