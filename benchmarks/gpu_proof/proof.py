"""What a row needs: the device, the size of its work, the data on this machine, and where its samples go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.book.measure import Measured, run
from benchmarks.cuda import BATCH, BY_HAND, SIDE, STEPS, WARM, output_of
from benchmarks.gpu_proof.board import SAMPLES, UNTIL
from benchmarks.runner import NotMeasuredError, Recording, Table, take_turns
from benchmarks.stream.data import CLASSES, photo
from tools.cifar10_images import unpacked_images

ENTRYPOINT = (sys.executable, "-m", "entrypoint")
RESNET, VIT = "resnet50", "timm:vit_small_patch16_224"
# What a dry run trains instead: models of the same kinds that timm has for tests, and their side.
SMALL, SMALL_SIDE = {RESNET: "timm:test_resnet", VIT: "timm:test_vit"}, 160
WIDTH, HEIGHT, QUALITY = 500, 375, 95
# Colors of a terminal.
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class CrashedError(NotMeasuredError):
    """A variant that failed, where others were refused or lack something; its row fails after the other variants."""


@dataclass(frozen=True)
class Proof:
    """`data` is a folder that the rows of this machine share; a dry run does little of each on a CPU."""

    data: Path
    dry: bool = False

    @property
    def device(self) -> str:
        """The device of all rows."""
        return "cpu" if self.dry else "cuda"

    def size(self, full: int, dry: int) -> int:
        """Return how much of something a row does."""
        return dry if self.dry else full

    def model(self, name: str) -> str:
        """Return a model, or the small one of its kind."""
        return SMALL[name] if self.dry else name

    @property
    def side(self) -> int:
        """The side of the images in pixels."""
        return self.size(SIDE, SMALL_SIDE)

    def settings(self, **more: str) -> dict[str, str]:
        """Return the trainer's settings for the device, with these `TRAIN_*`, without that prefix."""
        launch = {"LAUNCH_DEVICE": self.device, "LAUNCH_NPROC_PER_NODE": "1", "TRAIN_EVAL_EVERY": "1000"}
        return launch | {f"TRAIN_{name.upper()}": value for name, value in more.items()}

    def training(self, model: str, **more: str) -> dict[str, str]:
        """Return the settings of a short training in bf16 at full size; the images are synthetic."""
        batch = self.size(BATCH, 2)
        words = {"model": self.model(model), "precision": "bf16", "batch_size": str(batch), "lr": "0.001"}
        words |= {"steps": str(self.size(WARM, 1) + self.size(STEPS, 1)), "dataset": "synthetic"}
        words |= {"synthetic_shape": f"3x{self.side}x{self.side}", "synthetic_images": str(10 * batch)}
        words = words | more
        if words["dataset"] != "synthetic":
            words = {name: value for name, value in words.items() if not name.startswith("synthetic_")}
        return self.settings(**words)

    def by_hand(self, model: str, *words: str) -> float:
        """Return the images per second of the loop by hand; raises `NotMeasuredError`."""
        sizes = [f"--device={self.device}", f"--model={self.model(model)}", f"--side={self.side}"]
        sizes += [f"--batch={self.size(BATCH, 2)}", f"--steps={self.size(STEPS, 1)}", f"--warm={self.size(WARM, 1)}"]
        return float(json.loads(output_of(*BY_HAND, *sizes, *words).splitlines()[-1])["images_per_second"])

    def photos(self) -> Path:
        """Return a folder of JPEG files of 500x375 with `train/` and `test/`, made once on a machine."""
        counts = (self.size(768, 8), self.size(256, 4))
        return made_photos(self.data / f"photos-{sum(counts)}", (WIDTH, HEIGHT), counts)

    def name_cifar10(self) -> None:
        """Name the unpacked images of CIFAR-10 to the benchmarks, or made ones of that size."""
        place = os.environ.get("CIFAR10_IMAGES", "")
        if place and Path(place).exists():
            folder = self.data / "cifar10"
            if not folder.exists():
                unpacked = unpacked_images(Path(place), self.data / "cifar10.tmp")
                folder.symlink_to(unpacked.resolve())
        else:
            counts = (self.size(4096, 64), self.size(1024, 16))
            folder = made_photos(self.data / f"small-{sum(counts)}", (32, 32), counts)
            state("images", [f"made ones of 32x32 in {CLASSES} classes: CIFAR10_IMAGES names none of CIFAR-10"])
        os.environ["CIFAR10_IMAGES"] = str(folder)


def made_photos(folder: Path, size: tuple[int, int], counts: tuple[int, int]) -> Path:
    """Write so many training and test images, on all cores, unless they are there; return the folder."""
    if folder.exists():
        return folder
    unfinished = folder.with_suffix(".tmp")
    jobs = [
        (unfinished / split / f"class{index % CLASSES}" / f"{index:05}.jpg", size, seed * 10**6 + index)
        for seed, (split, count) in enumerate(zip(("train", "test"), counts, strict=True))
        for index in range(count)
    ]
    for path in {job[0].parent for job in jobs}:
        path.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(make_photo, jobs, chunksize=16))
    return unfinished.rename(folder)


def make_photo(job: tuple[Path, tuple[int, int], int]) -> None:
    """Write one image from its seed."""
    path, (width, height), seed = job
    photo(np.random.default_rng(seed), width, height).save(path, quality=QUALITY)


class SampledTable(Table):
    """A table whose samples are kept at once, so that a row that does not end has them."""

    def add(self, variant: str, *values: float) -> None:
        """Add samples of a variant."""
        super().add(variant, *values)
        for value in self.samples[variant][-len(values) :] if values else ():
            emit({"table": self.title, "unit": self.unit, "variant": variant, "value": value})


class SampledRecording(Recording):
    """Tables whose samples are kept at once."""

    def table(self, title: str, unit: str, base: str = "") -> Table:
        """Return a new table."""
        super().table(title, unit, base)
        self.tables[-1] = SampledTable(title, unit, base)
        return self.tables[-1]


def emit(sample: Mapping[str, Any]) -> None:
    """Add a sample to the row's file, and print it."""
    line = json.dumps(sample, ensure_ascii=False)
    print(line, flush=True)
    if path := os.environ.get(SAMPLES):
        with Path(path).open("a") as file:
            file.write(f"{line}\n")


def state(fact: str, lines: Sequence[str]) -> None:
    """Keep what something printed, without colors."""
    emit({"fact": fact, "lines": [ESCAPES.sub("", line) for line in lines]})


def alternate(
    works: Mapping[str, Callable[[], Sequence[float]]], tables: Sequence[tuple[str, str, str]], rounds: int
) -> list[Table]:
    """Call all works in each round, and keep their samples, and the reason of each that cannot run here.

    Ends the row with an error if none ran, or if one crashed.
    """
    record, crashed = SampledRecording(), list[str]()
    kept = [record.table(*words) for words in tables]

    def reported(variant: str, work: Callable[[], Sequence[float]]) -> Sequence[float]:
        try:
            return work()
        except NotMeasuredError as error:
            emit({"table": kept[0].title, "variant": variant, "missing": str(error)})
            if isinstance(error, CrashedError):
                crashed.append(f"{variant}: {error}")
            raise

    take_turns({name: partial(reported, name, work) for name, work in works.items()}, kept, rounds)
    if crashed or not kept[0].samples:
        raise SystemExit("; ".join(crashed or kept[0].missing.values()))
    return kept


def trained(settings: Mapping[str, str]) -> Measured:
    """Return one run of the trainer; raises `CrashedError`, or `NotMeasuredError` for what it refuses."""
    seen = Measured()
    try:
        run(settings, seen)
    except SystemExit as error:
        lines = [line for line in str(error).replace("\\n", "\n").splitlines() if len(line) > 3]
        raise CrashedError(lines[-1] if lines else "failed") from error
    if seen.refusal:
        raise NotMeasuredError(seen.refusal)
    return seen


@dataclass(frozen=True)
class Ending:
    """How a command ended, and what it printed."""

    code: int | None
    lines: list[str]
    seconds: float

    def keep(self, what: str, count: int = 12) -> None:
        """Keep exit code and last lines verbatim."""
        state(f"{what}, code {self.code}, {self.seconds:.1f} s", self.lines[-count:])


@contextlib.contextmanager
def started(*words: str, environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start the entrypoint with these words, and end it with the block."""
    command = (*ENTRYPOINT, *words)
    with subprocess.Popen(
        command, env={**os.environ, **(environ or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def ending_of(*words: str, environ: Mapping[str, str] | None = None, limit_s: float = 90) -> Ending:
    """Return how the entrypoint ends with these words; code None if it took longer, or its row has no more time."""
    began = time.monotonic()
    limit_s = max(1.0, min(limit_s, float(os.environ.get(UNTIL, "inf")) - began))
    with started(*words, environ=environ) as process:
        try:
            out, code = process.communicate(timeout=limit_s)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            out, code = process.communicate()[0], None
    return Ending(code, out.splitlines(), time.monotonic() - began)
