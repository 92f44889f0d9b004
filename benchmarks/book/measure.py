"""Runs the trainer as a user does, with alternating variants, and collects the summary of each run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from entrypoint.core.console import last_error_line
from entrypoint.machine.detect import detect_machine
from tools.cifar10_images import unpacked_images

ENTRYPOINT = (sys.executable, "-m", "entrypoint", "train")
# Settings of every run, besides the data: one line of output, no events.
QUIET = {"LAUNCH_QUIET": "1", "TRAIN_PROGRESS": "off", "TRAIN_TENSORBOARD": "0", "TRAIN_CHECKPOINT_EVERY": "0"}
# The number of nodes. Each is an entrypoint of its own, all on this machine over its loopback.
NODES = "BOOK_NODES"
LIMIT_S = 3600


class Runnable(Protocol):
    """A name and settings."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, str]: ...

    @property
    def needs_cores(self) -> int: ...

    @property
    def gone(self) -> str: ...


@dataclass
class Measured:
    """Results of a variant's runs: complete ones, and short ones for the speed if there are any.

    `refusal` is the error line if the variant does not run here.
    """

    summaries: list[dict[str, Any]] = field(default_factory=list)
    short: list[dict[str, Any]] = field(default_factory=list)
    refusal: str = ""

    def values(self, name: str) -> list[float]:
        """Return one figure of the summaries, for every run."""
        return [summary[name] for summary in self.summaries]

    @property
    def speeds(self) -> list[float]:
        """Images per second after the first step, of every run."""
        return [summary["batch_size"] / summary["step_seconds"] for summary in self.short or self.summaries]

    @property
    def speed(self) -> float:
        """The median of the speeds."""
        return statistics.median(self.speeds)

    @property
    def cpu_wait_share(self) -> float:
        """The median share of the time that threads waited for a CPU, 0 to 1."""
        return statistics.median([float(one.get("cpu_wait_share", 0.0)) for one in self.short or self.summaries])

    @property
    def accuracy(self) -> float:
        """The median of the test accuracies, in percent."""
        return statistics.median(self.values("test_accuracy"))

    @property
    def seconds(self) -> float:
        """The median of the training's seconds, with the first step."""
        return statistics.median(self.values("train_seconds"))

    @property
    def total_seconds(self) -> float:
        """The median of the whole commands' seconds."""
        return statistics.median(self.values("total_seconds"))

    @property
    def first_step(self) -> float:
        """The median of the first steps' seconds."""
        return statistics.median([float(one["first_step_seconds"]) for one in self.short or self.summaries])

    @property
    def parameters(self) -> int:
        """The parameters that were trained at the end."""
        return int(self.summaries[-1]["parameters"])

    @property
    def spread(self) -> float:
        """The difference of the fastest and the slowest run, as a share of the median speed."""
        return (max(self.speeds) - min(self.speeds)) / self.speed


# A speed counts from so many short runs on, and up to this share of time without a CPU.
MIN_ROUNDS, MAX_CPU_WAIT_SHARE = 5, 0.1


def speed_doubt(seen: Mapping[str, Measured]) -> str:
    """Return why these variants' speeds allow no conclusion, empty if they do."""
    few = [name for name, one in seen.items() if len(one.short) < MIN_ROUNDS]
    if few:
        return f"its speed is of fewer than {MIN_ROUNDS} alternating runs ({', '.join(few[:3])})"
    name = max(seen, key=lambda name: seen[name].cpu_wait_share, default="")
    share = seen[name].cpu_wait_share if name else 0.0
    return f"other processes took {100 * share:.0f} % of the time ({name})" if share > MAX_CPU_WAIT_SHARE else ""


def alternate(variants: Sequence[Runnable], common: Mapping[str, str], rounds: int) -> dict[str, Measured]:
    """Run all variants alternately, with one seed per round; a variant with an error is not run again."""
    seen = {variant.name: Measured() for variant in variants}
    for number in range(rounds):
        for variant in variants:
            if not seen[variant.name].refusal:
                run({**common, **variant.settings, "TRAIN_SEED": str(number)}, seen[variant.name])
    return seen


def run_to_the_end(
    variants: Sequence[Runnable], common: Mapping[str, str], known: Sequence[tuple[Mapping[str, str], Measured]]
) -> dict[str, Measured]:
    """Run each variant completely; a result in `known` with equal settings is used instead."""
    seen: dict[str, Measured] = {}
    for variant in variants:
        same = [one for settings, one in known if settings == variant.settings and not one.refusal]
        seen[variant.name] = replace(same[0], short=[]) if same else Measured(refusal=missing_reason(variant))
        if not same and not seen[variant.name].refusal:
            run({**common, **variant.settings}, seen[variant.name])
    return seen


def missing_reason(variant: Runnable) -> str:
    """Return what this machine or this PyTorch lacks for a variant, empty if nothing is known."""
    needed = variant.needs_cores
    if needed > CORES:
        return f"needs {needed} physical cores, and this machine has {CORES}"
    return variant.gone


def physical_cores() -> int:
    """Return the physical cores that this process may use."""
    return len({(cpu.socket, cpu.core) for cpu in detect_machine(affinity=frozenset(os.sched_getaffinity(0))).cpus})


CORES = physical_cores()


def with_speeds(
    seen: dict[str, Measured], variants: Sequence[Runnable], common: Mapping[str, str], steps: int, rounds: int
) -> dict[str, Measured]:
    """Add alternating short runs of the variants that run here; these prune at their start."""
    there = [variant for variant in variants if seen[variant.name].summaries]
    short = alternate(there, {**common, "TRAIN_STEPS": str(steps), "TRAIN_PRUNE_WARMUP": "0"}, rounds)
    return {name: replace(one, short=short[name].summaries if name in short else []) for name, one in seen.items()}


def run(settings: Mapping[str, str], into: Measured) -> None:
    """Train once; a user error is recorded, any other failure ends the benchmark."""
    with tempfile.TemporaryDirectory(prefix="book-") as folder:
        environ = {**os.environ, **QUIET, **settings, "TRAIN_OUTPUT_DIR": folder, "TRAIN_RUN_NAME": "run"}
        nodes = int(environ.pop(NODES, "1"))
        more = {
            "LAUNCH_NNODES": str(nodes),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "LAUNCH_CPU_BINDING": "none",
            "LAUNCH_THREADS": "1",
        }
        places = [{**more, "LAUNCH_NODE_RANK": str(rank)} for rank in range(nodes)] if nodes > 1 else [{}]
        processes = [
            subprocess.Popen(
                ENTRYPOINT, env={**environ, **place}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for place in places
        ]
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
        if any(process.returncode in (2, 3) for process in processes):
            into.refusal = last_error_line(errors[0], "refused")
        elif any(process.returncode for process in processes):
            raise SystemExit(f"{dict(settings)} ended with {[p.returncode for p in processes]}: {errors}")
        else:
            into.summaries.append(json.loads((Path(folder) / "run/summary.json").read_text()))


@contextmanager
def cifar10_settings(each: int | None) -> Iterator[dict[str, str]]:
    """Yield the settings for CIFAR-10: `each` images per class of CIFAR10_IMAGES, else a download."""
    place = os.environ.get("CIFAR10_IMAGES", "")
    if not place:
        yield {"TRAIN_DATASET": "cifar10"}
        return
    with tempfile.TemporaryDirectory(prefix="book-cifar10-") as temporary:
        folder = unpacked_images(Path(place), Path(temporary))
        data = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(folder), "TRAIN_CACHE_DIR": f"{temporary}/cache"}
        with first_images(data, each) as chosen:
            yield chosen


@contextmanager
def first_images(data: dict[str, str], each: int | None) -> Iterator[dict[str, str]]:
    """Yield the settings with the first images of each class only; unchanged for None or a download."""
    if each is None or "TRAIN_DATA_DIR" not in data:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="book-chosen-") as chosen:
        link_first_images(Path(data["TRAIN_DATA_DIR"]), Path(chosen), each)
        yield {**data, "TRAIN_DATA_DIR": chosen}


def link_first_images(folder: Path, into: Path, each: int, test_each: int | None = None) -> None:
    """Link the first images of each class, and a quarter as many for the test unless their number is given."""
    for part, count in (("train", each), ("test", max(1, each // 4) if test_each is None else test_each)):
        for label in sorted((folder / part).iterdir()):
            (into / part / label.name).mkdir(parents=True)
            for image in sorted(label.iterdir())[:count]:
                (into / part / label.name / image.name).symlink_to(image)
