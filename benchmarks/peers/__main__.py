"""The trainer compared with common tools: `make bench-peers`.

All train the same model on 10,000 of CIFAR-10's images as files.
Batch size, optimizer, learning rates and number of steps are equal, in fp32 on all cores.
All flip and shift the images, except for the loop written by hand.
The other tools load with one worker per core, and otherwise with their defaults.
Ours is `entrypoint train` with its own defaults, including checkpoints and events.
It runs once without decoded images (cold), and once with those of an earlier run.
All alternate ROUNDS (5) times; results are medians and range.
They are the images per second after the first steps, and the seconds of the whole command.
The whole command includes start, evaluation and saving. A tool that is not installed is a row with that reason.
Claim: ours is faster than each of them in both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.book.measure import LIMIT_S, cifar10_settings
from benchmarks.runner import NotMeasuredError, Recording, parse_options, recording, take_turns
from entrypoint.core.console import last_error_line

PYTHON = (sys.executable, "-m")
ACCELERATE = (*PYTHON, "accelerate.commands.launch", "--cpu")
TORCHRUN = (*PYTHON, "torch.distributed.run", "--standalone")
HERE = "benchmarks.peers"
OURS, COLD = "ours", "ours, cold"
EACH = 1000  # images of a class
# model → batch, steps
MODELS = {"cnn": (64, 200), "resnet18": (128, 50)}


@dataclass(frozen=True)
class Peer:
    """A command without its arguments, empty for ours; `needs` is the required module."""

    name: str
    command: Sequence[str] = ()
    needs: str = "torch"


PEERS: Mapping[int, Sequence[Peer]] = {
    1: (
        Peer("plain loop", (*PYTHON, f"{HERE}.plain")),
        Peer("torchvision's reference", (*PYTHON, f"{HERE}.reference")),
        Peer("Lightning", (*PYTHON, f"{HERE}.lightning"), "pytorch_lightning"),
        Peer("accelerate launch", (*ACCELERATE, "--num_processes=1", "-m", f"{HERE}.accelerate_loop"), "accelerate"),
        Peer(COLD),
        Peer(OURS),
    ),
    2: (
        Peer("torchrun, plain loop", (*TORCHRUN, "--nproc-per-node=2", "-m", f"{HERE}.plain")),
        # `accelerate launch --cpu --num_processes=2` starts one process, without a message.
        Peer("torchrun, accelerate", (*TORCHRUN, "--nproc-per-node=2", "-m", f"{HERE}.accelerate_loop"), "accelerate"),
        Peer(OURS),
    ),
}


def start(peer: Peer, model: str, ranks: int, data: Mapping[str, str]) -> tuple[float, float]:
    """Run a peer once; return its rate and its seconds. Raises `NotMeasuredError` with its last line if it fails."""
    if not importlib.util.find_spec(peer.needs):
        raise NotMeasuredError(f"{peer.needs} is not installed")
    batch, steps = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        out = Path(folder, "rate.json")
        task = {"data": data["TRAIN_DATA_DIR"], "model": model, "batch": batch, "steps": steps, "out": out}
        command = [*peer.command, *(f"--{name}={value}" for name, value in task.items())]
        environ = dict(os.environ)
        if not peer.command:
            flags = {"model": model, "batch-size": batch, "steps": steps, "output-dir": folder, "run-name": "run"}
            command = [*PYTHON, "entrypoint", "train", *(f"--{name}={value}" for name, value in flags.items())]
            command.append(f"--nproc-per-node={ranks}")
            environ |= {**data, "LAUNCH_QUIET": "1", **({"TRAIN_CACHE_DIR": folder} if peer.name == COLD else {})}
        started = time.perf_counter()
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        seconds = time.perf_counter() - started
        if done.returncode or not (out.exists() or not peer.command):
            raise NotMeasuredError(f"ended with {done.returncode}: {last_error_line(done.stderr, 'no message')}")
        if peer.command:
            return json.loads(out.read_text())["images_per_second"], seconds
        return batch / json.loads(Path(folder, "run/summary.json").read_text())["step_seconds"], seconds


def compare(model: str, ranks: int, data: Mapping[str, str], rounds: int, record: Recording) -> None:
    """Run all peers alternately and print their tables."""
    batch, steps = MODELS[model]
    title = f"{model}, {ranks} rank{'s' * (ranks > 1)}, batch {batch}"
    tables = (
        record.table(title, "images/s", OURS),
        record.table(f"{title}, command of {steps} steps", "s", OURS),
    )
    take_turns({peer.name: partial(start, peer, model, ranks, data) for peer in PEERS[ranks]}, tables, rounds)


def main() -> None:
    """Print a table for each model and number of ranks."""
    parser = argparse.ArgumentParser(prog="make bench-peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS), help="with commas")
    parser.add_argument("--ranks", default="1,2", help="with commas")
    args = parse_options(parser)
    with cifar10_settings(EACH) as data, recording("peers", args) as record:
        if "TRAIN_DATA_DIR" not in data:
            sys.exit("CIFAR10_IMAGES is not set: name the folder or the .tar.xz of CIFAR-10's images")
        for model in args.models.split(","):
            for ranks in args.ranks.split(","):
                compare(model, int(ranks), data, args.rounds, record)


if __name__ == "__main__":
    main()
