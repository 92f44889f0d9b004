"""What `make bench-cuda` does with a GPU, and without."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from benchmarks.cuda import BY_HAND
from tests.conftest import PYTHON

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_cuda_benchmark_without_gpu_says_so() -> None:
    done = subprocess.run([PYTHON, "-m", "benchmarks.cuda"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no NVIDIA GPU: ")


@pytest.mark.cuda
@NEEDS_GPU
def test_cuda_loop_by_hand_returns_rate() -> None:
    done = subprocess.run(BY_HAND, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["images_per_second"] > 0
