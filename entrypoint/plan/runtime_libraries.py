"""Allocator and OpenMP runtime of the ranks, by preload, and the variables of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from msgspec import Struct

from entrypoint.core.errors import ExitCode, UserError, printable, value_to_show
from entrypoint.machine.shared_libraries import Library, split_ld_preload
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, Source

# As torch.backends.xeon.run_cpu sets it, plus Intel's tuning guide: pages are not returned to the kernel between steps.
MALLOC_CONF = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
# glibc returns a step's tensors to the kernel, and every step faults the pages in again (glibc manual, Memory
# Allocation Tunables). Figures: benchmarks/README.md.
GLIBC_TUNABLES_VALUE = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776"
LIBC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
# The file name of every preloaded allocator contains it.
ALLOCATOR_WORD = "malloc"
PASSIVE_REASON = "cores are shared or limited: spinning takes CPU time"
# Each runtime's own way to pin threads one by one; the other runtime's variables would have no effect.
PINNING = {
    "intel": {"KMP_AFFINITY": "granularity=fine,compact,1,0"},
    "gnu": {"OMP_PLACES": "cores", "OMP_PROC_BIND": "close"},
}
# Either sets torch's threads: where both are set, torch uses MKL's (ATen/ParallelOpenMP.cpp).
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
AFFINITY_VARIABLES = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


class RuntimeLibraries(Struct, frozen=True):
    """Libraries to preload, their variables (each with value and reason), and the decisions."""

    preload: tuple[str, ...]
    environment: Mapping[str, tuple[str, str]]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()


def choose_runtime(inputs: PlanInputs, *, spinning_is_costly: bool) -> RuntimeLibraries:
    """Choose allocator and OpenMP runtime, and set the variables of the chosen ones only.

    `spinning_is_costly` if ranks share cores or have a CPU limit. Raises `UserError` where the user asks for a library
    that is not installed.
    """
    own_preload = inputs.environ.get("LD_PRELOAD", "")
    allocator, allocator_decision = decide_allocator(inputs, own_preload)
    intel, openmp_decision = decide_openmp(inputs, own_preload)
    environment = openmp_variables(inputs, openmp_decision.value, spinning_is_costly=spinning_is_costly)
    if allocator and allocator.name == "jemalloc":
        environment["MALLOC_CONF"] = (MALLOC_CONF, "jemalloc for large tensors with long lives")
    own: list[Decision] = []
    if allocator_decision.value == "system":
        own = [inputs.user_decision(name) for name in LIBC_VARIABLES if inputs.environ.get(name)]
        if not own:
            environment["GLIBC_TUNABLES"] = (GLIBC_TUNABLES_VALUE, "keep freed memory; returning it costs page faults")
    preload = tuple(library.path for library in (intel, allocator) if library and library.path)
    warnings = ignored_variables(inputs, openmp_decision.value)
    return RuntimeLibraries(preload, environment, (openmp_decision, allocator_decision, *own), warnings)


def openmp_variables(inputs: PlanInputs, runtime: str, *, spinning_is_costly: bool) -> dict[str, tuple[str, str]]:
    """Return the variables of the chosen runtime, each with its reason; raises `UserError` for a contradiction.

    Threads are pinned one by one only if the user asks for it: the main thread is pinned too, and all that it starts
    later (loader workers, Gloo's threads) would inherit its single CPU.
    """
    variables = {"OMP_SCHEDULE": ("static", "libgomp's default, dynamic,1, is slow for equal parts")}
    if runtime == "intel" and not inputs.environ.get("OMP_WAIT_POLICY"):  # KMP_BLOCKTIME would overrule the user's
        # The runtime knows `us` since LLVM 17; KMP_USE_YIELD=2 yields only where its threads outnumber the CPUs
        # (kmp_settings.cpp). A thread that yields next to a busy process loses its whole time slice.
        short_wait = ("150us", "idle threads sleep after 150 us (default: 200 ms)")
        variables["KMP_BLOCKTIME"] = ("0", PASSIVE_REASON) if spinning_is_costly else short_wait
        variables["KMP_USE_YIELD"] = ("2", "yielding while waiting gives the core to other processes")
    elif runtime == "gnu" and spinning_is_costly:
        variables["OMP_WAIT_POLICY"] = ("passive", PASSIVE_REASON)
    elif runtime == "gnu" and not inputs.environ.get("OMP_WAIT_POLICY"):
        # libgomp's own count is 300,000 rounds (env.c).
        variables["GOMP_SPINCOUNT"] = ("10000", "idle threads spin for about 0.3 ms (default: about 10 ms)")
    own = [name for name in AFFINITY_VARIABLES if inputs.environ.get(name)]
    if inputs.settings.values.cpu_binding == "threads":
        if own:
            raise UserError(
                f"{inputs.settings.sources['cpu_binding']} and {own[0]}={printable(inputs.environ[own[0]])} both pin"
                " threads. Unset one of them."
            )
        variables |= {name: (value, "each thread on its own core") for name, value in PINNING[runtime].items()}
    return variables


def ignored_variables(inputs: PlanInputs, runtime: str) -> tuple[str, ...]:
    """Warn of variables of Intel's runtime that the user has set and GNU's ignores."""
    own = [name for name in inputs.environ if name.startswith("KMP_")] if runtime == "gnu" else []
    return tuple(
        f"{name}={printable(value_to_show(name, inputs.environ[name]))} has no effect: only Intel's OpenMP runtime"
        " reads it. LAUNCH_OPENMP=intel selects it."
        for name in sorted(own)
    )


def decide_allocator(inputs: PlanInputs, own_preload: str) -> tuple[Library | None, Decision]:
    """tcmalloc where it is installed, unless the user chooses another allocator.

    Raises `UserError` where LAUNCH_ALLOCATOR and LD_PRELOAD contradict, or the library is not installed.
    """
    settings = inputs.settings
    requested, source = settings.values.allocator, settings.sources.get("allocator", "")
    preloaded = user_preload(own_preload, ALLOCATOR_WORD)
    preload_setting = f"LD_PRELOAD={printable(own_preload)}"
    if preloaded and requested == "auto":
        name = printable(PurePath(preloaded).name)
        return None, Decision(key="allocator", value=name, reason="", source=Source.USER, setting=preload_setting)
    if preloaded:
        raise UserError(f"{source} and {preload_setting} both name an allocator. Unset one of them.")
    if requested == "system":
        return None, inputs.decide("allocator", "allocator", "system", "")
    library = inputs.machine.library("tcmalloc" if requested == "auto" else requested)
    if library.path:
        return library, inputs.decide("allocator", "allocator", library.name, "faster for small models", library.path)
    if requested != "auto":
        raise UserError(f"{source}: {library.why}, or set LAUNCH_ALLOCATOR=auto.", ExitCode.MACHINE)
    return None, Decision("allocator", "system", f"tcmalloc is {library.why}")


def decide_openmp(inputs: PlanInputs, own_preload: str) -> tuple[Library | None, Decision]:
    """Intel's runtime on Intel CPUs where it is installed, else torch's own (GNU's).

    Raises `UserError` where LAUNCH_OPENMP and LD_PRELOAD contradict, or Intel's runtime is not installed.
    """
    settings, machine = inputs.settings, inputs.machine
    requested, source = settings.values.openmp, settings.sources.get("openmp", "")
    preloaded = user_preload(own_preload, "iomp5")
    preload_setting = f"LD_PRELOAD={printable(own_preload)}"
    if preloaded and requested == "gnu":
        raise UserError(f"{source} and {preload_setting} contradict. Unset one of them.")
    if preloaded:
        return None, Decision(key="openmp", value="intel", reason="", source=Source.USER, setting=preload_setting)
    if requested == "gnu":
        return None, inputs.decide("openmp", "openmp", "gnu", "")
    library = machine.library("intel")
    if requested == "intel":
        if not library.path:
            raise UserError(f"{source}: {library.why}, or set LAUNCH_OPENMP=auto.", ExitCode.MACHINE)
        return library, inputs.decide("openmp", "openmp", "intel", "", library.path)
    if machine.cpu_vendor != "GenuineIntel":
        return None, Decision("openmp", "gnu", "torch's own; Intel's is for Intel CPUs")
    if not library.path:
        return None, Decision("openmp", "gnu", f"torch's own; Intel's is {library.why}")
    return library, Decision("openmp", "intel", f"an Intel CPU; {library.path}")


def user_preload(own_preload: str, word: str) -> str:
    """Return the file in the user's LD_PRELOAD whose name contains the word, empty without one."""
    return next((file for file in split_ld_preload(own_preload) if word in PurePath(file).name), "")
