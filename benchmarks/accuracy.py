"""Seconds until a model is as good as the book's, and accuracy after the book's time: `make bench-accuracy`.

Data: all of CIFAR-10 as real JPEG files in class folders (CIFAR10_IMAGES). All cores of this machine are used.
Model: the book's CNN of 2,122,186 parameters.
The book's loop is implemented again from its description, for ten epochs.
It decodes the images before it starts, then converts each one separately (PIL, torchvision, not normalized).
It has one loading process, batch size 64 and Adam at 1e-5.
Ours is `entrypoint train` with its defaults and TRAIN_STEPS=125, a sixth of an epoch.
A second variant adds TRAIN_PRECISION=auto.
A third one is TRAIN_RECIPE=speedrun, which must fit into the time of the book's ten epochs.
Each run is a new process with a new seed. The images are decoded once, before the first run.
An epoch of the book's loop alternates with a run of each variant.
The time is that of training, without evaluation. The time of the whole command, from a cold start, is next to it.
Claim: at least 9 of 10 seeds reach the book's 47.10 % at least 100 times sooner.
Claim: in the book's time the recipe's mean accuracy is at least 88 %.
"""

from __future__ import annotations

import argparse
import statistics
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
from benchmarks.record import parse_options, recording
from benchmarks.tables import Table
from train.data.image_folder import ImageList, list_splits
from train.models.cnn import CNN

BOOKS_ACCURACY, EPOCHS = 47.10, 10
RECIPES_ACCURACY = 88.0
BATCH, LR = 64, 1e-5
OURS = (
    Variant("defaults", {"TRAIN_STEPS": "125"}),
    Variant("precision auto", {"TRAIN_STEPS": "125", "TRAIN_PRECISION": "auto"}),
)
SPEEDRUN = Variant("speedrun", {"TRAIN_RECIPE": "speedrun"})


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
    args = parse_options(argparse.ArgumentParser(prog="make bench-accuracy"))
    with cifar10_settings(None) as data, recording("accuracy", args, EPOCHS) as record:
        if "TRAIN_DATA_DIR" not in data:
            sys.exit("CIFAR10_IMAGES is not set: name the folder or the .tar.xz of CIFAR-10's images")
        run({**data, "TRAIN_STEPS": "1"}, Measured())  # decodes
        training = record.table("training", "s", "book's epoch")
        whole = record.table("the whole command", "s")
        accuracy = record.table("accuracy", "%", "book's epoch")
        for seed, epoch in enumerate(books_loop(Path(data["TRAIN_DATA_DIR"]))):
            training.add("book's epoch", epoch[0])
            accuracy.add("book's epoch", epoch[1])
            print(f"book's epoch {seed + 1:>2}: {epoch[0]:5.1f} s, {epoch[1]:5.2f} %", end="", flush=True)
            for variant in (*OURS, SPEEDRUN):
                seen = Measured()
                run({**data, **variant.settings, "TRAIN_SEED": str(seed)}, seen)
                if seen.refusal:
                    sys.exit(seen.refusal)
                training.add(variant.name, seen.seconds)
                whole.add(variant.name, seen.total_seconds)
                accuracy.add(variant.name, seen.accuracy)
                print(
                    f";  {variant.name}, seed {seed}: {seen.seconds:5.2f} s, {seen.accuracy:5.2f} %", end="", flush=True
                )
            print()
        budget, reached = sum(training.samples["book's epoch"]), accuracy.samples["book's epoch"]
        sooner = next((number for number, one in enumerate(reached, 1) if one >= BOOKS_ACCURACY), None)
        reported = f"{BOOKS_ACCURACY} % with epoch {sooner}" if sooner else f"never {BOOKS_ACCURACY} %"
        print(f"book's loop: {budget:.0f} s to {reached[-1]:.2f} % here, {reported}")
        for variant in OURS:
            print_speedup(variant.name, (training, whole, accuracy), budget)
        print_speedrun((training, whole, accuracy), budget)


def print_speedup(name: str, tables: tuple[Table, Table, Table], budget: float) -> None:
    """Print how many runs reached the book's accuracy, and how much sooner."""
    training, whole, accuracy = tables
    good = sum(one >= BOOKS_ACCURACY for one in accuracy.samples[name])
    seconds, command = training.median(name), whole.median(name)
    print(
        f"ours, {name}: {good} of {len(accuracy.samples[name])} seeds at {BOOKS_ACCURACY} % or better, median"
        f" {accuracy.median(name):.2f} %; training {seconds:.2f} s, {budget / seconds:.0f} times sooner; whole command"
        f" {command:.2f} s, {budget / command:.0f} times sooner than the book's training alone"
    )


def print_speedrun(tables: tuple[Table, Table, Table], budget: float) -> None:
    """Print the recipe's mean accuracy and its share of the time of the book's ten epochs."""
    training, whole, accuracy = (table.samples[SPEEDRUN.name] for table in tables)
    good = sum(one >= RECIPES_ACCURACY for one in accuracy)
    print(
        f"TRAIN_RECIPE=speedrun: {statistics.mean(accuracy):.2f} % on average ({min(accuracy):.2f} to"
        f" {max(accuracy):.2f}), {good} of {len(accuracy)} seeds at {RECIPES_ACCURACY:g} % or better; training"
        f" {statistics.median(training):.0f} s, whole command {statistics.median(whole):.0f} s (the longest"
        f" {max(whole):.0f} s), of the {budget:.0f} s of the book's ten epochs"
    )


if __name__ == "__main__":
    main()
