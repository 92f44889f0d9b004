"""What the options of a launcher say of a rank's binding."""

from __future__ import annotations

import pytest

from entrypoint.job.launcher_quirks import options_before
from entrypoint.job.launchers import LauncherBinding, mpirun_binding, open_mpi_binding, open_mpi_master


@pytest.mark.parametrize(
    ("options", "binding"),
    [
        ("-np 2", None),
        ("-np 2 --map-by node", None),
        ("--bind-to none", LauncherBinding.NONE),
        ("-bind-to core", LauncherBinding.USER),
        ("--bind-to=core", LauncherBinding.USER),
        ("--bind-to-core", LauncherBinding.USER),
        ("--bind-to-none", LauncherBinding.NONE),
        ("--cpu-set 0,1", LauncherBinding.USER),
        ("--cpu-list 0,1 --bind-to none", LauncherBinding.USER),
        ("-rf hosts", LauncherBinding.USER),
        ("--rankfile hosts", LauncherBinding.USER),
        ("--map-by ppr:1:node:PE=2", LauncherBinding.USER),
        ("--map-by pe-list=1", LauncherBinding.USER),
        ("--mca hwloc_base_binding_policy core", LauncherBinding.USER),
        ("--mca hwloc_base_binding_policy none", LauncherBinding.NONE),
        ("--prtemca hwloc_default_cpu_list 0-3", LauncherBinding.USER),
        ("--mca btl self", None),
    ],
)
def test_mpirun_options_say_who_binds(options: str, binding: LauncherBinding | None) -> None:
    assert mpirun_binding(options.split()) == binding


@pytest.mark.parametrize(
    ("environ", "binding"),
    [
        ({}, LauncherBinding.LAUNCHER_DEFAULT),
        ({"OMPI_MCA_hwloc_base_cpu_set": "1"}, LauncherBinding.USER),
        ({"OMPI_MCA_hwloc_base_cpu_list": "1"}, LauncherBinding.USER),
        ({"OMPI_MCA_orte_rankfile": "file"}, LauncherBinding.USER),
        ({"OMPI_MCA_rmaps_base_mapping_policy": "node"}, LauncherBinding.LAUNCHER_DEFAULT),
        ({"OMPI_MCA_rmaps_base_mapping_policy": "socket:PE=2"}, LauncherBinding.USER),
        ({"PRTE_MCA_hwloc_default_binding_policy": "none"}, LauncherBinding.NONE),
    ],
)
def test_open_mpi_variables_say_who_binds(environ: dict[str, str], binding: LauncherBinding) -> None:
    assert open_mpi_binding(environ) == binding


def test_options_of_the_program_are_not_the_launchers() -> None:
    words = ["mpirun", "-np", "1", "/venv/bin/python", "-m", "entrypoint", "run", "x.py", "--bind-to", "core"]
    assert options_before(words, ["python", "-m", "entrypoint"]) == ["mpirun", "-np", "1"]


@pytest.mark.parametrize(
    ("environ", "master"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "1263468544.0;tcp://10.78.0.1,192.168.1.1:34657"}, "10.78.0.1"),
        (
            {"PMIX_NAMESPACE": "prterun-node1-17@1", "PMIX_SERVER_URI41": "prterun-node1-17@0.1;tcp4://127.0.0.1:5"},
            "node1",
        ),
        ({"PMIX_NAMESPACE": "prterun-gpu-node-0012-3141@1"}, "gpu-node-0012"),
        ({"PMIX_NAMESPACE": "prte-login1.site.org-9@4"}, "login1.site.org"),
        ({"PMIX_NAMESPACE": "prterun-login1-17@1", "SLURM_JOB_NODELIST": "n[1-2]"}, ""),  # the job's first node
        ({"PMIX_NAMESPACE": "slurm.pmix.18.0"}, ""),
        ({"PMIX_NAMESPACE": "1263468545"}, ""),
        ({}, ""),
    ],
)
def test_node_of_mpirun_is_read_of_open_mpi_4_and_5(environ: dict[str, str], master: str) -> None:
    assert open_mpi_master(environ) == master
