"""What a person may tell the launcher: the LAUNCH_* variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from entrypoint.variables import Given, Settings, read_settings

PREFIX = "LAUNCH_"


class LaunchSettings(Settings):
    """The launcher's settings, each a variable LAUNCH_<NAME> and a flag --<name>."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to train: auto takes CUDA where a GPU and its driver are seen."
    )
    nproc_per_node: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = Field(
        "auto", description="Ranks on this node: auto is one a GPU, on CPU one."
    )
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = Field(
        "auto", description="OpenMP threads of each rank: auto is its share of the physical cores."
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Collectives between ranks: auto is nccl on CUDA, gloo on CPU."
    )
    bind: bool = Field(True, description="Pin each rank to its own physical cores: 1 or 0.")
    openmp: Literal["auto", "intel", "gnu"] = Field(
        "auto", description="OpenMP runtime: auto is Intel's, by preload, on Intel CPUs where it is installed."
    )
    allocator: Literal["auto", "tcmalloc", "jemalloc", "system"] = Field(
        "auto", description="Memory allocator: auto is tcmalloc, by preload, where it is installed."
    )
    oversubscribe: bool = Field(False, description="Allow more ranks than cores, which then share: 1 or 0.")
    quiet: bool = Field(False, description="Do not show the plan before a launch: 1 or 0.")


def read_launch_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> Given[LaunchSettings]:
    """Validate LAUNCH_* and the launcher's flags; raises `Refused`."""
    return read_settings(LaunchSettings, PREFIX, environ, flags)
