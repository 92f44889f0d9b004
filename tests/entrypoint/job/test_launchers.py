"""What the options of a launcher say of a rank's binding."""

from __future__ import annotations

import pytest

from entrypoint.job.launcher_quirks import options_before
from entrypoint.job.launchers import mpirun_binding, open_mpi_binding


@pytest.mark.parametrize(
    ("options", "binding"),
    [
        ("-np 2", None),
        ("-np 2 --map-by node", None),
        ("--bind-to none", ""),
        ("-bind-to core", "asked"),
        ("--bind-to=core", "asked"),
        ("--bind-to-core", "asked"),
        ("--bind-to-none", ""),
        ("--cpu-set 0,1", "asked"),
        ("--cpu-list 0,1 --bind-to none", "asked"),
        ("-rf hosts", "asked"),
        ("--rankfile hosts", "asked"),
        ("--map-by ppr:1:node:PE=2", "asked"),
        ("--map-by pe-list=1", "asked"),
        ("--mca hwloc_base_binding_policy core", "asked"),
        ("--mca hwloc_base_binding_policy none", ""),
        ("--prtemca hwloc_default_cpu_list 0-3", "asked"),
        ("--mca btl self", None),
    ],
)
def test_mpirun_options_say_who_binds(options: str, binding: str | None) -> None:
    assert mpirun_binding(options.split()) == binding


@pytest.mark.parametrize(
    ("environ", "binding"),
    [
        ({}, "default"),
        ({"OMPI_MCA_hwloc_base_cpu_set": "1"}, "asked"),
        ({"OMPI_MCA_hwloc_base_cpu_list": "1"}, "asked"),
        ({"OMPI_MCA_orte_rankfile": "file"}, "asked"),
        ({"OMPI_MCA_rmaps_base_mapping_policy": "node"}, "default"),
        ({"OMPI_MCA_rmaps_base_mapping_policy": "socket:PE=2"}, "asked"),
        ({"PRTE_MCA_hwloc_default_binding_policy": "none"}, ""),
    ],
)
def test_open_mpi_variables_say_who_binds(environ: dict[str, str], binding: str) -> None:
    assert open_mpi_binding(environ) == binding


def test_options_of_the_program_are_not_the_launchers() -> None:
    words = ["mpirun", "-np", "1", "/venv/bin/python", "-m", "entrypoint", "run", "x.py", "--bind-to", "core"]
    assert options_before(words, ["python", "-m", "entrypoint"]) == ["mpirun", "-np", "1"]
