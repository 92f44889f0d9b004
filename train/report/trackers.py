"""Send a run's numbers to MLflow or Weights & Biases besides its own files: `TRAIN_TRACK`.

Both work without a network by default. A tracker's own variables name a server: MLFLOW_TRACKING_URI, or WANDB_MODE
with WANDB_API_KEY. What fails or does not answer is given up with one line, and the training goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from train.settings import TrainSettings

# The project or experiment, unless the tracker's own variable names another.
PROJECT = "reference-training"
# A server that does not answer must not hold up the training for long.
MLFLOW_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
INIT_TIMEOUT_S = 30
# What MLflow accepts as the value of a parameter.
MLFLOW_VALUE_LENGTH = 6000


class Tracker(Protocol):
    """Takes the numbers of one run. Each method may raise anything, after which none is called again."""

    def log(self, kind: str, step: int, values: Mapping[str, float | int]) -> None:
        """Take the numbers of a step or of an epoch."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Take the run's summary."""

    def close(self) -> None:
        """End the run."""


def start_tracker(settings: TrainSettings, folder: Path) -> Tracker | None:
    """Return the tracker of a run, None without TRAIN_TRACK; may raise anything that the tracker raises."""
    if settings.track == "mlflow":
        return MLflowTracker(settings, folder)
    if settings.track == "wandb":
        return WandbTracker(settings, folder)
    return None


class MLflowTracker:
    """Logs to the server of MLFLOW_TRACKING_URI, else to files in `mlruns` next to the run's folder."""

    def __init__(self, settings: TrainSettings, folder: Path) -> None:
        for name, value in MLFLOW_LIMITS.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        place = os.environ.get("MLFLOW_TRACKING_URI") or (folder.parent / "mlruns").absolute().as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        self.client = MlflowClient(tracking_uri=place)
        known = self.client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self.client.create_experiment(experiment)
        self.run_id = (
            self.find_run(number, folder.name) or self.client.create_run(number, run_name=folder.name).info.run_id
        )
        for name, value in settings.to_json().items():
            self.client.set_tag(self.run_id, f"TRAIN_{name.upper()}", str(value)[:MLFLOW_VALUE_LENGTH])

    def find_run(self, experiment: str, name: str) -> str:
        """Return the id of a run of this name, which is resumed, empty without one."""
        found = self.client.search_runs([experiment], filter_string=f"attributes.run_name = '{name}'", max_results=1)
        return str(found[0].info.run_id) if found else ""

    def log(self, kind: str, step: int, values: Mapping[str, float | int]) -> None:
        """Send the numbers in one request."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(f"{kind}/{name}", float(value), now, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Send each number of the summary."""
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.client.log_metric(self.run_id, f"summary/{name}", float(value))

    def close(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.run_id)


class WandbTracker:
    """Logs to files in `wandb` next to the run's folder, which `wandb sync` sends; online if WANDB_MODE says so."""

    def __init__(self, settings: TrainSettings, folder: Path) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=os.environ.get("WANDB_RUN_ID", folder.name),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(folder.parent.absolute()),
            config={f"TRAIN_{name.upper()}": value for name, value in settings.to_json().items()},
            settings=wandb.Settings(
                console="off", silent=True, save_code=False, disable_git=True, init_timeout=INIT_TIMEOUT_S
            ),
        )

    def log(self, kind: str, step: int, values: Mapping[str, float | int]) -> None:
        """Log the numbers; an epoch's have the step of its last step."""
        self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Keep the numbers and words of the summary."""
        self.run.summary.update({name: value for name, value in values.items() if not isinstance(value, (list, dict))})

    def close(self) -> None:
        """Write or send what is left."""
        self.run.finish()
