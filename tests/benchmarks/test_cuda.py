"""What `make bench-cuda` does with a GPU, and without."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.cuda import BY_HAND, SIDE, decoded_batches
from tests.conftest import PYTHON

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_cuda_benchmark_without_gpu_says_so() -> None:
    done = subprocess.run([PYTHON, "-m", "benchmarks.cuda"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no NVIDIA GPU: ")


SMALL = ("--device=cpu", "--model=timm:test_resnet", "--batch=2", "--side=64", "--warm=1", "--steps=1")


@pytest.mark.parametrize(
    "words", [pytest.param((), marks=(pytest.mark.cuda, NEEDS_GPU)), pytest.param(SMALL, marks=pytest.mark.launch)]
)
def test_cuda_loop_by_hand_returns_rate(words: tuple[str, ...]) -> None:
    pytest.importorskip("timm")
    done = subprocess.run((*BY_HAND, *words), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["images_per_second"] > 0


def jpegs(folder: Path) -> Path:
    """Return a folder of two classes, the first one black and the second one white."""
    for split in ("train", "test"):
        for name, value in (("black", 0), ("white", 255)):
            path = folder / split / name / "one.jpg"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (500, 375), (value,) * 3).save(path)
    return folder


@pytest.mark.usefixtures("torchvision")
def test_cuda_decoded_batches_are_crops_with_their_labels(tmp_path: Path) -> None:
    images, labels = next(decoded_batches(jpegs(tmp_path), torch.device("cpu"), 16))
    assert images.shape == (16, 3, SIDE, SIDE)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert set(labels.tolist()) == {0, 1}
    assert torch.equal(images.flatten(1).float().mean(1) > 127, labels == 1)


@pytest.mark.cuda
@NEEDS_GPU
def test_cuda_loop_by_hand_decodes_on_the_gpu(tmp_path: Path) -> None:
    words = (*BY_HAND, "--images", str(jpegs(tmp_path)))
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["images_per_second"] > 0
