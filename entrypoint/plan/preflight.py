"""Checks that are made before every launch, from the machine alone; the doctor shows them too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from entrypoint.machine.interpreter import minor_version
from entrypoint.plan.devices import find_gpu_problem
from entrypoint.plan.inputs import PlanInputs

# `absent`: optional, and not on this machine.
State = Literal["ok", "absent", "warning", "failure"]
# Docker's default is 64 MiB, which one batch of 224x224 images of a few workers fills.
SHM_BYTES = 128 << 20
# What RDMA locks for the buffers of one connection to a few peers, by the adapters' manuals: they say unlimited.
MEMLOCK_BYTES = 1 << 30
# Packages that go with the torch of their own minor version, 2.8 with 2.8. IPEX compares both when
# it is imported (its __init__.py), and does not name torch in its metadata.
SAME_MINOR_VERSION = ("intel_extension_for_pytorch", "oneccl_bind_pt")


class Check(Struct, frozen=True):
    """One thing looked at: what was seen, whether that is well, and what to do where it is not.

    A prominent warning is the first and the last line of a run.
    """

    what: str
    state: State
    seen: str
    advice: str = ""
    is_prominent: bool = False

    @property
    def line(self) -> str:
        """The check as a warning or an error of one line."""
        return f"{self.what}: {self.seen}. {self.advice}."


def preflight_checks(inputs: PlanInputs) -> tuple[Check, ...]:
    """Return every check that needs only the inputs of the plan."""
    return (
        check_topology(inputs),
        check_image(inputs),
        check_shm(inputs),
        check_memlock(inputs),
        check_driver(inputs),
        *check_gpu_of_image(inputs),
        *check_packages(inputs),
    )


def check_topology(inputs: PlanInputs) -> Check:
    """Check what had to be assumed about the CPUs."""
    machine = inputs.machine
    nodes = len({cpu.node for cpu in machine.cpus})
    seen = f"{len(machine.cpus)} of {machine.online_cpus} CPUs, {nodes} NUMA node{'s' * (nodes != 1)}"
    if not machine.assumptions:
        return Check("topology", "ok", seen)
    return Check("topology", "warning", "; ".join(machine.assumptions), "Mount the host's /sys into the container")


def check_image(inputs: PlanInputs) -> Check:
    """Return which image this is, and what it lacks."""
    image = inputs.machine.container.image
    if not image:
        return Check("image", "absent", "not an image of this project")
    build = f"torch build {image.get('torch_build', 'unknown')}"
    seen = f"{image['name']}, revision {image['revision'][:12]}, {build}, oneCCL {image['oneccl']}"
    return Check("image", "ok", seen)


def check_shm(inputs: PlanInputs) -> Check:
    """Check /dev/shm, which the workers of a DataLoader pass batches through; if it is full they die of SIGBUS."""
    shm = inputs.machine.container.shm_bytes
    seen = f"{shm / 2**20:,.0f} MiB"
    if shm >= SHM_BYTES or inputs.program.kind == "train":  # the trainer decodes in threads
        return Check("/dev/shm", "ok", seen)
    advice = "Start with --shm-size=2g (Docker) or use no loader workers, which may die of a bus error"
    return Check("/dev/shm", "warning", seen, advice)


def check_memlock(inputs: PlanInputs) -> Check:
    """Check the limit of locked memory: RDMA adapters lock the buffers that they send from."""
    around = inputs.machine.container
    limit = around.memlock_bytes
    seen = "unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB"
    if not around.rdma or limit is None or limit >= MEMLOCK_BYTES:
        return Check("locked memory", "ok", seen)
    adapters = ", ".join(around.rdma)
    return Check("locked memory", "warning", f"{seen} with {adapters}", "Set `ulimit -l unlimited`, or RDMA may fail")


def check_driver(inputs: PlanInputs) -> Check:
    """Return the driver and its CUDA; the plan decides whether torch can use them."""
    machine = inputs.machine
    if machine.driver.problem:
        return Check("NVIDIA driver", "warning", machine.driver.problem, "Reload the driver, or restart with --nv")
    if not machine.driver.version:
        return Check("NVIDIA driver", "absent", "none")
    built = f", torch is built for {machine.packages.torch_cuda or 'the CPU'}"
    return Check("NVIDIA driver", "ok", f"{machine.driver.version}, CUDA up to {machine.driver.cuda}{built}")


def check_gpu_of_image(inputs: PlanInputs) -> Iterator[Check]:
    """Check that the CUDA image has a GPU that it can use, unless the user chose a device.

    Ranks that a launcher starts on other nodes check it there.
    """
    image = inputs.machine.container.image.get("name")
    if image != "cuda" or inputs.settings.values.device != "auto" or inputs.remote_launcher:
        return
    if problem := find_gpu_problem(inputs):
        advice = f"{problem[0].upper()}{problem[1:]}, or set LAUNCH_DEVICE=cpu"
        yield Check("CUDA image", "warning", "the CPU is used", advice, is_prominent=True)


def check_packages(inputs: PlanInputs) -> Iterator[Check]:
    """Check packages that need one version of torch."""
    versions = inputs.machine.packages.versions
    torch = minor_version(versions.get("torch", ""))
    if not torch:
        yield Check("torch", "absent", "not in this environment")
        return
    yield Check("torch", "ok", versions["torch"])
    for name in ("torchvision", *SAME_MINOR_VERSION):
        if name not in versions:
            continue
        required = inputs.machine.packages.needs_torch.get(name, "")
        as_torch = name in SAME_MINOR_VERSION
        public_version = versions["torch"].partition("+")[0]  # 2.8.0 of 2.8.0+cpu
        if minor_version(versions[name]) == torch if as_torch else required in ("", public_version):
            yield Check(name, "ok", versions[name])
            continue
        advice = f"Install its version {torch}" if as_torch else f"Install torch {required}"
        seen = f"{versions[name]} with torch {versions['torch']}"
        yield Check(name, "warning", seen, f"{advice}, or remove it: it will not import")
