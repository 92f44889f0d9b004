"""How a node finds the job's master, and the way to it."""

from __future__ import annotations

import socket

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.network import interface_address, interface_for_route
from entrypoint.job.detect import Job
from entrypoint.rank.rendezvous import rendezvous_variables, resolve_master

NOWHERE = "no-such-node.invalid"


def own_address() -> str:
    """This machine's own address in a network; skips the test where it has none but loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("needs a network interface with a route besides loopback")
        return str(probe.getsockname()[0])


def test_resolve_master_unknown_name_raises_after_timeout() -> None:
    with pytest.raises(UserError, match=rf"MASTER_ADDR={NOWHERE}: does not resolve here \(.*\) after 1 s") as error:
        resolve_master(NOWHERE, 1)
    assert error.value.code == ExitCode.RENDEZVOUS


THERE = Job("srun", 1, 2, 0, 1)
HERE = Job("srun", 0, 2, 0, 1)


@pytest.mark.parametrize("name", ["localhost", "127.0.1.1"])
def test_rendezvous_variables_loopback_on_other_node_raises(name: str) -> None:
    with pytest.raises(
        UserError, match=rf"MASTER_ADDR={name}: resolves to (127|::1).* here, which other nodes cannot"
    ) as error:
        rendezvous_variables({"MASTER_ADDR": name}, 1, THERE)
    assert error.value.code == ExitCode.RENDEZVOUS


def test_rendezvous_variables_loopback_on_master_is_allowed() -> None:
    own = interface_for_route(own_address())
    others = tuple(name for _, name in socket.if_nameindex() if name not in ("lo", own) and interface_address(name))
    if others:
        with pytest.raises(UserError, match=r"Set MASTER_ADDR to this node's address .* or GLOO_SOCKET_IFNAME"):
            rendezvous_variables({"MASTER_ADDR": "127.0.1.1"}, 1, HERE)
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
