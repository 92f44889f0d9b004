"""Feeds: every number of ranks and parts sees the same global batches, from memory or streamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.factories import train_settings
from train.acceleration.amp import memory_format
from train.data.datasets import ImageTensors, load
from train.data.feeds.batches import BatchSource
from train.data.feeds.loader import BatchLoader, ImageDataset
from train.data.feeds.memory import MemorySource
from train.data.feeds.stream import MAX_WARNINGS, StreamSource
from train.data.sources.image_folder import list_splits
from train.data.workers import WorkerSpec
from train.distributed.process_group import ProcessGroup
from train.seeding import make_generator
from train.settings import TrainSettings
from train.transforms.registry import select_transform

SHAPE = (3, 8, 8)


def group(rank: int = 0, world_size: int = 1) -> ProcessGroup:
    return ProcessGroup(rank, world_size, rank, torch.device("cpu"))


def images(count: int) -> ImageTensors:
    pixels = torch.randint(0, 256, (count, 8, 8, 3), dtype=torch.uint8, generator=make_generator("pixels"))
    return ImageTensors(pixels, torch.arange(count))


def memory_source(settings: TrainSettings, rank: int, world_size: int, test: int = 10) -> MemorySource:
    return MemorySource(images(50), images(test), settings, group(rank, world_size))


def global_batches(settings: TrainSettings, world_size: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Put the ranks' shares of each step together again."""
    per_rank = [list(memory_source(settings, rank, world_size).train_batches(epoch)) for rank in range(world_size)]
    steps = []
    for shares in zip(*per_rank, strict=True):
        parts = [part for of_ranks in zip(*(share.micro_batches for share in shares), strict=True) for part in of_ranks]
        others = [
            other for of_ranks in zip(*(share.mixed_labels for share in shares), strict=True) for other in of_ranks
        ]
        steps.append((torch.cat([x for x, _ in parts]), torch.cat([*(y for _, y in parts), *others])))
    return steps


def test_last_epochs_are_not_mixed() -> None:
    settings = train_settings({"batch_size": 16, "mixup_alpha": 0.4, "unmixed_epochs": 2, "epochs": 5})
    source = memory_source(settings, 0, 1)
    assert [bool(next(source.train_batches(epoch)).mixed_labels) for epoch in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 3), (2, 3), (3, 1), (16, 1)])
@pytest.mark.parametrize(
    ("transforms", "mixed"),
    [
        ("none", {}),
        ("flip-crop", {}),
        ("book", {}),
        ("none", {"mixup_alpha": 0.4}),
        ("flip-crop", {"cutmix_alpha": 1.0}),
    ],
)
def test_global_batches_are_equal_for_any_ranks(
    world_size: int, accumulate: int, transforms: str, mixed: dict[str, float]
) -> None:
    alone = train_settings({"batch_size": 16, "transforms": transforms, **mixed})
    shared = alone.with_values(grad_accum_steps=accumulate)
    for (x, y), (xs, ys) in zip(
        global_batches(alone, 1, epoch=2), global_batches(shared, world_size, epoch=2), strict=True
    ):
        assert torch.equal(y, ys)
        assert torch.allclose(x, xs, atol=1e-5), "to rounding, where images are computed and not just moved"


@pytest.mark.parametrize(
    ("transforms", "more"),
    [("none", {}), ("flip-crop", {}), ("flip-crop", {"mixup_alpha": 0.4, "grad_accum_steps": 2}), ("book", {})],
)
@pytest.mark.parametrize("first", [1, 2])
def test_memory_source_gathering_ahead_is_bitwise_identical(
    transforms: str, more: dict[str, float], first: int
) -> None:
    settings = train_settings({"batch_size": 16, "transforms": transforms, **more})
    ahead, each = memory_source(settings, 0, 1), memory_source(settings, 0, 1)
    assert (ahead.steps_ahead > 1) is (transforms != "book"), "what is computed may round otherwise among more images"
    each.steps_ahead = 1
    for whole, alone in zip(ahead.train_batches(1, first), each.train_batches(1, first), strict=True):
        for part, other in zip(whole.micro_batches, alone.micro_batches, strict=True):
            assert torch.equal(part[0], other[0])
            assert part[0].stride() == other[0].stride()
            assert torch.equal(part[1], other[1])


def test_epoch_has_only_full_distinct_batches() -> None:
    labels = torch.cat([y for _, y in global_batches(TrainSettings().with_values(batch_size=16), 2, epoch=0)])
    assert len(labels) == 48
    assert len(set(labels.tolist())) == 48


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("count", [1, 10, 11])
def test_every_test_image_is_on_exactly_one_rank(world_size: int, count: int) -> None:
    settings = TrainSettings().with_values(eval_batch_size=3)
    seen: list[int] = []
    for rank in range(world_size):
        for _, labels in memory_source(settings, rank, world_size, test=count).test_batches():
            seen += labels.tolist()
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("channels_last", [True, False])
def test_batches_are_normalized_in_memory_format(channels_last: bool) -> None:
    settings = TrainSettings().with_values(batch_size=50, transforms="none", channels_last=channels_last)
    batch = next(memory_source(settings, 0, 1).train_batches(0))
    x, _ = batch.micro_batches[0]
    assert x.shape == (50, 3, 8, 8)
    assert x.is_contiguous(memory_format=memory_format(channels_last=channels_last))
    assert x.is_contiguous() is not channels_last
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(x.std((0, 2, 3)), torch.ones(3), atol=1e-3)


@pytest.mark.parametrize(("dataset", "channels", "augments"), [("imagefolder", 3, True), ("imagefolder", 1, False)])
def test_auto_transforms_augment_only_color(dataset: str, channels: int, augments: bool) -> None:
    settings = train_settings({"dataset": dataset})
    assert (select_transform(settings.data, channels).sample_params is not None) is augments


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_and_cached_batches_have_equal_images(image_folder: Path, tmp_path: Path, workers: int) -> None:
    settings = TrainSettings().with_values(
        dataset="imagefolder", data_dir=image_folder, batch_size=5, cache_dir=tmp_path / "cache", eval_batch_size=4
    )
    shape = (3, 16, 16)
    cached = load(settings, shape, "memory", WorkerSpec(frozenset({0}), 1))
    assert isinstance(cached.train, ImageTensors)
    assert isinstance(cached.test, ImageTensors)
    memory = MemorySource(cached.train, cached.test, settings, group(1, 2))
    workers = WorkerSpec(frozenset({0}), workers)
    with BatchLoader(ImageDataset(list_splits(image_folder), shape), workers, torch.device("cpu")) as loader:
        stream = StreamSource(loader, settings, group(1, 2))
        stream.normalize = memory.normalize
        sources: tuple[BatchSource, BatchSource] = (memory, stream)
        trained = [[part for batch in source.train_batches(1) for part in batch.micro_batches] for source in sources]
        tested = [list(source.test_batches()) for source in sources]
    for (x, y), (xs, ys) in zip(trained[0] + tested[0], trained[1] + tested[1], strict=True):
        assert torch.equal(y, ys)
        assert torch.equal(x, xs)


def test_many_unreadable_images_are_counted_only(image_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = TrainSettings().with_values(dataset="imagefolder", data_dir=image_folder, batch_size=4)
    dataset = ImageDataset(list_splits(image_folder), (3, 16, 16))
    with BatchLoader(dataset, WorkerSpec(frozenset({0}), 0), torch.device("cpu")) as loader:
        stream = StreamSource(loader, settings, group())
        for index in range(2 * MAX_WARNINGS):
            stream.warn_once(f"image {index}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_WARNINGS + 1
    assert lines[-1].endswith("images_skipped in summary.json counts them")
    assert len(stream.skipped) == 2 * MAX_WARNINGS
