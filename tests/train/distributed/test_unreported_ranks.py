"""Which ranks are missing from a failed exchange, and where they are."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from entrypoint.core.network import hold_port
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment
from tests.processes import killed_at_end, state, wait_until
from train.distributed import unreported_ranks
from train.distributed.rendezvous import Peer
from train.distributed.unreported_ranks import (
    StepCounter,
    call_roll,
    locate_missing,
    not_reported,
    report_key,
    steps_of,
)

pytestmark = [pytest.mark.launch, pytest.mark.versions]


@pytest.mark.parametrize("absent", [set(), {0}, {7}, {3, 4}, set(range(1000))])
def test_not_reported_finds_all_with_few_questions(absent: set[int]) -> None:
    asked = []

    def check(keys: Sequence[str]) -> bool:
        asked.append(keys)
        return not any(report_key(rank) in keys for rank in absent)

    assert not_reported(check, range(1000)) == sorted(absent)
    assert len(asked) <= 1 + 2 * 10 * min(len(absent), 100) + 2 * len(absent)


def test_call_roll_finds_rank_that_does_not_report() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    other = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
    found: list[list[int] | None] = []
    thread = threading.Thread(target=lambda: found.append(call_roll(other, 2, [0, 1, 2])))
    thread.start()
    assert call_roll(store, 0, [0, 1, 2]) == [1]
    thread.join()
    assert found == [[1]]


HOST = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=600), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_call_roll_ends_while_host_of_store_is_stopped() -> None:
    with killed_at_end([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=600), wait_for_workers=False)
        host.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(host.pid) == "T")
        assert call_roll(store, 1, [0, 1]) is None


STEPS = """
import sys
from train.distributed.unreported_ranks import STEPS
STEPS.note(41)
print(1, flush=True)
sys.stdin.read()
"""


def test_locate_missing_tells_own_node_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreported_ranks, "STEPS", StepCounter())  # an earlier test of this process may have trained
    own = Peer(0, socket.gethostname(), "127.0.0.1", os.getpid())
    with killed_at_end([sys.executable, "-c", STEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        assert steps_of(rank.pid) == 41
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(rank.pid) == "T")
        peers = (own, Peer(1, own.node, own.address, rank.pid), Peer(2, "another", "10.0.0.2", 1))
        stopped = f"(process {rank.pid}) is stopped (SIGSTOP)"
        assert locate_missing(0, peers, [1, 2]) == {1: stopped, 2: "has not reported that it waits"}
        assert locate_missing(0, peers, []) == {}
        assert locate_missing(0, peers, None) == {1: stopped}, "no answer about other nodes"
        rank.kill()
        rank.wait()
        assert locate_missing(0, peers, [1]) == {1: f"(process {rank.pid}) is no longer running"}


@pytest.mark.parametrize(("stopped", "backend"), [(1, "auto"), pytest.param(0, "gloo", marks=pytest.mark.slow)])
def test_stopped_rank_of_trainer_is_named_with_its_step(entrypoint: Entrypoint, stopped: int, backend: str) -> None:
    words = ("--nproc-per-node=2", "--oversubscribe=1", "--dataset=digits", "--epochs=100000", "--run-name=two")
    limits = ("--collective-timeout-s=6", "--grace-period-s=1", f"--backend={backend}")
    env = {**clean_environment(), "HOME": str(entrypoint.home), "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"}
    folder = entrypoint.folder / "runs/two"
    with killed_at_end(
        [PYTHON, "-m", "entrypoint", "train", *words, *limits], cwd=entrypoint.folder, env=env, text=True,
        stderr=subprocess.PIPE,
    ) as job:  # fmt: skip
        wait_until(lambda: bool((folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text()))
        process = json.loads((folder / "ranks.json").read_text())[stopped]["process"]
        os.kill(process, signal.SIGSTOP)
        _, err = job.communicate(timeout=LAUNCH_LIMIT_S)
    assert job.returncode == 5
    last = err.splitlines()[-1]
    other = 1 - stopped
    assert last.startswith(
        f"entrypoint: error: rank {other}: lost rank {stopped} on {socket.gethostname()} (127.0.0.1)"
    )
    assert f"; rank {stopped} (process {process}) is stopped (SIGSTOP) after step " in last
    assert f", rank {other} after step " in last
