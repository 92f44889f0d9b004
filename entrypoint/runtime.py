"""Which allocator and which OpenMP runtime the ranks get, by preload, and with which variables of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from entrypoint.errors import Exit, Refused, shown
from entrypoint.libraries import Library
from entrypoint.machine import Machine
from entrypoint.plan import Decision
from entrypoint.settings import LaunchSettings
from entrypoint.variables import Given

# As torch.backends.xeon.run_cpu sets it, and without giving pages back to the kernel between steps, as Intel's tuning
# guide has it: that alone made the CNN's training 1.6 times as fast.
MALLOC_CONF = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
# Every allocator that people preload has the word in its file's name.
ALLOCATOR_WORD = "malloc"


@dataclass(frozen=True)
class Runtime:
    """What is preloaded, the variables that go with it, and why."""

    preload: tuple[str, ...]
    environment: dict[str, str]
    decisions: tuple[Decision, ...]


def decide_runtime(settings: Given[LaunchSettings], machine: Machine, own_preload: str, waits: bool) -> Runtime:
    """Choose allocator and OpenMP runtime; `waits` says that ranks or their quota make spinning threads costly.

    Raises `Refused` where a library is asked for and absent. Only the variables of the runtime that is chosen are
    set: the other's would be read by nobody, or worse, by a second copy. Threads are not pinned one by one: a
    pinned thread's forked loader workers would all inherit its single CPU, and the rank's own mask holds anyway.
    """
    allocator, allocator_decision = decide_allocator(settings, machine, own_preload)
    intel, openmp_decision = decide_openmp(settings, machine, own_preload)
    environment: dict[str, str] = {}
    if allocator and allocator.name == "jemalloc":
        environment["MALLOC_CONF"] = MALLOC_CONF
    if waits:
        environment |= {"KMP_BLOCKTIME": "0"} if intel else {"OMP_WAIT_POLICY": "passive"}
    preload = tuple(library.path for library in (intel, allocator) if library and library.path)
    return Runtime(preload, environment, (openmp_decision, allocator_decision))


def decide_allocator(
    settings: Given[LaunchSettings], machine: Machine, own_preload: str
) -> tuple[Library | None, Decision]:
    """tcmalloc where it is there: small models trained up to 40 % faster with it, and none slower; jemalloc did not."""
    asked = settings.values.allocator
    own = own_file(own_preload, ALLOCATOR_WORD)
    if own and asked == "auto":
        return None, Decision("allocator", shown(PurePath(own).name), f"(yours) LD_PRELOAD={shown(own_preload)}")
    if own:
        raise Refused(
            f"{settings.source['allocator']} and LD_PRELOAD={shown(own_preload)} name an allocator each;"
            " unset one of them"
        )
    if asked == "system":
        return None, Decision("allocator", "system", f"(yours) {settings.source['allocator']}")
    library = machine.library("tcmalloc" if asked == "auto" else asked)
    if library.path:
        reason = "as fast as the system's or faster, most for small models"
        why = reason if asked == "auto" else f"(yours) {settings.source['allocator']}"
        return library, Decision("allocator", library.name, f"{why}; {library.path}")
    if asked != "auto":
        raise Refused(f"{settings.source['allocator']}: {library.why}, or set LAUNCH_ALLOCATOR=auto", Exit.MACHINE)
    return None, Decision("allocator", "system", f"tcmalloc may be faster, but is {library.why}")


def decide_openmp(
    settings: Given[LaunchSettings], machine: Machine, own_preload: str
) -> tuple[Library | None, Decision]:
    """Intel's runtime on Intel's CPUs where it is there, else the one that torch brings (GNU's)."""
    asked = settings.values.openmp
    own = own_file(own_preload, "iomp5")
    if own and asked == "gnu":
        raise Refused(f"{settings.source['openmp']} and LD_PRELOAD={shown(own_preload)} differ; unset one of them")
    if own:
        return None, Decision("openmp", "intel", f"(yours) LD_PRELOAD={shown(own_preload)}")
    if asked == "gnu":
        return None, Decision("openmp", "gnu", f"(yours) {settings.source['openmp']}")
    library = machine.library("intel")
    if asked == "intel":
        if not library.path:
            raise Refused(f"{settings.source['openmp']}: {library.why}, or set LAUNCH_OPENMP=auto", Exit.MACHINE)
        return library, Decision("openmp", "intel", f"(yours) {settings.source['openmp']}; {library.path}")
    if machine.cpu_vendor != "GenuineIntel":
        return None, Decision("openmp", "gnu", "torch's own; Intel's gains nothing on this CPU")
    if not library.path:
        return None, Decision("openmp", "gnu", f"torch's own; Intel's is {library.why}")
    return library, Decision("openmp", "intel", f"an Intel CPU; {library.path}")


def own_file(own_preload: str, word: str) -> str:
    """Return the file in a person's LD_PRELOAD whose name has the word, nothing where there is none."""
    files = own_preload.replace(":", " ").split()
    return next((file for file in files if word in PurePath(file).name), "")
