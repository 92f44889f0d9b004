"""Guards know of each other's ranks: who failed first, and whose node has fallen silent."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from entrypoint.bond import NODE_LOST, Bond, Place, Verdict


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def bonds(count: int, timeout_s: float = 30, tokens: tuple[str, ...] = ()) -> list[Bond]:
    port = free_port()
    tokens = tokens or ("job 7",) * count
    return [Bond(Place(rank, f"node{rank}", "127.0.0.1", port, tokens[rank]), timeout_s) for rank in range(count)]


def within(limit_s: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + limit_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def joined(leader: Bond, count: int) -> bool:
    return within(10, lambda: len(leader.peers) == count)


def test_all_learn_who_failed_first_and_keep_to_it() -> None:
    leader, one, two = bonds(3)
    assert joined(leader, 2)
    one.ended(9, "killed by SIGKILL")
    failed = Verdict(1, "node1", 9, "killed by SIGKILL")
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


def test_a_rank_that_comes_late_learns_what_has_happened() -> None:
    port = free_port()
    leader = Bond(Place(0, "node0", "127.0.0.1", port, "x"), 30)
    leader.fail(Verdict(0, "node0", 3, "exit code 3"))
    late = Bond(Place(1, "node1", "127.0.0.1", port, "x"), 30)
    assert within(10, lambda: late.verdict is not None)


def test_a_node_that_falls_silent_is_lost() -> None:
    port = free_port()
    leader = Bond(Place(0, "node0", "127.0.0.1", port, "x"), 1.0)
    assert within(10, lambda: port_answers(port))
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b'{"hello": {"rank": 1, "node": "node1", "host": "", "port": 0, "token": "x"}}\n')
        assert within(10, lambda: leader.verdict is not None)
    assert leader.verdict == Verdict(1, "node1", NODE_LOST, "its node is lost: silent for 1 s")


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


def joined_within_a_second(leader: Bond) -> bool:
    return within(1, lambda: bool(leader.peers))
