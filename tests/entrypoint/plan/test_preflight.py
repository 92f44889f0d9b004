"""The doctor's fast checks: what is seen, whether that is well, what to do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from entrypoint.machine.container import ContainerInfo
from entrypoint.machine.detect import Machine
from entrypoint.machine.gpus import Driver
from entrypoint.machine.interpreter import Packages
from entrypoint.plan.model import Plan, Program
from entrypoint.plan.preflight import preflight_checks
from tests.factories import SCRIPT, make_machine, make_test_plan, plan_inputs

WELL = make_machine(4)
TORCH = {"torch": "2.8.0"}


def with_around(**changes: Any) -> Machine:
    return replace(WELL, container=replace(WELL.container, **changes))


def lines(node: Machine, program: Program = SCRIPT) -> list[str]:
    inputs = plan_inputs(node, program=program)
    return [check.line for check in preflight_checks(inputs) if check.state in ("warning", "failure")]


def test_preflight_healthy_machine_has_no_warning() -> None:
    assert lines(WELL) == []


CUDA = with_around(image={"name": "cuda", "revision": "0" * 40, "torch_build": "pypi", "oneccl": "not for CUDA"})
# Node, LAUNCH_DEVICE, and whether the warning is the first and the last line of a run.
IMAGES = [
    (CUDA, "auto", "no NVIDIA driver answers"),
    (replace(CUDA, driver=Driver(problem="Driver/library version mismatch")), "auto", "version mismatch"),
    (replace(make_machine(4, gpus=1), container=CUDA.container, packages=Packages(TORCH, "")), "auto", "for the CPU"),
    (CUDA, "cpu", ""),
    (replace(make_machine(4, gpus=1), container=CUDA.container), "auto", ""),
    (replace(WELL, container=replace(CUDA.container, image={**CUDA.container.image, "name": "cpu-intel"})), "auto", ""),
    (WELL, "auto", ""),
]


@pytest.mark.parametrize(("node", "device", "said"), IMAGES)
def test_cuda_image_without_gpu_warns_prominently(node: Machine, device: str, said: str) -> None:
    warning = make_test_plan(node, {"LAUNCH_DEVICE": device}).prominent_warning
    assert bool(warning) == bool(said)
    assert said in warning
    if said:
        assert warning.startswith("CUDA image: the CPU is used. ")
        assert warning.endswith(", or set LAUNCH_DEVICE=cpu.")
    plan = make_test_plan(node, {"LAUNCH_DEVICE": device})
    assert Plan.from_json(plan.to_json()).prominent_warning == warning, "torchrun's agent repeats it"


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (with_around(shm_bytes=64 << 20), "/dev/shm: 64 MiB. Start with --shm-size=2g (Docker)"),
        (
            with_around(memlock_bytes=8 << 20, rdma=("mlx5_0",)),
            "locked memory: 8 MiB with mlx5_0. Set `ulimit -l unlimited`",
        ),
        (replace(WELL, assumptions=("/sys hides the NUMA nodes",)), "topology: /sys hides the NUMA nodes. Mount the"),
        (replace(WELL, driver=Driver(problem="Driver/library version mismatch")), "NVIDIA driver: Driver/library"),
        (
            replace(WELL, packages=Packages(TORCH | {"torchvision": "0.28.0"}, needs_torch={"torchvision": "2.13.0"})),
            "torchvision: 0.28.0 with torch 2.8.0. Install torch 2.13.0, or remove it: it will not import",
        ),
        (
            replace(WELL, packages=Packages(TORCH | {"intel_extension_for_pytorch": "2.7.0"})),
            "intel_extension_for_pytorch: 2.7.0 with torch 2.8.0. Install its version 2.8, or remove it: it will not"
            " import",
        ),
        (
            replace(WELL, packages=Packages(TORCH | {"oneccl_bind_pt": "1.8.0"})),
            "oneccl_bind_pt: 1.8.0 with torch 2.8.0. Install its version 2.8, or remove it: it will not import",
        ),
    ],
)
def test_preflight_problem_warns_at_every_launch(node: Machine, said: str) -> None:
    assert len(lines(node)) == 1
    assert lines(node)[0].startswith(said)
    assert lines(node)[0] in make_test_plan(node).warnings, "every launch makes the fast checks"


@pytest.mark.parametrize(
    "node",
    [
        with_around(memlock_bytes=8 << 20),
        with_around(memlock_bytes=None, rdma=("mlx5_0",)),
        replace(WELL, driver=Driver("580.65", "13.0"), packages=Packages(TORCH, "12.8")),
        replace(WELL, packages=Packages(TORCH | {"torchvision": "0.23.0", "intel_extension_for_pytorch": "2.8.0"})),
        replace(
            WELL, packages=Packages({"torch": "2.15.0+cpu", "torchvision": "0.29.2"}, None, {"torchvision": "2.15.0"})
        ),
        replace(WELL, packages=Packages({"torch": "2.13.0", "torchvision": "0.28.0"})),
    ],
)
def test_preflight_harmless_state_has_no_warning(node: Machine) -> None:
    assert lines(node) == []


def test_trainer_needs_no_shared_memory_for_its_loader() -> None:
    node = replace(WELL, container=ContainerInfo(shm_bytes=64 << 20))
    assert lines(node, Program("train", ("python", "-m", "train"))) == []
