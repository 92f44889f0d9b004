"""Nodes whose names resolve badly or not at all: the ranks meet, or are refused before they wait."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Cluster, Started, in_all
from tests.conftest import script

pytestmark = pytest.mark.cluster

LOCAL = "127.0.0.1 localhost\n"
# Agents that meet do so by names too.
WAYS = [
    pytest.param({}, id="agents alone"),
    pytest.param({"LAUNCH_MAX_RESTARTS": "1"}, id="agents that meet", marks=in_all),
]


def address(cluster: Cluster, node: str) -> str:
    """Return a node's address in the network that they share."""
    return cluster.run(node, "getent", "ahostsv4", node).out.split()[0]


def start(cluster: Cluster, master: str, **more: str) -> list[Started]:
    """Start the same command on both nodes."""
    return cluster.agents("train", env={"TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "many", "MASTER_ADDR": master, **more})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("first", "second", "master"),
    [
        ("127.0.1.1 node1\n{two} node2\n", "{one} node1\n127.0.1.1 node2\n", "node1"),
        ("", "", "{one}"),
        ("{one} node1\n", "{one} node1\n", "node1"),
    ],
    ids=[
        "each one's own name is its loopback, as on Debian",
        "no names at all, an address",
        "the first one's name alone",
    ],
)
def test_ranks_connect_by_host_name(
    cluster: Cluster, way: dict[str, str], first: str, second: str, master: str
) -> None:
    known = {"one": address(cluster, "node1"), "two": address(cluster, "node2")}
    for node, text in (("node1", first), ("node2", second)):
        cluster.do("hosts", node, script(cluster.folder, f"hosts-{node}", LOCAL + text.format(**known)))
    started = start(cluster, master.format(**known), **way)
    assert [one.code() for one in started] == [0, 0], "\n".join(one.text()[-2000:] for one in started)
    assert cluster.summary("many")["world_size"] == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("", "MASTER_ADDR=node1: does not resolve here"),
        ("127.0.1.1 node1\n", "MASTER_ADDR=node1: resolves to 127.0.1.1 here, which other nodes cannot reach"),
    ],
    ids=["it does not resolve there", "it is loopback there"],
)
def test_unreachable_master_name_is_reported(cluster: Cluster, way: dict[str, str], second: str, said: str) -> None:
    cluster.do("hosts", "node2", script(cluster.folder, "hosts", LOCAL + second))
    _, two = start(cluster, "node1", LAUNCH_RENDEZVOUS_TIMEOUT_S="5", **way)
    assert two.code(30) == 4, two.text()
    assert two.text().splitlines()[-1].startswith(f"entrypoint: error: {said}"), two.text()
