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
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.book.experiments import Variant
from benchmarks.book.measure import Measured, cifar10_settings, run
from benchmarks.record import Recording, parse_options, recording
from benchmarks.tables import Table
from train.data.sources.image_folder import ImageList, list_splits
from train.models.cnn import CNN

BOOKS_ACCURACY, EPOCHS = 47.10, 10
RECIPES_ACCURACY = 88.0
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


@dataclass(frozen=True)
class Part:
    """The variants of a part, and its tables."""

    variants: tuple[Variant, ...]
    training: Table
    whole: Table
    accuracy: Table

    def train(self, variant: Variant, seed: int, data: dict[str, str]) -> str:
        """Train a variant with a seed, add what was measured, and return it as text. A refusal ends the program."""
        seen = Measured()
        run({**data, **variant.settings, "TRAIN_SEED": str(seed)}, seen)
        if seen.refusal:
            sys.exit(seen.refusal)
        self.training.add(variant.name, seen.seconds)
        self.whole.add(variant.name, seen.total_seconds)
        self.accuracy.add(variant.name, seen.accuracy)
        return f"{variant.name}, seed {seed}: {seen.seconds:5.2f} s, {seen.accuracy:5.2f} %"


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
    """Print a line per seed, and what follows from all of them."""
    parser = argparse.ArgumentParser(prog="make bench-accuracy")
    parser.add_argument("--parts", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="those to run")
    args = parse_options(parser)
    with cifar10_settings(None) as data, recording("accuracy", args, EPOCHS) as record:
        if "TRAIN_DATA_DIR" not in data:
            sys.exit("CIFAR10_IMAGES is not set: name the folder or the .tar.xz of CIFAR-10's images")
        run({**data, "TRAIN_STEPS": "1"}, Measured())  # decodes
        parts = {name: new_part(name, record) for name in args.parts}
        book = list[tuple[float, float]]()
        for seed, epoch in enumerate(books_loop(Path(data["TRAIN_DATA_DIR"]))):
            book.append(epoch)
            seen = [f"book's epoch {seed + 1:>2}: {epoch[0]:5.1f} s, {epoch[1]:5.2f} %"]
            for part in parts.values():
                part.training.add(BOOK, epoch[0])
                part.accuracy.add(BOOK, epoch[1])
                seen += [part.train(variant, seed, data) for variant in part.variants]
            print(*seen, sep=";  ", flush=True)
        budget = sum(seconds for seconds, _ in book)
        sooner = next((number for number, (_, one) in enumerate(book, 1) if one >= BOOKS_ACCURACY), None)
        reported = f"{BOOKS_ACCURACY} % with epoch {sooner}" if sooner else f"never {BOOKS_ACCURACY} %"
        print(f"book's loop: {budget:.0f} s to {book[-1][1]:.2f} % here, {reported}")
        if "sooner" in parts:
            for variant in VARIANTS["sooner"]:
                print_speedup(variant.name, parts["sooner"], budget)
        if "recipe" in parts:
            print_speedrun(parts["recipe"], budget)


def new_part(name: str, record: Recording) -> Part:
    """Return a part with empty tables of a record."""
    title = TITLES[name]
    return Part(
        VARIANTS[name],
        record.table(f"{title}training", "s", BOOK),
        record.table(f"{title}the whole command", "s"),
        record.table(f"{title}accuracy", "%", BOOK),
    )


def print_speedup(name: str, part: Part, budget: float) -> None:
    """Print how many runs reached the book's accuracy, and how much sooner."""
    accuracy = part.accuracy
    good = sum(one >= BOOKS_ACCURACY for one in accuracy.samples[name])
    seconds, command = part.training.median(name), part.whole.median(name)
    print(
        f"ours, {name}: {good} of {len(accuracy.samples[name])} seeds at {BOOKS_ACCURACY} % or better, median"
        f" {accuracy.median(name):.2f} %; training {seconds:.2f} s, {budget / seconds:.0f} times sooner; whole command"
        f" {command:.2f} s, {budget / command:.0f} times sooner than the book's training alone"
    )


def print_speedrun(part: Part, budget: float) -> None:
    """Print the recipe's mean accuracy and its share of the time of the book's ten epochs."""
    training, whole, accuracy = (table.samples[SPEEDRUN.name] for table in (part.training, part.whole, part.accuracy))
    good = sum(one >= RECIPES_ACCURACY for one in accuracy)
    print(
        f"TRAIN_RECIPE=speedrun: {statistics.mean(accuracy):.2f} % on average ({min(accuracy):.2f} to"
        f" {max(accuracy):.2f}), {good} of {len(accuracy)} seeds at {RECIPES_ACCURACY:g} % or better; training"
        f" {statistics.median(training):.0f} s, whole command {statistics.median(whole):.0f} s (the longest"
        f" {max(whole):.0f} s), of the {budget:.0f} s of the book's ten epochs"
    )


if __name__ == "__main__":
    main()
