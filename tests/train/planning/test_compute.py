"""What the model is computed in and by, as the plan has it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.machine.detect import Machine
from entrypoint.machine.interpreter import Packages
from entrypoint.plan.model import Plan
from tests.conftest import refusal
from tests.factories import make_machine, make_test_plan
from tests.train.given import SMALL_DATASET as SMALL
from train.planning.trainer_plan import TrainerFacts, plan_trainer
from train.settings import read_train_settings


@pytest.mark.parametrize(
    ("environ", "flags", "precision", "why"),
    [
        ({}, (), "fp32", "the default"),
        ({}, ("avx512_bf16",), "fp32", "the default; TRAIN_PRECISION=auto selects bf16 here"),
        ({"TRAIN_PRECISION": "auto"}, ("avx512_bf16",), "bf16", "the CPU has avx512_bf16; weights stay fp32"),
        ({"TRAIN_PRECISION": "auto"}, ("amx_bf16", "avx512_bf16"), "bf16", "the CPU has amx_bf16; weights stay fp32"),
        ({"TRAIN_PRECISION": "auto"}, ("avx512f",), "fp32", "the hardware has no bf16; emulating it is slow"),
        ({"TRAIN_PRECISION": "bf16"}, ("avx512_bf16",), "bf16", "(set by you) TRAIN_PRECISION=bf16"),
        ({"TRAIN_PRECISION": "bf16"}, (), "bf16", "(set by you) TRAIN_PRECISION=bf16; the hardware emulates it,"
         " which is slow"),
        ({"TRAIN_PRECISION": "fp16"}, ("avx512_fp16",), "fp16", "(set by you) TRAIN_PRECISION=fp16;"
         " PyTorch computes fp16 gradients slowly on CPUs"),
    ],
)  # fmt: skip
def test_auto_precision_uses_bf16_if_cpu_supports_it(
    environ: dict[str, str], flags: tuple[str, ...], precision: str, why: str
) -> None:
    node = replace(make_machine(4), cpu_flags=flags)
    made = plan_trainer(make_test_plan(node), read_train_settings(environ, {}), SMALL, node)
    assert made.the_trainer().precision == precision
    assert {decision.key: decision.text for decision in made.decisions}["precision"] == why


def hopper(capability: int = 90, versions: dict[str, str] | None = None) -> Machine:
    node = make_machine(4, gpus=1)
    gpus = tuple(replace(gpu, capability=capability) for gpu in node.gpus)
    return replace(node, gpus=gpus, packages=Packages({"torchao": "0.13.0"} if versions is None else versions))


@pytest.mark.parametrize(
    ("node", "more", "code", "said"),
    [
        (make_machine(4), {}, ExitCode.MACHINE, "only NVIDIA GPUs from Hopper on support it"),
        (hopper(89), {}, ExitCode.MACHINE, "only NVIDIA GPUs from Hopper on support it"),
        (hopper(versions={}), {}, ExitCode.MACHINE, "needs torchao, which is not installed"),
        (hopper(), {"TRAIN_PRUNE_RATIO": "0.5"}, ExitCode.USAGE, "TRAIN_PRUNE_RATIO=0.5 contradict: fp8 is for"),
        (hopper(), {"TRAIN_EXPORT": "onnx"}, ExitCode.USAGE, "TRAIN_EXPORT=onnx contradict"),
        (hopper(), {"TRAIN_PARALLELISM": "fsdp"}, ExitCode.USAGE, "TRAIN_PARALLELISM=fsdp contradict"),
    ],
)
def test_fp8_is_refused_where_it_cannot_be(node: Machine, more: dict[str, str], code: ExitCode, said: str) -> None:
    given = read_train_settings({"TRAIN_PRECISION": "fp8"} | more, {})
    refusal(plan_trainer, make_test_plan(node), given, SMALL, node, match=said, code=code)


def test_fp8_is_planned_on_hopper_with_torchao() -> None:
    given = read_train_settings({"TRAIN_PRECISION": "fp8"}, {})
    assert plan_trainer(make_test_plan(hopper()), given, SMALL, hopper()).the_trainer().precision == "fp8"


@pytest.mark.parametrize(("capability", "precision"), [(70, "fp32"), (80, "bf16"), (90, "bf16")])
def test_auto_precision_uses_bf16_from_ampere(capability: int, precision: str) -> None:
    node = make_machine(4, gpus=1)
    node = replace(node, gpus=tuple(replace(gpu, capability=capability) for gpu in node.gpus))
    made = plan_trainer(make_test_plan(node), read_train_settings({"TRAIN_PRECISION": "auto"}, {}), SMALL, node)
    assert made.the_trainer().precision == precision


AMX = ("amx_bf16", "avx512f")
FITS = {"torch": "2.8.0", "intel_extension_for_pytorch": "2.8.0"}
MISFITS = {"torch": "2.13.0", "intel_extension_for_pytorch": "2.8.0"}


@pytest.mark.parametrize(
    ("environ", "flags", "versions", "ipex", "why"),
    [
        (
            {},
            AMX,
            FITS,
            False,
            "the default: it gave no speedup",
        ),
        ({}, AMX, {"torch": "2.8.0"}, False, "Intel's extension is not installed"),
        ({}, AMX, MISFITS, False, "Intel's extension 2.8.0 does not go with torch 2.13.0"),
        (
            {"TRAIN_IPEX": "on"},
            ("avx2",),
            FITS,
            True,
            "(set by you) TRAIN_IPEX=on; weights and update as PyTorch's: no AVX-512 or AMX",
        ),
        (
            {"TRAIN_IPEX": "on"},
            ("avx2", "avx512f"),
            FITS,
            True,
            "(set by you) TRAIN_IPEX=on; weights packed, update fused",
        ),
        (
            {"TRAIN_IPEX": "on", "TRAIN_EMA_DECAY": "0.9"},
            AMX,
            FITS,
            True,
            "(set by you) TRAIN_IPEX=on; weights and update as PyTorch's: EMA copies the model",
        ),
        (
            {"TRAIN_IPEX": "on", "TRAIN_COMPILE": "default"},
            AMX,
            FITS,
            True,
            "(set by you) TRAIN_IPEX=on; weights and update as PyTorch's: the model is compiled",
        ),
        (
            {"TRAIN_IPEX": "on"},
            ("amx_tile",),
            FITS,
            True,
            "(set by you) TRAIN_IPEX=on; weights packed, update fused",
        ),
        ({"TRAIN_IPEX": "off"}, AMX, FITS, False, "(set by you) TRAIN_IPEX=off"),
    ],
)
def test_ipex_is_used_only_on_request(
    environ: dict[str, str], flags: tuple[str, ...], versions: dict[str, str], ipex: bool, why: str
) -> None:
    node = replace(make_machine(4), cpu_flags=flags, packages=Packages(versions))
    made = plan_trainer(make_test_plan(make_machine(4)), read_train_settings(environ, {}), SMALL, node)
    assert made.the_trainer().use_ipex is ipex
    assert made.the_trainer().ipex_packs is (ipex and why.endswith("fused"))
    assert {decision.key: decision.text for decision in made.decisions}["ipex"] == why


@pytest.mark.parametrize(("versions", "said"), [({}, "is not installed"), (MISFITS, "does not go with torch 2.13.0")])
def test_requested_unusable_ipex_raises(versions: dict[str, str], said: str) -> None:
    node = replace(make_machine(4), packages=Packages(versions))
    refusal(
        plan_trainer,
        make_test_plan(make_machine(4)),
        read_train_settings({"TRAIN_IPEX": "on"}, {}),
        SMALL,
        node,
        match=rf"TRAIN_IPEX=on: Intel's extension .*{said}\. Set TRAIN_IPEX=auto",
        code=ExitCode.MACHINE,
    )


def compiled(environ: dict[str, str]) -> Plan:
    node = make_machine(4)
    plan = make_test_plan(node).with_variables({"TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"})
    return plan_trainer(plan, read_train_settings(environ, {}), SMALL, node)


@pytest.mark.parametrize(
    ("environ", "value"),
    [
        ({}, "off"),
        ({"TRAIN_COMPILE": "default"}, "default by inductor"),
        ({"TRAIN_COMPILE": "auto", "TRAIN_COMPILE_BACKEND": "eager"}, "auto by eager"),
    ],
)
def test_plan_names_the_compile_backend(environ: dict[str, str], value: str) -> None:
    made = next(decision for decision in compiled(environ).decisions if decision.key == "compile")
    assert made.value == value
    assert ("(set by you)" in made.text) is bool(environ)
    assert ("kept in /tmp/inductor" in made.reason) is (value == "default by inductor")


@pytest.mark.parametrize(
    ("environ", "said", "code"),
    [
        ({"TRAIN_COMPILE_BACKEND": "eager"}, "TRAIN_COMPILE_BACKEND=eager: nothing is compiled", ExitCode.USAGE),
        (
            {"TRAIN_COMPILE": "max-autotune", "TRAIN_COMPILE_BACKEND": "eager"},
            "TRAIN_COMPILE=max-autotune and TRAIN_COMPILE_BACKEND=eager contradict",
            ExitCode.USAGE,
        ),
        ({"TRAIN_PRECISION": "tf32"}, "TRAIN_PRECISION=tf32: only NVIDIA GPUs from Ampere on", ExitCode.MACHINE),
    ],
)
def test_unusable_compute_setting_raises(environ: dict[str, str], said: str, code: ExitCode) -> None:
    refusal(compiled, environ, match=said, code=code)


def test_unusable_compile_backend_is_refused() -> None:
    node = make_machine(4)
    environ = {"TRAIN_COMPILE": "default", "TRAIN_COMPILE_BACKEND": "tvm"}
    refusal(
        plan_trainer,
        make_test_plan(node),
        read_train_settings(environ, {}),
        SMALL,
        node,
        TrainerFacts(compile_problem="cannot be used (…)"),
        match="TRAIN_COMPILE_BACKEND=tvm: tvm cannot be used",
        code=ExitCode.MACHINE,
    )


AVX2 = ("avx2",)
USES_IT = "fewer multiplications in 3x3 convolutions; the CPU has AVX2"
NO_KERNEL = "is not compiled: the set-up found no C++ compiler, or the CPU is no x86-64"


def plan_winograd(environ: dict[str, str], flags: tuple[str, ...], *, has_kernel: bool = True) -> Plan:
    node = replace(make_machine(4), cpu_flags=flags)
    given = read_train_settings(environ, {})
    return plan_trainer(make_test_plan(make_machine(4)), given, SMALL, node, TrainerFacts(winograd_kernel=has_kernel))


@pytest.mark.parametrize(
    ("environ", "flags", "has_kernel", "used", "why"),
    [
        ({}, AVX2, True, True, USES_IT),
        ({}, AVX2, False, False, f"it {NO_KERNEL}"),
        ({}, (), True, False, "it needs a CPU with AVX2"),
        ({}, ("avx2", "avx512f"), True, False, "it gains little with AVX-512; TRAIN_WINOGRAD=on uses it"),
        ({"TRAIN_WINOGRAD": "on"}, ("avx2", "avx512f"), True, True, "(set by you) TRAIN_WINOGRAD=on"),
        ({"TRAIN_WINOGRAD": "on"}, AVX2, True, True, "(set by you) TRAIN_WINOGRAD=on"),
        ({"TRAIN_WINOGRAD": "off"}, AVX2, True, False, "(set by you) TRAIN_WINOGRAD=off"),
        ({"TRAIN_PRECISION": "bf16"}, AVX2, True, False, None),
        ({"TRAIN_COMPILE": "default"}, AVX2, True, False, None),
        ({"TRAIN_PARALLELISM": "fsdp"}, AVX2, True, False, None),
        ({"TRAIN_CHANNELS_LAST": "0"}, AVX2, True, False, None),
    ],
)
def test_winograd_is_used_with_avx2_and_fp32(
    environ: dict[str, str], flags: tuple[str, ...], has_kernel: bool, used: bool, why: str | None
) -> None:
    made = plan_winograd(environ, flags, has_kernel=has_kernel)
    assert made.the_trainer().winograd is used
    assert {decision.key: decision.text for decision in made.decisions}.get("winograd") == why


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TRAIN_PRECISION": "bf16"}, "it is for fp32, and the run uses bf16"),
        ({"TRAIN_COMPILE": "auto"}, "a compiler cannot see through it (TRAIN_COMPILE=auto)"),
        ({"TRAIN_PARALLELISM": "fsdp"}, "it needs whole filters (TRAIN_PARALLELISM=fsdp)"),
        ({"TRAIN_CHANNELS_LAST": "0"}, "it needs TRAIN_CHANNELS_LAST=1"),
    ],
)
def test_winograd_with_what_contradicts_raises(environ: dict[str, str], said: str) -> None:
    assert (
        refusal(plan_winograd, environ | {"TRAIN_WINOGRAD": "on"}, AVX2)
        == f"TRAIN_WINOGRAD=on: {said}. Set TRAIN_WINOGRAD=auto."
    )


@pytest.mark.parametrize(
    ("flags", "has_kernel", "said"), [(AVX2, False, NO_KERNEL), ((), True, "needs a CPU with AVX2")]
)
def test_winograd_that_the_machine_lacks_raises(flags: tuple[str, ...], has_kernel: bool, said: str) -> None:
    assert (
        refusal(plan_winograd, {"TRAIN_WINOGRAD": "on"}, flags, has_kernel=has_kernel, code=ExitCode.MACHINE)
        == f"TRAIN_WINOGRAD=on: the algorithm {said}. Set TRAIN_WINOGRAD=auto."
    )


def test_winograd_is_for_cpus() -> None:
    node, given = make_machine(4, gpus=1), read_train_settings({}, {})
    made = plan_trainer(
        make_test_plan(node), given, SMALL, replace(node, cpu_flags=AVX2), TrainerFacts(winograd_kernel=True)
    )
    assert not made.the_trainer().winograd
    assert "winograd" not in {decision.key for decision in made.decisions}
