"""Open MPI 4 and 5 over two nodes: who is rank 0, and the daemon of a node is started inside the image."""

from __future__ import annotations

import os
import re

import pytest

from tests.cluster.conftest import ENTRYPOINT, Cluster
from tests.conftest import script

pytestmark = pytest.mark.cluster

VERSIONS = ("Open MPI", "Open MPI 5")
SHOW = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # a rank that leaves at once breaks the connections that the other still opens
print("rank", os.environ["RANK"], os.environ["ENTRYPOINT_MASTER_ADDR"], os.uname().nodename, flush=True)
dist.destroy_process_group()
"""
# Stands for Apptainer on the nodes: it notes what it was asked for, and runs it.
APPTAINER = """
#!/bin/sh
echo "$(hostname) $*" >>{folder}/asked
shift 2
exec "$@"
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_mpirun_outside_tells_ranks_the_first_node(cluster: Cluster, version: str) -> None:
    script(cluster.folder, "x.py", SHOW)
    words = ("mpirun", "--bind-to", "none", "-np", "2", "--host", "node1:1,node2:1", *ENTRYPOINT, "run", "x.py")
    result = cluster.run("node1", *words, env=cluster.mpi(version)).succeeded()
    lines = sorted(line for line in result.out.splitlines() if line.startswith("rank "))
    assert [line.split()[1::2] for line in lines] == [["0", "node1"], ["1", "node2"]]
    first = f"{os.environ.get('CI_NODES_NET', '10.78.0')}.1"
    assert {line.split()[2] for line in lines} <= {"node1", first}
    assert len({line.split()[2] for line in lines}) == 1


@pytest.mark.parametrize(("options", "threads"), [((), 1), (("--bind-to", "none"), 2)])
def test_binding_by_default_on_other_nodes_is_said(cluster: Cluster, options: tuple[str, ...], threads: int) -> None:
    words = ("mpirun", *options, "-np", "2", "--host", "node1:1,node2:1", *ENTRYPOINT, "train")
    flags = ("--run-name=two", "--dataset=digits", "--epochs=1")
    result = cluster.run("node1", *words, *flags, env=cluster.mpi("Open MPI 5")).succeeded()
    assert cluster.summary("two")["threads"] == threads, "those of the slowest rank"
    slower = "rank 1 on node2 computes with 1 threads, and rank 0 on node1 with 2"
    assert (slower in result.out) == (threads == 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_daemons_of_other_nodes_start_inside_the_image(cluster: Cluster, version: str) -> None:
    script(cluster.folder, "x.py", SHOW)
    stand_in = cluster.folder / "bin"
    stand_in.mkdir()
    script(stand_in, "apptainer", APPTAINER.format(folder=cluster.folder).lstrip()).chmod(0o755)
    path = f"{stand_in}:{os.environ['PATH']}"
    rsh = script(cluster.folder, "rsh.sh", f"""
        #!/bin/sh
        host=$1
        shift
        exec ssh -F {cluster.ssh} "$host" "PATH={path}; export PATH; $*"
        """.lstrip("\n"))  # fmt: skip
    rsh.chmod(0o755)
    inside = {"APPTAINER_CONTAINER": "/images/cuda.sif"}
    agents = {"OMPI_MCA_plm_rsh_agent": str(rsh), "PRTE_MCA_plm_ssh_agent": str(rsh)}
    words = (*ENTRYPOINT, "run", "--hosts=node1:1,node2:1", "x.py")
    result = cluster.run("node1", *words, env=cluster.mpi(version) | inside | agents).succeeded()
    assert result.out.count("rank ") == 2
    daemon = "prted" if version == "Open MPI 5" else "orted"
    (asked,) = (cluster.folder / "asked").read_text().splitlines()
    assert re.match(rf"node2 exec /images/cuda\.sif (/\S+/)?{daemon} ", asked)


def test_books_script_for_several_machines_runs_unchanged(cluster: Cluster) -> None:
    script(
        cluster.folder,
        "book.py",
        """
        import os
        import torch
        import torch.distributed as dist

        os.environ['RANK'] = os.environ['OMPI_COMM_WORLD_RANK']
        os.environ['WORLD_SIZE'] = os.environ['OMPI_COMM_WORLD_SIZE']
        dist.init_process_group(backend='gloo', init_method='env://')
        total = torch.ones(1) * dist.get_rank()
        dist.all_reduce(total)
        print(f'rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}')
        dist.destroy_process_group()
        """,
    )
    env = cluster.mpi("Open MPI") | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    words = ("mpirun", "-np", "4", "--host", "node1:2,node2:2", "-x", "MASTER_ADDR", "-x", "MASTER_PORT")
    done = cluster.run("node1", *words, *ENTRYPOINT, "run", "book.py", env=env).succeeded()
    assert sorted(line for line in done.out.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} of 4: 6.0" for rank in range(4)
    ]
