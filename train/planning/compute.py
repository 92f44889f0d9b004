"""What the model is computed in and by, decided before any process starts: number format, compiler, extension."""

from __future__ import annotations

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.machine.compile_backends import find_ipex_problem
from entrypoint.machine.detect import Machine
from entrypoint.plan.model import Decision
from train.settings import TrainSettings

# What computes in bf16 itself: AVX-512's and AMX's instructions, Arm's extension, NVIDIA's GPUs from Ampere on; in fp16
# those from Volta on. TF32 came with Ampere too.
CPU_FLAGS = {"bf16": ("amx_bf16", "avx512_bf16", "bf16")}
MIN_COMPUTE_CAPABILITY = {"bf16": 80, "fp16": 70, "tf32": 80}


def decide_precision(given: ParsedSettings[TrainSettings], device: str, machine: Machine) -> Decision:
    """On auto, bf16 where the hardware has units for it; elsewhere it is emulated, and up to 14 times slower.

    fp32 stays the default: rounded to bf16, runs of one seed on one and on two ranks part sooner.
    """
    unit = hardware_support("bf16", device, machine)
    if given.values.precision == "auto":
        why = f"{unit}; weights stay fp32" if unit else "no unit computes in bf16, and emulating it is slow"
        return Decision("precision", "bf16" if unit else "fp32", why)
    if given.values.precision == "tf32" and not hardware_support("tf32", device, machine):
        raise UserError(
            f"{given.sources['precision']}: only NVIDIA GPUs from Ampere on have units for it; set"
            " TRAIN_PRECISION=auto",
            ExitCode.MACHINE,
        )
    if "precision" in given.sources:
        note = slow_precision_note(given.values.precision, device, machine)
        return Decision("precision", given.values.precision, f"(yours) {given.sources['precision']}{note}")
    hint = f"; TRAIN_PRECISION=auto would take bf16: {unit}" if unit else ""
    return Decision("precision", given.values.precision, f"the default{hint}")


def slow_precision_note(precision: str, device: str, machine: Machine) -> str:
    """Say what makes a 16-bit format slow here, nothing where it is not.

    A convolution's gradients took 50 to 120 times as long in fp16 as in bf16 on a CPU with units for both (torch 2.8).
    """
    if precision == "fp16" and device == "cpu":
        return "; on CPUs PyTorch computes its gradients without their units, up to 100 times slower than bf16"
    if precision in ("bf16", "fp16") and not hardware_support(precision, device, machine):
        return "; no unit here computes in it, and emulating it is slow"
    return ""


def hardware_support(precision: str, device: str, machine: Machine) -> str:
    """Say what computes in a number format itself, nothing where nothing does."""
    if device == "cuda":
        least = min(gpu.capability for gpu in machine.gpus)
        return f"the GPU has compute capability {least / 10:.1f}" if least >= MIN_COMPUTE_CAPABILITY[precision] else ""
    flag = next((flag for flag in CPU_FLAGS.get(precision, ()) if flag in machine.cpu_flags), None)
    return f"the CPU has {flag}" if flag else ""


def decide_compiling(given: ParsedSettings[TrainSettings], problem: str) -> Decision:
    """Compile if the user asks for it; `problem` says why the backend cannot be used. Raises `Refused` in that case."""
    values = given.values
    if values.compile == "off":
        if "compile_backend" in given.sources:
            raise UserError(f"{given.sources['compile_backend']}: nothing is compiled; set TRAIN_COMPILE=default too")
        own = given.sources.get("compile", "")
        why = f"(yours) {own}" if own else "the default: it costs half a minute and more; TRAIN_COMPILE=auto weighs it"
        return Decision("compile", "off", why)
    if problem:
        said = given.sources.get("compile_backend", given.sources["compile"])
        raise UserError(f"{said}: {values.compile_backend} {problem}; see `entrypoint doctor`", ExitCode.MACHINE)
    if values.compile_backend != "inductor" and values.compile not in ("default", "auto"):
        raise UserError(
            f"{given.sources['compile']} and {given.sources['compile_backend']} contradict each other: only inductor"
            " has"
            " modes; set TRAIN_COMPILE=default"
        )
    when = ", where the run is long enough" if values.compile == "auto" else ""
    return Decision(
        "compile", f"{values.compile} by {values.compile_backend}", f"(yours) {given.sources['compile']}{when}"
    )


def decide_ipex(given: ParsedSettings[TrainSettings], device: str, machine: Machine) -> Decision:
    """On auto, not: it was slower for the CNN wherever it was tried; asked for and unusable is refused.

    Images/s against PyTorch's own, five interleaved runs: with AMX 0.88 (CNN) and 0.93 to 1.01 (ResNet-18), in fp32
    and bf16, packed weights no more than 5 % beyond; with AVX-512 up to 1.16 for ResNet-18 only; with AVX2 0.79.
    """
    asked = given.values.ipex
    problem = find_ipex_problem(device, machine.packages.versions)
    problem = problem and f"Intel's extension {problem}"
    if given.values.parallelism == "fsdp":
        problem = problem or "its kernels do not go with weights spread over ranks (TRAIN_PARALLELISM=fsdp)"
    if asked == "on" and problem:
        raise UserError(f"{given.sources['ipex']}: {problem}; set TRAIN_IPEX=auto", ExitCode.MACHINE)
    if asked != "auto":
        return Decision("ipex", asked, f"(yours) {given.sources['ipex']}")
    default = "the default: it gained nothing for small pictures, and takes 5 s to import; TRAIN_IPEX=on takes it"
    return Decision("ipex", "off", problem or default)
