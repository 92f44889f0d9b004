"""The workflows of .github, valid, with few rights, and with commands that exist here, and the scripts of cluster/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from entrypoint.launch.remote import FORWARDED_NAMES, FORWARDED_PREFIXES, forwarded_variables

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
IMAGES = set(re.findall(r" AS image-(\S+)$", (ROOT / "containers/Dockerfile").read_text(), re.MULTILINE))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_matches_its_schema(workflow: Path) -> None:
    checker = shutil.which("check-jsonschema")
    if checker is None:
        pytest.skip("needs check-jsonschema (`pip install check-jsonschema`)")
    words = (checker, "--builtin-schema", "vendor.github-workflows", str(workflow))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_has_few_rights_and_pinned_actions(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}, "a job that needs more says so itself"
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 120
        assert set(job.get("permissions", {})) <= {"contents", "packages", "id-token", "attestations"}
    for step in steps(workflow):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", step.get("uses", "a/b@v1"))
        # What anybody may write, such as a branch's name, reaches a shell as a variable alone.
        assert not re.search(r"\$\{\{ *(github|inputs|steps|secrets)\.", step.get("run", ""))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_workflow_are_sound(workflow: Path, tmp_path: Path) -> None:
    checker = shutil.which("shellcheck") or str(ROOT / ".venv/bin/shellcheck")
    if not Path(checker).exists():
        pytest.skip("needs shellcheck: make .venv/installed")
    for number, step in enumerate(step for step in steps(workflow) if "run" in step):
        script = tmp_path / f"{number}.sh"
        script.write_text("#!/bin/bash\nset -e\n" + re.sub(r"\$\{\{[^}]*\}\}", "value", step["run"]))
        done = subprocess.run((checker, str(script)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        for named in re.findall(r"(?:bash|pytest) ((?:containers|tests)/\S+)", step["run"]):
            assert (ROOT / named).exists(), named


def test_images_are_published_for_tags_and_each_month() -> None:
    content = yaml.safe_load((ROOT / ".github/workflows/images.yaml").read_text())
    for job in content["jobs"].values():
        assert set(job["strategy"]["matrix"]["image"]) == IMAGES
    triggers = content[True]  # YAML 1.1 reads the key `on` so
    assert triggers["push"] == {"tags": ["v*"]}
    assert triggers["schedule"][0]["cron"].split()[2:] == ["1", "*", "*"]
    for step in steps(ROOT / ".github/workflows/images.yaml"):
        if re.search(r"docker push|cosign (sign|attest)", step.get("run", "")) and "sif" not in step["run"]:
            assert step["if"] == "github.event_name != 'pull_request'"


SETTINGS = {f"{prefix}SETTING": "1" for prefix in FORWARDED_PREFIXES} | {"CUDA_VISIBLE_DEVICES": "0"}
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "x", "MY_TOKEN": "x", "CCLX": "x", "TORCH_HUB_TOKEN": "x", "TRAIN_API_KEY": "x",
    "UCX_password": "x",
}  # fmt: skip
NO_SECRETS = {"UCX_IB_PKEY": "x", "NCCL_IB_PKEY": "x", "NCCL_KEYS": "x"}
SLURM = {
    "SLURM_JOB_ID": "40", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "2",
    "TRAIN_RUN_NAME": "run",
}  # fmt: skip


def run_script(folder: Path, script: str, environ: dict[str, str], code: int = 0) -> str:
    """Run a script without an image; return the calls of the programs in its place, a line each."""
    for name in ("mpirun", "srun", "scontrol"):
        ending = "exit 0" if name == "scontrol" else f"exit {code}"
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{folder}/calls"\n{ending}\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    base = {"PATH": path, "HOME": str(folder), "IMAGE": ""}
    done = subprocess.run(
        ["bash", str(ROOT / script)], env=base | environ, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return (folder / "calls").read_text()


@pytest.mark.parametrize("script", ["cluster/mpi/train.sh", "cluster/slurm/train-mpi.sbatch"])
def test_script_passes_what_the_entrypoint_passes(tmp_path: Path, script: str) -> None:
    environ = SETTINGS | SECRETS | NO_SECRETS | (SLURM if "slurm" in script else {})
    passed = set(re.findall(r"-x (\S+)", run_script(tmp_path, script, environ)))
    ours = {name for name in forwarded_variables(environ) if not name.startswith("ENTRYPOINT_")}
    assert ours - {"MASTER_ADDR"} <= passed
    assert not passed & set(SECRETS)
    assert passed >= set(NO_SECRETS)


@pytest.mark.parametrize("script", [f"cluster/slurm/train{kind}.sbatch" for kind in ("", "-mpi", "-pyxis")])
@pytest.mark.parametrize(
    ("array", "requeued"), [({}, "40"), ({"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "40_3")]
)
def test_preempted_task_of_an_array_requeues_itself_alone(
    tmp_path: Path, script: str, array: dict[str, str], requeued: str
) -> None:
    calls = run_script(tmp_path, script, SLURM | array, code=75)
    assert calls.splitlines()[-1] == f"scontrol requeue {requeued}"


@pytest.mark.launch
def test_script_sees_how_an_mpirun_ended_that_ended_at_once(tmp_path: Path) -> None:
    """Each command of the script waits first, so that mpirun has ended when the script asks for it."""
    (tmp_path / "slowly").write_text("trap 'sleep 0.05' DEBUG\n")
    environ = SLURM | {"BASH_ENV": str(tmp_path / "slowly")}
    calls = run_script(tmp_path, "cluster/slurm/train-mpi.sbatch", environ, code=75)
    assert calls.splitlines()[-1] == "scontrol requeue 40"


@pytest.mark.parametrize("image", ["/images/cuda.sqsh", ""])
def test_pyxis_starts_the_entrypoint_in_the_image(tmp_path: Path, image: str) -> None:
    calls = run_script(
        tmp_path, "cluster/slurm/train-pyxis.sbatch", SLURM | {"IMAGE": image, "MOUNTS": "/home/a:/workspace"}
    )
    container = f"--container-image={image} --container-mounts=/home/a:/workspace --container-workdir=/workspace"
    words = f" {container} --no-container-mount-home" if image else ""
    options = "--cpus-per-task=2 --cpu-bind=none --kill-on-bad-exit=1"
    assert calls == f"srun {options}{words} entrypoint train\n"


def test_compose_passes_every_setting_of_its_file() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    trainers = [service for name, service in services.items() if name != "tensorboard"]
    assert len(trainers) >= 4
    assert all(service["env_file"] for service in trainers)
    shown = re.search(r"grep -E '\^\(([A-Z_|]+)\)_'", (ROOT / "compose.yaml").read_text())
    assert shown is not None
    assert {f"{name}_" for name in shown[1].split("|")} == set(FORWARDED_PREFIXES)
    assert "CUDA_VISIBLE_DEVICES" in FORWARDED_NAMES
