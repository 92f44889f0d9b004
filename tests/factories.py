"""Builders of settings, machines and plans for tests."""

from __future__ import annotations

import gzip
import os
import shutil
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from entrypoint.core.settings_base import annotations_of
from entrypoint.job.detect import Job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.machine.container import ContainerInfo
from entrypoint.machine.cpu_topology import Cpu
from entrypoint.machine.detect import Machine, detect_machine
from entrypoint.machine.gpus import Gpu
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan, Program
from entrypoint.plan.planner import make_plan
from entrypoint.settings import read_launch_settings
from tests.machines import MACHINES, MASKS, nvlink_node, nvswitch_node
from train.settings import TrainSettings

SCRIPT = Program("script", ("python", "x.py"))
# A machine is thousands of files, which a disk writes in seconds. A container's /dev/shm may be small.
SHM = "/dev/shm"
IN_MEMORY = SHM if os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > 1 << 28 else None


def make_machine(cores: int = 4, online: int | None = None, quota: float | None = None, gpus: int = 0) -> Machine:
    return Machine(
        "node1",
        "a CPU",
        "AuthenticAMD",
        tuple(Cpu(core, core, 0, 0) for core in range(cores)),
        online or cores,
        quota,
        8 << 30,
        tuple(Gpu(index, f"GPU-{index}", "H200", 1 << 37) for index in range(gpus)),
        container=ContainerInfo(shm_bytes=1 << 30),
    )


def plan_inputs(
    node: Machine,
    environ: Mapping[str, str] | None = None,
    job: Job | None = None,
    program: Program = SCRIPT,
    **more: Any,
) -> PlanInputs:
    """Return what a plan is made from, of one node if `node_group` does not say more."""
    environ = environ or {}
    return PlanInputs(read_launch_settings(environ, {}), node, job or Job(), program, environ, "python", **more)


def make_test_plan(
    node: Machine,
    environ: Mapping[str, str] | None = None,
    job: Job | None = None,
    program: Program = SCRIPT,
    **more: Any,
) -> Plan:
    """Make a plan for the nodes that the settings and the job name."""
    inputs = plan_inputs(node, environ, job, program, **more)
    return make_plan(replace(inputs, node_group=detect_node_group(inputs.settings, inputs.environ, inputs.job)))


def reason_for(made: Plan, what: str) -> str:
    return next(decision.text for decision in made.decisions if decision.key == what)


NVML = {"8-GPU NVLink node": nvlink_node, "8-GPU NVSwitch node": nvswitch_node}


@cache
def simulated_machine(name: str) -> Machine:
    """Return what the entrypoint finds in the files of a machine, which are built once."""
    tree = MACHINES[name]()
    with TemporaryDirectory(dir=IN_MEMORY) as folder:
        root = tree.build(Path(folder))
        found = detect_machine(root, MASKS.get(name, tree.cpus), NVML[name]() if name in NVML else None)
    return replace(found, hostname="there", container=ContainerInfo(shm_bytes=1 << 30))


def elf_header(machine: int) -> bytes:
    """Return the first bytes of a little-endian 64-bit shared object for a machine."""
    return b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, machine)


# Kubeflow's training operator, a PyTorchJob of 2 nodes with 4 processes each.
KUBERNETES = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456", "WORLD_SIZE": "8", "RANK": "1",
}  # fmt: skip


STEP = {
    "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip


class HostilePickle:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile-was-here",)


def train_settings(fields: Mapping[str, Any] | None = None, **more: Any) -> TrainSettings:
    """Return the trainer's settings with these fields, validated."""
    types = annotations_of(TrainSettings)
    values = {
        name: msgspec.convert(value, types[name], dec_hook=lambda kind, raw: kind(raw))
        for name, value in {**(fields or {}), **more}.items()
    }
    return TrainSettings().with_values(**values)


def write_fashion_mnist(data_dir: Path, train: int, test: int) -> None:
    """Write random images as Fashion-MNIST's files, in the format of the MNIST family."""
    folder = data_dir / "FashionMNIST/raw"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("t10k", test)):
        for kind, shape, limit in (("images-idx3", (count, 28, 28), 256), ("labels-idx1", (count,), 10)):
            data = random.integers(0, limit, shape, dtype=np.uint8)
            content = struct.pack(">HBB", 0, 8, data.ndim) + struct.pack(f">{data.ndim}I", *shape) + data.tobytes()
            path = folder / f"{split}-{kind}-ubyte"
            path.write_bytes(content)
            path.with_suffix(".gz").write_bytes(gzip.compress(content))
