"""Send a run's numbers to MLflow or Weights & Biases besides its own files: `TRAIN_TRACK`.

Both work without a network by default. A tracker's own variables name a server: MLFLOW_TRACKING_URI, or WANDB_MODE
with WANDB_API_KEY. What fails or does not answer is given up with one line, and the training goes on.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.core.files import atomic_write_text
from train.checkpoint.metadata import read_json
from train.models.users_code import import_users_module
from train.settings import TrainSettings

# The project or experiment, unless the tracker's own variable names another.
PROJECT = "reference-training"
# Holds the tracker's own name of the run, by which a resumed run goes on in the same place.
ID_FILE = "tracker.json"
RUN_ID = re.compile(r"[\w-]{1,128}", re.ASCII)
MLFLOW_DEFAULTS = {
    # A server that does not answer must not hold up the training for long.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # which asks a server of its makers
}
INIT_TIMEOUT_S = 30
# What MLflow accepts as the value of a tag.
MLFLOW_VALUE_LENGTH = 5000
# How a run ended, in MLflow's words.
FINISHED, PREEMPTED, FAILED = "FINISHED", "KILLED", "FAILED"


def start_tracker(settings: TrainSettings, folder: Path, *, resumes: bool) -> Tracker | None:
    """Return the tracker of a run, None without TRAIN_TRACK; may raise anything that the tracker raises.

    Only a run that `resumes` goes on in the tracker's run of before. Another one of the same name is a new run there.
    """
    if settings.run.track == "off":
        return None
    import_users_module(settings.run.track, None)  # a rank's own path lacks PYTHONPATH, in which the plan has found it
    known = read_run_id(folder, settings.run.track) if resumes else ""
    kind = MLflowTracker if settings.run.track == "mlflow" else WandbTracker
    tracker = kind(settings, folder, known)
    atomic_write_text(folder / ID_FILE, json.dumps({settings.run.track: tracker.run_id}) + "\n")
    return tracker


def read_run_id(folder: Path, track: str) -> str:
    """Return the tracker's name of a run from its folder, empty if there is none."""
    name = (read_json(folder / ID_FILE, dict[str, str]) or {}).get(track, "")
    return name if RUN_ID.fullmatch(name) else ""


class MLflowTracker:
    """Logs to the server of MLFLOW_TRACKING_URI, else to files in `mlruns` next to the run's folder."""

    def __init__(self, settings: TrainSettings, folder: Path, known: str) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI") or (folder.parent / "mlruns").absolute().as_uri()
        self.client = MlflowClient(tracking_uri=place)
        if known:
            self.client.update_run(known, status="RUNNING")
        self.run_id = known or self.new_run(folder.name)
        for name, setting in settings.to_json().items():
            self.client.set_tag(self.run_id, f"TRAIN_{name.upper()}", str(setting)[:MLFLOW_VALUE_LENGTH])

    def new_run(self, name: str) -> str:
        """Return the id of a new run in MLFLOW_EXPERIMENT_NAME, which is made if it is missing."""
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self.client.create_experiment(experiment)
        return str(self.client.create_run(number, run_name=name).info.run_id)

    def log(self, kind: str, step: int, values: Mapping[str, float | int]) -> None:
        """Send the numbers in one request."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(f"{kind}/{name}", float(value), now, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Send the numbers of the summary."""
        self.log("summary", 0, {name: value for name, value in values.items() if type(value) in (int, float)})

    def close(self, status: str) -> None:
        """End the run with its status."""
        self.client.set_terminated(self.run_id, status)


class WandbTracker:
    """Logs to files in `wandb` next to the run's folder, which `wandb sync` sends; online if WANDB_MODE says so."""

    def __init__(self, settings: TrainSettings, folder: Path, known: str) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=known or None,
            resume="allow" if known else None,
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(folder.parent.absolute()),
            config={f"TRAIN_{name.upper()}": value for name, value in settings.to_json().items()},
            settings=wandb.Settings(
                console="off", silent=True, save_code=False, disable_git=True, init_timeout=INIT_TIMEOUT_S
            ),
        )
        self.run_id = str(self.run.id)

    def log(self, kind: str, step: int, values: Mapping[str, float | int]) -> None:
        """Log the numbers; an epoch's have the step of its last step."""
        self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Keep the numbers and words of the summary."""
        self.run.summary.update({name: value for name, value in values.items() if not isinstance(value, (list, dict))})

    def close(self, status: str) -> None:
        """Write or send what is left; wandb calls a run with a code other than 0 failed."""
        self.run.finish(exit_code=0 if status == FINISHED else 1)


# Takes the numbers of one run. Each method may raise anything, after which none is called again.
Tracker = MLflowTracker | WandbTracker
