"""The workflows of .github: valid, with few rights, and with commands that exist here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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
