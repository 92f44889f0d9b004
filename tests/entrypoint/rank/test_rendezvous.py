"""How a node finds the job's master, and the way to it, over IPv6 too."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.core.network import interface_address, interface_for_route
from entrypoint.job.detect import Job
from entrypoint.rank.rendezvous import rendezvous_variables, resolve_master
from tests.conftest import PYTHON, refusal, script
from tests.net import free_port

NOWHERE = "no-such-node.invalid"


def own_address() -> str:
    """This machine's own address in a network; skips the test where it has none but loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("needs a network interface with a route besides loopback")
        return str(probe.getsockname()[0])


@pytest.mark.seconds
def test_resolve_master_unknown_name_raises_after_timeout() -> None:
    refusal(
        resolve_master,
        NOWHERE,
        1,
        match=rf"MASTER_ADDR={NOWHERE}: does not resolve here \(.*\) after 1 s",
        code=ExitCode.RENDEZVOUS,
    )


def is_up(interface: str) -> bool:
    return (
        bool(interface_address(interface)) and "down" not in Path("/sys/class/net", interface, "operstate").read_text()
    )


THERE = Job("srun", 1, 2, 0, 1)
HERE = Job("srun", 0, 2, 0, 1)


@pytest.mark.parametrize("name", ["localhost", "127.0.1.1"])
def test_rendezvous_variables_loopback_on_other_node_raises(name: str) -> None:
    refusal(
        rendezvous_variables,
        {"MASTER_ADDR": name},
        1,
        THERE,
        match=rf"MASTER_ADDR={name}: resolves to (127|::1).* here, which other nodes cannot",
        code=ExitCode.RENDEZVOUS,
    )


def test_rendezvous_variables_loopback_on_master_is_allowed() -> None:
    own = interface_for_route(own_address())
    others = tuple(name for _, name in socket.if_nameindex() if name not in ("lo", own) and is_up(name))
    if others:
        refusal(
            rendezvous_variables,
            {"MASTER_ADDR": "127.0.1.1"},
            1,
            HERE,
            match=r"^MASTER_ADDR=127.0.1.1: .* Set it to this node's address .* or GLOO_SOCKET_IFNAME",
            code=ExitCode.RENDEZVOUS,
        )
    else:
        assert rendezvous_variables({"MASTER_ADDR": "127.0.1.1"}, 1, HERE)["GLOO_SOCKET_IFNAME"] == own
    second = Job("srun", 1, 4, 1, 2, hostnames=("192.0.2.9",))
    assert rendezvous_variables({"MASTER_ADDR": "localhost"}, 1, second)["GLOO_SOCKET_IFNAME"] == own
    other = replace(HERE, hostnames=("192.0.2.9",))
    assert rendezvous_variables({"MASTER_ADDR": "127.0.1.1"}, 1, other)["GLOO_SOCKET_IFNAME"] == own, (
        "the way to the rest"
    )


def test_rendezvous_variables_use_route_to_master() -> None:
    address = own_address()
    name = interface_for_route(address)
    assert name in {name for _, name in socket.if_nameindex()}
    # The kernel reaches an address of its own over loopback, yet from that address: the interface is the address's.
    assert name != "lo"
    found = rendezvous_variables({"MASTER_ADDR": address}, 1, THERE)
    assert found == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def test_rendezvous_variables_keep_user_interface() -> None:
    found = rendezvous_variables({"MASTER_ADDR": own_address(), "GLOO_SOCKET_IFNAME": "ib0"}, 1, THERE)
    assert found == {"NCCL_SOCKET_IFNAME": "ib0"}


SETUP = """
mount -t sysfs sysfs /sys
ip link set lo up
ip link add net0 type veth peer name net1
ip link set net0 up
ip link set net1 up
ip -6 address add fd00::1/64 dev net0 nodad
ip link add idle0 type veth peer name idle1
ip address add 198.51.100.1/24 dev idle0
ip link set idle0 up
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
    wrapped = ("unshare", "--net", "--mount", "sh", "-ec", SETUP, "sh", *command)
    tried = subprocess.run(in_shell("true"), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs a network namespace with IPv6 (root): {tried.stderr.strip()}")
    return wrapped


def in_shell(command: str) -> tuple[str, ...]:
    return ("unshare", "--net", "--mount", "sh", "-ec", SETUP, "sh", command)


@pytest.mark.launch
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


@pytest.mark.launch
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
