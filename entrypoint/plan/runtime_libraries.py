"""Which allocator and which OpenMP runtime the ranks get, by preload, and with which variables of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.machine.detect import Machine
from entrypoint.machine.shared_libraries import Library, split_ld_preload
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision
from entrypoint.settings import LaunchSettings

# As torch.backends.xeon.run_cpu sets it, and without giving pages back to the kernel between steps, as Intel's tuning
# guide has it: that alone made the CNN's training 1.6 times as fast.
MALLOC_CONF = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
# libc's allocator gives a step's tensors back to the kernel and faults them in anew, 14,000 pages a step of the book's
# CNN at batch 128: kept, it was 1.26 times as fast and level with tcmalloc (0.97, within noise; glibc manual, Memory
# Allocation Tunables). Its own variables say the same, each for itself.
GLIBC_TUNABLES_VALUE = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
KEEP_MEMORY_REASON = (
    "memory that a step frees is kept for the next: libc would give it back, and the kernel clear it anew"
)
LIBC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
# Every allocator that people preload has the word in its file's name.
ALLOCATOR_WORD = "malloc"


STATIC_REASON = "equal parts for loops that leave it open, which GNU's runtime would deal out one by one"
# Measured (the book's CNN, two cores): as fast as Intel's own advice of 1 ms on a quiet machine and beside one busy
# neighbour, 2.3 times as fast where every core has one, since a thread that yields there loses its whole turn. The
# runtime knows `us` since LLVM 17; KMP_USE_YIELD=2 yields only where its own threads outnumber the CPUs
# (kmp_settings.cpp).
SHORT_WAIT_REASON = (
    "threads sleep soon after a parallel part, by default after 200 ms: Intel's guide, measured beside neighbours"
)
# Measured as above: alone as fast as the 300,000 rounds of libgomp's own (env.c), 1.3 times as fast where every core
# has a busy neighbour, 1.8 times beside one.
GOMP_SPINCOUNT_VALUE = "10000"
SHORT_SPIN_REASON = (
    "threads sleep some 0.3 ms after a parallel part, by default after 30 times as long: measured beside neighbours"
)
NO_YIELD_REASON = "a thread that yields while it waits loses its turn to a busy neighbour"
PASSIVE_REASON = "cores are shared or rationed: a thread that spins takes another's time"
PINNED_REASON = "each thread on its own core"
# Each runtime's own way to pin threads one by one; the other's variables would be read by nobody.
PINNING = {
    "intel": {"KMP_AFFINITY": "granularity=fine,compact,1,0"},
    "gnu": {"OMP_PLACES": "cores", "OMP_PROC_BIND": "close"},
}
# Either sets torch's threads: where both are set, torch takes MKL's (ATen/ParallelOpenMP.cpp).
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
AFFINITY_VARIABLES = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


@dataclass(frozen=True)
class RuntimeLibraries:
    """What is preloaded, the variables that go with it (each with its value and reason), and why."""

    preload: tuple[str, ...]
    environment: Mapping[str, tuple[str, str]]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()


def choose_runtime(question: PlanInputs, waits: bool) -> RuntimeLibraries:
    """Choose allocator and OpenMP runtime; `waits` says that ranks or their quota make spinning threads costly.

    Raises `Refused` where a library is asked for and absent. Only the variables of the runtime that is chosen are
    set.
    """
    settings, machine, own_preload = question.settings, question.machine, question.environ.get("LD_PRELOAD", "")
    allocator, allocator_decision = decide_allocator(settings, machine, own_preload)
    intel, openmp_decision = decide_openmp(settings, machine, own_preload)
    environment = openmp_variables(question, openmp_decision.value, waits)
    if allocator and allocator.name == "jemalloc":
        environment["MALLOC_CONF"] = (MALLOC_CONF, "jemalloc for large tensors that live long")
    own: list[Decision] = []
    if allocator_decision.value == "system":
        own = [question.own(name) for name in LIBC_VARIABLES if question.environ.get(name)]
        if not own:
            environment["GLIBC_TUNABLES"] = (GLIBC_TUNABLES_VALUE, KEEP_MEMORY_REASON)
    preload = tuple(library.path for library in (intel, allocator) if library and library.path)
    warnings = ignored_variables(question, openmp_decision.value)
    return RuntimeLibraries(preload, environment, (openmp_decision, allocator_decision, *own), warnings)


def openmp_variables(question: PlanInputs, runtime: str, waits: bool) -> dict[str, tuple[str, str]]:
    """Return the variables that the runtime in charge gets, each with its reason; raises `Refused` for a conflict.

    Threads are pinned one by one only where that is asked for: the thread that starts the others is pinned too, and
    what it forks or starts later (loader workers, Gloo's threads) would all inherit its single CPU.
    """
    variables = {"OMP_SCHEDULE": ("static", STATIC_REASON)}
    if runtime == "intel" and not question.environ.get("OMP_WAIT_POLICY"):  # it would overrule a person's own
        variables["KMP_BLOCKTIME"] = ("0", PASSIVE_REASON) if waits else ("150us", SHORT_WAIT_REASON)
        variables["KMP_USE_YIELD"] = ("2", NO_YIELD_REASON)
    elif runtime == "gnu" and waits:
        variables["OMP_WAIT_POLICY"] = ("passive", PASSIVE_REASON)
    elif runtime == "gnu" and not question.environ.get("OMP_WAIT_POLICY"):
        variables["GOMP_SPINCOUNT"] = (GOMP_SPINCOUNT_VALUE, SHORT_SPIN_REASON)
    own = [name for name in AFFINITY_VARIABLES if question.environ.get(name)]
    if question.settings.values.cpu_binding == "threads":
        if own:
            raise UserError(
                f"{question.settings.sources['cpu_binding']} and {own[0]}={printable(question.environ[own[0]])} both"
                " pin"
                " threads;"
                " unset one of them"
            )
        variables |= {name: (value, PINNED_REASON) for name, value in PINNING[runtime].items()}
    return variables


def ignored_variables(question: PlanInputs, runtime: str) -> tuple[str, ...]:
    """Warn of variables of Intel's runtime that a person has set and GNU's, in charge, does not read."""
    own = [name for name in question.environ if name.startswith("KMP_")] if runtime == "gnu" else []
    return tuple(
        f"{name}={printable(question.environ[name])} is read by Intel's OpenMP runtime only, and GNU's is in charge;"
        " LAUNCH_OPENMP=intel takes Intel's"
        for name in sorted(own)
    )


def decide_allocator(
    settings: ParsedSettings[LaunchSettings], machine: Machine, own_preload: str
) -> tuple[Library | None, Decision]:
    """tcmalloc where it is there: small models trained up to 40 % faster with it, and none slower; jemalloc did not."""
    asked = settings.values.allocator
    own = user_preload(own_preload, ALLOCATOR_WORD)
    if own and asked == "auto":
        return None, Decision(
            "allocator", printable(PurePath(own).name), f"(yours) LD_PRELOAD={printable(own_preload)}"
        )
    if own:
        raise UserError(
            f"{settings.sources['allocator']} and LD_PRELOAD={printable(own_preload)} name an allocator each;"
            " unset one of them"
        )
    if asked == "system":
        return None, Decision("allocator", "system", f"(yours) {settings.sources['allocator']}")
    library = machine.library("tcmalloc" if asked == "auto" else asked)
    if library.path:
        reason = "as fast as the system's or faster, most for small models"
        why = reason if asked == "auto" else f"(yours) {settings.sources['allocator']}"
        return library, Decision("allocator", library.name, f"{why}; {library.path}")
    if asked != "auto":
        raise UserError(
            f"{settings.sources['allocator']}: {library.why}, or set LAUNCH_ALLOCATOR=auto", ExitCode.MACHINE
        )
    return None, Decision("allocator", "system", f"tcmalloc, which the images have, is {library.why}")


def decide_openmp(
    settings: ParsedSettings[LaunchSettings], machine: Machine, own_preload: str
) -> tuple[Library | None, Decision]:
    """Intel's runtime on Intel's CPUs where it is there, else the one that torch brings (GNU's)."""
    asked = settings.values.openmp
    own = user_preload(own_preload, "iomp5")
    if own and asked == "gnu":
        raise UserError(
            f"{settings.sources['openmp']} and LD_PRELOAD={printable(own_preload)} differ; unset one of them"
        )
    if own:
        return None, Decision("openmp", "intel", f"(yours) LD_PRELOAD={printable(own_preload)}")
    if asked == "gnu":
        return None, Decision("openmp", "gnu", f"(yours) {settings.sources['openmp']}")
    library = machine.library("intel")
    if asked == "intel":
        if not library.path:
            raise UserError(f"{settings.sources['openmp']}: {library.why}, or set LAUNCH_OPENMP=auto", ExitCode.MACHINE)
        return library, Decision("openmp", "intel", f"(yours) {settings.sources['openmp']}; {library.path}")
    if machine.cpu_vendor != "GenuineIntel":
        return None, Decision("openmp", "gnu", "torch's own; Intel's gains nothing on this CPU")
    if not library.path:
        return None, Decision("openmp", "gnu", f"torch's own; Intel's is {library.why}")
    return library, Decision("openmp", "intel", f"an Intel CPU; {library.path}")


def user_preload(own_preload: str, word: str) -> str:
    """Return the file in a person's LD_PRELOAD whose name has the word, nothing where there is none."""
    return next((file for file in split_ld_preload(own_preload) if word in PurePath(file).name), "")
