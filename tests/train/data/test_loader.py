"""A rank's loader workers: forked once, before the rank has threads, and there to its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from tests.conftest import Entrypoint
from tests.processes import children, has_ended, wait_until
from tests.train.given import TWO_RANKS_WHERE_THEY_FIT, imagefolder
from tests.train.started import Started
from train.data.image_folder import list_splits
from train.data.loader import TEST, TRAIN, BatchLoader, BatchRequest, ImageDataset
from train.data.workers import WorkerPoolSpec
from train.settings import TrainSettings

SHAPE = (3, 16, 16)
BATCHES: list[BatchRequest] = [(TRAIN, [3, 1]), (TEST, [0, 2, 4]), (TRAIN, [7])]


def loader(image_folder: Path, workers: int) -> BatchLoader:
    worker_pool = WorkerPoolSpec(frozenset(os.sched_getaffinity(0)), workers)
    return BatchLoader(
        ImageDataset(list_splits(image_folder), SHAPE), worker_pool, TrainSettings(), torch.device("cpu")
    )


@pytest.fixture(params=[0, 1, 2])
def workers(request: pytest.FixtureRequest, image_folder: Path) -> Iterator[BatchLoader]:
    with loader(image_folder, request.param) as made:
        yield made


def test_loader_yields_both_splits_in_order(workers: BatchLoader) -> None:
    for _ in range(2):
        for wanted, (images, labels, bad) in zip(BATCHES, workers.load(BATCHES), strict=True):
            expected, right, _ = workers.dataset[wanted]
            assert torch.equal(images, expected)
            assert torch.equal(labels, right)
            assert not bad


def test_loader_drops_batches_not_consumed(workers: BatchLoader) -> None:
    next(workers.load([(TRAIN, [row]) for row in range(20)]))
    found = [images for images, _, _ in workers.load([(TEST, [5])])]
    assert len(found) == 1
    assert torch.equal(found[0], workers.dataset[TEST, [5]][0])


def test_loader_keeps_its_workers_until_exit(image_folder: Path) -> None:
    before = set(active_children())
    with loader(image_folder, 2) as made:
        began = set(active_children()) - before
        assert len(began) == 2
        for wanted in ([], BATCHES, BATCHES[:1]):
            list(made.load(wanted))
            assert set(active_children()) - before == began
    assert set(active_children()) == before


def test_loader_leaves_global_rng_unchanged(image_folder: Path) -> None:
    torch.manual_seed(0)
    with loader(image_folder, 1) as made:
        list(made.load(BATCHES))
    found = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(3))


@pytest.mark.parametrize(("count", "ahead"), [(0, 1), (1, 2), (2, 4)])
def test_loader_draws_requests_as_it_needs_them(image_folder: Path, count: int, ahead: int) -> None:
    rows = iter(range(20))
    with loader(image_folder, count) as made:
        batches = made.load((TRAIN, [row]) for row in rows)
        next(batches)
        first = next(rows)
        assert first <= ahead + 1
        next(batches)
        assert next(rows) == first + 2  # one more was drawn for the second batch


@pytest.mark.versions
@pytest.mark.launch
def test_rank_forks_no_worker_after_rendezvous(entrypoint: Entrypoint, image_folder: Path) -> None:
    env = imagefolder(
        image_folder, TRAIN_DATA_SOURCE="stream", TRAIN_NUM_WORKERS="2", TRAIN_EPOCHS="100000", TRAIN_TENSORBOARD="0"
    )
    run = Started(entrypoint, env | TWO_RANKS_WHERE_THEY_FIT)

    def workers() -> list[int]:
        ranks = children(run.process.pid) if TWO_RANKS_WHERE_THEY_FIT else [run.process.pid]
        return [worker for rank in ranks for worker in children(rank)]

    run.wait_for("epoch 1/")
    first = workers()
    run.wait_for("epoch 3/")
    assert workers() == first
    assert len(first) == 2 * int(TWO_RANKS_WHERE_THEY_FIT.get("LAUNCH_NPROC_PER_NODE", "1"))
    run.process.send_signal(signal.SIGTERM)
    assert run.ended()[0] == 75
    wait_until(lambda: all(map(has_ended, first)))
