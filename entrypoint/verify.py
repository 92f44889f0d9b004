"""What a rank really got, read from inside it after its program has started, against what was planned."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath

from entrypoint.plan import Plan
from entrypoint.topology import format_cpu_list


@dataclass(frozen=True)
class Observed:
    """One rank as it runs: its CPUs, torch's threads (None without torch), the file of the OpenMP runtime that is
    in charge (empty where none is loaded), and which of the plan's preloads are mapped.
    """

    rank: int
    local_rank: int
    cpus: tuple[int, ...]
    threads: int | None
    openmp: str
    preloaded: tuple[str, ...]


class DlInfo(ctypes.Structure):
    """The C library's Dl_info, which dladdr(3) fills in."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def observe(plan: Plan) -> Observed:
    """Look at this process; call it in the program's main thread before the first parallel work."""
    torch = sys.modules.get("torch")
    mapped = Path("/proc/self/maps").read_text()
    return Observed(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        threads=torch.get_num_threads() if torch else None,
        openmp=openmp_in_charge(),
        preloaded=tuple(path for path in plan.preload if str(Path(path).resolve()) in mapped),
    )


def openmp_in_charge() -> str:
    """Return the file that GOMP_parallel resolves to: where two runtimes are mapped, only this tells which one runs.

    torch's parallel_info() and __config__ read the same either way.
    """
    here = ctypes.CDLL(None)
    try:
        address = ctypes.cast(here.GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return ""
    found = DlInfo()
    return found.file.decode(errors="replace") if here.dladdr(address, ctypes.byref(found)) else ""


def mismatches(plan: Plan, seen: Observed) -> tuple[str, ...]:
    """Return one line for each thing that is not as planned, naming both."""
    planned = plan.ranks[seen.local_rank]
    lines: list[str] = []
    if plan.bind and seen.cpus != planned.cpus:
        lines.append(f"runs on CPUs {format_cpu_list(seen.cpus)}, planned were {format_cpu_list(planned.cpus)}")
    if seen.threads is not None and seen.threads != planned.threads:
        lines.append(f"torch has {seen.threads} threads, planned were {planned.threads}")
    absent = [path for path in plan.preload if path not in seen.preloaded]
    lines += [f"{path} was to be preloaded and is not loaded" for path in absent]
    intel = any("iomp5" in PurePath(path).name for path in plan.preload)
    if intel and seen.openmp and "iomp5" not in PurePath(seen.openmp).name:
        lines.append(f"the OpenMP runtime in charge is {seen.openmp}, planned was Intel's")
    return tuple(f"rank {seen.rank}: {line}" for line in lines)
