"""Seconds until a model is as good as the book's, and accuracy after the book's time: `make bench-accuracy`.

Data: all of CIFAR-10 as real JPEG files in class folders (CIFAR10_IMAGES). All cores of this machine are used.
The book's loop and our defaults train the book's CNN of 2,122,186 parameters.
The book's loop is implemented again from its description, for ten epochs.
It decodes the images before it starts, then converts each one separately (PIL, torchvision, not normalized).
It has one loading process, batch size 64 and Adam at 1e-5.
An epoch of the book's loop alternates with a run of each variant.
Part "sooner", short runs of `entrypoint train` on all images:
- the defaults with TRAIN_STEPS=125, a sixth of an epoch, and these with TRAIN_PRECISION=auto;
- TRAIN_RECIPE=speedrun with another model and optimizer, for 25 steps of 128 images.
Part "recipe": TRAIN_RECIPE=speedrun, which must fit into the time of the book's ten epochs.
`BENCH_ARGS=--parts=sooner` leaves the other part out: 25 minutes.
Each run is a new process with a new seed. The images are decoded once, before the first run.
The time is that of training, without evaluation. The time of the whole command, from a cold start, is next to it.
Claim: at least 9 of 10 seeds reach the book's 47.10 % at least 150 times sooner, with the recipe's short run.
Claim: the defaults reach it at least 100 times sooner.
Claim: in the book's time the recipe's mean accuracy is at least 88 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.book.experiments import Variant
from benchmarks.book.measure import Measured, cifar10_settings, run
from benchmarks.runner import Recording, Table, parse_options, recording
from train.data.sources.image_folder import list_splits
from train.data.sources.image_list import ImageList
from train.models.cnn import CNN

EPOCHS = 10
BATCH, LR = 64, 1e-5
BOOK = "book's epoch"
SPEEDRUN = Variant("speedrun", {"TRAIN_RECIPE": "speedrun"})
SHORT_RECIPE = {**SPEEDRUN.settings, "TRAIN_STEPS": "25", "TRAIN_BATCH_SIZE": "128"}
# By part. The tables' titles differ by part, so that a later run of one part does not hide the other's figures.
VARIANTS = {
    "sooner": (
        Variant("defaults", {"TRAIN_STEPS": "125"}),
        Variant("precision auto", {"TRAIN_STEPS": "125", "TRAIN_PRECISION": "auto"}),
        Variant("speedrun, 25 steps", SHORT_RECIPE),
    ),
    "recipe": (SPEEDRUN,),
}
TITLES = {"sooner": "to the book's accuracy, ", "recipe": ""}


class Images(Dataset[tuple[torch.Tensor, int]]):
    """One split's decoded images, converted to tensors one by one."""

    def __init__(self, listing: ImageList) -> None:
        self.images = [Image.open(path).convert("RGB") for path in listing.files]
        self.labels = listing.labels
        self.transform = transforms.ToTensor()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return one image and its label."""
        return self.transform(self.images[index]), int(self.labels[index])


def books_loop(folder: Path) -> Iterator[tuple[float, float]]:
    """Train as the book does; yield each epoch's seconds and the test accuracy after it, in percent."""
    torch.manual_seed(0)
    model = CNN((3, 32, 32), 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    criterion = nn.CrossEntropyLoss()
    train_part, test_part = (Images(listing) for listing in list_splits(folder))
    loader, test = DataLoader(train_part, BATCH, shuffle=True), DataLoader(test_part, 1000)
    for _ in range(EPOCHS):
        started = time.perf_counter()
        model.train()
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - started
        model.eval()
        with torch.inference_mode():
            right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test)
        yield seconds, right / len(test_part) * 100


def main() -> None:
    """Train in turns, and print the tables of each part."""
    parser = argparse.ArgumentParser(prog="make bench-accuracy")
    parser.add_argument("--parts", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="those to run")
    args = parse_options(parser)
    with cifar10_settings(None) as data, recording("accuracy", args) as record:
        if "TRAIN_DATA_DIR" not in data:
            sys.exit("CIFAR10_IMAGES is not set: name the folder or the .tar.xz of CIFAR-10's images")
        run({**data, "TRAIN_STEPS": "1"}, Measured())  # decodes
        tables = {part: part_tables(part, record) for part in args.parts}
        for seed, (seconds, accuracy) in enumerate(books_loop(Path(data["TRAIN_DATA_DIR"]))):
            print(f"book's epoch {seed + 1}: {seconds:.1f} s, {accuracy:.2f} %", flush=True)
            for part, (training, whole, reached) in tables.items():
                training.add(BOOK, seconds)
                reached.add(BOOK, accuracy)
                for variant in VARIANTS[part]:
                    seen = Measured()
                    run({**data, **variant.settings, "TRAIN_SEED": str(seed)}, seen)
                    if seen.refusal:
                        sys.exit(seen.refusal)
                    training.add(variant.name, seen.seconds)
                    whole.add(variant.name, seen.total_seconds)
                    reached.add(variant.name, seen.accuracy)
        print(*(table.text() for part in tables.values() for table in part), sep="\n")


def part_tables(part: str, record: Recording) -> tuple[Table, Table, Table]:
    """Return the empty tables of a part: seconds of training, of the whole command, and accuracy."""
    title = TITLES[part]
    return (
        record.table(f"{title}training", "s", BOOK),
        record.table(f"{title}the whole command", "s"),
        record.table(f"{title}accuracy", "%", BOOK),
    )


if __name__ == "__main__":
    main()
