"""Which ranks rank 0's monitor admits, and with which exit code a rank's monitor ends."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.supervise.admission import Admission, FirstFailure, RankEndpoint, final_exit_code
from entrypoint.supervise.channel_server import NODE_LOST_CODE

FIRST = RankEndpoint(0, "node1", "node1", 65000, "7.0", world_size=3, version="0.2", pid=1)
SECOND = replace(FIRST, rank=1, node="node2", pid=2)


def refused(admission: Admission, rank: RankEndpoint) -> FirstFailure:
    """Return the failure with which a rank ends the job."""
    answer, failure = admission.admit(rank)
    assert answer == ""
    assert failure is not None
    return failure


def test_each_rank_of_the_run_is_admitted_once() -> None:
    admission = Admission(FIRST)
    assert admission.admit(SECOND) == ("", None)
    assert admission.admit(SECOND) == ("", None), "the same process connects again"
    assert admission.admitted == {1: SECOND}
    failure = refused(admission, replace(SECOND, node="node3", pid=9))
    assert failure.how.startswith("rank 1 is started twice, on node2 and on node3. Give each node its own")


@pytest.mark.parametrize(
    ("other", "code", "said"),
    [
        (replace(SECOND, version="0.1"), ExitCode.MACHINE, "node1 runs version 0.2 of the entrypoint, node2 runs"),
        (replace(SECOND, world_size=2), ExitCode.USAGE, "the nodes disagree: 3 ranks by node1, 2 by node2."),
        (replace(SECOND, rank=0), ExitCode.USAGE, "rank 0 is started twice, on node1 and on node2."),
    ],
)
def test_nodes_that_disagree_are_named(other: RankEndpoint, code: ExitCode, said: str) -> None:
    failure = refused(Admission(FIRST), other)
    assert (failure.code, failure.before_start) == (code, True)
    assert failure.how.startswith(said)


def test_rank_of_another_run_is_sent_on() -> None:
    admission = Admission(FIRST)
    assert admission.admit(replace(SECOND, token="7.1")) == ("7.0", None)
    assert admission.admitted == {}


def test_node_with_another_command_by_hand_is_named() -> None:
    own = replace(FIRST, token="61000 program x.py A (0)", is_unique=False)
    other = replace(SECOND, token="61000 program x.py B (1)", is_unique=False)
    assert "node1 runs `x.py A`, node2 runs `x.py B`. Start the same command" in refused(Admission(own), other).how
    complete = Admission(own, admitted={1: replace(own, rank=1)})
    assert complete.admit(other) == (own.token, None), "this run has its rank 1"
    assert Admission(own).admit(replace(other, is_unique=True)) == (own.token, None), "a launcher's run"


def test_second_run_of_one_command_is_sent_on() -> None:
    own = replace(FIRST, is_unique=False)
    admission = Admission(own)
    assert admission.admit(replace(SECOND, is_unique=False)) == ("", None)
    assert admission.admit(replace(SECOND, is_unique=False, pid=9)) == ("7.0 (it has its rank 1)", None)


def test_node_without_ranks_takes_no_place() -> None:
    admission = Admission(FIRST)
    assert admission.admit(replace(SECOND, world_size=0)) == ("", None)
    assert admission.admitted == {}


KILL, TERM = -signal.SIGKILL, -signal.SIGTERM


def failed(code: int, *, before_start: bool = False) -> FirstFailure:
    return FirstFailure(1, "node1", code, "", before_start=before_start)


@pytest.mark.parametrize(
    ("code", "received", "failure", "forced", "expected"),
    [
        pytest.param(0, (), None, False, 0, id="success"),
        pytest.param(9, (), None, False, 9, id="its own code"),
        pytest.param(75, (), None, False, 75, id="it was preempted"),
        pytest.param(KILL, (), None, False, 5, id="killed"),
        pytest.param(TERM, (signal.SIGTERM,), None, False, 143, id="ended by the launcher"),
        pytest.param(143, (signal.SIGTERM,), None, False, 143, id="its handler of the launcher's signal"),
        pytest.param(75, (signal.SIGTERM,), None, False, 75, id="it saved at the launcher's signal"),
        pytest.param(KILL, (signal.SIGTERM,), None, False, 5, id="killed after another signal"),
        pytest.param(0, (), failed(9), False, 0, id="success after another failure"),
        pytest.param(5, (), failed(9), False, 5, id="its collective failed after another failure"),
        pytest.param(1, (), failed(9), False, 1, id="its own end after another failure"),
        pytest.param(TERM, (), failed(9), True, 5, id="ended by this monitor"),
        pytest.param(0, (), failed(9), True, 5, id="success when ended by this monitor"),
        pytest.param(TERM, (), failed(NODE_LOST_CODE), True, 5, id="a node is lost"),
        pytest.param(TERM, (), failed(2), True, 2, id="another rank has a wrong setting"),
        pytest.param(KILL, (), failed(75), True, 75, id="another rank was preempted"),
        pytest.param(TERM, (), failed(4, before_start=True), True, 4, id="another node has not started"),
        pytest.param(TERM, (signal.SIGTERM,), failed(9), False, 5, id="ended by the launcher after another failure"),
        pytest.param(TERM, (signal.SIGTERM,), failed(143), False, 143, id="all were ended by the launcher"),
    ],
)
def test_final_exit_code(
    code: int, received: tuple[int, ...], failure: FirstFailure | None, forced: bool, expected: int
) -> None:
    assert final_exit_code(code, received, failure, forced=forced) == expected


def test_code_is_one_of_the_documented_table() -> None:
    assert isinstance(final_exit_code(KILL, (), None, forced=False), ExitCode)
