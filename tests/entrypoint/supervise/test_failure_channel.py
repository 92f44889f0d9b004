"""Guards know of each other's ranks: who failed first, and whose node has fallen silent."""

from __future__ import annotations

import socket
import time

import pytest

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.supervise.failure_channel import NODE_LOST_CODE, FailureChannel, FirstFailure
from tests.entrypoint.supervise.channels import bond, bonds, joined, within
from tests.net import free_port, listen_on

pytestmark = pytest.mark.launch


def test_all_learn_who_failed_first_and_keep_to_it() -> None:
    leader, one, two = bonds(3)
    assert joined(leader, 2)
    one.ended(9, "killed by SIGKILL")
    failed = FirstFailure(1, "node1", 9, "killed by SIGKILL")
    assert within(5, lambda: leader.verdict == two.verdict == failed)
    two.ended(5, "exit code 5")
    leader.ended(5, "exit code 5")
    assert leader.verdict == failed


def test_ranks_that_end_well_tell_nobody_to_end() -> None:
    leader, one, two = bonds(3)
    assert joined(leader, 2)
    one.ended(0, "exit code 0")
    leader.ended(0, "exit code 0")
    assert not within(1.5, lambda: any(bond.verdict for bond in (leader, one, two)))


def test_a_rank_that_ends_well_never_takes_it_for_a_loss_that_the_others_hang_up() -> None:
    for _ in range(10):
        leader, one = bonds(2)
        assert joined(leader, 1)
        one.ended(0, "exit code 0")
        assert within(5, lambda leader=leader: not leader.peers)
        assert within(5, lambda one=one: not one.peers)
        assert (leader.verdict, one.verdict) == (None, None)
        leader.ended(0, "exit code 0")


def test_a_rank_that_comes_late_learns_what_has_happened() -> None:
    port = free_port()
    leader = bond(0, (port,))
    leader.fail(FirstFailure(0, "node0", 3, "exit code 3"))
    late = bond(1, (port,))
    assert within(10, lambda: late.verdict is not None)


def test_guards_that_have_nothing_to_say_leave_the_cores_to_the_ranks() -> None:
    made = bonds(5)
    assert joined(made[0], 4)
    began, used = time.monotonic(), time.process_time()
    time.sleep(3)
    share = (time.process_time() - used) / (time.monotonic() - began)
    assert share < 0.05, "of one core, all five together"
    made[0].ended(0, "exit code 0")


def test_a_node_that_falls_silent_is_lost() -> None:
    port = free_port()
    leader = bond(0, (port,), timeout_s=1.0)
    assert within(10, lambda: port_answers(port))
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(
            b'{"hello": {"rank": 1, "node": "node1", "host": "", "ports": [], "token": "x"}}\n{"joined": true}\n'
        )
        assert within(10, lambda: leader.verdict is not None)
    assert leader.verdict == FirstFailure(1, "node1", NODE_LOST_CODE, "its node is lost: silent for 1 s")


def port_answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_another_jobs_guard_on_the_same_port_is_none_of_ours() -> None:
    leader, stranger = bonds(2, tokens=("job 7", "job 8"))
    assert not joined_within_a_second(leader)
    stranger.ended(5, "exit code 5")
    assert not within(1, lambda: leader.verdict is not None)


def joined_within_a_second(leader: FailureChannel) -> bool:
    return within(1, lambda: bool(leader.peers))


def test_ranks_meet_on_the_next_port_where_one_is_taken_and_all_learn_which() -> None:
    guards, ranks = (free_port(), free_port()), (free_port(), free_port())
    with listen_on(guards[0]), listen_on(ranks[0]):  # another program's, which takes connections and says nothing
        one = bond(1, guards, meet=ranks)
        leader = bond(0, guards, meet=ranks)
        told: list[str] = []
        assert one.wait_for_port(30, told.append) == leader.wait_for_port(1, told.append) == ranks[1]
    one.ended(9, "exit code 9")
    assert within(5, lambda: leader.verdict is not None)


def test_an_outsider_on_the_port_does_no_harm(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    leader = bond(0, (port,), timeout_s=1)
    assert within(10, lambda: port_answers(port))
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"hello": 7}\n', b'{"hello": {"rank": 1}}\n'):
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(text)
            while peer.recv(4096):
                pass
    assert leader.verdict is None
    assert "Traceback" not in capfd.readouterr().err


def test_a_rank_0_that_does_not_answer_is_told_meanwhile_and_refused_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("entrypoint.supervise.failure_channel.LOG_INTERVAL_S", 0.2)
    told: list[str] = []
    port = free_port()
    with pytest.raises(
        UserError, match=f"rank 1: rank 0 at 127.0.0.1, ports {port} to {port}, did not answer"
    ) as error:
        bond(1, (port,), meet=(1, 2)).wait_for_port(1, told.append)
    assert error.value.code == ExitCode.RENDEZVOUS
    assert told[0] == f"rank 1 waits for rank 0 at 127.0.0.1, ports {port} to {port} (0 of 1 s)"


@pytest.mark.parametrize("which", ["guards", "ranks"])
def test_where_every_port_is_taken_it_says_so(which: str) -> None:
    free, taken = (free_port(),), (free_port(),)
    with listen_on(taken[0]), pytest.raises(UserError, match="are all taken here") as error:
        bond(0, taken if which == "guards" else free, meet=free if which == "guards" else taken)
    assert error.value.code == ExitCode.RENDEZVOUS
