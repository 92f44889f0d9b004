"""On a GPU: CIFAR-10 against airbench94, and ResNet-50's images per second: `make bench-cuda`.

Needs one GPU. Without a GPU the benchmark prints that and exits.
First table: TRAIN_RECIPE=speedrun on real CIFAR-10 images (CIFAR10_IMAGES), RUNS (5) seeds.
It shows the seconds of training without evaluation, and of the whole command.
AIRBENCH94 names airbench94.py (arXiv:2404.00498). It trains on the same images, RUNS times in one process.
It has 94.01 % on CIFAR-10's original images. JPEG files of them have less to learn.
Second table: ResNet-50, bf16, batch 256 of synthetic 3x224x224 images, which are on the GPU as bytes.
The comparison is the same loop written by hand, with random images, without logs and without checks.
Both run in processes of their own and alternate ROUNDS (5) times. Their ratio is the cost of the loop.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.book.measure import Measured, cifar10_settings, run
from benchmarks.record import Recording, parse_options, recording
from benchmarks.stream.data import make_folder
from benchmarks.tables import Table
from entrypoint.core.console import last_error_line
from entrypoint.machine.gpus import read_gpus

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BATCH, STEPS, WARM, IMAGES, SIDE = 256, 100, 10, 2560, 224
BY_HAND = (sys.executable, "-m", "benchmarks.cuda", "--by-hand")
COMMON = {
    "TRAIN_MODEL": "resnet50", "TRAIN_PRECISION": "bf16", "TRAIN_BATCH_SIZE": str(BATCH), "TRAIN_LR": "0.001",
    "TRAIN_STEPS": str(WARM + STEPS), "TRAIN_EVAL_EVERY": "1000", "LAUNCH_DEVICE": "cuda", "LAUNCH_GPUS": "1",
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


def by_hand(jpegs: Path | None) -> None:
    """Train ResNet-50 with a loop written by hand; print the images per second after warm-up as JSON."""
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet50

    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    model = resnet50().to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, nesterov=True, fused=True)
    batches = decoded_batches(jpegs, device, BATCH) if jpegs else random_batches(device)
    started = 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            torch.cuda.synchronize()
            started = time.perf_counter()
        images, labels = next(batches)
        batch = images.float().sub_(127.5).mul_(1 / 64)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(batch), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.cuda.synchronize()
    print(json.dumps({"images_per_second": BATCH * STEPS / (time.perf_counter() - started)}))


def random_batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of random images that are on the device as bytes, in channels_last."""
    import torch

    images = torch.randint(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (IMAGES,), device=device)
    while True:
        rows = torch.randint(0, IMAGES, (BATCH,), device=device)
        yield images[rows].permute(0, 3, 1, 2), labels[rows]


def decoded_batches(folder: Path, device: torch.device, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of random crops as bytes, in channels_last; torchvision decodes the files on the device."""
    import torch
    from torchvision.io import decode_jpeg, read_file
    from torchvision.transforms.v2 import RandomResizedCrop

    from train.data.sources.image_folder import list_splits

    listing, crop = list_splits(folder)[0], RandomResizedCrop(SIDE)
    labels = torch.as_tensor(listing.labels, dtype=torch.int64, device=device)
    while True:
        rows = torch.randint(0, len(listing.files), (size,))
        decoded = decode_jpeg([read_file(str(listing.files[row])) for row in rows.tolist()], device=device)
        batch = torch.stack([crop(image) for image in decoded])
        yield batch.contiguous(memory_format=torch.channels_last), labels[rows.to(device)]


def airbench94(script: Path, images: Path, runs: int) -> None:
    """Run airbench94.py on these images; print accuracy in percent and seconds of each run as JSON."""
    import torch

    from train.data.datasets import ImageTensors, load
    from train.data.workers import WorkerSpec
    from train.settings import TrainSettings

    cpus = os.sched_getaffinity(0)
    settings = TrainSettings(dataset="imagefolder", data_dir=images)
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


def speedrun(runs: int, record: Recording) -> None:
    """Print the accuracy of the recipe for each seed, the medians, and those of airbench94."""
    seen = Measured()
    with cifar10_settings(None) as data:
        run({**data, "TRAIN_STEPS": "1"}, Measured())  # decodes
        for seed in range(runs):
            run({**data, "TRAIN_RECIPE": "speedrun", "TRAIN_SEED": str(seed)}, seen)
            if seen.refusal:
                sys.exit(seen.refusal)
            one = seen.summaries[-1]
            print(
                f"seed {seed}: {one['test_accuracy']:.2f} %, training {one['train_seconds']:.2f} s, of these the first"
                f" step {one['first_step_seconds']:.2f} s",
                flush=True,
            )
        print(
            f"speedrun: median {seen.accuracy:.2f} % in {seen.seconds:.2f} s of training, {seen.total_seconds:.1f} s"
            " the whole command",
            flush=True,
        )
        accuracy, seconds = record.table("CIFAR-10, accuracy", "%"), record.table("CIFAR-10, seconds", "s")
        accuracy.add("speedrun", *seen.values("test_accuracy"))
        seconds.add("speedrun, training", *seen.values("train_seconds"))
        seconds.add("speedrun, its first step", *seen.values("first_step_seconds"))
        seconds.add("speedrun, the whole command", *seen.values("total_seconds"))
        script = os.environ.get("AIRBENCH94")
        if not script:
            accuracy.missing["airbench94"] = "AIRBENCH94 names no script"
            print("airbench94: AIRBENCH94 names no script")
            return
        words = ("--airbench94", str(Path(script).resolve()), "--images", data["TRAIN_DATA_DIR"], "--runs", str(runs))
        done = subprocess.run([*BY_HAND[:-1], *words], capture_output=True, text=True, check=False)
        if done.returncode:
            accuracy.missing["airbench94"] = last_error_line(done.stderr, f"ended with {done.returncode}")
            print(f"airbench94: {accuracy.missing['airbench94']}")
            return
        for percent, took in json.loads(done.stdout.splitlines()[-1]):
            accuracy.add("airbench94", percent)
            seconds.add("airbench94, training, warm", took)
        print(
            f"airbench94: median {accuracy.median('airbench94'):.2f} % ({accuracy.range('airbench94')}) in"
            f" {seconds.median('airbench94, training, warm'):.2f} s, the first run in the process left out",
            flush=True,
        )


def resnet50(rounds: int, variant_rounds: int, record: Recording) -> None:
    """Print both rates and the cost of the loop, then the variants."""
    ours, table = Measured(), record.table("ResNet-50, bf16, batch 256", "images/s", "by hand")
    for _ in range(rounds):
        run(SYNTHETIC, ours)
        if ours.refusal:
            sys.exit(ours.refusal)
        done = subprocess.run(BY_HAND, capture_output=True, text=True, check=True)
        table.add("ours", ours.speeds[-1])
        table.add("by hand", json.loads(done.stdout)["images_per_second"])
    rate = table.median("by hand")
    print(
        f"ResNet-50: ours {ours.speed:,.0f} images/s ({table.range('ours')}), by hand"
        f" {rate:,.0f} ({table.range('by hand')}): the loop costs {rate / ours.speed - 1:+.1%}",
        flush=True,
    )
    first_steps = record.table("ResNet-50, first step", "s")
    with tempfile.TemporaryDirectory() as folder:
        images = str(make_folder(Path(folder), "500x375"))
        jpegs = COMMON | {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": images, "TRAIN_TRANSFORMS": "imagenet"}
        variants = {"from JPEG files": jpegs | {"TRAIN_DATA_SOURCE": "stream"}}
        variants |= {name: SYNTHETIC | settings for name, settings in VARIANTS.items()}
        for name, settings in variants.items():
            seen = run_variant(name, settings, variant_rounds)
            if seen.refusal:
                table.missing[name] = seen.refusal
            else:
                table.add(name, *seen.speeds)
                first_steps.add(name, *seen.values("first_step_seconds"))
        decode_on_gpu(images, variant_rounds, table)


def decode_on_gpu(images: str, rounds: int, table: Table) -> None:
    """Add the rate of the loop by hand with JPEG files that the GPU decodes, or why it does not run."""
    name = "by hand, JPEG files decoded on the GPU"
    for _ in range(rounds):
        done = subprocess.run([*BY_HAND, "--images", images], capture_output=True, text=True, check=False)
        if done.returncode:
            table.missing[name] = last_error_line(done.stderr, f"ended with {done.returncode}")
            print(f"{name}: {table.missing[name]}", flush=True)
            return
        table.add(name, json.loads(done.stdout)["images_per_second"])
    print(f"{name}: {table.median(name):,.0f} images/s", flush=True)


def run_variant(name: str, settings: Mapping[str, str], rounds: int) -> Measured:
    """Run a variant; print its images per second, or why it does not run."""
    seen = Measured()
    for _ in range(rounds):
        run(settings, seen)
        if seen.refusal:
            print(f"{name}: {seen.refusal}", flush=True)
            return seen
    print(f"{name}: {seen.speed:,.0f} images/s, first step {seen.first_step:.1f} s", flush=True)
    return seen


def main() -> None:
    """Print both tables, or run what they are compared with."""
    parser = argparse.ArgumentParser(prog="make bench-cuda")
    parser.add_argument("--by-hand", action="store_true", help="be the loop that ours is compared with")
    parser.add_argument("--airbench94", type=Path, help="run this script on --images")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant-rounds", type=int, default=1)
    args = parse_options(parser)
    if args.by_hand:
        return by_hand(args.images)
    if args.airbench94:
        return airbench94(args.airbench94, args.images, args.runs)
    gpus, driver = read_gpus(Path("/"))
    if not gpus:
        print(f"no NVIDIA GPU: {driver.problem or 'none is visible'}")
        return None
    print(f"{gpus[0].name}")
    with recording("cuda", args, args.rounds) as record:
        speedrun(args.runs, record)
        resnet50(args.rounds, args.variant_rounds, record)
    return None


if __name__ == "__main__":
    main()
