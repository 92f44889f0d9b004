"""A short measurement of bf16 against fp32 in a child process: CPU flags do not say which is faster."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

TRIAL_TIMEOUT_S = 120
# Training steps of a small convolutional network, alternating; the fastest of each format counts, because other
# processes only slow steps down.
TRIAL = """
import os, sys, time
threads, *cpus = map(int, sys.argv[1:])
os.sched_setaffinity(0, cpus)
import torch
torch.set_num_threads(threads)
layers = torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 128, 3, padding=1), torch.nn.ReLU()
head = torch.nn.Flatten(), torch.nn.Linear(128 * 16 * 16, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
model = torch.nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)
images = torch.randn(64, 32, 16, 16).contiguous(memory_format=torch.channels_last)
labels = torch.randint(10, (64,))
fastest = {}
for step in range(9):
    for enabled in (False, True):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        model.zero_grad()
        seconds = time.perf_counter() - start
        if step > 1:
            fastest[enabled] = min(seconds, fastest.get(enabled, seconds))
print(fastest[False] / fastest[True])
"""


def measure_bf16(threads: int, cpus: Sequence[int], python: str) -> float | None:
    """Return how many times as fast as fp32 bf16 is on these CPUs, None if that cannot be measured.

    It takes some seconds, most of them to import torch.
    """
    command = [python, "-I", "-c", TRIAL, str(threads), *map(str, cpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, check=True)
        return round(float(done.stdout), 2)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
