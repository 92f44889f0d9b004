"""What a person may tell the launcher: the LAUNCH_* variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from entrypoint.variables import Given, Settings, read_settings

PREFIX = "LAUNCH_"
NODE_COUNT = r"[1-9]\d{0,5}"
NODE_RANGE = f"{NODE_COUNT}:{NODE_COUNT}"


class LaunchSettings(Settings):
    """The launcher's settings, each a variable LAUNCH_<NAME> and a flag --<name>."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to train: auto takes CUDA where a GPU and its driver are seen."
    )
    nproc_per_node: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = Field(
        "auto",
        description="Ranks on this node: auto is one a GPU, on CPU one a NUMA node, and for train one a core where"
        " others keep more CPUs busy than can be left to them.",
    )
    nnodes: Annotated[int, Field(ge=1, le=100_000)] | Annotated[str, Field(pattern=f"^{NODE_RANGE}$")] = Field(
        1,
        description="Nodes of the job, where no scheduler says it: start the same command on each. 1:4 goes on with"
        " as few as one when others are lost, and takes up to four.",
    )
    node_rank: Annotated[int, Field(ge=0, lt=100_000)] = Field(
        0, description="This node's number among them, from 0; MASTER_ADDR names number 0 on all."
    )
    with_: Literal["auto", "direct", "spawn", "torchrun", "mpirun", "srun"] = Field(
        "auto",
        description="What starts the ranks: auto is the entrypoint itself for several (spawn), torchrun's agent where"
        " they may have to start again, srun where a batch script has an allocation, mpirun where LAUNCH_HOSTS names"
        " nodes.",
    )
    hosts: str = Field(
        "", description="Nodes for mpirun, with ranks on each: r1:4,r2:2, or a file with such a line for each node."
    )
    max_restarts: Literal["auto"] | Annotated[int, Field(ge=0, le=1000)] = Field(
        "auto",
        description="How often ranks that fail are started again, from the last checkpoint: auto is 3 with"
        " LAUNCH_NNODES=1:4, else 0.",
    )
    rendezvous_timeout_s: Annotated[int, Field(ge=1, le=86_400)] = Field(
        1800, description="How long ranks wait for each other at the start."
    )
    fail_timeout_s: Literal["auto"] | Annotated[int, Field(ge=1, le=86_400)] = Field(
        "auto", description="How long an exchange between ranks may stall: auto is 60 over nodes, 1800 on one."
    )
    grace_s: Annotated[int, Field(ge=1, le=86_400)] = Field(
        30, description="How long ranks that are told to end have to save in; Slurm's job ends so much sooner."
    )
    gpus: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = Field(
        "auto",
        description="How many GPUs to use, a rank each, the best connected ones: auto is all visible ones."
        " CUDA_VISIBLE_DEVICES names particular ones.",
    )
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = Field(
        "auto", description="OpenMP threads of each rank: auto is its share of the physical cores."
    )
    cores: Literal["auto", "performance", "physical", "logical"] = Field(
        "auto",
        description="Which cores: auto is the physical ones, of a hybrid CPU the performance cores; logical is all"
        " CPUs, siblings too.",
    )
    backend: Literal["auto", "gloo", "ccl", "nccl", "mpi"] = Field(
        "auto", description="Collectives between ranks: auto is nccl on CUDA, gloo on CPU."
    )
    bind: Literal["auto", "ranks", "threads", "none"] = Field(
        "auto",
        description="What is pinned: ranks to their own cores, threads each to one too, or none; auto is ranks, which"
        " share the cores of their NUMA node where others keep too many busy to leave.",
    )
    memory: Literal["auto", "bind", "preferred", "default"] = Field(
        "auto", description="Memory of a rank within one NUMA node: auto binds it there, preferred lets it spill over."
    )
    openmp: Literal["auto", "intel", "gnu"] = Field(
        "auto", description="OpenMP runtime: auto is Intel's, by preload, on Intel CPUs where it is installed."
    )
    allocator: Literal["auto", "tcmalloc", "jemalloc", "system"] = Field(
        "auto", description="Memory allocator: auto is tcmalloc, by preload, where it is installed, else the system's."
    )
    time_slice_us: Literal["auto", "kernel"] | Annotated[int, Field(ge=100, le=100_000)] = Field(
        "auto",
        description="Length of the turns at a CPU that ranks ask for, in microseconds: auto is 300 where a rank has"
        " several threads and Linux is 6.12 or newer; kernel leaves them as they are.",
    )
    neighbours: Literal["auto"] | Annotated[int, Field(ge=0, le=4096)] = Field(
        "auto",
        description="CPUs that ranks leave to others by having fewer threads: auto is as many as others keep busy, on a"
        " node that no scheduler has granted.",
    )
    oversubscribe: bool = Field(False, description="Allow more ranks than cores, which then share: 1 or 0.")
    tuned: str = Field(
        "auto", description="What `entrypoint tune` found: auto looks in the user's cache folder; off; or a folder."
    )
    quiet: bool = Field(False, description="Do not show the plan before a launch: 1 or 0.")


def read_launch_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> Given[LaunchSettings]:
    """Validate LAUNCH_* and the launcher's flags; raises `Refused`."""
    return read_settings(LaunchSettings, PREFIX, environ, flags)
