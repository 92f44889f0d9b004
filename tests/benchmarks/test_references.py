"""What `make bench-references` reads from three programs, and how it runs ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.references import OURS, TIMM, TORCHVISION, Program, Task, link_images, train
from tests.conftest import paint


@pytest.mark.parametrize(
    ("program", "line", "accuracy"),
    [
        (OURS, "epoch 1/3  train loss 2.3026  test loss 2.2987  test accuracy 12.00 %\n", 12.0),
        (OURS, "test accuracy  12.00 % (top 5: 40.00 %) of 25 images after 1 epochs, 4 steps\n", None),
        (TORCHVISION, "Test:  Acc@1 49.500 Acc@5 93.250\n", 49.5),
        (TORCHVISION, "Test:   [ 0/63]  eta: 0:00:09  loss: 2.4 (2.4)  acc1: 9.38 (9.38)  acc5: 46.88 (46.88)\n", None),
        (TIMM, "Test: [  62/62]  Time: 0.1 (0.2)  Loss:   2.2 ( 2.3)  Acc@1:  12.500 ( 46.700)", 46.7),
        (TIMM, "Test: [   0/62]  Time: 0.9 (0.9)  Loss:   2.2 ( 2.2)  Acc@1:  12.500 ( 12.500)", None),
        (TIMM, "Train: 0 [ 155/156 (100%)]  Loss: 2.28 (2.30)  Time: 0.5s,   64.00/s  (0.5s,   64.00/s)", None),
    ],
)  # fmt: skip
def test_end_of_an_evaluation_is_found(program: Program, line: str, accuracy: float | None) -> None:
    found = program.evaluated.search(line)
    assert (float(found.groups()[-1]) if found else None) == accuracy


def data(folder: Path, each: int) -> Path:
    for split in ("train", "test"):
        paint(folder / "images" / split, each=20)
    return link_images(folder / "images", folder / "linked", each, 10)


def test_both_get_the_same_images(tmp_path: Path) -> None:
    linked = data(tmp_path, 5)
    for own, theirs, count in (("ours/train", "theirs/train", 15), ("ours/test", "theirs/val", 30)):
        files = [
            sorted(path.relative_to(linked / name) for path in (linked / name).glob("*/*")) for name in (own, theirs)
        ]
        assert files[0] == files[1]
        assert len(files[0]) == count


@pytest.mark.slow
@pytest.mark.launch
def test_ours_trains_and_a_failure_ends_the_benchmark(tmp_path: Path) -> None:
    task = Task(data(tmp_path, 20), tmp_path / "out", size=32, epochs=2, seed=0)
    seconds, accuracy = train(OURS, tmp_path, task)
    assert 0 < seconds < 600
    assert 0 <= accuracy <= 100
    with pytest.raises(SystemExit, match="torchvision ended with 1 after 0 of 2 epochs"):
        train(TORCHVISION, tmp_path, task)
