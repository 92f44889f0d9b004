"""The simulation of a large job's failure channel, on a small one."""

from __future__ import annotations

import pytest

from benchmarks.channel import measure

pytestmark = pytest.mark.launch


def test_simulated_nodes_join_and_hear_of_the_failure() -> None:
    measured = measure(nodes=4, ranks=3, idle_s=0.2)
    assert (measured["joined"], measured["lost"]) == (9, 0), "rank 0 is alone on its node"
    assert measured["false_loss"] is None
    assert measured["spread_s"] > 0
