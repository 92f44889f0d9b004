"""What is left when a run has ended: the summary, the curves, and a few lines to read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from entrypoint.plan import Plan
from train.evaluate import Score
from train.models import count_parameters
from train.run import Run


def finish(run: Run, score: Score, plan: Plan, started: float) -> None:
    """Write the summary and the curves, and show what came out."""
    if not run.recorder:
        return
    learner = run.learner
    images = learner.step * run.settings.batch_size
    summary = {
        "test_accuracy": round(score.accuracy, 4),
        "test_loss": score.loss,
        "test_images": score.images,
        "epochs": run.settings.epochs,
        "steps": learner.step,
        "train_seconds": round(learner.seconds, 3),
        "images_per_second": round(images / learner.seconds, 1) if learner.seconds else 0.0,
        "parameters": count_parameters(learner.model),
        "model": run.settings.model,
        "dataset": run.settings.dataset,
        "batch_size": run.settings.batch_size,
        "world_size": run.group.world_size,
        "threads": torch.get_num_threads(),
        "feed": plan.training["feed"],
        "device": str(run.group.device),
        "precision": learner.precision,
        "seed": run.settings.seed,
    }
    run.recorder.close()
    run.progress.close()
    total = round(time.time() - started, 3)
    run.recorder.summary({**summary, "total_seconds": total})
    if run.settings.progress != "off":
        show_summary(summary, total, run.folder)


def show_summary(summary: dict[str, Any], total_seconds: float, folder: Path) -> None:
    """Print what came out in a few lines."""
    print(
        f"test accuracy  {summary['test_accuracy']:.2f} % of {summary['test_images']:,} images"
        f" after {summary['epochs']} epochs, {summary['steps']:,} steps\n"
        f"training       {summary['train_seconds']:.1f} s, {summary['images_per_second']:,.0f} images/s,"
        f" the whole command {total_seconds:.1f} s\n"
        f"model          {summary['model']}, {summary['parameters']:,} parameters, {summary['precision']}"
        f" on {summary['world_size']} x {summary['device']} with {summary['threads']} threads\n"
        f"run folder     {folder}",
        file=sys.stdout,
        flush=True,
    )
