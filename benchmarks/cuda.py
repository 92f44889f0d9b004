"""On a GPU: CIFAR-10 against airbench94, and ResNet-50's images per second: `make bench-cuda`.

Needs one GPU. Without a GPU the benchmark prints that and exits.
First table: TRAIN_RECIPE=speedrun on real CIFAR-10 images (CIFAR10_IMAGES), RUNS (5) seeds.
It shows the seconds of training without evaluation, and of the whole command.
AIRBENCH94 names airbench94.py (arXiv:2404.00498). It trains on the same images, RUNS times in one process.
It has 94.01 % on CIFAR-10's original images. JPEG files of them have less to learn.
Second table: ResNet-50, bf16, batch 256 of synthetic 3x224x224 images, which are on the GPU as bytes.
The comparison is the same loop written by hand, with random images, without logs and without checks.
Both run in processes of their own and alternate ROUNDS (5) times. Their ratio is the cost of the loop.
The loop by hand also takes other models, sizes, timm's loader and the CPU, for `make gpu-proof`.
The variants that follow run once a round of VARIANT_ROUNDS (1): without channels_last, compiled, with CUDA graphs, and
from JPEG files of 500x375 that the CPU decodes. The loop by hand decodes the same files on the GPU (torchvision's
nvJPEG, whole images, then random crops); this row has not run on a GPU yet.
Claim: CIFAR-10 is learned as well as by airbench94, and the loop costs less than 2 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.book.measure import Measured, cifar10_settings, run
from benchmarks.runner import NotMeasuredError, Recording, parse_options, recording, take_turns
from benchmarks.stream.data import make_folder
from entrypoint.core.console import last_error_line
from entrypoint.machine.gpus import read_gpus

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BATCH, STEPS, WARM, IMAGES, SIDE = 256, 100, 10, 2560, 224
BY_HAND = (sys.executable, "-m", "benchmarks.cuda", "--by-hand")
COMMON = {
    "TRAIN_MODEL": "resnet50", "TRAIN_PRECISION": "bf16", "TRAIN_BATCH_SIZE": str(BATCH), "TRAIN_LR": "0.001",
    "TRAIN_STEPS": str(WARM + STEPS), "TRAIN_EVAL_EVERY": "1000", "LAUNCH_DEVICE": "cuda", "LAUNCH_NPROC_PER_NODE": "1",
}  # fmt: skip
SYNTHETIC = COMMON | {
    "TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_SHAPE": "3x224x224", "TRAIN_SYNTHETIC_IMAGES": str(IMAGES),
}  # fmt: skip
VARIANTS = {
    "TRAIN_CHANNELS_LAST=0": {"TRAIN_CHANNELS_LAST": "0"},
    "TRAIN_COMPILE=default": {"TRAIN_COMPILE": "default"},
    "TRAIN_COMPILE=reduce-overhead, CUDA graphs": {"TRAIN_COMPILE": "reduce-overhead"},
}
# The line of airbench94.py with the accuracies and seconds of a finished run.
FINAL_LINE = re.compile(r"\|\s+eval\s+\|.*\|\s*([0-9.]+)\s+\|\s*([0-9.]+)\s+\|")


def by_hand(args: argparse.Namespace) -> None:
    """Train a model with a loop written by hand; print the images per second after warm-up as JSON."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    model = bare_model(args.model).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, nesterov=True, fused=True)
    forward = torch.compile(model) if args.compile else model
    if args.images:
        make_batches = timm_batches if args.timm_loader else decoded_batches
        batches = make_batches(args.images, device, args.batch, args.side)
    else:
        batches = random_batches(device, args.batch, args.side)
    started = 0.0
    for step in range(args.warm + args.steps):
        if step == args.warm:
            synchronize()
            started = time.perf_counter()
        images, labels = next(batches)
        batch = images if images.is_floating_point() else images.float().sub_(127.5).mul_(1 / 64)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(forward(batch), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    synchronize()
    print(json.dumps({"images_per_second": args.batch * args.steps / (time.perf_counter() - started)}))


def bare_model(name: str) -> nn.Module:
    """Return a new model of torchvision, or of timm with `timm:`, as a program without the trainer makes it."""
    if name.startswith("timm:"):
        import timm

        model: nn.Module = timm.create_model(name.removeprefix("timm:"))
    else:
        from torchvision.models import get_model

        model = get_model(name)
    return model


def random_batches(device: torch.device, size: int, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of random images that are on the device as bytes, in channels_last."""
    import torch

    count = 10 * size
    images = torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (count,), device=device)
    while True:
        rows = torch.randint(0, count, (size,), device=device)
        yield images[rows].permute(0, 3, 1, 2), labels[rows]


def decoded_batches(folder: Path, device: torch.device, size: int, side: int = SIDE) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of random crops as bytes, in channels_last; torchvision decodes the files on the device."""
    import torch
    from torchvision.io import decode_jpeg, read_file
    from torchvision.transforms.v2 import RandomResizedCrop

    from train.data.sources.image_folder import list_splits

    listing, crop = list_splits(folder)[0], RandomResizedCrop(side)
    labels = torch.as_tensor(listing.labels, dtype=torch.int64, device=device)
    while True:
        rows = torch.randint(0, len(listing.files), (size,))
        decoded = decode_jpeg([read_file(str(listing.files[row])) for row in rows.tolist()], device=device)
        batch = torch.stack([crop(image) for image in decoded])
        yield batch.contiguous(memory_format=torch.channels_last), labels[rows.to(device)]


def timm_batches(folder: Path, device: torch.device, size: int, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches as timm's train.py makes them: random crops by worker processes, normalized on the device."""
    import torch
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(folder / "train"), is_training=True)
    workers, shape = len(os.sched_getaffinity(0)), (3, side, side)
    loader = create_loader(dataset, shape, size, is_training=True, num_workers=workers, pin_memory=True, device=device)
    while True:
        for images, labels in loader:
            yield images.contiguous(memory_format=torch.channels_last), labels


def airbench94(script: Path, images: Path, runs: int) -> None:
    """Run airbench94.py on these images; print accuracy in percent and seconds of each run as JSON."""
    import torch

    from train.data.datasets import ImageTensors, load
    from train.data.workers import WorkerSpec
    from train.settings import TrainSettings

    cpus = os.sched_getaffinity(0)
    settings = TrainSettings().with_values(dataset="imagefolder", data_dir=images)
    data = load(settings, (3, 32, 32), "memory", WorkerSpec(frozenset(cpus), len(cpus)))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("cifar10").mkdir()
        for name, split in (("train", data.train), ("test", data.test)):
            assert isinstance(split, ImageTensors)  # `memory` asks for them
            values = {"images": split.images, "labels": split.labels, "classes": list(data.classes)}
            torch.save(values, f"cifar10/{name}.pt")
        out = io.StringIO()
        main = runpy.run_path(str(script))["main"]
        with contextlib.redirect_stdout(out):
            for number in range(runs + 1):
                main(number)
    found = FINAL_LINE.findall(out.getvalue())[1:]  # the first run warms up
    print(json.dumps([[100 * float(accuracy), float(seconds)] for accuracy, seconds in found]))


def speedrun(runs: int, record: Recording, each: int | None = None, more: Mapping[str, str] | None = None) -> None:
    """Train by the recipe with each seed, and by airbench94; print the tables.

    `each` are the training images of a class, all without it. `more` are further settings of ours.
    """
    seen = Measured()
    accuracy, seconds = record.table("CIFAR-10, accuracy", "%"), record.table("CIFAR-10, seconds", "s")
    with cifar10_settings(each) as data:
        run({**data, **(more or {}), "TRAIN_STEPS": "1"}, Measured())  # decodes
        for seed in range(runs):
            run({**data, "TRAIN_RECIPE": "speedrun", "TRAIN_SEED": str(seed), **(more or {})}, seen)
            if seen.refusal:
                sys.exit(seen.refusal)
        accuracy.add("speedrun", *seen.values("test_accuracy"))
        seconds.add("speedrun, training", *seen.values("train_seconds"))
        seconds.add("speedrun, its first step", *seen.values("first_step_seconds"))
        seconds.add("speedrun, the whole command", *seen.values("total_seconds"))
        try:
            for percent, took in run_airbench94(data.get("TRAIN_DATA_DIR", ""), runs):
                accuracy.add("airbench94", percent)
                seconds.add("airbench94, training, warm", took)
        except NotMeasuredError as error:
            accuracy.missing["airbench94"] = str(error)
    print(accuracy.text(), seconds.text(), sep="\n", flush=True)


def run_airbench94(images: str, runs: int) -> list[tuple[float, float]]:
    """Return accuracy in percent and seconds of each run in one process; raises `NotMeasuredError`."""
    script = os.environ.get("AIRBENCH94")
    if not script:
        raise NotMeasuredError("AIRBENCH94 names no script")
    words = ("--airbench94", str(Path(script).resolve()), "--images", images, "--runs", str(runs))
    reached: list[tuple[float, float]] = json.loads(output_of(*BY_HAND[:-1], *words).splitlines()[-1])
    return reached


def output_of(*command: str) -> str:
    """Return the output of a command; raises `NotMeasuredError` with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotMeasuredError(last_error_line(done.stderr, f"ended with {done.returncode}"))
    return done.stdout


def resnet50(rounds: int, variant_rounds: int, record: Recording) -> None:
    """Print the rates of ours and of the loop by hand, then those of the variants."""
    table = record.table("ResNet-50, bf16, batch 256", "images/s", "by hand")
    take_turns({"ours": partial(train_once, SYNTHETIC), "by hand": hand_written}, [table], rounds)
    with tempfile.TemporaryDirectory() as folder:
        images = str(make_folder(Path(folder), "500x375"))
        jpegs = COMMON | {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": images, "TRAIN_TRANSFORMS": "imagenet"}
        variants = {"from JPEG files": jpegs | {"TRAIN_DATA_SOURCE": "stream"}}
        variants |= {name: SYNTHETIC | settings for name, settings in VARIANTS.items()}
        works: dict[str, Callable[[], Sequence[float]]] = {
            name: partial(train_once, settings) for name, settings in variants.items()
        }
        works["by hand, JPEG files decoded on the GPU"] = partial(hand_written, "--images", images)
        take_turns(works, [table], variant_rounds)


def train_once(settings: Mapping[str, str]) -> tuple[float]:
    """Return ours' images per second; raises `NotMeasuredError` for what it refuses."""
    seen = Measured()
    run(settings, seen)
    if seen.refusal:
        raise NotMeasuredError(seen.refusal)
    return (seen.speed,)


def hand_written(*words: str) -> tuple[float]:
    """Return the images per second of the loop by hand; raises `NotMeasuredError` if it fails."""
    return (json.loads(output_of(*BY_HAND, *words))["images_per_second"],)


def main() -> None:
    """Print both tables, or run what they are compared with."""
    parser = argparse.ArgumentParser(prog="make bench-cuda")
    parser.add_argument("--by-hand", action="store_true", help="be the loop that ours is compared with")
    parser.add_argument("--airbench94", type=Path, help="run this script on --images")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--model", default="resnet50", help="of the loop by hand: torchvision's, or timm:NAME")
    parser.add_argument("--device", default="cuda", help="of the loop by hand")
    parser.add_argument("--batch", type=int, default=BATCH, help="of the loop by hand")
    parser.add_argument("--side", type=int, default=SIDE, help="of the images of the loop by hand")
    parser.add_argument("--warm", type=int, default=WARM, help="steps of the loop by hand before those that count")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the loop by hand, after its warm-up")
    parser.add_argument("--compile", action="store_true", help="compile the model of the loop by hand")
    parser.add_argument("--timm-loader", action="store_true", help="timm's loader reads --images, not nvJPEG")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant-rounds", type=int, default=1)
    args = parse_options(parser)
    if args.by_hand:
        return by_hand(args)
    if args.airbench94:
        return airbench94(args.airbench94, args.images, args.runs)
    gpus, driver = read_gpus(Path("/"))
    if not gpus:
        print(f"no NVIDIA GPU: {driver.problem or 'none is visible'}")
        return None
    print(f"{gpus[0].name}")
    with recording("cuda", args) as record:
        speedrun(args.runs, record)
        resnet50(args.rounds, args.variant_rounds, record)
    return None


if __name__ == "__main__":
    main()
