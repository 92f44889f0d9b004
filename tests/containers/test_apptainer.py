"""The same images as SIFs, under a real Apptainer and as an ordinary user: what the host passes in stays out."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import clean_environment, script
from tests.containers.conftest import REPOSITORY, SIFS, SITE, Apptainer, inside, run

pytestmark = pytest.mark.apptainer

SHORT = {"TRAIN_EPOCHS": "1", "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"}
POISON = "raise SystemExit('the host leaked in')\n"


@pytest.mark.parametrize("image", SIFS)
def test_apptainer_run_equals_docker_run(apptainer: Apptainer, place: Path, image: str) -> None:
    here = ("--pwd", inside(apptainer, place))
    trained = apptainer("run", image, options=here).succeeded()
    assert float(re.findall(r"test accuracy +([\d.]+) %", trained.out)[-1]) >= 97
    assert {path.lstat().st_uid for path in (place / "runs").rglob("*")} == {place_owner(apptainer)}
    script(place, "x.py", "import sys, torch; print(torch.get_num_threads(), sys.argv[1:])")
    assert apptainer("run", image, "run", "x.py", "-v", options=here).out == f"{os.cpu_count()} ['-v']\n"
    assert apptainer("run", image, "plan").out.startswith("plan: ")
    assert apptainer("run", image, "bash", "-c", "echo $0").out == "/usr/bin/bash\n"


@pytest.mark.parametrize("image", SIFS)
def test_sif_tells_what_it_is(apptainer: Apptainer, image: str) -> None:
    printed = run(*apptainer.command, "run-help", apptainer.sif(image)).succeeded()
    assert f"{image}.sif entrypoint run x.py" in printed.out
    labels = json.loads(run(*apptainer.command, "inspect", "--json", "--labels", apptainer.sif(image)).out)
    found = labels["data"]["attributes"]["labels"]
    stages = re.split(
        r"^FROM .*?(?: AS (\S+))?$", (REPOSITORY / "containers/Dockerfile").read_text(), flags=re.MULTILINE
    )
    text = "".join(
        stages[number + 1] for number in range(1, len(stages), 2) if stages[number] in (f"image-{image}", None)
    )
    wanted = re.findall(r"((?:org\.opencontainers\.image|reference-training)\.[a-z-]+)=\"", text)
    assert len(wanted) > 8
    assert [name for name in wanted if not found.get(name)] == []
    image_file = json.loads(apptainer("exec", image, "cat", "/opt/reference-training/image.json").out)
    assert found["reference-training.torch-build"] == image_file["torch_build"]


def test_cuda_sif_asks_for_gpus(apptainer: Apptainer) -> None:
    ask = ("bash", "-c", "echo $NVIDIA_VISIBLE_DEVICES $NVIDIA_DRIVER_CAPABILITIES")
    assert apptainer("exec", "cuda", *ask).out == "all compute,utility\n"
    chosen = apptainer("exec", "cuda", *ask, options=("--env", "NVIDIA_VISIBLE_DEVICES=1"))
    assert chosen.out == "1 compute,utility\n"


def test_contained_sif_warns_of_lost_results(apptainer: Apptainer) -> None:
    planned = apptainer("run", "cpu-intel", "plan", options=("--containall",))
    assert "is in a tmpfs of the container, and its files are lost" in " ".join(planned.out.split())


def place_owner(apptainer: Apptainer) -> int:
    """Return the user that Apptainer runs as."""
    return int(apptainer("exec", "cpu-intel", "id", "-u").out)


@pytest.mark.parametrize("image", SIFS)
def test_apptainer_exec_nv_runs_entrypoint_and_bare_script(apptainer: Apptainer, place: Path, image: str) -> None:
    script(place, "x.py", "import os, sys, torch; print(sys.prefix, torch.get_num_threads(), os.environ['PATH'])")
    here = ("--nv", "--pwd", inside(apptainer, place))
    bare = apptainer("exec", image, "python", "x.py", options=here)
    assert bare.out.startswith(f"/opt/venv {os.cpu_count()} /opt/venv/bin:"), bare.err
    planned = apptainer("exec", image, "entrypoint", "run", "x.py", options=here)
    assert (planned.code, planned.out) == (0, bare.out)


@pytest.mark.parametrize("verb", [("exec", "python", "x.py"), ("run", "run", "x.py")])
def test_apptainer_isolates_home_and_environment(apptainer: Apptainer, place: Path, verb: tuple[str, ...]) -> None:
    packages = place / "home/.local/lib/python3.13/site-packages"
    packages.mkdir(parents=True)
    poison = place / "poison"
    poison.mkdir()
    for name in ("torch", "numpy", "entrypoint", "sitecustomize"):
        (packages / f"{name}.py").write_text(POISON)
        (poison / f"{name}.py").write_text(POISON)
    (packages / "evil.pth").write_text("import sys; sys.exit('the host leaked in')\n")
    script(place, "x.py", "import torch, numpy, os; print(torch.__file__, os.environ.get('LD_LIBRARY_PATH'))")
    result = apptainer(
        verb[0],
        "cpu-intel",
        *verb[1:],
        options=("--home", f"{inside(apptainer, place)}/home", "--pwd", inside(apptainer, place)),
        PYTHONPATH=inside(apptainer, poison),
        PYTHONHOME=inside(apptainer, poison),
        PYTHONSTARTUP=f"{inside(apptainer, poison)}/torch.py",
        LD_LIBRARY_PATH=inside(apptainer, poison),
        LD_PRELOAD="/nowhere/libbroken.so",
    ).succeeded()
    expected = f"{SITE}/torch/__init__.py /.singularity.d/libs\n"
    assert result.out == expected
    # The host's own programs complain of the preload before the container begins, the container's do not.
    assert result.err.count("libbroken.so") == apptainer(
        "exec", "cpu-intel", "true", LD_PRELOAD="/nowhere/libbroken.so"
    ).err.count("libbroken.so")


def test_apptainer_env_option_sets_pythonpath(apptainer: Apptainer, place: Path) -> None:
    script(place, "mine.py", "print('mine')")
    options = ("--env", f"PYTHONPATH={inside(apptainer, place)}")
    assert apptainer("exec", "cpu-intel", "python", "-c", "import mine", options=options).out == "mine\n"


@pytest.mark.parametrize("image", SIFS)
def test_mpirun_5_outside_starts_ranks_of_a_sif(apptainer: Apptainer, place: Path, tmp_path: Path, image: str) -> None:
    """The site's Open MPI and the image's need not be one: PMIx of 5.0.11 here, of 5.0.7 there."""
    mpirun = os.environ.get("OPENMPI5_MPIRUN", "")
    if not mpirun or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs Open MPI 5 outside (OPENMPI5_MPIRUN names its mpirun) and 2 cores")
    # A second apart: starts of Apptainer in its own root, as CI has it, get into each other's way.
    lock = f"(flock 9; sleep 1) 9>{tmp_path}/lock"
    command = script(tmp_path, "apptainer", f'#!/bin/sh\n{lock}\nexec {shlex.join(apptainer.command)} "$@"\n')
    command.chmod(0o755)
    started = ("--allow-run-as-root", "--oversubscribe", "-n", "2", "--bind-to", "none", command, "--quiet")
    words = (*started, "run", "--pwd", inside(apptainer, place), apptainer.sif(image))
    run(mpirun, *words, env={**SHORT, "TRAIN_RUN_NAME": "mpi", "LAUNCH_RESERVE_CPUS": "0"}).succeeded()
    ranks = json.loads((place / "runs/mpi/ranks.json").read_text())
    assert [rank["rank"] for rank in ranks] == [0, 1]


def test_apptainer_read_only_home_trains(apptainer: Apptainer, place: Path) -> None:
    for name, mode in (("out", 0o777), ("home", 0o555)):
        (place / name).mkdir()
        (place / name).chmod(mode)
    here = inside(apptainer, place)
    options = ("--home", f"{here}/home", "--bind", f"{here}/out:/out", "--pwd", "/out")
    result = apptainer("run", "cpu-intel", options=options, **SHORT)
    assert (result.code, result.err) == (0, "")
    assert (place / "out/runs/latest/summary.json").exists()


def test_apptainer_sigterm_saves_and_exits_75(apptainer: Apptainer, place: Path) -> None:
    command = (*apptainer.command, "--quiet", "run", "--pwd", inside(apptainer, place), apptainer.sif("cpu-intel"))
    process = subprocess.Popen(
        command,
        env={**clean_environment(), **SHORT, "TRAIN_EPOCHS": "100000", "TRAIN_RUN_NAME": "long"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 3/"):
            break
    os.killpg(process.pid, signal.SIGTERM)  # as Slurm does: every process of the step gets it
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert err.splitlines()[-1].startswith("entrypoint: preempted: stopped by SIGTERM: step ")
    result = apptainer(
        "run",
        "cpu-intel",
        options=("--pwd", inside(apptainer, place)),
        **{**SHORT, "TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "long", "TRAIN_RESUME": "auto"},
    )
    assert "TRAIN_EPOCHS was 100000, is 1" in result.err, "and the checkpoint is the run's own"


@pytest.mark.parametrize("image", SIFS)
def test_apptainer_nv_without_driver_fails_or_uses_cpu(apptainer: Apptainer, place: Path, image: str) -> None:
    options = ("--nv", "--pwd", inside(apptainer, place))
    refused = apptainer("run", image, options=options, LAUNCH_DEVICE="cuda")
    assert refused.code == 3
    reported = [line for line in refused.err.splitlines() if not line.startswith(("INFO:", "WARNING:"))]
    assert len(reported) == 1
    assert reported[0].startswith("entrypoint: error: LAUNCH_DEVICE=cuda: ")
    assert apptainer("run", image, options=options, **SHORT).code == 0
