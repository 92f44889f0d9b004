"""Images per second from JPEG files to normalized batches, compared with other loaders: `make bench-stream`.

Conditions: one process with two workers or threads, files in the page cache unless a row says `cold`.
Data: photo-like JPEGs that the benchmark writes itself, 768 of 500x375 (60 to 130 KB) and 4,096 of 96x96.
Task: to evaluate, resize and cut out the middle; to train, random resized crop and flip; normalized floats out.
`limit` decodes whole images with libjpeg-turbo in two threads and drops them.
All rows alternate ROUNDS times, each in a process of its own, for SECONDS after its workers have started.
Figures are medians. Memory is the PSS of all processes while they load, imports included.
`training` is the whole trainer, from the stream and from memory.
Rows whose packages are not installed say so: `make bench-stream` installs them into .venv-stream.
Claim: ahead of every row but the limit, at 0.6 of it or more.
It takes at most 1.2 times the memory of torchvision's reference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.runner import NotMeasuredError, Recording, parse_options, recording, take_turns
from benchmarks.stream.data import SETS, make_folder
from benchmarks.stream.loaders import LOADERS
from entrypoint.core.console import last_error_line

ROOT = Path(__file__).resolve().parents[2]
SIDES = {"500x375": 224, "96x96": 96}
COLD = ("ours", "torchvision's reference")
# Model, image size, batch size, steps.
TRAININGS = {"the book's CNN at 64": ("cnn", 64, 64, 24), "ResNet-18 at 128": ("resnet18", 128, 32, 10)}
LIMIT = "limit: decoding alone"
# Our own loader runs as in a run, whose allocator keeps the memory of batches.
PLANNED = ("-m", "entrypoint", "run", "--quiet", "--nproc-per-node=1")


def main() -> None:
    """Print a table for each data set and task, then the trainer's rates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--sets", nargs="*", choices=[*SETS], default=[*SETS])
    parser.add_argument("--only", nargs="*", choices=[*LOADERS], default=[*LOADERS])
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), f"bench-stream-{os.getuid()}"))
    args = parse_options(parser)
    args.folder.mkdir(parents=True, exist_ok=True)
    with recording("stream", args) as record:
        for name in args.sets:
            data = make_folder(args.folder, name)
            for task in ("evaluate", "train"):
                compare_loaders(data, name, task, args, record)
            if not args.no_training:
                compare_training(data, name, args.rounds, record)


def compare_loaders(data: Path, name: str, task: str, args: argparse.Namespace, record: Recording) -> None:
    """Measure all loaders in turns, and print their tables."""
    what = "training crop and flip" if task == "train" else "evaluation"
    title = f"{name} to {SIDES[name]}x{SIDES[name]}, {what}"
    tables = record.table(title, "images/s", LIMIT), record.table(f"{title}, memory", "MiB of PSS")
    works = {}
    for loader in args.only:
        works[loader] = partial(measure, loader, data, task, SIDES[name], args.seconds)
        if loader in COLD:
            works[f"{loader}, cold"] = partial(works[loader], cold=True)
    take_turns(works, tables, args.rounds)


def drop_cached(folder: Path) -> None:
    """Have the kernel forget the files' content."""
    for path in folder.glob("*/*.jpg"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    loader: str, data: Path, task: str, side: int, seconds: float, *, cold: bool = False
) -> tuple[float, float]:
    """Return a loader's images per second and memory; raises `NotMeasuredError` with its last line if it fails."""
    if cold:
        drop_cached(data / "train")
    started = PLANNED if loader.startswith("ours") else ()
    module = ("-m", "benchmarks.stream.measure")
    command = [sys.executable, *started, *module, loader, str(data), task, str(side), str(seconds)]
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        raise NotMeasuredError("no end after 180 s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise NotMeasuredError(last_error_line(done.stderr, f"exit code {done.returncode}")[:100])
    figures = json.loads(lines[-1])
    return figures["images_per_second"], figures["pss_mib"]


def compare_training(data: Path, name: str, rounds: int, record: Recording) -> None:
    """Train from the stream and from memory in turns, and print the tables."""
    for title, (model, side, batch, steps) in TRAININGS.items():
        env = {
            "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(data), "TRAIN_MODEL": model,
            "TRAIN_IMAGE_SIZE": str(side), "TRAIN_BATCH_SIZE": str(batch), "TRAIN_STEPS": str(steps * 4),
            "TRAIN_TENSORBOARD": "0", "TRAIN_PROGRESS": "off", "TRAIN_CHECKPOINT_EVERY": "0", "LAUNCH_QUIET": "1",
            "TRAIN_CACHE_DIR": str(data.parent / "cache"),
        }  # fmt: skip
        works = {source: partial(train, {**env, "TRAIN_DATA_SOURCE": source}) for source in ("stream", "memory")}
        take_turns(works, [record.table(f"training {title} from {name}", "images/s", "memory")], rounds)


def train(env: dict[str, str]) -> tuple[float]:
    """Return the images per second of a training, without its first step."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "entrypoint", "train"], cwd=folder, env={**os.environ, **env}, check=True,
            capture_output=True,
        )  # fmt: skip
        summary = json.loads(Path(folder, "runs/latest/summary.json").read_text())
        return (float(summary["batch_size"] / summary["step_seconds"]),)


if __name__ == "__main__":
    main()
