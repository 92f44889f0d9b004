"""Write a finished run's summary, curves and export."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entrypoint.core.atomic_files import atomic_path, atomic_write_text
from entrypoint.core.errors import one_line
from entrypoint.plan.model import Plan
from train.acceleration.faster_conv import original_convolutions
from train.checkpoint.tensor_files import write_tensors
from train.distributed.ddp import full_state_dict, is_sharded
from train.engine.run_setup import TrainingRun
from train.engine.save_policy import check_weights_finite
from train.evaluation.evaluate import EvalResult, evaluation_values
from train.evaluation.mistakes import KEPT, as_json
from train.evaluation.onnx_export import export_onnx
from train.models.inspection import count_multiply_adds, count_parameters
from train.models.pruning import resize_to_state
from train.models.registry import restore_state_metadata
from train.models.weights_origin import WEIGHTS_FILE, WeightsOrigin, origin_header
from train.report.metrics import disk_errors_as_user_errors
from train.report.page import REPORT_FILE, write_report
from train.report.progress import guarded_stdout
from train.report.stragglers import RankTimes, cpu_wait_text, stragglers_text, summarize
from train.report.trackers import FINISHED


def write_summary(run: TrainingRun, score: EvalResult, val: EvalResult | None, plan: Plan, started: float) -> None:
    """Write the summary, the curves and the export, and print the summary; `val` is of the images that choose.

    Raises `UserError` if a weight is not finite: the last step's loss does not show that.
    """
    check_weights_finite(run.trainer)
    trainer = run.trainer
    state = full_state_dict(trainer.state.model)
    eval_state = full_state_dict(trainer.state.eval_model) if trainer.state.ema_model else state
    waited = max(run.group.gather(run.cpu_wait.share()))
    reports = run.group.gather(run.source.load_report(trainer.state.seconds))
    node = next((peer.node for peer in run.group.peers if peer.rank == run.group.rank), "")
    on_cpu = run.group.device.type == "cpu"
    times = run.group.gather(RankTimes(run.group.rank, node, trainer.meter, on_cpu, trainer.gpu_clock.to_json()))
    loading = max((one for one in reports if one), default=None)
    skipped = set(run.skipped).union(*run.group.gather(run.source.skipped))
    gathered = run.group.gather(run.mistakes.kept if run.mistakes else [])
    mistakes = sorted((one for kept in gathered for one in kept), reverse=True)[:KEPT]
    run.checkpoint_writer.wait()
    if not run.metrics:
        return
    model, evaluated, device = trainer.state.model, trainer.state.eval_model, run.group.device
    if is_sharded(model) or plan.the_trainer().use_ipex:
        model = evaluated = run.model_builder.create_model()
        if trainer.state.pruned:
            resize_to_state(evaluated, eval_state)
        evaluated.load_state_dict(restore_state_metadata(evaluated, eval_state))
        device = torch.device("cpu")
    with original_convolutions(model):
        multiply_adds = count_multiply_adds(model, run.model_builder.shape, device)
    images = trainer.state.step * run.settings.batch_size
    later = trainer.state.seconds - trainer.first_step_seconds
    summary: dict[str, Any] = {
        "test_accuracy": round(score.accuracy, 4),
        "test_loss": score.loss,
        "test_images": score.images,
        **({"test_top5_accuracy": round(score.top5, 4)} if score.top5 else {}),
        **({"val_accuracy": round(val.accuracy, 4), "val_loss": val.loss, "val_images": val.images} if val else {}),
        "best_accuracy": round(trainer.state.best, 4) if trainer.state.best >= 0 else None,
        "best_chosen_on": run.choice,
        "epochs": trained_epochs(run),
        "steps": trainer.state.step,
        "train_seconds": round(trainer.state.seconds, 3),
        "step_seconds": round(later / max(1, trainer.state.step - 1), 6),
        "images_per_second": round(images / trainer.state.seconds, 1) if trainer.state.seconds else 0.0,
        "first_step_seconds": round(trainer.first_step_seconds, 4),
        "parameters": count_parameters(model),
        "weights_sha256": weights_sha256(state),
        "multiply_adds": multiply_adds,
        "model": run.settings.model,
        "dataset": run.settings.dataset,
        "classes": list(run.classes),
        "images_skipped": len(skipped),
        "batch_size": run.settings.batch_size,
        "world_size": run.group.world_size,
        "threads": torch.get_num_threads(),
        "feed": plan.the_trainer().data_source,
        "device": str(run.group.device),
        "precision": trainer.precision,
        "seed": run.settings.seed,
        "cpu_wait_share": round(waited, 3),
    }
    if stragglers := summarize(times):
        summary["stragglers"] = stragglers
    if loading:
        summary |= {
            "data_share": round(loading.share, 3),
            "data_slow_part": loading.part,
            "loader_workers": loading.workers,
            "read_ms": round(loading.read_ms, 3),
            "decode_ms": round(loading.decode_ms, 3),
        }
    if run.profiler:
        run.progress.print(run.profiler.stop_incomplete())
    with disk_errors_as_user_errors(run.folder):
        run.metrics.close()
        run.progress.close()
        total = round(time.time() - started, 3)
        values = {**evaluation_values(score, run.classes), "mistakes": as_json(mistakes, run.classes)}
        atomic_write_text(run.folder / "evaluation.json", json.dumps(values, allow_nan=False) + "\n")
        write_weights(run, eval_state)
        run.metrics.summary({**summary, "total_seconds": total})
        run.metrics.end_tracker(FINISHED)
        with run.metrics.without_failing(REPORT_FILE):
            write_report(run.folder)
    if run.settings.progress != "off":
        print_summary(summary, total, run.folder, loading.text(plan.the_trainer().num_workers) if loading else "")
    if run.settings.export == "onnx":
        sizes, classes = run.model_builder.sizes, run.classes
        shape = run.model_builder.shape if sizes.eval == sizes.train else sizes.eval
        export_onnx(evaluated, run.source.normalize, shape, classes, run.folder / "model.onnx")


def trained_epochs(run: TrainingRun) -> int:
    """Return the number of epochs that were trained: fewer than asked for after an early stop."""
    return min(run.epochs, -(-run.trainer.state.step // run.source.steps_per_epoch))


def write_weights(run: TrainingRun, state: Mapping[str, Tensor]) -> None:
    """Write model.safetensors: the weights that were evaluated last, with classes and normalization; raises OSError."""
    origin = WeightsOrigin(
        classes=run.classes,
        normalization=run.source.normalize.to_metadata(),
        settings=run.settings.to_json(),
        shape=run.model_builder.plan.the_trainer().image_shape,
    )
    with atomic_path(run.folder / WEIGHTS_FILE) as path:
        write_tensors(path, {name: one.detach().cpu() for name, one in state.items()}, origin_header(origin))


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """Return a digest of a model's parameters and buffers; equal digests mean bitwise identical models."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def print_summary(summary: dict[str, Any], total_seconds: float, folder: Path, loading: str) -> None:
    """Print the summary in a few lines."""
    top5 = f" (top 5: {summary['test_top5_accuracy']:.2f} %)" if "test_top5_accuracy" in summary else ""
    cpu_wait = cpu_wait_text(summary["cpu_wait_share"])
    count = summary["images_skipped"]
    among = " among those that this run read" if summary["feed"] == "stream" else ""
    skipped = f"left out       {count:,} unreadable image{'s' * (count != 1)}{among}\n" if count else ""
    waited = f"waiting        {cpu_wait}\n" if cpu_wait else ""
    slowest = stragglers_text(summary.get("stragglers"))
    slow = f"stragglers     {slowest}\n" if slowest else ""
    loaded = f"loading        {loading}\n" if loading else ""
    chosen = ""
    if summary["best_accuracy"] is not None:
        hint = "" if summary["best_chosen_on"] == "val" else "; TRAIN_VAL_SPLIT=0.1 sets other images apart for that"
        chosen = (
            f"best           {summary['best_accuracy']:.2f} %, chosen on the {summary['best_chosen_on']} images{hint}\n"
        )
    with guarded_stdout():
        print(
            f"test accuracy  {summary['test_accuracy']:.2f} %{top5} of {summary['test_images']:,} images"
            f" after {summary['epochs']} epochs, {summary['steps']:,} steps\n"
            f"{chosen}training       {summary['train_seconds']:.1f} s, {summary['images_per_second']:,.0f} images/s,"
            f" the whole command {total_seconds:.1f} s\n"
            f"model          {summary['model']}, {summary['parameters']:,} parameters,"
            f" {summary['multiply_adds']:,} multiply-adds an image\n"
            f"computed in    {summary['precision']} on {summary['world_size']} x {summary['device']} with"
            f" {summary['threads']} threads, first step {1000 * summary['first_step_seconds']:,.0f} ms, then"
            f" {1000 * summary['step_seconds']:,.1f} ms\n"
            f"{skipped}{waited}{slow}{loaded}"
            f"run folder     {one_line(folder)}"
        )
