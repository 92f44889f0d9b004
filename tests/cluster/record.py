"""Records what real launchers put into the environment of each rank: python -m tests.cluster.record >FILE

Needs the nodes of conftest.py (CLUSTER_NODES, CLUSTER_SSH, CLUSTER_SLURM), Open MPI 4 and 5, and MPICH. It prints
tests/entrypoint/job/launches.json, which `test_documented_launches.py` reads: each launch with its ranks' variables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cluster.conftest import Cluster
from tests.conftest import script

# What a plan or a user who debugs one reads; the rest are paths, sockets and this machine's own.
KEPT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid"),
    *("OMPI_MCA_hwloc_base_binding_policy", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_HOSTNAME", "PMI_RANK", "PMI_SIZE"),
    *("PMI_JOBID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
    *("SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST", "SLURM_MPI_TYPE", "SLURM_JOB_NUM_NODES"),
)
OMPI = "OMPI_COMM_WORLD_"
SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))


def launches(nodes: int, ranks: int, me: str) -> dict[str, list[str]]:
    """Return the command of each launcher for so many ranks on each of so many nodes; `me` is what a rank runs."""
    total, hosts = str(nodes * ranks), ",".join(f"node{node + 1}:{ranks}" for node in range(nodes))
    srun = ["srun", f"-N{nodes}", f"-n{total}"]
    batch = ["salloc", f"-N{nodes}", f"-n{total}"]
    mpirun = ["mpirun.openmpi", "-np", total]
    found = {
        "Open MPI": [*mpirun, "--host", hosts, me],
        "hydra": ["mpiexec.hydra", "-n", total, "-hosts", hosts, me],
        "srun": [*srun, me],
        "srun --mpi=pmi2": [*srun, "--mpi=pmi2", me],
        "srun --mpi=pmix": [*srun, "--mpi=pmix", me],
        "Open MPI in an allocation": [*batch, *mpirun, "--host", hosts, me],
        "hydra in an allocation": [*batch, "mpiexec.hydra", "-n", total, "-hosts", hosts, me],
    }
    if newer := os.environ.get("OPENMPI5_MPIRUN"):
        found["Open MPI 5"] = [newer, "-np", total, "--host", hosts, me]
    if nodes == 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--no-python"]
        found["torchrun, static"] = [*torchrun, me]
        found["torchrun, c10d"] = [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", me]
    return found


def record(cluster: Cluster, slurm: str, name: str, command: list[str]) -> list[dict[str, str]]:
    """Run one launch and return the kept variables of its ranks."""
    for old in cluster.folder.glob("env.*"):
        old.unlink()
    by_slurm = command[0] in ("srun", "salloc")
    done = cluster.run("node1", *command, env={"LAUNCH_QUIET": ""}, tool=slurm if by_slurm else "")
    if done.code:
        raise SystemExit(f"{name}: ended with {done.code}: {done.out}")
    found = [json.loads(path.read_text()) for path in cluster.folder.glob("env.*")]
    kept = [{k: v for k, v in one.items() if k in KEPT or k.startswith(OMPI)} for one in found]
    return sorted(kept, key=lambda one: json.dumps(one, sort_keys=True))


def main() -> None:
    tool, slurm = os.environ["CLUSTER_NODES"], os.environ["CLUSTER_SLURM"]
    folder = Path(tempfile.mkdtemp())
    cluster = Cluster(tool, os.environ["CLUSTER_SSH"], folder)
    dump = "import json, os; json.dump(dict(os.environ), open(f'env.{os.uname().nodename}.{os.getpid()}', 'w'))"
    me = script(folder, "me.sh", f'#!/bin/sh\ncd {folder}\nexec {sys.executable} -c "{dump}"\n')
    me.chmod(0o755)
    cluster.do("up", "2")
    subprocess.run([slurm, "up", "2"], check=True)
    found: list[dict[str, Any]] = []
    try:
        for nodes, ranks in SHAPES:
            for name, command in launches(nodes, ranks, str(me)).items():
                environments = record(cluster, slurm, name, command)
                found.append({"launch": name, "nodes": nodes, "ranks": ranks, "environments": environments})
    finally:
        subprocess.run([slurm, "down"], check=False)
        cluster.do("down")
    lines = [json.dumps(one, sort_keys=True) for one in found]
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main()
