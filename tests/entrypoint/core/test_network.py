"""Ports that are held for a run, and the addresses of this node."""

from __future__ import annotations

import socket

import pytest

from entrypoint.core.network import hold_port, is_own_address, try_listen


def test_held_port_goes_to_the_ranks_alone() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        with socket.socket(held.family) as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        listener = try_listen(port)  # as torch's store does, with SO_REUSEADDR
        assert listener is not None
        with listener:
            assert try_listen(port) is None
            with pytest.raises(OSError, match="in use"):
                hold_port(port)


@pytest.mark.parametrize(("address", "own"), [("127.0.0.1", True), ("127.1.2.3", True), ("192.0.2.1", False)])
def test_own_addresses_are_those_that_can_be_bound(address: str, own: bool) -> None:
    assert is_own_address(address) == own
