"""Rows that keep what a user reads: checks of a machine, a trained model in use, and runs that fail."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.book.measure import QUIET
from benchmarks.conditions import ROOT, read_machine, read_versions
from benchmarks.gpu_proof.proof import RESNET, Ending, Proof, alternate, ending_of, started, state
from train.kernels.library import find_kernel

CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,pcie.link.gen.current"
ACCURACY = re.compile(r"\baccuracy +([\d.]+) %")
# Ranks of a user's script, whose tensors are on the device in the script's first argument.
RANKS = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist

device, kind = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
rank, total = dist.get_rank(), torch.ones(1, device=device)
dist.all_reduce(total)
if rank == 1 and kind == "hang":
    time.sleep(600)
if rank == 1 and kind == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
"""
MEMORY = """
import sys
import torch

torch.empty(2**50, device=sys.argv[1])
"""
BUSY = """
import os, sys, time
import torch

matrix = torch.randn(1024, 1024, device=sys.argv[1])
print("busy", os.getpid(), flush=True)
until = time.monotonic() + 120
while time.monotonic() < until:
    matrix = (matrix @ matrix).clamp(-1, 1)
    matrix.sum().item()
"""


def script(text: str) -> str:
    """Return the path of a script with this text."""
    path = Path(tempfile.mkdtemp(prefix="gpu-proof-")) / "script.py"
    path.write_text(text)
    return str(path)


def clocks() -> list[str]:
    """Return what the driver says of the card now."""
    if not shutil.which("nvidia-smi"):
        return ["nvidia-smi is not here"]
    words = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()


def machine(proof: Proof) -> None:
    """What runs where: versions, compiled kernels, clocks, and the doctor's checks."""
    facts = read_machine()
    state("machine", [f"{facts.cpu}, {facts.cpus} CPUs, {facts.memory_gib:g} GiB, {', '.join(facts.gpus) or 'no GPU'}"])
    state("versions", [json.dumps(read_versions())])
    for name in ("jpeg", "winograd"):
        state(f"kernel {name}", ["compiled" if find_kernel(name) else "not there"])
    state("clocks, idle", clocks())
    ending_of("doctor", environ={"LAUNCH_DEVICE": proof.device}).keep("doctor", 60)


def running(proof: Proof) -> None:
    """A rank that computes: the card's clocks, and what verify and stacks print."""
    words = ("run", "--quiet", "--nproc-per-node=1", f"--device={proof.device}", script(BUSY), proof.device)
    with started(*words) as process:
        assert process.stdout is not None
        rank = next((line.split()[-1] for line in process.stdout if line.startswith("busy")), "")
        time.sleep(proof.size(3, 1))
        state("clocks, busy", clocks())
        endings = {command: ending_of(command, rank) for command in ("verify", "stacks")}
    for command, ending in endings.items():
        ending.keep(command, 30)
    if any(ending.code for ending in endings.values()):
        raise SystemExit(f"ended with {[ending.code for ending in endings.values()]}")


def use(proof: Proof) -> None:
    """A model is trained on photos, evaluated from its run folder, and asked about images."""
    folder = proof.photos()
    output = Path(tempfile.mkdtemp(prefix="gpu-proof-"))
    words = {"dataset": "imagefolder", "data_dir": str(folder), "model": "resnet18", "image_size": "64"}
    words |= {"batch_size": str(proof.size(64, 4)), "steps": str(proof.size(50, 2)), "output_dir": str(output)}
    settings = QUIET | proof.settings(**words, run_name="run", progress="plain")
    trained = ending_of("train", environ=settings, limit_s=300)
    device = {"LAUNCH_QUIET": "1", "LAUNCH_DEVICE": proof.device}
    evaluated = ending_of("evaluate", str(output / "run"), environ=device)
    images = [str(path) for path in sorted((folder / "test").glob("*/*.jpg"))]
    predicted = ending_of("predict", str(output / "run"), *images, "--format=csv")
    trained.keep("train")
    evaluated.keep("evaluate")
    predicted.keep("predict", 4)
    figures = [ACCURACY.findall("\n".join(ending.lines)) for ending in (trained, evaluated)]
    if any(ending.code for ending in (trained, evaluated, predicted)):
        raise SystemExit("a command failed")
    if not all(figures) or figures[0][-1] != figures[1][0]:
        raise SystemExit(f"train and evaluate differ in their accuracy: {figures}")
    alternate({"evaluate": lambda: (evaluated.seconds,)}, [("seconds of the command", "s", "")], 1)


def two_ranks(proof: Proof) -> None:
    """Two ranks: right on a CPU; on one GPU refused, or right too."""
    settings = QUIET | proof.training(RESNET) | {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1"}
    with tempfile.TemporaryDirectory() as output:
        settings |= {"TRAIN_OUTPUT_DIR": output, "TRAIN_STEPS": "2", "TRAIN_PROGRESS": "plain"}
        ending = ending_of("train", environ=settings, limit_s=120)
    ending.keep("train on two ranks")
    expected = {0} if proof.dry else {0, 2, 3}
    if ending.code not in expected:
        raise SystemExit(f"ended with {ending.code}, not with {sorted(expected)}")


def out_of_memory(proof: Proof) -> None:
    """What is printed when memory does not suffice: of a script, and on a GPU of the trainer."""
    run = ("run", "--quiet", "--nproc-per-node=1", f"--device={proof.device}", script(MEMORY), proof.device)
    kept(ending_of(*run), "a script of a user", "memory")
    if not proof.dry:  # a CPU would take the memory of other processes
        more = {"TRAIN_BATCH_SIZE": "16384", "TRAIN_SYNTHETIC_IMAGES": "16384", "TRAIN_STEPS": "2"}
        more["TRAIN_OUTPUT_DIR"] = tempfile.mkdtemp(prefix="gpu-proof-")
        kept(ending_of("train", environ=QUIET | proof.training(RESNET) | more), "the trainer", "memory")


def ranks_that_end(proof: Proof, kind: str, text: str) -> None:
    """Two ranks of a script over Gloo, with tensors on the device; rank 1 does not take part to the end."""
    words = ("run", "--quiet", "--nproc-per-node=2", "--device=cpu", "--backend=gloo")
    environ = {"LAUNCH_OVERSUBSCRIBE": "1", "LAUNCH_GRACE_PERIOD_S": "5"}
    kept(ending_of(*words, script(RANKS), proof.device, kind, environ=environ, limit_s=100), kind, text)


def kept(ending: Ending, what: str, text: str) -> None:
    """Keep what a failed command printed; it has to end by itself with a code, and to say this text."""
    ending.keep(what, 30)
    if not ending.code or text not in "\n".join(ending.lines):
        raise SystemExit(f"{what}: ended with {ending.code}; {text!r} is expected in its lines")


def cuda_tests(proof: Proof) -> None:
    """The tests that need an NVIDIA GPU; a dry run takes the file of bench-cuda, where they skip."""
    files = ["tests/benchmarks/test_cuda.py"] if proof.dry else []
    words = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    state("pytest -m cuda", lines[-40:] or done.stderr.splitlines()[-10:])
    nothing_ran = not proof.dry and " passed" not in "".join(lines[-1:])
    if done.returncode or nothing_ran:
        raise SystemExit(lines[-1] if lines else "pytest did not start")
