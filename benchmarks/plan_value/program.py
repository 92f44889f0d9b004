"""A user's script: some steps of the book's CNN on images in memory, with one or more ranks; prints its rate.

`rate N on C CPUs` is the images per second over all ranks after warm-up, and the number of CPUs of rank 0.
The batch of 64 is sharded over the ranks.
"""

from __future__ import annotations

import os
import time

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

from train.models.cnn import CNN

BATCH, WARM, STEPS = 64, 5, 60


def main() -> None:
    """Train and print."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model: nn.Module = CNN((3, 32, 32), 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if ranks > 1:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(BATCH // ranks, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH // ranks,))
    started = 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            started = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if os.environ.get("RANK", "0") == "0":
        rate = BATCH * STEPS / (time.perf_counter() - started)
        print(f"rate {rate:.1f} on {len(os.sched_getaffinity(0))} CPUs", flush=True)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
