"""The ImageNet recipe against torchvision's reference script and timm's train.py: `make bench-references`.

Their scripts are not part of this project. BENCH_ARGS="--torchvision=DIR --timm=DIR" names the folders with their
train.py and what it imports; a program whose folder is not named does not run.
Data: CIFAR-10's JPEGs (CIFAR10_IMAGES), the first 500 of each class to train and the first 200 to test.
All three train a new ResNet-18 with the same settings: random resized crops and flips, SGD with Nesterov momentum of
0.9 and weight decay of 1e-4, label smoothing of 0.1, and a cosine schedule after an epoch of warm-up to 0.05.
Each has all cores of this machine. Two processes load the images of torchvision's and timm's; ours plans its threads.
The programs alternate, with one seed after the other. The titles name the seeds, so those of several days add up.
--no-speed is for days on which the machine has other work, which does not change the accuracy; --programs runs some.
Speed: the training images per second from the end of the first epoch to the end of the last, evaluation included, by
the times at which the programs print that an evaluation has ended.
Claim: the mean accuracy of ours is at most 1.0 point below the better of the two, and its speed ahead of both.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.book.measure import link_first_images
from benchmarks.runner import parse_options, recording
from tools.cifar10_images import unpacked_images

TRAIN_EACH, TEST_EACH = 500, 200
CLASSES = 10
BATCH, LR, WORKERS = 32, 0.05, 2
# torchvision's script has no seed of its own.
SEEDED = """
import runpy, sys, torch
torch.manual_seed(int(sys.argv.pop(1)))
sys.path.insert(0, ".")
runpy.run_path("train.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Task:
    """What a program trains: images of `size` pixels below `data`, for some epochs, from a seed, into `output`."""

    data: Path
    output: Path
    size: int
    epochs: int
    seed: int


@dataclass(frozen=True)
class Program:
    """A command, and the line of its output that ends an evaluation, with the accuracy in percent."""

    name: str
    command: Callable[[Task], list[str]]
    evaluated: re.Pattern[str]


def ours(task: Task) -> list[str]:
    """Return the command of this project."""
    return [
        sys.executable,
        "-m",
        "entrypoint",
        "train",
        "--dataset=imagefolder",
        f"--data-dir={task.data / 'ours'}",
        "--model=resnet18",
        "--transforms=imagenet",
        f"--image-size={task.size}",
        f"--epochs={task.epochs}",
        f"--batch-size={BATCH}",
        "--optimizer=sgd",
        "--momentum=0.9",
        f"--lr={LR}",
        "--weight-decay=1e-4",
        "--label-smoothing=0.1",
        "--schedule=cosine",
        f"--warmup={1 / task.epochs}",
        f"--seed={task.seed}",
        f"--output-dir={task.output}",
        "--tensorboard=0",
    ]


def torchvision(task: Task) -> list[str]:
    """Return the command of torchvision's reference script; it needs two epochs or more."""
    resize = round(task.size * 256 / 224)
    return [
        sys.executable,
        "-c",
        SEEDED,
        str(task.seed),
        f"--data-path={task.data / 'theirs'}",
        "--device=cpu",
        "--model=resnet18",
        f"--train-crop-size={task.size}",
        f"--val-crop-size={task.size}",
        f"--val-resize-size={resize}",
        f"--epochs={task.epochs}",
        f"--batch-size={BATCH}",
        "--opt=sgd_nesterov",
        "--momentum=0.9",
        f"--lr={LR}",
        "--weight-decay=1e-4",
        "--label-smoothing=0.1",
        "--lr-scheduler=cosineannealinglr",
        "--lr-warmup-epochs=1",
        "--lr-warmup-method=linear",
        "--lr-warmup-decay=0.01",
        f"--workers={WORKERS}",
        f"--output-dir={task.output}",
    ]


def timm(task: Task) -> list[str]:
    """Return the command of timm's script."""
    return [
        sys.executable,
        "train.py",
        f"--data-dir={task.data / 'theirs'}",
        "--val-split=val",
        "--device=cpu",
        "--model=resnet18",
        f"--num-classes={CLASSES}",
        "--input-size",
        "3",
        str(task.size),
        str(task.size),
        "--crop-pct=0.875",
        "--color-jitter=0",
        "--interpolation=bilinear",
        "--train-interpolation=bilinear",
        f"--epochs={task.epochs}",
        f"--batch-size={BATCH}",
        "--opt=sgd",
        "--momentum=0.9",
        f"--lr={LR}",
        "--weight-decay=1e-4",
        "--smoothing=0.1",
        "--sched=cosine",
        "--warmup-epochs=1",
        f"--warmup-lr={LR / 100}",
        "--cooldown-epochs=0",
        f"--seed={task.seed}",
        f"--workers={WORKERS}",
        f"--output={task.output}",
        "--log-interval=100000",
    ]


OURS = Program("ours", ours, re.compile(r"^epoch \d+/\d+ .*test accuracy ([\d.]+) %"))
TORCHVISION = Program("torchvision", torchvision, re.compile(r"^Test: +Acc@1 ([\d.]+) Acc@5"))
TIMM = Program("timm", timm, re.compile(r"Test: +\[ *(?P<last>\d+)/(?P=last)\].* Acc@1: +[\d.]+ \( *([\d.]+)\)"))
PROGRAMS = {one.name: one for one in (OURS, TORCHVISION, TIMM)}


def main() -> None:
    """Train with each seed, and print what each program reached."""
    parser = argparse.ArgumentParser(prog="make bench-references")
    parser.add_argument("--torchvision", type=Path, help="folder of torchvision's references/classification")
    parser.add_argument("--timm", type=Path, help="folder of timm's repository")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--size", type=int, default=128, help="pixels of the images' side")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--each", type=int, default=TRAIN_EACH, help="training images of a class")
    parser.add_argument("--test-each", type=int, default=TEST_EACH, help="test images of a class")
    parser.add_argument("--no-speed", action="store_true", help="leave the speed out, for a machine with other work")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="those to run")
    args = parse_options(parser)
    place = os.environ.get("CIFAR10_IMAGES", "")
    if not place:
        sys.exit("CIFAR10_IMAGES is not set: name the folder or the .tar.xz of CIFAR-10's images")
    given = {OURS: Path.cwd(), TORCHVISION: args.torchvision, TIMM: args.timm}
    folders = {program: given[program] for program in (PROGRAMS[name] for name in args.programs)}
    what = f"ResNet-18 at {args.size}, {args.epochs} epochs of {args.each * CLASSES} images"
    seeds = f"seed{'s' * (len(args.seeds) > 1)} {', '.join(map(str, args.seeds))}"
    of = "" if len(folders) == len(PROGRAMS) else f" of {' and '.join(args.programs)}"
    with tempfile.TemporaryDirectory() as scratch, recording("references", args) as record:
        data = link_images(
            unpacked_images(Path(place), Path(scratch)), Path(scratch, "data"), args.each, args.test_each
        )
        accuracy = record.table(f"{what}, {seeds}, accuracy{of}", "%", OURS.name)
        speed = None if args.no_speed else record.table(f"{what}, {seeds}, speed{of}", "images/s", OURS.name)
        accuracy.missing |= {one.name: f"--{one.name} was not given" for one, folder in folders.items() if not folder}
        for seed in args.seeds:
            for program, folder in folders.items():
                if not folder:
                    continue
                output = Path(scratch, f"{program.name}-{seed}")
                seconds, reached = train(program, folder, Task(data, output, args.size, args.epochs, seed))
                accuracy.add(program.name, reached)
                if speed:
                    speed.add(program.name, args.each * CLASSES * (args.epochs - 1) / seconds)
            print(*(table.text() for table in (accuracy, speed) if table), sep="\n", flush=True)


def link_images(images: Path, into: Path, each: int, test_each: int) -> Path:
    """Link some images of each class below ours/{train,test}, and these as theirs/{train,val}; return the folder."""
    link_first_images(images, into / "ours", each, test_each)
    (into / "theirs").mkdir()
    for own, name in (("train", "train"), ("test", "val")):
        (into / "theirs" / name).symlink_to((into / "ours" / own).resolve())
    return into


def train(program: Program, folder: Path, task: Task) -> tuple[float, float]:
    """Train once; return the seconds from the first evaluation's end to the last one's, and the last accuracy."""
    environ = {**os.environ, "LAUNCH_QUIET": "1", "PYTHONUNBUFFERED": "1"}
    times, accuracies, lines = list[float](), list[float](), list[str]()
    with subprocess.Popen(
        program.command(task), cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if found := program.evaluated.search(line):
                times.append(time.monotonic())
                accuracies.append(float(found.groups()[-1]))
    if process.returncode or len(times) != task.epochs:
        tail = "".join(lines[-20:])
        sys.exit(f"{program.name} ended with {process.returncode} after {len(times)} of {task.epochs} epochs:\n{tail}")
    return times[-1] - times[0], accuracies[-1]


if __name__ == "__main__":
    main()
