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
from benchmarks.record import Recording, parse_options, recording
from benchmarks.tables import Table
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
    with recording("techniques", args, args.rounds) as record:
        for name, steps in STEPS.items():
            built, missing = steps_of(name)
            works = {variant: partial(repeat, step, steps) for variant, step in built.items()}
            table = show(record, f"{name}, a step, torch {version}", take_turns(works, args.rounds), steps)
            table.missing.update(missing)
        crops = {variant: partial(repeat, crop, 5) for variant, crop in crops_of().items()}
        show(record, f"crop and flip of a batch, torch {version}", take_turns(crops, args.rounds), 5)
        for name, steps in STEPS.items():
            show(record, f"{name}, a step of two ranks, torch {version}", run_ranks(name, args.rounds), steps)


def show(record: Recording, title: str, seconds: Mapping[str, list[float]], steps: int) -> Table:
    """Keep and print what the variants took, in ms per step; return their table."""
    table = record.table(title, "ms", next(iter(seconds)))
    for variant, samples in seconds.items():
        table.add(variant, *(took / steps * 1e3 for took in samples))
        ratio = f"{table.ratio(variant):.2f} of {table.base}"
        print(f"{title:40} {variant:32} {table.median(variant):8.2f} ({table.range(variant)}) {ratio}", flush=True)
    return table


def repeat(work: Work, times: int) -> None:
    """Call a work several times."""
    for _ in range(times):
        work()


def take_turns(works: Mapping[str, Work], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each work in each round, after one round to warm up."""
    seconds: dict[str, list[float]] = {variant: [] for variant in works}
    for number in range(rounds + 1):
        for variant, work in works.items():
            took = timed(work)
            if number:
                seconds[variant].append(took)
    return seconds


def steps_of(name: str) -> tuple[dict[str, Work], dict[str, str]]:
    """Return a step of a model as the trainer builds it and without each of its techniques, and what cannot be."""
    import torch

    built = partial(build_step, name)
    works = {"ours": built(), "convolutions of small images": built(products=False)}
    if plans_winograd():
        works["convolutions by Winograd"] = built(winograd=False)
    elif find_kernel("winograd"):
        works["with Winograd, which auto leaves off here"] = built(winograd=True)
    works["images in channels first"] = built(channels_last=False, products=False, winograd=False)
    compiled = built(compiler=torch.compile)
    try:
        compiled()
    except Exception as error:  # torch.compile has many ways to find no compiler
        return works, {"compiled": first_line(error)}
    return works | {"compiled": compiled}, {}


def build_step(
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

    from train.acceleration.memory_format import memory_format, set_memory_format
    from train.acceleration.small_conv import use_matmul_for_small_inputs
    from train.acceleration.winograd import use_winograd
    from train.distributed.ddp import wrap_ddp
    from train.distributed.sync_batchnorm import convert_sync_batchnorm
    from train.models.registry import build_model
    from train.optimization.optimizer import build_optimizer
    from train.settings import TrainSettings

    torch.manual_seed(0)
    settings = TrainSettings(batch_size=batch, model=name)
    model = build_model(settings, SHAPE, 10)
    if group:
        model = convert_sync_batchnorm(model, group)
    model = set_memory_format(model, channels_last=channels_last)
    if products and not compiler:
        model = use_matmul_for_small_inputs(model, SHAPE)
    if not compiler and (plans_winograd() if winograd is None else winograd):
        model = use_winograd(model)
    optimizer = build_optimizer(settings, model)
    if group:
        model = wrap_ddp(model, settings, group)
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


def run_ranks(name: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps that two ranks of this node take together."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("ENTRYPOINT_", "LAUNCH_"))}
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    env = {key: value for key, value in own.items() if key not in ranks and not key.startswith("TORCHELASTIC_")}
    words = (*RANKS, "--nproc-per-node=2", "-m", "benchmarks.techniques", f"--rounds={rounds}")
    done = subprocess.run(
        (sys.executable, *words), env={**env, "BENCH_RANKS": name}, check=True, text=True, stdout=subprocess.PIPE
    )
    seconds: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return seconds


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
    works: dict[str, Work] = {}
    for variant, group in (("ours", shared), ("gloo", plain)):
        works[variant] = partial(repeat, build_step(name, group=group), STEPS[name])
    seconds = take_turns(works, rounds)
    if rank == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
