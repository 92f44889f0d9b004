"""One function a loader: it yields the number of images of each batch of normalized floats.

All have two workers and the same task: to evaluate, resize the shorter side to 8/7 of the output and cut out the
middle; to train, random resized crop and flip. `limit` only decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.stream.data import make_mds, make_tar_shards

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH, WORKERS = 64, 2


@dataclass(frozen=True)
class Task:
    """A data set, whether its images are loaded to train, and the side of the output in pixels."""

    data: Path
    trains: bool
    side: int

    @property
    def resized(self) -> int:
        """The shorter side before the middle is cut out."""
        return self.side * 8 // 7


def ours(task: Task) -> Iterator[int]:
    """Load by the trainer's own stream."""
    import os

    import torch

    from train.data.feeds.loader import BatchLoader, ImageDataset
    from train.data.feeds.stream import StreamSource
    from train.data.sources.image_folder import list_splits
    from train.data.workers import WorkerSpec
    from train.distributed.process_group import ProcessGroup
    from train.planning.loading import IMAGENET
    from train.settings import TrainSettings
    from train.transforms.image_part import View
    from train.transforms.imagenet import eval_crop
    from train.transforms.normalize import Normalize

    settings = TrainSettings().with_values(batch_size=BATCH, transforms="imagenet", eval_batch_size=BATCH)
    group = ProcessGroup(0, 1, 0, torch.device("cpu"))
    shape = (3, task.side, task.side)
    images, _ = list_splits(task.data)
    dataset = ImageDataset((images, images), shape, View(eval_crop((task.side, task.side), 0.875)))
    workers = WorkerSpec(frozenset(os.sched_getaffinity(0)), WORKERS)
    with BatchLoader(dataset, workers, group.device) as loader:
        mean, deviation = (torch.tensor(one) * 255 for one in IMAGENET)
        source = StreamSource(loader, settings, group, Normalize.from_stats(mean, deviation, group.device))
        epoch = 0
        while True:
            if task.trains:
                for batch in source.train_batches(epoch):
                    yield sum(len(images) for images, _ in batch.micro_batches)
            else:
                for images, _ in source.test_batches():
                    yield len(images)
            epoch += 1


def ours_with_pillow(task: Task) -> Iterator[int]:
    """Load as without a compiler."""
    import train.data.decoding.decoder as decoding

    decoding.jpeg_kernel = lambda: None  # type: ignore[assignment]
    return ours(task)


def pillow_transform(task: Task) -> Any:
    """Return torchvision's first transforms, which work on Pillow's images."""
    from torchvision import transforms as t

    end = [t.ToTensor(), t.Normalize(MEAN, STD)]
    if task.trains:
        return t.Compose([t.RandomResizedCrop(task.side), t.RandomHorizontalFlip(), *end])
    return t.Compose([t.Resize(task.resized), t.CenterCrop(task.side), *end])


def count_batches(loader: Any) -> Iterator[int]:
    """Yield the sizes of a DataLoader's batches, epoch after epoch."""
    while True:
        for batch in loader:
            images = batch[0] if isinstance(batch, list | tuple) else batch
            yield len(images)


def data_loader(dataset: Any, **options: Any) -> Iterator[int]:
    """Yield the sizes of the batches of a data set in a DataLoader with two workers."""
    from torch.utils.data import DataLoader

    return count_batches(DataLoader(dataset, BATCH, num_workers=WORKERS, persistent_workers=True, **options))


def reference(task: Task) -> Iterator[int]:
    """Load as torchvision's reference script."""
    from torchvision.datasets import ImageFolder

    return data_loader(ImageFolder(task.data / "train", pillow_transform(task)), shuffle=task.trains)


def decode_jpeg(task: Task) -> Iterator[int]:
    """Load by torchvision's own JPEG decoder and second transforms."""
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image, read_file
    from torchvision.transforms import v2

    end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    size = (
        [v2.RandomResizedCrop(task.side, antialias=True), v2.RandomHorizontalFlip()]
        if task.trains
        else [v2.Resize(task.resized, antialias=True), v2.CenterCrop(task.side)]
    )

    def load(path: str) -> Any:
        return decode_image(read_file(path), ImageReadMode.RGB)

    return data_loader(ImageFolder(task.data / "train", v2.Compose([*size, *end]), loader=load), shuffle=task.trains)


def timm(task: Task) -> Iterator[int]:
    """Load by timm's loader."""
    import torch
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(task.data / "train"))
    return count_batches(
        create_loader(
            dataset, (3, task.side, task.side), BATCH, is_training=task.trains, num_workers=WORKERS,
            use_prefetcher=False, color_jitter=0.0, interpolation="bilinear", device=torch.device("cpu"),
            persistent_workers=True,
        )
    )  # fmt: skip


def webdataset(task: Task) -> Iterator[int]:
    """Load tar shards by webdataset."""
    import webdataset as wds

    transform = pillow_transform(task)
    shards = make_tar_shards(task.data, "train")
    data = wds.WebDataset(shards, shardshuffle=False, empty_check=False).decode("pil").to_tuple("jpg")
    return data_loader(data.map_tuple(transform))


def streaming(task: Task) -> Iterator[int]:
    """Load MosaicML's shards."""
    from PIL import Image
    from streaming import StreamingDataset
    from torch.utils.data import Dataset

    transform = pillow_transform(task)
    shards = StreamingDataset(local=str(make_mds(task.data, "train")), batch_size=BATCH, shuffle=task.trains)

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(shards)

        def __getitem__(self, index: int) -> Any:
            return transform(Image.open(BytesIO(shards[index]["image"])).convert("RGB"))

    return data_loader(Images(), shuffle=task.trains)


def spdl(task: Task) -> Iterator[int]:
    """Load by SPDL's threads."""
    import random

    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder

    files = [str(path) for path in sorted((task.data / "train").glob("*/*.jpg"))]
    side = task.side
    middle = f"scale={task.resized}:{task.resized}:force_original_aspect_ratio=increase,crop={side}:{side}"
    mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in (MEAN, STD))

    def decode(paths: list[str]) -> Any:
        frames = []
        for path in paths:
            crop = middle
            if task.trains:
                share = random.uniform(0.08, 1.0) ** 0.5
                aspect = random.uniform(3 / 4, 4 / 3) ** 0.5
                across, down = f"iw*{min(1, share * aspect):.4f}", f"ih*{min(1, share / aspect):.4f}"
                crop = f"crop={across}:{down}:(iw-ow)*{random.random():.4f}:(ih-oh)*{random.random():.4f},"
                crop += f"scale={side}:{side}" + (",hflip" if random.random() < 0.5 else "")
            frames.append(
                spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=f"{crop},format=pix_fmts=rgb24")
            )
        images = torch.from_numpy(spdl.io.to_numpy(spdl.io.convert_frames(frames))).permute(0, 3, 1, 2)
        return (images.float().div_(255) - mean) / std

    def paths() -> Iterator[list[str]]:
        while True:
            order = random.sample(files, len(files)) if task.trains else files
            for start in range(0, len(order), BATCH):
                yield order[start : start + BATCH]

    pipeline = PipelineBuilder().add_source(paths()).pipe(decode, concurrency=WORKERS).add_sink(2)
    running = pipeline.build(num_threads=WORKERS)
    with running.auto_stop():
        for batch in running:
            yield len(batch)


def dali(task: Task) -> Iterator[int]:
    """Load by DALI on the CPU."""
    import sysconfig

    import nvidia

    # torch's own `nvidia` folder hides that of DALI, which is in another environment.
    nvidia.__path__.append(f"{sysconfig.get_path('purelib')}/nvidia")
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)
    def pipeline() -> Any:
        files, _ = fn.readers.file(file_root=str(task.data / "train"), random_shuffle=task.trains)
        mirror: Any = 0
        if task.trains:
            images = fn.decoders.image_random_crop(files, device="cpu", output_type=types.RGB)
            images = fn.resize(images, size=(task.side, task.side), antialias=True)
            mirror = fn.random.coin_flip()
        else:
            images = fn.decoders.image(files, device="cpu", output_type=types.RGB)
            images = fn.resize(images, resize_shorter=task.resized, antialias=True)
        return fn.crop_mirror_normalize(
            images, crop=(task.side, task.side), mirror=mirror, mean=[255 * one for one in MEAN],
            std=[255 * one for one in STD], output_layout="CHW",
        )  # fmt: skip

    running = pipeline()
    running.build()
    while True:
        (images,) = running.run()
        yield len(images.as_tensor().shape()) and images.as_tensor().shape()[0]


def limit(task: Task) -> Iterator[int]:
    """Decode whole images by libjpeg-turbo in two threads, and do nothing with them."""
    from concurrent.futures import ThreadPoolExecutor
    from itertools import cycle

    import simplejpeg

    files = sorted((task.data / "train").glob("*/*.jpg"))

    def decode(some: list[Path]) -> int:
        for path in some:
            simplejpeg.decode_jpeg(path.read_bytes())
        return len(some)

    pieces = cycle([files[start : start + 16] for start in range(0, len(files), 16)])
    with ThreadPoolExecutor(WORKERS) as pool:
        pending = [pool.submit(decode, next(pieces)) for _ in range(2 * WORKERS)]
        while True:
            yield pending.pop(0).result()
            pending.append(pool.submit(decode, next(pieces)))


LOADERS: dict[str, Callable[[Task], Iterator[int]]] = {
    "ours": ours,
    "ours without a compiler": ours_with_pillow,
    "torchvision's reference": reference,
    "timm": timm,
    "webdataset": webdataset,
    "MosaicML streaming": streaming,
    "SPDL": spdl,
    "torchvision decode_jpeg": decode_jpeg,
    "DALI": dali,
    "limit: decoding alone": limit,
}
