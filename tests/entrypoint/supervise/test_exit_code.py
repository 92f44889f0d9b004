"""The exit code of a rank's monitor, a row for each way in which its program and the others end."""

from __future__ import annotations

import signal

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.supervise.admission import FirstFailure, final_exit_code
from entrypoint.supervise.channel_server import NODE_LOST_CODE

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
