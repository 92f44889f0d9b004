"""On a GPU: seconds to 94 % of CIFAR-10, ResNet-50's images per second, cost of the loop: `make bench-cuda`.

Needs one GPU. Without a GPU the benchmark prints that and exits.
First table: TRAIN_RECIPE=speedrun on real CIFAR-10 images (CIFAR10_IMAGES), RUNS (5) seeds.
It shows the seconds of training without evaluation, and of the whole command.
The reference is airbench94: 94.01 % in 2.59 s on an A100 (arXiv:2404.00498).
Second table: ResNet-50, bf16, channels_last, batch 256 of synthetic 3x224x224 images.
The images are on the GPU as bytes, and `entrypoint train` flips and shifts them.
The comparison is the same loop written by hand, without transforms and without logs.
Both run in processes of their own and alternate ROUNDS (5) times. Their ratio is the cost of the loop.
Claim: 94 % accuracy, and the loop costs less than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.book.measure import Measured, cifar10_settings, run
from entrypoint.machine.gpus import read_gpus

BATCH, STEPS, WARM, IMAGES = 256, 100, 10, 2560
BY_HAND = (sys.executable, "-m", "benchmarks.cuda", "--by-hand")


def by_hand() -> None:
    """Train ResNet-50 with a loop written by hand; print the images per second after warm-up as JSON."""
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet50

    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    model = resnet50().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, nesterov=True, fused=True)
    images = torch.randint(0, 256, (IMAGES, 224, 224, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (IMAGES,), device=device)
    started = 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            torch.cuda.synchronize()
            started = time.perf_counter()
        rows = torch.randint(0, IMAGES, (BATCH,), device=device)
        batch = images[rows].permute(0, 3, 1, 2).float().sub_(127.5).mul_(1 / 64)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(model(batch), labels[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.cuda.synchronize()
    print(json.dumps({"images_per_second": BATCH * STEPS / (time.perf_counter() - started)}))


def speedrun(runs: int) -> None:
    """Print the accuracy of the recipe for each seed, and the medians."""
    seen = Measured()
    with cifar10_settings(None) as data:
        run({**data, "TRAIN_STEPS": "1"}, Measured())  # decodes
        for seed in range(runs):
            run({**data, "TRAIN_RECIPE": "speedrun", "TRAIN_SEED": str(seed)}, seen)
            if seen.refusal:
                sys.exit(seen.refusal)
            one = seen.summaries[-1]
            print(f"seed {seed}: {one['test_accuracy']:.2f} %, training {one['train_seconds']:.2f} s", flush=True)
    whole = statistics.median(seen.values("total_seconds"))
    print(
        f"speedrun: median {seen.accuracy:.2f} % in {seen.seconds:.2f} s of training, {whole:.1f} s the whole command"
    )


def resnet50(rounds: int) -> None:
    """Print both rates and the cost of the loop."""
    ours, hand = Measured(), []
    settings = {
        "TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_SHAPE": "3x224x224", "TRAIN_SYNTHETIC_IMAGES": str(IMAGES),
        "TRAIN_MODEL": "resnet50", "TRAIN_PRECISION": "bf16", "TRAIN_BATCH_SIZE": str(BATCH), "TRAIN_LR": "0.001",
        "TRAIN_STEPS": str(WARM + STEPS), "LAUNCH_DEVICE": "cuda", "LAUNCH_GPUS": "1",
    }  # fmt: skip
    for _ in range(rounds):
        run(settings, ours)
        if ours.refusal:
            sys.exit(ours.refusal)
        done = subprocess.run(BY_HAND, capture_output=True, text=True, check=True)
        hand.append(json.loads(done.stdout)["images_per_second"])
    rate = statistics.median(hand)
    print(
        f"ResNet-50: ours {ours.speed:,.0f} images/s ({min(ours.speeds):,.0f}-{max(ours.speeds):,.0f}), by hand"
        f" {rate:,.0f} ({min(hand):,.0f}-{max(hand):,.0f}): the loop costs {rate / ours.speed - 1:+.1%}"
    )


def main() -> None:
    """Print both tables, or run the loop written by hand."""
    parser = argparse.ArgumentParser(prog="make bench-cuda")
    parser.add_argument("--by-hand", action="store_true", help="be the loop that ours is compared with")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.by_hand:
        return by_hand()
    gpus, driver = read_gpus(Path("/"))
    if not gpus:
        print(f"no NVIDIA GPU: {driver.problem or 'none is visible'}")
        return None
    print(f"{gpus[0].name}")
    speedrun(args.runs)
    return resnet50(args.rounds)


if __name__ == "__main__":
    main()
