"""Rows that compare speeds: variants take turns in one process after the other on one card."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.book.measure import cifar10_settings
from benchmarks.conditions import ROOT
from benchmarks.cuda import BATCH, WARM, speedrun as compare_speedruns
from benchmarks.gpu_proof.proof import RESNET, VIT, Proof, SampledRecording, alternate, state, trained
from benchmarks.runner import NotMeasuredError

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
# Images of CIFAR-10 have 8x8 patches of 4 pixels.
SMALL_VIT = {
    "model": "timm:vit_tiny_patch16_224", "model_args": "img_size=32 patch_size=4", "batch_size": "512",
    "optimizer": "adamw", "lr": "0.001", "weight_decay": "0.05",
}  # fmt: skip
# Steps that count where images come from files.
FILE_STEPS = 40
# The usual flags of timm's train.py for this card.
TIMM_FLAGS = (
    "--amp", "--amp-dtype=bfloat16", "--channels-last", "--epochs=5", "--warmup-epochs=0", "--cooldown-epochs=0",
    "--log-interval=1", "--val-split=test", "--num-classes=4",
)  # fmt: skip
# The mean rate of an epoch so far, in the lines that it logs.
TIMM_RATE = re.compile(r"/s\s+\(\s*[\d.]+s,\s+([\d.]+)/s\)")

Work = Callable[[], Sequence[float]]


def speedrun(proof: Proof) -> None:
    """CIFAR-10 by the recipe in new processes, and by airbench94 in a warm one; the earlier figures without it."""
    proof.name_cifar10()
    rows = tomllib.loads((ROOT / "benchmarks/claims.toml").read_text())["cuda"]["rows"]
    state("earlier, on an H200 with torch 2.11", [": ".join(row) for row in rows if "airbench94" in row[0]])
    record = SampledRecording()
    more = proof.settings(**({"steps": "1", "batch_size": "16"} if proof.dry else {}))
    del more["TRAIN_EVAL_EVERY"]  # the recipe's own
    compare_speedruns(proof.size(5, 1), record, 8 if proof.dry else None, more)
    state("airbench94", list(record.tables[0].missing.values()) or ["ran"])


def from_memory(proof: Proof, model: str) -> None:
    """Images that are on the device as bytes: the trainer and the loop by hand, eager and compiled."""
    eager: dict[str, Work] = {
        "ours": partial(rate_of, proof.training(model)),
        "by hand": lambda: (proof.by_hand(model),),
    }
    compiled: dict[str, Work] = {
        "ours, compiled": partial(rate_of, proof.training(model, compile="default")),
        "by hand, compiled": lambda: (proof.by_hand(model, "--compile"),),
    }
    alternate(eager, [(f"{model} from memory", "images/s", "by hand")], proof.size(2, 1))
    alternate(compiled, [(f"{model} from memory", "images/s", "by hand, compiled")], 1)


def from_files(proof: Proof, model: str) -> None:
    """JPEG files of 500x375: the trainer by its kernel, and loops by hand with nvJPEG and with timm's loader."""
    folder = proof.photos()
    files = {"dataset": "imagefolder", "data_dir": str(folder), "transforms": "imagenet"}
    files |= {"data_source": "stream", "image_size": str(proof.side)}
    if not proof.dry:
        files["steps"] = str(WARM + FILE_STEPS)
    images = [f"--images={folder}", *([] if proof.dry else [f"--steps={FILE_STEPS}"])]
    works: dict[str, Work] = {
        "ours, from memory": partial(rate_of, proof.training(model)),
        "ours": partial(rate_of, proof.training(model, **files)),
        "by hand, nvJPEG": lambda: (proof.by_hand(model, *images),),
        "by hand, timm's loader": lambda: (proof.by_hand(model, *images, "--timm-loader"),),
        "timm's train.py": partial(timm_script, proof, model, folder),
    }
    alternate(works, [(f"{model} from JPEG files", "images/s", "ours, from memory")], 1)


def timm_script(proof: Proof, model: str, folder: Path) -> tuple[float]:
    """Return the images per second of timm's train.py in its last epoch; TIMM_TRAIN names the script."""
    script = os.environ.get("TIMM_TRAIN", "")
    if not script:
        raise NotMeasuredError("TIMM_TRAIN names no script, and timm's package has none")
    name = proof.model(model).removeprefix("timm:")
    words = [f"--data-dir={folder}", f"--model={name}", f"--batch-size={proof.size(BATCH, 2)}"]
    words += [f"--workers={len(os.sched_getaffinity(0))}", f"--device={proof.device}", "--input-size", "3"]
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [sys.executable, script, *words, *[str(proof.side)] * 2, *TIMM_FLAGS, f"--output={output}"],
            check=False,
            capture_output=True,
            text=True,
        )
    rates = TIMM_RATE.findall(done.stdout + done.stderr)
    if done.returncode or not rates:
        raise NotMeasuredError((done.stderr.strip().splitlines() or ["failed"])[-1])
    return (float(rates[-1]),)


def rate_of(settings: Mapping[str, str]) -> tuple[float]:
    """Return the trainer's images per second after its first step."""
    return (trained(settings).speed,)


def precisions(proof: Proof, model: Mapping[str, str]) -> None:
    """Three epochs of CIFAR-10 in each precision: images per second, and what they reach."""
    proof.name_cifar10()
    short = {"steps": "1", "batch_size": "16"} if proof.dry else {"epochs": "3"}
    with cifar10_settings(8 if proof.dry else None) as data:

        def reached(precision: str) -> tuple[float, float]:
            settings = proof.settings(**{**model, **short, "precision": precision})
            seen = trained({**data, **settings})
            return seen.speed, seen.accuracy

        works: dict[str, Work] = {precision: partial(reached, precision) for precision in PRECISIONS}
        name = model.get("recipe") or model["model"].removeprefix("timm:")
        alternate(works, [(f"{name}, speed", "images/s", "fp32"), (f"{name}, accuracy", "%", "")], 1)


def transfer(proof: Proof) -> None:
    """Batches of bytes from host to device, with and without pinned memory."""
    import torch

    size, times = proof.size(BATCH, 8), proof.size(20, 2)
    images = torch.randint(0, 256, (size, proof.side, proof.side, 3), dtype=torch.uint8)
    synchronize = torch.cuda.synchronize if proof.device == "cuda" else torch.cpu.synchronize

    def rate(*, pinned: bool, non_blocking: bool) -> tuple[float]:
        try:
            source = images.pin_memory() if pinned else images
        except RuntimeError as error:
            raise NotMeasuredError(str(error).splitlines()[0]) from error
        target = torch.empty_like(images, device=proof.device)
        target.copy_(source)
        synchronize()
        began = time.perf_counter()
        for _ in range(times):
            target.copy_(source, non_blocking=non_blocking)
        synchronize()
        return (times * images.nbytes / (time.perf_counter() - began) / 1e9,)

    works: dict[str, Work] = {
        "pageable": partial(rate, pinned=False, non_blocking=False),
        "pinned": partial(rate, pinned=True, non_blocking=False),
        "pinned, non-blocking": partial(rate, pinned=True, non_blocking=True),
    }
    alternate(works, [("host to device", "GB/s", "pageable")], proof.size(5, 2))


def checkpoints(proof: Proof) -> None:
    """A training with a checkpoint after each of its epochs, and without: seconds of the whole command."""
    short = proof.training(RESNET)
    del short["TRAIN_STEPS"]
    epochs = proof.size(5, 2)

    def seconds(every: int) -> tuple[float]:
        more = {"TRAIN_EPOCHS": str(epochs), "TRAIN_CHECKPOINT_EVERY": str(every), "TRAIN_BATCH_SIZE": "512"}
        return (trained(short | (more if not proof.dry else more | {"TRAIN_BATCH_SIZE": "10"})).total_seconds,)

    works: dict[str, Work] = {"without": partial(seconds, 0), f"{epochs} checkpoints": partial(seconds, 1)}
    alternate(works, [(f"{RESNET}, the whole command", "s", "without")], proof.size(2, 1))


def parallelism(proof: Proof) -> None:
    """FSDP2 and DDP on one rank."""
    works: dict[str, Work] = {name: partial(rate_of, proof.training(VIT, parallelism=name)) for name in ("ddp", "fsdp")}
    alternate(works, [(f"{VIT} on one rank", "images/s", "ddp")], proof.size(2, 1))
