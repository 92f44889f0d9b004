"""Precision, torch.compile and Intel's extension, decided before any process starts."""

from __future__ import annotations

from collections.abc import Collection

from entrypoint.core.errors import ExitCode, UserError, printable, refuse_if
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.machine.backends import find_ipex_problem
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Decision, Source
from train.setting_groups.compute import ComputeSettings
from train.settings import TrainSettings

# CPU flags of bf16 instructions: AVX-512's, AMX's and Arm's.
CPU_FLAGS = {"bf16": ("amx_bf16", "avx512_bf16", "bf16")}
# oneDNN's convolutions are faster with it, and Winograd's kernel does not use it.
FAST_WITHOUT_WINOGRAD = "avx512f"
# The first compute capability of NVIDIA's GPUs with the format: Ampere for bf16 and TF32, Volta for fp16.
MIN_COMPUTE_CAPABILITY = {"bf16": 80, "fp16": 70, "tf32": 80, "fp8": 90}


def decide_precision(given: ParsedSettings[TrainSettings], device: str, machine: Machine) -> Decision:
    """On auto, bf16 if the hardware supports it: elsewhere it is emulated and much slower.

    fp32 is the default, because in bf16 runs of one seed on one rank and on two diverge sooner.
    """
    support = hardware_support("bf16", device, machine)
    requested = given.values.compute.precision
    if requested == "auto":
        reason = f"{support}; weights stay fp32" if support else "the hardware has no bf16; emulating it is slow"
        return Decision("precision", "bf16" if support else "fp32", reason)
    if requested == "tf32" and not hardware_support("tf32", device, machine):
        raise UserError(
            f"{given.sources['precision']}: only NVIDIA GPUs from Ampere on support it. Set TRAIN_PRECISION=auto.",
            ExitCode.MACHINE,
        )
    if requested == "fp8":
        check_fp8(given, device, machine)
    if "precision" in given.sources:
        note = slow_precision_note(requested, device, machine)
        return Decision("precision", requested, note, Source.USER, given.sources["precision"])
    hint = "; TRAIN_PRECISION=auto selects bf16 here" if support else ""
    return Decision("precision", requested, f"the default{hint}")


def check_fp8(given: ParsedSettings[TrainSettings], device: str, machine: Machine) -> None:
    """Raise `UserError` where linear layers cannot be trained in fp8, or nobody has tried it."""
    source, values = given.sources["precision"], given.values
    refuse_if(
        {
            f"{source}: only NVIDIA GPUs from Hopper on support it. Set TRAIN_PRECISION=auto.": (
                device != "cuda" or not hardware_support("fp8", device, machine)
            ),
            f"{source}: needs torchao, which is not installed. Run: pip install torchao": (
                "torchao" not in machine.packages.versions
            ),
        },
        ExitCode.MACHINE,
    )
    others = {
        "evaluate": values.run.evaluate,
        "prune_ratio": values.network.prune_ratio > 0,
        "export": values.run.export != "off",
        "parallelism": values.compute.parallelism == "fsdp",
    }
    if clash := next((name for name, is_set in others.items() if is_set), ""):
        other = given.sources.get(clash) or f"TRAIN_{clash.upper()}"
        raise UserError(f"{source} and {other} contradict: fp8 is for training with DDP alone. Drop one of the two.")


def slow_precision_note(precision: str, device: str, machine: Machine) -> str:
    """Return why a 16-bit format is slow here, empty if it is not."""
    if precision == "fp16" and device == "cpu":
        return "PyTorch computes fp16 gradients slowly on CPUs"
    if precision in ("bf16", "fp16") and not hardware_support(precision, device, machine):
        return "the hardware emulates it, which is slow"
    return ""


def hardware_support(precision: str, device: str, machine: Machine) -> str:
    """Return what supports a number format here, empty if nothing does."""
    if device == "cuda":
        least = min(gpu.capability for gpu in machine.gpus)
        return f"compute capability {least / 10:.1f}" if least >= MIN_COMPUTE_CAPABILITY[precision] else ""
    flag = next((flag for flag in CPU_FLAGS.get(precision, ()) if flag in machine.cpu_flags), None)
    return f"the CPU has {flag}" if flag else ""


def decide_compiling(given: ParsedSettings[TrainSettings], problem: str, cache: str) -> Decision:
    """Compile if the user asks for it; `problem` says why the backend cannot be used, `cache` where inductor keeps it.

    Raises `UserError` in that case, and for settings that contradict.
    """
    values, sources = given.values, given.sources
    if values.compute.compile == "off":
        if "compile_backend" in sources:
            raise UserError(f"{sources['compile_backend']}: nothing is compiled. Set TRAIN_COMPILE=default too.")
        if "compile" in sources:
            return Decision("compile", "off", "", Source.USER, sources["compile"])
        return Decision("compile", "off", "the default: compilation takes 30 s or more")
    if problem:
        source = sources.get("compile_backend", sources["compile"])
        raise UserError(
            f"{source}: {values.compute.compile_backend} {problem}. See `entrypoint doctor`.", ExitCode.MACHINE
        )
    if values.compute.compile_backend != "inductor" and values.compute.compile not in ("default", "auto"):
        raise UserError(
            f"{sources['compile']} and {sources['compile_backend']} contradict: only inductor has modes."
            " Set TRAIN_COMPILE=default."
        )
    when = "if the run is long enough; " if values.compute.compile == "auto" else ""
    detail = f"{when}kept in {printable(cache)}" if cache and values.compute.compile_backend == "inductor" else when
    value = f"{values.compute.compile} by {values.compute.compile_backend}"
    return Decision("compile", value, detail, Source.USER, sources["compile"])


def decide_winograd(
    given: ParsedSettings[TrainSettings], device: str, machine: Machine, precision: str, *, has_kernel: bool
) -> tuple[Decision, ...]:
    """Compute 3x3 convolutions by Winograd's algorithm where that was faster (benchmarks/README.md): AVX2, fp32.

    `precision` is the planned one. `has_kernel` says whether the compiled algorithm is there.
    Returns nothing where it cannot be used and nobody asked. Raises `UserError` where the user asks for it then.
    """
    values, source = given.values, given.sources.get("winograd", "")
    problem = why_no_winograd(values.compute, device, precision)
    missing = winograd_needs(machine.cpu_flags, has_kernel=has_kernel)
    if values.compute.winograd == "on" and (problem or missing):
        code = ExitCode.USAGE if problem else ExitCode.MACHINE
        raise UserError(f"{source}: {problem or f'the algorithm {missing}'}. Set TRAIN_WINOGRAD=auto.", code)
    if values.compute.winograd != "auto":
        return (Decision("winograd", values.compute.winograd, "", Source.USER, source),)
    if problem:
        return ()
    if reason := why_auto_leaves_winograd(machine.cpu_flags, has_kernel=has_kernel):
        return (Decision("winograd", "off", reason),)
    return (Decision("winograd", "on", "fewer multiplications in 3x3 convolutions; the CPU has AVX2"),)


def why_auto_leaves_winograd(cpu_flags: Collection[str], *, has_kernel: bool) -> str:
    """Return why TRAIN_WINOGRAD=auto does not use the algorithm on these CPUs, empty if it does."""
    if missing := winograd_needs(cpu_flags, has_kernel=has_kernel):
        return f"it {missing}"
    return "it gains little with AVX-512; TRAIN_WINOGRAD=on uses it" if FAST_WITHOUT_WINOGRAD in cpu_flags else ""


def winograd_needs(cpu_flags: Collection[str], *, has_kernel: bool) -> str:
    """Return what the compiled algorithm lacks here, empty if nothing."""
    if not has_kernel:
        return "is not compiled: the set-up found no C++ compiler, or the CPU is no x86-64"
    return "" if "avx2" in cpu_flags else "needs a CPU with AVX2"


def why_no_winograd(settings: ComputeSettings, device: str, precision: str) -> str:
    """Return what contradicts Winograd's algorithm, empty if nothing does."""
    contradictions = {
        f"it is for CPUs, and the run uses {device}": device != "cpu",
        f"it is for fp32, and the run uses {precision}": precision != "fp32",
        f"a compiler cannot see through it (TRAIN_COMPILE={settings.compile})": settings.compile != "off",
        "Intel's extension has its own convolutions (TRAIN_IPEX=on)": settings.ipex == "on",
        "it needs whole filters (TRAIN_PARALLELISM=fsdp)": settings.parallelism == "fsdp",
        "it needs TRAIN_CHANNELS_LAST=1": not settings.channels_last,
    }
    return next((text for text, holds in contradictions.items() if holds), "")


def why_ipex_does_not_pack(settings: TrainSettings, machine: Machine) -> str:
    """Return why IPEX does not pack weights and fuse the update, empty if it does.

    Its kernels are for AVX-512 and AMX, and compilers need plain weights (its manual). A copy of a packed model, as EMA
    makes one, has no plain state dict (IPEX 2.8).
    """
    if not {"avx512f", "amx_tile"} & set(machine.cpu_flags):
        return "no AVX-512 or AMX"
    if settings.network.ema_decay:
        return "EMA copies the model"
    return "" if settings.compute.compile == "off" else "the model is compiled"


def decide_ipex(given: ParsedSettings[TrainSettings], device: str, machine: Machine) -> Decision:
    """Off unless the user asks for it: it gave no speedup (benchmarks/README.md).

    Raises `UserError` where the user asks for it and it cannot be used.
    """
    requested = given.values.compute.ipex
    problem = find_ipex_problem(device, machine.packages.versions)
    problem = problem and f"Intel's extension {problem}"
    if given.values.compute.parallelism == "fsdp":
        problem = problem or "its kernels do not work with sharded weights (TRAIN_PARALLELISM=fsdp)"
    if requested == "on" and problem:
        raise UserError(f"{given.sources['ipex']}: {problem}. Set TRAIN_IPEX=auto.", ExitCode.MACHINE)
    if requested == "on":
        obstacle = why_ipex_does_not_pack(given.values, machine)
        detail = f"weights and update as PyTorch's: {obstacle}" if obstacle else "weights packed, update fused"
        return Decision("ipex", "on", detail, Source.USER, given.sources["ipex"])
    if requested != "auto":
        return Decision("ipex", requested, "", Source.USER, given.sources["ipex"])
    return Decision("ipex", "off", problem or "the default: it gave no speedup")
