"""What each technique of the trainer gives on this CPU with this torch: `make bench-techniques`.

Conditions: CPU, fp32, allocator and binding as planned, images of 3x32x32 in memory, batch 128.
A step is forward, backward and optimizer on a prepared batch. `ours` is a step as the trainer builds it.
Each other variant leaves out or replaces one technique; channels first has neither small products nor Winograd.
Where auto leaves Winograd's algorithm off, a row has it on: a ratio below 1 is what it would save.
All alternate ROUNDS (9; `--rounds`) times, a few steps each.
A ratio above 1 is what the technique saves; for `compiled`, a ratio below 1 is what compiling would save.
The random crop and flip of a batch is compared with the same as one indexed read of a padded batch, and with
torchvision's own functions for one image after another.
Two ranks on one node average gradients and BatchNorm's sums through shared memory; `gloo` uses the process group.
A technique that gives less than 5 % on the newest torch goes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from benchmarks.conditions import plans_winograd
from benchmarks.limit import timed
from benchmarks.runner import NotMeasuredError, Table, parse_options, recording, take_turns
from entrypoint.core.errors import first_line
from train.kernels.library import find_kernel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from train.distributed.process_group import ProcessGroup

BATCH, STEPS, SHAPE = 128, {"cnn": 10, "resnet18": 3}, (3, 32, 32)
ROUNDS = 9
RANKS = ("-m", "entrypoint", "run", "--quiet")

Work = Callable[[], object]


def main() -> None:
    """Print a table for each model, for the crop and flip, and for two ranks."""
    parser = argparse.ArgumentParser(prog="make bench-techniques")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parse_options(parser)
    if "BENCH_RANKS" in os.environ:
        time_ranks(os.environ["BENCH_RANKS"], args.rounds)
        return
    if "ENTRYPOINT_PLAN" not in os.environ:  # start again as a user's script, with the plan's binding and preloads
        words = (*RANKS, "--nproc-per-node=1", "-m", "benchmarks.techniques")
        os.execv(sys.executable, (sys.executable, *words, *sys.argv[1:]))
    import torch

    version = ".".join(torch.__version__.split(".")[:2])
    with recording("techniques", args) as record:
        for name, steps in STEPS.items():
            table = record.table(f"{name}, a step, torch {version}", "ms", "ours")
            take_turns(per_step(steps_of(name), steps), [table], args.rounds, warm_up=True)
        table = record.table(f"crop and flip of a batch, torch {version}", "ms", "ours")
        take_turns(per_step(crops_of(), 5), [table], args.rounds, warm_up=True)
        for name in STEPS:
            table = record.table(f"{name}, a step of two ranks, torch {version}", "ms", "ours")
            run_ranks(name, args.rounds, table)


def per_step(works: Mapping[str, Work], steps: int) -> dict[str, Callable[[], tuple[float]]]:
    """Return works that take several steps each, and return the milliseconds of one."""

    def milliseconds(work: Work) -> tuple[float]:
        return (timed(lambda: [work() for _ in range(steps)]) / steps * 1e3,)

    return {variant: partial(milliseconds, work) for variant, work in works.items()}


def steps_of(name: str) -> dict[str, Work]:
    """Return a step of a model as the trainer builds it and without each of its techniques."""
    import torch

    built = partial(build_step, name)
    works: dict[str, Work] = {"ours": built(), "convolutions of small images": built(products=False)}
    if plans_winograd():
        works["convolutions by Winograd"] = built(winograd=False)
    elif find_kernel("winograd"):
        works["with Winograd, which auto leaves off here"] = built(winograd=True)
    works["images in channels first"] = built(channels_last=False, products=False, winograd=False)
    compiled = built(compiler=torch.compile)

    def compiled_step() -> object:
        try:
            return compiled()
        except Exception as error:  # torch.compile has many ways to find no compiler
            raise NotMeasuredError(first_line(error)) from error

    return works | {"compiled": compiled_step}


def build_step(  # noqa: PLR0913  # a keyword for each technique
    name: str,
    *,
    channels_last: bool = True,
    products: bool = True,
    winograd: bool | None = None,
    compiler: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None,
    group: ProcessGroup | None = None,
    batch: int = BATCH,
) -> Callable[[], Tensor]:
    """Return a training step of a model, which returns the loss; with a `group` its ranks take it together.

    Winograd's algorithm is used as the plan has it, unless `winograd` says otherwise.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from train.acceleration.amp import memory_format, set_memory_format
    from train.acceleration.small_conv import use_matmul_for_small_inputs
    from train.acceleration.winograd import use_winograd
    from train.distributed.ddp import wrap_ddp
    from train.distributed.sync_batchnorm import convert_sync_batchnorm
    from train.models.registry import build_model
    from train.optimization.optimizer import build_optimizer
    from train.settings import TrainSettings

    torch.manual_seed(0)
    settings = TrainSettings().with_values(batch_size=batch, model=name)
    model = build_model(settings.network, SHAPE, 10)
    if group:
        model = convert_sync_batchnorm(model, group)
    model = set_memory_format(model, channels_last=channels_last)
    if products and not compiler:
        model = use_matmul_for_small_inputs(model, SHAPE)
    if not compiler and (plans_winograd() if winograd is None else winograd):
        model = use_winograd(model)
    optimizer = build_optimizer(settings, model)
    if group:
        model = wrap_ddp(model, settings.compute, group)
    forward = compiler(model) if compiler else model
    images = torch.randn(batch, *SHAPE).contiguous(memory_format=memory_format(channels_last=channels_last))
    labels = torch.randint(0, 10, (batch,))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(forward(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def crops_of() -> dict[str, Work]:
    """Return the ways to shift and flip the images of a batch; each call takes the next batch."""
    import torch

    from train.transforms import flip_crop

    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4096, *SHAPE[1:], SHAPE[0]), dtype=torch.uint8)
    batches = cycle(torch.randperm(len(images), generator=random).split(BATCH))

    def crop(way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        return way(images, next(batches), flip_crop.sample_params(BATCH, SHAPE[1], random))

    ways = {
        "ours": flip_crop.apply,
        "a padded batch, indexed": indexed,
        "torchvision, one after another": one_after_another,
    }
    return {variant: partial(crop, way) for variant, way in ways.items()}


def indexed(images: Tensor, rows: Tensor, params: Tensor) -> Tensor:
    """Return what `flip_crop.apply` returns, by advanced indices of a padded batch."""
    import torch
    from torch.nn.functional import pad

    from train.transforms.flip_crop import max_shift

    _, height, width, _ = images.shape
    most = max_shift(height)
    down, across, flipped = params.unbind(1)
    planes = images[rows].permute(0, 3, 1, 2)
    padded = pad(planes.float(), (most,) * 4, mode="reflect").to(torch.uint8).permute(0, 2, 3, 1)
    columns = torch.where(flipped[:, None] > 0, torch.arange(width - 1, -1, -1), torch.arange(width))
    row_at = (down + most)[:, None, None] + torch.arange(height)[:, None]
    column_at = (across + most)[:, None, None] + columns[:, None, :]
    return padded[torch.arange(len(rows))[:, None, None], row_at, column_at]


def one_after_another(images: Tensor, rows: Tensor, params: Tensor) -> Tensor:
    """Return what `flip_crop.apply` returns, by torchvision's functions for each image."""
    import torch
    from torchvision.transforms.v2 import functional

    from train.transforms.flip_crop import max_shift

    _, height, width, _ = images.shape
    most, crops = max_shift(height), []
    for row, (down, across, flipped) in zip(rows.tolist(), params.tolist(), strict=True):
        padded = functional.pad(images[row].permute(2, 0, 1), [most] * 4, padding_mode="reflect")
        crop = functional.crop(padded, down + most, across + most, height, width)
        crops.append((functional.horizontal_flip(crop) if flipped else crop).permute(1, 2, 0))
    return torch.stack(crops)


def run_ranks(name: str, rounds: int, table: Table) -> None:
    """Add the milliseconds of steps that two ranks of this node take together."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ENTRYPOINT_", "LAUNCH_"))}
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    env = {key: value for key, value in kept.items() if key not in ranks and not key.startswith("TORCHELASTIC_")}
    words = (*RANKS, "--nproc-per-node=2", "-m", "benchmarks.techniques", f"--rounds={rounds}")
    done = subprocess.run(
        (sys.executable, *words), env={**env, "BENCH_RANKS": name}, check=True, text=True, stdout=subprocess.PIPE
    )
    lines = done.stdout.splitlines()
    samples: dict[str, list[float]] = json.loads(next(line for line in lines if line.startswith("{")))
    for variant, values in samples.items():
        table.add(variant, *values)
    print(table.text(), flush=True)


def time_ranks(name: str, rounds: int) -> None:
    """Time steps of two ranks, with and without shared memory, and print them on rank 0 as JSON."""
    import torch
    import torch.distributed as dist

    from train.distributed.process_group import ProcessGroup
    from train.distributed.shared_memory import open_shared_memory

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = ProcessGroup(rank, world_size, rank, torch.device("cpu"))
    shared = replace(plain, memory=open_shared_memory(rank, world_size, 60))
    works = {variant: build_step(name, group=group) for variant, group in (("ours", shared), ("gloo", plain))}
    table = Table(name, "ms", "ours")
    take_turns(per_step(works, STEPS[name]), [table], rounds, warm_up=True)
    if rank == 0:
        print(json.dumps(table.samples), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
