"""The share of the machine's matrix product rate that a training step reaches: `make bench-limit`.

Conditions: CPU, fp32, one rank with all cores, allocator and binding as planned.
Data: images of 3x32x32 in memory, flipped and shifted, batch 128.
The limit is the best rate of square fp32 matrix products of 1,024 to 4,096, with the threads of the same process.
The operations of a step are those that PyTorch counts for forward and backward products and convolutions.
The trainer computes many 3x3 convolutions with fewer operations (Winograd's algorithm), and ResNet-18's last layers
as matrix products. So a share can exceed 1.
`bare` is the same model, optimizer and loss on one prepared batch, with nothing else in the loop.
`epoch` is the trainer's loop with data, transforms, logging and metrics.
All variants alternate ROUNDS (25; `--rounds`) times, for at most a second each. Results are medians and ranges.
`outside the step` is the trainer's time outside forward, backward and optimizer, by its own clock.
Other load on the machine affects both parts of it alike; `epoch to bare` compares two separate measurements.
Claim: 0.60 of the limit for the book's CNN, 0.45 for ResNet-18, and less than 3 % outside the step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.conditions import plans_winograd
from benchmarks.runner import Recording, parse_options, recording

if TYPE_CHECKING:
    import torch

BATCH, STEPS = 128, {"cnn": 15, "resnet18": 5}
SIZES = (1024, 2048, 4096)


def main() -> None:
    """Print the tables of each model."""
    parser = argparse.ArgumentParser(prog="make bench-limit")
    parser.add_argument("--rounds", type=int, default=25)
    args = parse_options(parser)
    if "ENTRYPOINT_PLAN" not in os.environ:  # start again as a user's script, with the plan's binding and preloads
        words = ("-m", "entrypoint", "run", "--quiet", "--nproc-per-node=1", "-m", "benchmarks.limit")
        os.execv(sys.executable, (sys.executable, *words, *sys.argv[1:]))
    import torch

    torch.manual_seed(0)
    matrices = [torch.randn(size, size) for size in SIZES]
    with recording("limit", args) as record:
        for name, steps in STEPS.items():
            measure(name, steps, matrices, args.rounds, record)


def measure(name: str, steps: int, matrices: Sequence[torch.Tensor], rounds: int, record: Recording) -> None:
    """Measure the limit and both loops of a model in turns, and print its tables."""
    import torch

    bare, epoch, flops, clock = loops(name, steps)
    limit, step = record.table(f"{name}, limit", "GFLOP/s"), record.table(f"{name}, a step", "ms", "bare")
    share = record.table(f"{name}, share of the limit", "")
    outside, ratio = record.table(f"{name}, outside the step", "%"), record.table(f"{name}, epoch to bare", "")
    for _ in range(rounds):
        limit.add(
            "products",
            max(2 * len(matrix) ** 3 / best_of(partial(torch.mm, matrix, matrix)) for matrix in matrices) / 1e9,
        )
        alone = timed(bare)
        clock.seconds = 0.0
        took = timed(epoch)
        step.add("bare", alone / steps * 1e3)
        step.add("epoch", took / steps * 1e3)
        outside.add("epoch", 100 * (1 - clock.seconds / took))
        ratio.add("epoch", took / alone)
    best = max(limit.samples["products"])
    for variant, values in step.samples.items():
        share.add(variant, *(flops / 1e6 / value / best for value in values))
    print(*(table.text() for table in (limit, step, share, outside, ratio)), sep="\n", flush=True)


class Clock:
    """Counts the seconds in all phases of steps but one."""

    def __init__(self, excluded: str) -> None:
        self.excluded, self.seconds = excluded, 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count a phase."""
        started = time.perf_counter()
        yield
        if name != self.excluded:
            self.seconds += time.perf_counter() - started


def loops(name: str, steps: int) -> tuple[Callable[[], None], Callable[[], None], int, Clock]:
    """Return `steps` bare steps, an epoch of the trainer, a step's operations, and the clock; both are warmed up."""
    import torch
    from torch.amp.grad_scaler import GradScaler
    from torch.nn.functional import cross_entropy
    from torch.utils.flop_counter import FlopCounterMode

    from train.acceleration.amp import set_memory_format
    from train.acceleration.small_conv import use_matmul_for_small_inputs
    from train.acceleration.winograd import use_winograd
    from train.data.datasets import ImageTensors
    from train.data.feeds.memory import MemorySource
    from train.distributed.process_group import ProcessGroup
    from train.engine.loop import StepCallbacks, train_epoch
    from train.engine.train_step import Trainer, TrainState
    from train.models.registry import build_model
    from train.optimization.optimizer import build_optimizer, lr_schedule
    from train.report.profiler import DATA
    from train.setting_groups.network import NetworkSettings
    from train.settings import TrainSettings

    settings = TrainSettings().with_values(batch_size=BATCH, model=name, transforms="flip-crop")
    group, shape = ProcessGroup(0, 1, 0, torch.device("cpu")), (3, 32, 32)
    count = BATCH * steps
    images = ImageTensors(torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8), torch.randint(0, 10, (count,)))
    feed = MemorySource(images, images, settings, group)
    model = set_memory_format(build_model(NetworkSettings(model=name), shape, 10), channels_last=True)
    ((pixels, labels),) = next(feed.train_batches(0)).micro_batches
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(pixels), labels).backward()  # type: ignore[no-untyped-call]
    use_matmul_for_small_inputs(model, shape)
    if plans_winograd():
        use_winograd(model)
    optimizer = build_optimizer(settings, model)
    state = TrainState(model, optimizer, GradScaler("cpu", enabled=False))
    trainer = Trainer(state, lr_schedule(settings.optim, 10**6), settings, group, "fp32")
    clock = Clock(DATA)
    trainer.mark_phase = clock.phase

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(pixels), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def bare() -> None:
        for _ in range(steps):
            step()

    def epoch() -> None:
        train_epoch(trainer, feed, trainer.state.step // steps, steps, StepCallbacks(lambda *_: None))

    bare()
    epoch()
    return bare, epoch, counter.get_total_flops(), clock


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_of(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest call within half a second."""
    until = time.perf_counter() + 0.5
    best = timed(work)
    while time.perf_counter() < until:
        best = min(best, timed(work))
    return best


if __name__ == "__main__":
    main()
