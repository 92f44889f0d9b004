"""Nothing lost: runs that are killed at random moments, over and over, end with the weights of an undisturbed one.

20 kills by default, KILLS=100 for as many as the project promises.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from tests.conftest import CORES, LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment
from tests.train.given import SMALL

pytestmark = pytest.mark.launch
KILLS = int(os.environ.get("KILLS", "20"))
# Kills of one run before it may go on to its end.
SERIES = 5
MARK = "KILLED_AT_RANDOM"
KINDS = [(1, "ddp"), (2, "ddp"), (2, "fsdp")] if CORES > 1 else [(1, "ddp")]
LONG = SMALL | {"TRAIN_EPOCHS": "40", "TRAIN_TENSORBOARD": "0", "TRAIN_EMA_DECAY": "0.9", "LAUNCH_QUIET": "1"}


def marked(mark: str) -> Iterator[tuple[int, bool]]:
    """Yield each process of a run, and whether it is a rank."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                environ = (folder / "environ").read_bytes().split(b"\0")
                if f"{MARK}={mark}".encode() in environ:
                    yield int(folder.name), any(one.startswith(b"RANK=") for one in environ)


def kill(victim: str, process: subprocess.Popen[str], mark: str, draw: random.Random) -> None:
    """Kill one process of the run, or all."""
    if victim == "launcher":
        process.kill()
        return
    found = list(marked(mark))
    ranks = [pid for pid, rank in found if rank]
    for pid in [draw.choice(ranks)] if victim == "rank" and ranks else [pid for pid, _ in found]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def disturb(entrypoint: Entrypoint, env: dict[str, str], draw: random.Random) -> str:
    """Start or go on with a run and kill it at a random moment; return who was killed, nothing if it had ended."""
    mark, victim = str(draw.random()), draw.choice(("rank", "launcher", "everything"))
    process = subprocess.Popen(
        [PYTHON, "-m", "entrypoint", "train"],
        cwd=entrypoint.folder,
        env={**clean_environment(), **env, "HOME": str(entrypoint.home), MARK: mark, "TRAIN_RESUME": "auto"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    if draw.random() < 0.8:  # else during its start
        process.stdout.readline()
    time.sleep(draw.uniform(0, 1.2))
    ended = process.poll() is not None
    kill(victim, process, mark, draw)
    process.communicate(timeout=LAUNCH_LIMIT_S)
    until = time.monotonic() + LAUNCH_LIMIT_S
    while any(marked(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not list(marked(mark)), "processes are left"
    return "" if ended else victim


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallelism"), KINDS)
def test_run_killed_repeatedly_ends_as_if_uninterrupted(entrypoint: Entrypoint, ranks: int, parallelism: str) -> None:
    env = LONG | {"LAUNCH_NPROC_PER_NODE": str(ranks), "TRAIN_PARALLELISM": parallelism}
    whole = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "whole", "TRAIN_CHECKPOINT_EVERY": "0"})
    draw, killed, amid_saving = random.Random(ranks), Counter[str](), 0
    for series in count():
        if killed.total() - killed[""] >= KILLS // len(KINDS):  # a kill that comes after the run's end is made up for
            break
        name = {"TRAIN_RUN_NAME": f"killed{series}"}
        for _ in range(SERIES):
            killed[disturb(entrypoint, env | name, draw)] += 1
            amid_saving += len(list((entrypoint.folder / f"runs/killed{series}/checkpoint").glob(".step-*")))
        ended = entrypoint.train(env=env | name | {"TRAIN_RESUME": "auto"})
        assert ended["weights_sha256"] == whole["weights_sha256"]
        assert ended["test_loss"] == whole["test_loss"]
        assert ended["steps"] == whole["steps"]
        assert not list((entrypoint.folder / f"runs/killed{series}/checkpoint").glob(".*"))
        assert killed[""] < max(2, KILLS // len(KINDS)), "most runs end before they can be killed"
    print(f"killed with {ranks} ranks, {parallelism}: {dict(killed)}, {amid_saving} while a checkpoint was written")
