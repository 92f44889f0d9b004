"""A rank's loader: batches in order and ahead of their use, by threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, refusal
from tests.processes import children, has_ended, wait_until
from tests.train.given import TWO_RANKS_WHERE_THEY_FIT, imagefolder
from tests.train.started import Started
from train.data.feeds.batches import IGNORE_LABEL
from train.data.feeds.loader import (
    BatchLoader,
    BatchRequest,
    ImageDataset,
)
from train.data.sources.image_file import read_file
from train.data.sources.image_folder import list_splits
from train.data.val_split import TEST, TRAIN
from train.data.workers import WorkerSpec
from train.transforms.image_part import Box, View

SHAPE = (3, 16, 16)
BATCHES = [BatchRequest(TRAIN, [3, 1]), BatchRequest(TEST, [0, 2, 4]), BatchRequest(TRAIN, [7])]


def loader(image_folder: Path, workers: int, *, may_grow: bool = False) -> BatchLoader:
    spec = WorkerSpec(frozenset(os.sched_getaffinity(0)), workers)
    dataset = ImageDataset(list_splits(image_folder), SHAPE)
    return BatchLoader(dataset, spec, torch.device("cpu"), may_grow=may_grow)


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
    next(workers.load([BatchRequest(TRAIN, [row]) for row in range(20)]))
    found = [images for images, _, _ in workers.load([BatchRequest(TEST, [5])])]
    assert len(found) == 1
    assert torch.equal(found[0], workers.dataset[BatchRequest(TEST, [5])][0])


def test_loader_keeps_its_threads_until_exit(image_folder: Path) -> None:
    def threads() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("loader-")}

    assert not threads()
    with loader(image_folder, 2) as made:
        began = threads()
        assert len(began) == 2
        for wanted in ([], BATCHES, BATCHES[:1]):
            list(made.load(wanted))
            assert threads() == began
    assert not threads()


def test_loader_leaves_global_rng_unchanged(image_folder: Path) -> None:
    torch.manual_seed(0)
    with loader(image_folder, 1) as made:
        list(made.load(BATCHES))
    found = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(3))


@pytest.mark.parametrize(("count", "ahead"), [(0, 0), (1, 2), (2, 2)])
def test_loader_draws_requests_as_it_needs_them(image_folder: Path, count: int, ahead: int) -> None:
    rows = iter(range(20))
    with loader(image_folder, count) as made:
        batches = made.load(BatchRequest(TRAIN, [row]) for row in rows)
        next(batches)
        first = next(rows)
        assert first == ahead + 1
        next(batches)
        assert next(rows) == first + 2  # one more was drawn for the second batch


@pytest.mark.parametrize("count", [0, 2])
def test_loader_returns_unreadable_images_in_their_places(image_folder: Path, count: int) -> None:
    with loader(image_folder, count) as made:
        files = made.dataset.splits[TRAIN].files
        files[2].write_bytes(b"no image")
        files[5].unlink()
        ((images, labels, bad),) = made.load([BatchRequest(TRAIN, range(8))])
    assert [row for row, label in enumerate(labels.tolist()) if label == IGNORE_LABEL] == [2, 5]
    assert [one.reason for one in bad] == ["not an image", "No such file or directory"]
    assert not images[2].any()
    assert not images[5].any()


def test_error_in_a_thread_reaches_the_training_loop(image_folder: Path) -> None:
    def crop(_: object) -> Box:
        raise KeyboardInterrupt

    with loader(image_folder, 2) as made, pytest.raises(KeyboardInterrupt):
        list(made.load([BatchRequest(TRAIN, [0], (View(crop),))]))


def test_short_memory_is_no_unreadable_image(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("train.data.feeds.loader.decode_image", short)
    with loader(image_folder, 1) as made, pytest.raises(MemoryError):
        list(made.load([BatchRequest(TRAIN, [0])]))


def test_threads_that_cannot_start_are_one_line(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    refusal(
        loader(image_folder, 3).__enter__,
        match=r"TRAIN_NUM_WORKERS=3: can't start new thread\. Lower it\.",
        code=ExitCode.MACHINE,
    )


def test_one_file_that_waited_makes_no_slow_disk(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits_once(path: Path) -> bytes | None:
        time.sleep(0.05 if path.name == "000.jpg" else 0)
        return read_file(path)

    monkeypatch.setattr("train.data.feeds.loader.read_file", waits_once)
    with loader(image_folder, 1) as made:
        list(made.load([BatchRequest(TRAIN, range(16))]))
        assert made.times.read_s < 0.05


@pytest.mark.seconds
@pytest.mark.parametrize(("grows", "threads"), [(True, 8), (False, 2)])
def test_slow_files_get_more_threads_unless_a_number_is_set(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch, grows: bool, threads: int
) -> None:
    def slow(path: Path) -> bytes | None:
        time.sleep(0.01)  # a network file system
        return read_file(path)

    monkeypatch.setattr("train.data.feeds.loader.read_file", slow)
    with loader(image_folder, 2, may_grow=grows) as made:
        for _ in made.load([BatchRequest(TRAIN, range(16), trains=True)] * 8):
            pass
        assert len(made.threads) >= threads if grows else len(made.threads) == threads
        assert made.times.read_s > made.times.decode_s
        assert made.times.wait_s > 0


@pytest.mark.versions
@pytest.mark.launch
def test_streaming_rank_forks_no_process(entrypoint: Entrypoint, image_folder: Path) -> None:
    env = imagefolder(
        image_folder, TRAIN_DATA_SOURCE="stream", TRAIN_NUM_WORKERS="2", TRAIN_EPOCHS="100000", TRAIN_TENSORBOARD="0"
    )
    run = Started(entrypoint, env | TWO_RANKS_WHERE_THEY_FIT)
    run.wait_for("epoch 3/")
    ranks = children(run.process.pid)
    assert len(ranks) == int(TWO_RANKS_WHERE_THEY_FIT.get("LAUNCH_NPROC_PER_NODE", "1"))
    assert not [child for rank in ranks for child in children(rank)]
    run.preempted()
    wait_until(lambda: all(map(has_ended, ranks)))
