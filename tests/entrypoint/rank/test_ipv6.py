"""A host that has IPv6 only, and whose own name is a loopback address, in a network namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PYTHON, script
from tests.net import free_port

pytestmark = pytest.mark.launch
SETUP = """
ip link set lo up
ip link add net0 type veth peer name net1
ip link set net0 up
ip link set net1 up
ip -6 address add fd00::1/64 dev net0 nodad
exec "$@"
"""
FIND = """
import sys
from entrypoint.core.network import interface_address, interface_for_route
from entrypoint.job.detect import Job
from entrypoint.rank.rendezvous import local_address, rendezvous_variables
master = {"MASTER_ADDR": sys.argv[1]}
print(interface_address("net0"), interface_for_route("fd00::2"))
print(rendezvous_variables(master, 1, Job("srun", int(sys.argv[2]), 2, 0, 1)))
print(local_address(master, 1, Job("srun", int(sys.argv[2]), 2, 0, 1)))
"""


def in_ipv6_host(*command: str) -> tuple[str, ...]:
    """Return a command in a network namespace whose only network interface has an IPv6 address."""
    if not shutil.which("ip"):
        pytest.skip("needs iproute2's ip")
    wrapped = ("unshare", "--net", "sh", "-ec", SETUP, "sh", *command)
    tried = subprocess.run(in_shell("true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs a network namespace with IPv6 (root): {tried.stderr.strip()}")
    return wrapped


def in_shell(command: str) -> tuple[str, ...]:
    return ("unshare", "--net", "sh", "-ec", SETUP, "sh", command)


@pytest.mark.parametrize(("master", "rank"), [("::1", "0"), ("127.0.1.1", "0"), ("fd00::1", "0"), ("fd00::2", "1")])
def test_interface_of_an_ipv6_host_is_found(master: str, rank: str) -> None:
    done = subprocess.run(in_ipv6_host(PYTHON, "-c", FIND, master, rank), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    addresses, variables, own = done.stdout.splitlines()
    assert addresses == "fd00::1 net0"
    assert variables == "{'GLOO_SOCKET_IFNAME': 'net0', 'NCCL_SOCKET_IFNAME': 'net0'}"
    assert own == "fd00::1"


SUM = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", int(total), flush=True)
    dist.destroy_process_group()
"""
BOTH = """
for rank in 0 1; do
  RANK=$rank LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 WORLD_SIZE=2 "$@" &
done
wait
"""


def test_ranks_meet_over_ipv6(tmp_path: Path) -> None:
    script(tmp_path, "sum.py", SUM)
    entrypoint = (PYTHON, "-m", "entrypoint", "run", "sum.py")
    done = subprocess.run(
        in_ipv6_host("sh", "-c", BOTH, "sh", *entrypoint),
        cwd=tmp_path,
        env={**os.environ, "MASTER_ADDR": "fd00::1", "MASTER_PORT": str(free_port()), "LAUNCH_QUIET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("sum")] == ["sum 2"] * 2, done.stderr
