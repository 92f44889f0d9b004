"""Ports that are held for a run, and the addresses of this node."""

from __future__ import annotations

import socket

import pytest

from entrypoint.core.network import addresses_towards, hold_port, is_own_address, try_listen


def test_held_port_goes_to_the_ranks_alone() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        with socket.socket(held.family) as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        (listener,) = try_listen(port)  # as torch's store does, with SO_REUSEADDR
        assert listener is not None
        with listener:
            assert try_listen(port) == []
            with pytest.raises(OSError, match="in use"):
                hold_port(port)


@pytest.mark.parametrize(("address", "own"), [("127.0.0.1", True), ("127.1.2.3", True), ("192.0.2.1", False)])
def test_own_addresses_are_those_that_can_be_bound(address: str, own: bool) -> None:
    assert is_own_address(address) == own


def test_address_that_is_not_ready_is_left_out(port: int) -> None:
    (listening,) = try_listen(port, ("192.0.2.9", "127.0.0.1"))
    assert listening.getsockname()[0] == "127.0.0.1"
    listening.close()


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")])
def test_listening_is_limited_to_the_addresses(addresses: tuple[str, ...], port: int) -> None:
    listening = try_listen(port, addresses)
    assert [one.getsockname()[0] for one in listening] == list(addresses)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", port), timeout=5)
    assert try_listen(port, ("127.0.0.9", *addresses)) == [], "taken on one of them"
    for one in (*listening, *try_listen(port, ("127.0.0.9",))):
        one.close()


def test_addresses_towards_peers_are_those_of_name_and_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"node1": ["10.0.0.1"], "debian": ["127.0.1.1"], "service": ["192.0.2.9"], "localhost": ["127.0.0.1"]}

    def resolve(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in names[name]]

    monkeypatch.setattr("entrypoint.core.network.socket.getaddrinfo", resolve)
    monkeypatch.setattr("entrypoint.core.network.is_own_address", lambda address: not address.startswith("192."))
    monkeypatch.setattr("entrypoint.core.network.interface_addresses", lambda name: (f"10.1.0.1/{name}",))
    assert addresses_towards("node1", "") == ("10.0.0.1",)
    assert addresses_towards("node1", "ib0") == ("10.0.0.1", "10.1.0.1/ib0")
    assert addresses_towards("debian", "eth0") == ("10.1.0.1/eth0", "127.0.1.1")
    assert addresses_towards("debian", "") == addresses_towards("service", "") == addresses_towards("gone", "") == ()
    assert addresses_towards("localhost", "lo") == ("127.0.0.1",)
