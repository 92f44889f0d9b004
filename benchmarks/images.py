"""Sizes and contents of the images, and the time that a container adds to the start of a command.

Claim: cpu and cpu-intel with PyTorch's CPU wheels have at most 1.8 GB, and everything except wheels at most 450 MB.
Claim: a container adds at most 0.5 s (Docker) or 0.6 s (Apptainer) to the same command in the virtual environment.
Sizes are those of the files in MB (10^6 bytes).
If the package index's torch is installed, a separate row has the parts that the CPU build does not have.
Starts alternate; results are medians and spread of ROUNDS. --images takes other tags, such as one of an older commit.
They are measured to the plan's first line, and to the line of the first optimizer step.
A missing engine or image is a row with that reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.record import Recording, parse_options, recording

IMAGES = ("cpu", "cuda", "cpu-intel")
BIN = Path(sys.executable).parent
SETTINGS = {"TRAIN_EPOCHS": "1", "TRAIN_LOG_INTERVAL": "1", "TRAIN_TENSORBOARD": "0"}
FIRST_LINE, FIRST_STEP = "plan: ", "epoch 1/1  step 1/"
# Runs in the image: bytes of all files, by kind.
COUNT_BYTES = r"""
import json, os, re
kinds = {"wheels": 0, "wheels: CUDA and Triton": 0, "system": 0, "ours": 0}
CUDA = re.compile("/site-packages/(nvidia|triton)/|/libtorch_cuda|/libc10_cuda|/libcaffe2_nvrtc|/libtorch_nvshmem")
for top, folders, files in os.walk("/"):
    if top == "/":
        folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
    for name in files:
        path = os.path.join(top, name)
        info = os.lstat(path)
        mine = re.match("/opt/reference-training/|/opt/venv/.*/site-packages/(entrypoint|train)/", path)
        kind = "ours" if mine else "system" if not path.startswith("/opt/venv/") else "wheels"
        if kind == "wheels" and CUDA.search(path):
            kind = "wheels: CUDA and Triton"
        kinds[kind] += info.st_size
print(json.dumps(kinds))
"""


def output(*command: str) -> str:
    """Return the output of a command, empty if it fails or does not exist."""
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def sizes(image: str, record: Recording) -> None:
    """Print and record an image's layers, and its content by kind."""
    tag = f"reference-training:{image}"
    kinds = output("docker", "run", "--rm", "--user=0", tag, "python", "-c", COUNT_BYTES)
    if not kinds:
        print(f"\n{image}: not built for a Docker Engine here (make images)")
        return
    print(f"\n{image}, by layer")
    history = output("docker", "history", "--format", "{{.Size}}\t{{.CreatedBy}}", "--no-trunc", tag)
    for line in history.splitlines():
        size, made_by = line.split("\t", 1)
        if size != "0B":
            print(f"{size:>10}  {' '.join(made_by.split())[-70:]}")
    found = json.loads(kinds)
    total = sum(found.values())
    found |= {"in all": total, "that is not wheels (at most 450)": found["system"] + found["ours"]}
    table = record.table(f"{image}, by what it is", "MB")
    print(table.title)
    for kind, count in found.items():
        table.add(kind, count / 1e6)
        print(f"{count / 1e6:>8,.0f} MB  {kind}")
    if image != "cuda":
        label = '{{index .Config.Labels "reference-training.torch-build"}}'
        build = output("docker", "image", "inspect", f"--format={label}", tag).strip()
        without = total - found["wheels: CUDA and Triton"]
        print(f"{without / 1e6:>8,.0f} MB  without CUDA's part; the torch measured is of the build {build}")


def start_commands(images: Iterable[str]) -> dict[str, list[str]]:
    """Return the commands of these images that are available here, by name."""
    settings = [word for name, value in SETTINGS.items() for word in ("--env", f"{name}={value}")]
    found = {"venv": [str(BIN / "entrypoint"), "train"]}
    apptainer = shlex.split(os.environ.get("APPTAINER", "apptainer"))
    sifs = os.environ.get("APPTAINER_SIFS", "sif")
    for image in images:
        if output("docker", "image", "inspect", f"reference-training:{image}"):
            found[f"docker, {image}"] = ["docker", "run", "--rm", *settings, f"reference-training:{image}"]
        if (Path(os.environ.get("APPTAINER_WORK", sifs)) / f"{image}.sif").exists():
            found[f"apptainer, {image}"] = [*apptainer, "run", "--pwd", "/tmp", f"{sifs}/{image}.sif"]
    return found


def seconds_to(command: list[str], folder: Path) -> tuple[float, float]:
    """Return the seconds from a command's start to its plan's first line, and to its first step's line."""
    started = time.monotonic()
    environ = {**os.environ, **SETTINGS}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the images have compiled modules, and so has the environment then
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    line_s = step_s = 0.0
    for line in process.stdout:
        now = time.monotonic() - started
        line_s = line_s or (now if line.startswith(FIRST_LINE) else 0.0)
        step_s = step_s or (now if line.startswith(FIRST_STEP) else 0.0)
    if process.wait() or not step_s:
        raise SystemExit(f"{shlex.join(command)}: ended with {process.returncode} before its first step")
    return line_s, step_s


def measure(images: Iterable[str], rounds: int, record: Recording) -> None:
    """Print and record the seconds of each start; variants alternate, and the first round is warm-up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = start_commands(images)
        tables = [record.table(f"to the {what}", "s", "venv") for what in ("plan's first line", "first training step")]
        for round_number in range(rounds + 1):
            for one, command in commands.items():
                taken = seconds_to(command, folder)
                if round_number:
                    for table, value in zip(tables, taken, strict=True):
                        table.add(one, value)
    for table in tables:
        print(table.text())
    for engine in ("docker", "apptainer"):
        if not any(one.startswith(engine) for one in commands):
            tables[0].missing[engine] = "no engine with our images here"
            print(f"{engine}: {tables[0].missing[engine]}")


def main() -> None:
    """Print sizes and starts."""
    parser = argparse.ArgumentParser(prog="make image-report", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", nargs="+", default=list(IMAGES), help="tags of reference-training, names of SIFs")
    args = parse_options(parser)
    with recording("images", args, args.rounds) as record:
        record.counts_children = False
        for image in args.images:
            sizes(image, record)
        measure(args.images, args.rounds, record)


if __name__ == "__main__":
    main()
