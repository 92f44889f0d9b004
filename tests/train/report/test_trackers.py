"""Trackers: real MLflow and Weights & Biases get a run's numbers, and a broken one never ends a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Entrypoint
from tests.net import free_port
from tests.train.given import SMALL, epochs_of
from tests.train.started import Started
from train.report.metrics import MetricsWriter
from train.report.trackers import FINISHED, ID_FILE, read_run_id

RUN = SMALL | {"TRAIN_RUN_NAME": "run", "TRAIN_EPOCHS": "2", "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"}
needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"needs {package}: pip install {package}")
    for name, package in (("mlflow", "mlflow-skinny"), ("wandb", "wandb"))
}
TRACKERS = [pytest.param(name, marks=mark) for name, mark in needs.items()]


def metrics_of(folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) pairs of each metric that MLflow's files hold."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in (folder / "runs/mlruns").rglob(f"metrics/{name}/*"):
        rows = [line.split() for line in path.read_text().splitlines()]
        found[f"{name}/{path.name}"] = [(int(step), float(value)) for _, value, step in rows]
    return found


@pytest.mark.launch
@needs["mlflow"]
def test_mlflow_has_the_numbers_of_a_resumed_run(entrypoint: Entrypoint) -> None:
    entrypoint.train(env=RUN | {"TRAIN_TRACK": "mlflow"})
    shutil.rmtree(max((entrypoint.folder / "runs/run/checkpoint").glob("step-*")))
    entrypoint.train(env=RUN | {"TRAIN_TRACK": "mlflow", "TRAIN_RESUME": "auto"})
    lines = epochs_of(entrypoint, "run")
    wanted = [(line["step"], pytest.approx(line["test_accuracy"])) for line in lines]
    assert sorted({*metrics_of(entrypoint.folder, "epoch")["epoch/test_accuracy"]}) == wanted
    summary = metrics_of(entrypoint.folder, "summary")["summary/test_accuracy"]
    assert summary[-1][1] == pytest.approx(entrypoint.summary("run")["test_accuracy"])
    tags = {path.name: path.read_text() for path in (entrypoint.folder / "runs/mlruns").rglob("tags/TRAIN_*")}
    assert (tags["TRAIN_EPOCHS"], tags["TRAIN_DATASET"]) == ("2", "synthetic")
    assert len(list((entrypoint.folder / "runs/mlruns").glob("*/*/meta.yaml"))) == 1


@pytest.mark.launch
@needs["wandb"]
def test_wandb_writes_its_files_without_a_network(entrypoint: Entrypoint) -> None:
    result = entrypoint.succeed("train", env=RUN | {"TRAIN_TRACK": "wandb", "TRAIN_RUN_NAME": "a:b's"})
    assert "TRAIN_TRACK" not in result.err
    (file,) = (entrypoint.folder / "runs/wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"weights_sha256" in content, "the summary"
    assert b"epoch/test_accuracy" in content
    assert b"TRAIN_DATASET" in content


@pytest.mark.launch
@pytest.mark.parametrize("name", TRACKERS)
def test_server_that_cannot_be_reached_is_named(entrypoint: Entrypoint, name: str) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    env = {"MLFLOW_TRACKING_URI": server} if name == "mlflow" else {
        "WANDB_MODE": "online", "WANDB_BASE_URL": server, "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "5",
    }  # fmt: skip
    result = entrypoint.succeed("train", env=RUN | {"TRAIN_TRACK": name} | env)
    (line,) = [line for line in result.err.splitlines() if "TRAIN_TRACK" in line]
    assert line.endswith("; the training goes on without the tracker")
    assert "Traceback" not in result.err
    assert "0" * 40 not in result.err + result.out


class Broken:
    """A tracker that takes nothing."""

    calls = 0
    run_id = "one"

    def log(self, kind: str, step: int, values: Mapping[str, float | int]) -> None:
        Broken.calls += 1
        raise ConnectionError(f"no answer to {kind} {step} {len(values)}")

    def summary(self, values: Mapping[str, Any]) -> None:
        raise AssertionError(values)

    def close(self, status: str) -> None:
        raise AssertionError(status)


def test_password_in_the_url_of_a_server_is_hidden(tmp_path: Path) -> None:
    def start() -> None:
        raise OSError("API request to http://user:s3cret@127.0.0.1:9/api failed")

    said: list[str] = []
    MetricsWriter(tmp_path, tensorboard=False, track=start, warn=said.append)
    assert said == [
        "train: TRAIN_TRACK: API request to (hidden)@127.0.0.1:9/api failed; the training goes on without the tracker"
    ]


def test_tracker_is_given_up_at_its_first_error(tmp_path: Path) -> None:
    said: list[str] = []
    writer = MetricsWriter(tmp_path, tensorboard=False, track=Broken, warn=said.append)
    for step in (1, 2, 3):
        writer.write("step", step, {"loss": 1.0})
    writer.close()
    writer.summary({"test_accuracy": 50.0})
    writer.end_tracker(FINISHED)
    assert Broken.calls == 1
    (line,) = said
    assert line == "train: TRAIN_TRACK: no answer to step 1 1; the training goes on without the tracker"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((tmp_path / "summary.json").read_text()) == {"test_accuracy": 50.0}


STATUS = {"3": "FINISHED", "4": "FAILED", "5": "KILLED"}


def runs_of(folder: Path) -> list[tuple[str, str]]:
    """Return name and status of each run that MLflow's files hold, oldest first."""
    found = []
    for path in (folder / "runs/mlruns").glob("*/*/meta.yaml"):
        fields = dict(line.split(": ", 1) for line in path.read_text().splitlines() if ": " in line)
        found.append((int(fields["start_time"]), fields["run_name"].strip("'"), STATUS[fields["status"]]))
    return [(name, status) for _, name, status in sorted(found)]


@pytest.mark.launch
@needs["mlflow"]
def test_mlflow_says_how_runs_of_one_name_ended(entrypoint: Entrypoint) -> None:
    env = RUN | {"TRAIN_TRACK": "mlflow", "TRAIN_RUN_NAME": "name's"}
    entrypoint.train(env=env)
    shutil.rmtree(entrypoint.folder / "runs/name's")
    failed = entrypoint("train", env=env | {"TRAIN_LR": "1e30", "TRAIN_SCHEDULE": "constant"})
    assert failed.code == 5
    stopped = Started(entrypoint, env | {"TRAIN_EPOCHS": "100000", "TRAIN_RUN_NAME": "long"})
    stopped.wait_for("epoch 2/")
    stopped.preempted()
    assert runs_of(entrypoint.folder) == [("name's", "FINISHED"), ("name's", "FAILED"), ("long", "KILLED")]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"mlflow": 3}', '{"mlflow": "../x"}', '{"wandb": "ok"}'])
def test_odd_id_of_a_tracker_is_no_id(tmp_path: Path, content: str) -> None:
    (tmp_path / ID_FILE).write_text(content)
    assert read_run_id(tmp_path, "mlflow") == ""
    (tmp_path / ID_FILE).write_text('{"mlflow": "0a-b_"}')
    assert read_run_id(tmp_path, "mlflow") == "0a-b_"


@pytest.mark.launch
@pytest.mark.skipif(find_spec("mlflow") is not None, reason="MLflow is installed here, and comes before PYTHONPATH")
def test_tracker_on_pythonpath_is_found_by_plan_and_rank(entrypoint: Entrypoint) -> None:
    package = entrypoint.folder / "more/mlflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def __getattr__(name): raise RuntimeError('it is found')")
    env = RUN | {"TRAIN_TRACK": "mlflow", "PYTHONPATH": f"{package.parent}:{os.environ.get('PYTHONPATH', '')}"}
    result = entrypoint.succeed("train", env=env)
    assert "No module named 'mlflow'" not in result.err
    assert "the training goes on without the tracker" in result.err
