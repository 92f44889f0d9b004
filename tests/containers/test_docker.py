"""The images under a real Docker Engine: what each command does, as whom, within which limits, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from entrypoint.cli.command_table import COMMANDS
from tests.conftest import needs_two_cores, script
from tests.containers.conftest import IMAGES, LIMIT_S, REPOSITORY, Docker, run

pytestmark = pytest.mark.docker

LEAST = ("--read-only", "--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges")
SHORT = ("-e", "TRAIN_EPOCHS=1", "-e", "TRAIN_TENSORBOARD=0", "-e", "LAUNCH_QUIET=1")
LONG = ("-e", "TRAIN_EPOCHS=100000", "-e", "LAUNCH_QUIET=1", "-e", "TRAIN_RUN_NAME=long")


def wait_for(docker: Docker, container: str, words: str, limit_s: float = 60) -> None:
    """Wait until a container has printed something."""
    until = time.monotonic() + limit_s
    while words not in docker.logs(container):
        assert time.monotonic() < until, docker.logs(container)
        time.sleep(0.2)


@pytest.mark.parametrize("image", IMAGES)
def test_docker_run_without_arguments_trains_to_97_percent(docker: Docker, image: str) -> None:
    result = docker.run(image).succeeded()
    assert float(re.findall(r"test accuracy +([\d.]+) %", result.out)[-1]) >= 97
    assert "warning" not in result.out
    warned = re.findall(r"^  warning: (.*)", result.err, re.MULTILINE)
    assert len(warned) == (2 if image == "cuda" else 1), "of the output and, in the CUDA image, of the GPU"
    assert warned[0].startswith("TRAIN_OUTPUT_DIR=runs: is in the container's own layer, ")
    assert "matplotlib" not in (result.out + result.err).lower()


@pytest.mark.parametrize("image", IMAGES)
def test_docker_run_accepts_every_command(docker: Docker, image: str, bound: Path) -> None:
    script(bound, "x.py", "import sys, torch; print(torch.get_num_threads(), sys.argv[1:])")
    here = ("-v", f"{bound}:/workspace")
    assert docker.run(image, "run", "x.py", "--lr", "1", options=here).out == f"{os.cpu_count()} ['--lr', '1']\n"
    assert docker.run(image, "plan").out.startswith("plan: ")
    doctor = docker.run(image, "doctor").succeeded()
    assert re.search(rf"^ok +image +{image}, revision ", doctor.out, re.MULTILINE)
    assert docker.run(image, "bash", "-c", "echo $0 $PWD").out == "/usr/bin/bash /workspace\n"
    assert docker.run(image, "python", "-c", "import torch; print(torch.__version__)").code == 0
    assert docker.run(image, "pln").err == (
        f"entrypoint: error: pln: no such command. Did you mean plan? Use one of: {', '.join(COMMANDS)}.\n"
    )


def test_runs_are_used_where_their_folder_alone_is_writable(docker: Docker, bound: Path) -> None:
    """A model of torchvision's and a drawing need a folder for temporary files, which Python does not find here."""
    options = (*LEAST, "--user=54321", "-v", f"{bound}:/workspace/runs", *SHORT, "-e", "TRAIN_MODEL=resnet18")
    for name in ("a", "b"):
        done = docker.run("cpu", options=(*options, "-e", f"TRAIN_RUN_NAME={name}")).succeeded()
    for words in (("predict", "runs/a", "runs/a/batch.png"), ("report", "runs/a"), ("compare", "runs/a", "runs/b")):
        done = docker.run("cpu", *words, options=options)
        assert (done.code, done.err) == (0, ""), words
    assert (bound / "compare.html").is_file()


USERS = {
    "one without a name": ("--user", "54321:54321"),
    "one without a home": ("--user", "54321:54321", "-e", "HOME="),
    "one whose home is read-only": ("--user", "54321:54321", "-e", "HOME=/usr/share"),
    "root": ("--user", "0:0"),
}


@pytest.mark.parametrize(
    ("user", "ranks"),
    [*((user, "1") for user in USERS), pytest.param("one without a name", "2", marks=needs_two_cores)],
)
def test_docker_any_uid_trains_and_owns_its_files(docker: Docker, bound: Path, user: str, ranks: str) -> None:
    options = (*LEAST, *SHORT, *USERS[user], "--tmpfs=/tmp", "-v", f"{bound}:/out", "-e", "TRAIN_OUTPUT_DIR=/out")
    result = docker.run("cpu-intel", options=(*options, "-e", f"LAUNCH_NPROC_PER_NODE={ranks}")).succeeded()
    assert (result.err, "warning" in result.out) == ("", False)
    owners = {path.lstat().st_uid for path in bound.rglob("*")}
    assert owners == {int(USERS[user][1].split(":")[0])}


def test_read_only_line_of_the_readme_works(docker: Docker, bound: Path) -> None:
    docker.tag("cpu")
    lines = (REPOSITORY / "containers/README.md").read_text().splitlines()
    (line,) = [line for line in lines if " --read-only " in line]
    result = subprocess.run(
        ["bash", "-c", line], cwd=bound, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (bound / "runs/latest/summary.json").exists()
    assert "lost with the container" not in result.stderr


def test_docker_read_only_without_output_folder_fails(docker: Docker) -> None:
    result = docker.run("cpu-intel", options=(*LEAST, *SHORT))
    assert (result.code, result.out) == (2, "")
    cause = "TRAIN_OUTPUT_DIR=runs: cannot be written (Read-only file system). Set it to a writable folder."
    assert result.err == f"entrypoint: error: {cause}\n"


def test_inductor_compiles_as_a_user_without_a_name(docker: Docker, bound: Path) -> None:
    script(bound, "x.py", "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).sum().item())")
    options = (*LEAST, "--user=54321", "--tmpfs=/tmp:exec", "-v", f"{bound}:/workspace:ro")
    result = docker.run("cpu-intel", "run", "x.py", options=options)
    assert (result.code, result.out) == (0, "3.0\n"), result.err


@pytest.mark.parametrize(
    ("image", "ranks"),
    [
        ("cpu-intel", "1"),
        pytest.param("cpu-intel", "2", marks=needs_two_cores),
        pytest.param("cpu", "2", marks=needs_two_cores),
        ("cuda", "1"),
    ],
)
def test_docker_stop_saves_and_next_start_resumes(docker: Docker, bound: Path, image: str, ranks: str) -> None:
    place = (*LONG, "-e", f"LAUNCH_NPROC_PER_NODE={ranks}", "-v", f"{bound}:/workspace/runs")
    container = docker.start(image, options=place)
    wait_for(docker, container, "epoch 3/")
    started = time.monotonic()
    assert run("docker", "stop", container).code == 0
    assert time.monotonic() - started < 8, "inside docker stop's own grace of 10 s"
    assert run("docker", "wait", container).out == "75\n"
    assert docker.logs(container).splitlines()[-1].startswith("entrypoint: preempted: stopped by SIGTERM: step ")
    again = docker.start(image, options=(*place, "-e", "TRAIN_RESUME=auto"))
    wait_for(docker, again, "resuming from runs/long/checkpoint/step-")
    wait_for(docker, again, "test accuracy")


def test_docker_stop_without_handler_ends_at_once(docker: Docker, bound: Path) -> None:
    script(bound, "x.py", "import time; print('here', flush=True); time.sleep(600)")
    container = docker.start("cpu-intel", "run", "x.py", options=("-v", f"{bound}:/workspace"))
    wait_for(docker, container, "here")
    started = time.monotonic()
    run("docker", "stop", container)
    assert time.monotonic() - started < 5
    assert run("docker", "wait", container).out == "143\n"


def test_docker_pid_1_reaps_orphans(docker: Docker, bound: Path) -> None:
    script(
        bound,
        "x.py",
        """
        import glob, os, subprocess, sys, time
        subprocess.run(["sh", "-c", "sleep 0.2 & sleep 0.2 & true"])
        time.sleep(1)
        stats = [open(path).read() for path in glob.glob("/proc/[0-9]*/stat")]
        print(*sorted(stat.partition("(")[2].rpartition(")")[0] for stat in stats))
        print([stat.rpartition(")")[2].split()[0] for stat in stats].count("Z"))
        """,
    )
    result = docker.run("cpu-intel", "run", "x.py", options=("-v", f"{bound}:/workspace"))
    assert result.out == "ep-agent python tini\n0\n"


def test_streaming_needs_little_shared_memory(docker: Docker, bound: Path) -> None:
    from tests.conftest import paint

    paint(bound / "train", each=8)
    paint(bound / "test", each=4)
    env = {
        "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "/data", "TRAIN_DATA_SOURCE": "stream",
        "TRAIN_NUM_WORKERS": "4", "TRAIN_IMAGE_SIZE": "224", "TRAIN_BATCH_SIZE": "16",
    }  # fmt: skip
    options = ("-v", f"{bound}:/data:ro", *(word for name in env for word in ("-e", f"{name}={env[name]}")))
    docker.run("cpu-intel", options=(*options, *SHORT, "--shm-size=1m")).succeeded()
    for image in IMAGES:
        plan = docker.run(image, "plan", "--verbose", options=options)
        assert re.search(r"^ *JPEG decoder +compiled", plan.out, re.MULTILINE), plan.out + plan.err
    doctor = docker.run("cpu-intel", "doctor", options=("--shm-size=16m",))
    assert re.search(r"^ok +/dev/shm +16 MiB", doctor.out, re.MULTILINE)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-e", "LAUNCH_QUIET=1"),
        pytest.param(("-e", "LAUNCH_NPROC_PER_NODE=2"), marks=needs_two_cores),
        ("-e", "LAUNCH_LAUNCHER=torchrun"),
    ],
)
def test_cuda_image_without_gpu_warns_first_and_last(docker: Docker, options: tuple[str, ...]) -> None:
    result = docker.run("cuda", options=("-e", "TRAIN_EPOCHS=1", "-e", "TRAIN_TENSORBOARD=0", *options)).succeeded()
    lines = result.err.splitlines()
    assert lines[0] == lines[-1]
    assert lines[0].startswith("entrypoint: warning: CUDA image: the CPU is used. No GPU is visible (")
    chosen = docker.run("cuda", options=(*SHORT, *options, "-e", "LAUNCH_DEVICE=cpu"))
    assert (chosen.code, "CUDA image" in chosen.err) == (0, False)


def test_cuda_image_without_gpu_warns_before_error(docker: Docker, bound: Path) -> None:
    script(bound, "x.py", "raise SystemExit(9)")
    options = ("-v", f"{bound}:/workspace", "-e", "LAUNCH_QUIET=1")
    alone = docker.run("cuda", "run", "x.py", options=options)
    assert (alone.code, alone.err.count("entrypoint: warning: CUDA image: ")) == (9, 2)
    doctor = docker.run("cuda", "doctor").succeeded()
    assert re.search(r"^warning +CUDA image +the CPU is used; No GPU is visible ", doctor.out, re.MULTILINE)
    assert "CUDA image" not in docker.run("cpu-intel", "doctor").out


def test_docker_cuda_without_driver_fails_with_one_line(docker: Docker) -> None:
    result = docker.run("cuda", options=("-e", "LAUNCH_DEVICE=cuda"))
    assert result.code == 3
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("entrypoint: error: LAUNCH_DEVICE=cuda: ")


# What --nv and --gpus bind from the host: a driver of 2021, whose CUDA is older than the image's.
OLD_DRIVER = """
#include <string.h>
typedef int R; typedef void *D;
R nvmlInit_v2(void) { return 0; }
R nvmlInitWithFlags(unsigned f) { return 0; }
R nvmlShutdown(void) { return 0; }
R nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "470.57.02", n); return 0; }
R nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 11040; return 0; }
R nvmlSystemGetCudaDriverVersion(int *v) { *v = 11040; return 0; }
R nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
R nvmlDeviceGetHandleByIndex_v2(unsigned i, D *d) { *d = (D)1; return 0; }
R nvmlDeviceGetName(D d, char *s, unsigned n) { strncpy(s, "NVIDIA A100", n); return 0; }
R nvmlDeviceGetUUID(D d, char *s, unsigned n) { strncpy(s, "GPU-1", n); return 0; }
R nvmlDeviceGetCudaComputeCapability(D d, int *a, int *b) { *a = 8; *b = 0; return 0; }
struct memory { unsigned long long total, free, used; };
R nvmlDeviceGetMemoryInfo(D d, struct memory *m) { m->total = 40ull << 30; return 0; }
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
R nvmlDeviceGetPciInfo_v3(D d, struct pci *p) { strcpy(p->bus_id, "00000000:06:00.0"); return 0; }
R nvmlDeviceGetNvLinkState(D d, unsigned l, unsigned *a) { return 3; }
R nvmlDeviceGetMigMode(D d, unsigned *a, unsigned *b) { *a = *b = 0; return 3; }
const char *nvmlErrorString(R r) { return "Not Supported"; }
"""


def test_docker_old_driver_fails_or_falls_back_to_cpu(docker: Docker, bound: Path) -> None:
    (bound / "nvml.c").write_text(OLD_DRIVER)
    library = bound / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(bound / "nvml.c")], check=True)
    driver = (
        "-v",
        f"{library}:/usr/lib/{os.uname().machine}-linux-gnu/libnvidia-ml.so.1:ro",
        "-v",
        "/dev/null:/dev/nvidiactl",
    )
    refused = docker.run("cuda", options=(*driver, "-e", "LAUNCH_DEVICE=cuda"))
    assert (refused.code, len(refused.err.splitlines())) == (3, 1)
    assert "470.57.02" in refused.err
    assert "11.4" in refused.err
    auto = docker.run("cuda", options=(*driver, "-e", "TRAIN_EPOCHS=1")).succeeded()
    assert re.search(r"^ +device +cpu +.*470\.57\.02", auto.err, re.MULTILINE)
