"""One writer for a run's folder: who is alive keeps it, who is gone loses it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from tests.conftest import Entrypoint
from tests.processes import children
from tests.train.given import SMALL
from tests.train.started import Started
from train.report.run_lock import LOCK_NAME, RunLock, identity


def test_run_lock_is_exclusive_until_released(tmp_path: Path) -> None:
    with RunLock() as one:
        one.acquire(tmp_path)
        assert one.is_held
        with (
            RunLock() as other,
            pytest.raises(UserError, match=rf"process {os.getpid()} on .* is training in this folder"),
        ):
            other.acquire(tmp_path)
        assert one.is_held
    assert not (tmp_path / LOCK_NAME).exists()
    with RunLock() as other:
        other.acquire(tmp_path)


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"born": "1"}])
def test_lock_of_a_dead_or_replaced_process_is_taken_at_once(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / LOCK_NAME).write_text(json.dumps(identity() | change))
    with RunLock(stale_s=60) as lock:
        lock.acquire(tmp_path)
        assert lock.is_held


@pytest.mark.parametrize(
    "content", ["", "{", "[]", json.dumps({"node": "far", "pid": 7, "pids": "another", "born": "1"})]
)
def test_run_lock_stale_is_taken_with_a_notice(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    with RunLock(stale_s=0.5) as lock:
        lock.acquire(tmp_path)
        assert lock.is_held
    assert f"{tmp_path} is locked by process " in capsys.readouterr().err


def test_run_lock_with_remote_heartbeat_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(beat_s=0.1) as far:
        far.acquire(tmp_path)
        monkeypatch.setattr("train.report.run_lock.pid_namespace", lambda: "another")
        with RunLock(stale_s=5) as near, pytest.raises(UserError, match="is training in this folder"):
            near.acquire(tmp_path)


@pytest.mark.launch
def test_lock_excludes_two_jobs_and_a_crash_leaves_none(entrypoint: Entrypoint) -> None:
    env = SMALL | {"TRAIN_RUN_NAME": "run", "TRAIN_TENSORBOARD": "0", "TRAIN_RESUME": "auto", "LAUNCH_QUIET": "1"}
    first = Started(entrypoint, env | {"TRAIN_EPOCHS": "100000"})
    first.wait_for("epoch 2/")
    second = entrypoint("train", env=env)
    assert second.code == 2
    (line,) = second.error_lines
    (rank,) = children(first.process.pid)
    assert f"runs/run: process {rank} on " in line
    os.kill(rank, signal.SIGKILL)
    first.ended()
    began = time.monotonic()
    third = entrypoint("train", env=env | {"TRAIN_RESUME_ALLOW_CHANGED": "1"})
    assert third.code == 0, third.err
    assert "locked" not in third.err
    assert time.monotonic() - began < 60
