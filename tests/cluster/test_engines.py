"""The files for SkyPilot and dstack: their own parsers read them, and their nodes are those of one job.

SKYPILOT_PYTHON and DSTACK_PYTHON each name a Python whose environment has that engine's package.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from entrypoint.cli.parser import parse_command_line
from entrypoint.core.errors import ExitCode
from entrypoint.job.detect import detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.settings import LaunchSettings, read_launch_settings
from tests.containers.conftest import REPOSITORY

DOCUMENTED = REPOSITORY / "tests/entrypoint/job/documented.json"
SKYPILOT = """
import json, sys, yaml, sky
config = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(config, secrets_overrides=[("ENTRYPOINT_JOB_KEY", "key")])
one, = task.resources
secrets = {name: value.get_secret_value() for name, value in task.secrets.items()}
print(json.dumps({"nodes": task.num_nodes, "command": task.run, "environment": task.envs | secrets,
    "spot": one.use_spot, "recovery": one.job_recovery, "image": one.extract_docker_image(),
    "files": task.file_mounts, "options": one.cluster_config_overrides}))
"""
DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
from dstack._internal.utils.interpolator import VariablesInterpolator
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
secrets = {"pets_key": "key", "aws_id": "id", "aws_key": "s3"}
known = VariablesInterpolator({"dstack": {"node_rank": "1"}, "secrets": secrets})
print(json.dumps({"nodes": task.nodes, "command": task.commands[0], "spot": task.spot_policy.value == "spot",
    "environment": {name: known.interpolate_or_error(value) for name, value in task.env.as_dict().items()},
    "volumes": {one.path: known.interpolate_or_error(one.name) for one in task.volumes},
    "retry": sorted(event.value for event in task.retry.on_events), "stop_s": task.stop_duration}))
"""


def parse(engine: str, program: str, file: str, tmp_path: Path) -> dict[str, Any]:
    """Return what an engine's own parser reads in a file of cluster/; skips the test without its package."""
    variable = f"{engine.upper()}_PYTHON"
    python = os.environ.get(variable, "")
    if not python:
        pytest.skip(f"needs the package {engine}: {variable} names no Python that has it")
    command = [python, "-c", program, REPOSITORY / "cluster" / file]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}  # both write into the home
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_second_node(found: dict[str, Any], launch: str) -> None:
    """Check that the entrypoint finds the second of two nodes with a task's variables, and takes its command."""
    recorded = next(one for one in json.loads(DOCUMENTED.read_text()) if one["launch"] == launch)
    environ = found["environment"] | recorded["environments"][1]
    group = detect_node_group(read_launch_settings(environ, {}), environ, detect_job(environ))
    assert (group.nnodes, group.node_rank) == (found["nodes"], 1)
    assert environ["ENTRYPOINT_JOB_KEY"] == "key"
    assert (environ["TRAIN_RESUME"], environ["TRAIN_OUTPUT_DIR"]) == ("auto", "s3://example-runs")
    program, *words = found["command"].split()
    parsed = parse_command_line(words, in_image=True)
    assert (program, parsed.command, set(parsed.flags)) == ("entrypoint", "train", {"TRAIN_MODEL", "TRAIN_EPOCHS"})
    assert found["spot"]


def test_skypilot_reads_its_file(tmp_path: Path) -> None:
    found = parse("skypilot", SKYPILOT, "skypilot/train.yaml", tmp_path)
    check_second_node(found, "SkyPilot")
    assert found["recovery"]["recover_on_exit_codes"] == [ExitCode.PREEMPTED]
    assert found["files"] == {"/data": "s3://example-pets"}
    assert found["image"] == "registry.example.org/reference-training:cpu"
    assert found["options"] == {"docker": {"run_options": ["--user=0"]}}


def test_dstack_reads_its_file(tmp_path: Path) -> None:
    found = parse("dstack", DSTACK, "dstack/train.dstack.yml", tmp_path)
    check_second_node(found, "dstack task of 2 nodes")
    assert found["volumes"] == {"/data": "pets-data-1"}
    assert found["environment"]["AWS_SECRET_ACCESS_KEY"] == "s3"
    assert found["retry"] == ["error", "interruption", "no-capacity"]
    assert found["stop_s"] > LaunchSettings().grace_period_s
