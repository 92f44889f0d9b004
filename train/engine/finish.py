"""Write a finished run's summary and export."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from entrypoint.core.files import atomic_path, atomic_write_text
from train.acceleration.amp import CAST_TO
from train.acceleration.faster_conv import original_convolutions
from train.checkpoint.metadata import NO_BEST
from train.checkpoint.tensor_files import write_tensors
from train.data.datasets import ImageTensors
from train.data.feeds.load_times import LoadReport
from train.distributed.ddp import full_state_dict, is_sharded
from train.engine.run_setup import TrainingRun
from train.engine.save_policy import check_steps_taken, check_weights_finite
from train.evaluation.evaluate import KEPT, Mistake, add_heat, as_json, evaluation_values
from train.evaluation.heat_map import features_by_class
from train.evaluation.results import EvalResult
from train.models.inspection import count_multiply_adds, count_parameters, count_training_flops, peak_flops
from train.models.pruning import resize_to_state
from train.models.registry import restore_state_metadata
from train.models.weights_origin import WEIGHTS_FILE, WeightsOrigin, origin_header
from train.planning.export_formats import AVERAGE_FILE, FORMATS, INT8_FILE
from train.report.cost import COST_FILE, prometheus_text, summarize_cost
from train.report.metrics import MetricsWriter, disk_errors_as_user_errors
from train.report.page import REPORT_FILE, SKIPPED_FILE, write_report
from train.report.progress import guarded_stdout
from train.report.stragglers import RankTimes, summarize
from train.report.summary_text import summary_lines
from train.report.trackers import FINISHED
from train.seeding import shard_slice
from train.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class RankResults:
    """What one rank knows at the end of a run."""

    threads: int
    cpu_wait_share: float
    times: RankTimes
    loading: LoadReport | None
    skipped: set[str]
    mistakes: list[Mistake]
    sample: list[tuple[Tensor, Tensor]]
    joules: float | None
    cpu_seconds: float


def write_summary(
    run: TrainingRun, test: EvalResult, val: EvalResult | None, best_epoch: int | None, started: float
) -> None:
    """Write the summary and the export, and print the summary; the results are those of `train_epochs`.

    `started` is the start of the whole command (Unix time, s). Raises `UserError` if a weight is not finite: the last
    step's loss does not show that.
    """
    check_weights_finite(run.trainer)
    check_steps_taken(run.trainer)
    state = full_state_dict(run.trainer.state.model)
    eval_state = full_state_dict(run.trainer.state.eval_model) if run.trainer.state.ema_model else state
    ranks = run.group.gather(results_of_rank(run), RankResults)
    run.checkpoint_writer.wait()
    if not run.metrics:
        return
    rebuilt = rebuild_model(run, eval_state)
    skipped = sorted(set(run.dataset.skipped).union(*(rank.skipped for rank in ranks)))
    summary = summarize_scores(run, test, val, best_epoch) | summarize_training(run, state, rebuilt)
    summary |= summarize_ranks(ranks, len(skipped))
    mistakes = sorted((mistake for rank in ranks for mistake in rank.mistakes), reverse=True)[:KEPT]
    evaluation = {
        **evaluation_values(test, run.data.classes, run.settings.data.score),
        "mistakes": as_json(mistakes, run.data.classes),
    }
    model = rebuilt or run.trainer.state.eval_model
    with run.metrics.without_failing("heat maps"):
        add_heat(evaluation["mistakes"], mistakes, model, run.source.normalize)
    with run.metrics.without_failing("features"):
        evaluation["features"] = features_by_class(
            model, [part for rank in ranks for part in rank.sample], run.data.classes, run.source.normalize
        )
    with run.metrics.without_failing("multiply_adds"), original_convolutions(model):
        device = torch.device("cpu") if rebuilt else run.group.device
        summary["multiply_adds"] = count_multiply_adds(model, run.model_builder.shape, device)
    with run.metrics.without_failing("peak_share"):
        summary |= peak_share(run, rebuilt or run.trainer.state.model, summary["step_seconds"])
    if run.profiler:
        run.progress.print(run.profiler.stop_incomplete())
    if skipped:
        with disk_errors_as_user_errors(run.folder):
            atomic_write_text(run.folder / SKIPPED_FILE, "".join(f"{line}\n" for line in skipped))
    summary["total_seconds"] = round(time.time() - started, 3)
    summary |= cost_of_ranks(run, ranks, summary["total_seconds"])
    write_files(run, run.metrics, summary, evaluation, eval_state)
    if run.settings.run.progress != "off":
        loading = slowest_loading(ranks)
        text = loading.text(run.model_builder.plan.the_trainer().num_workers) if loading else ""
        with guarded_stdout():
            print("\n".join(summary_lines(summary, run.folder, text, *code_flags(run.settings))))
    if run.settings.run.export != "off":
        from train.evaluation.exports import Exported, export_model  # late: few runs export

        decoded = run.model_builder.plan.the_trainer().image_shape
        exported = Exported.of(model, run.source.normalize, decoded, run.settings.data, run.data.classes)
        export_model(exported, run.settings.run.export.split(","), run.folder)


def code_flags(settings: TrainSettings) -> tuple[str, str]:
    """Return the flags that name a model and a data set of the user's own, each empty for one of ours."""
    network, data = settings.network, settings.data
    folder = f" --model-path={shlex.quote(str(network.model_path))}" if network.model_path else ""
    return (
        f" --model={shlex.quote(network.model)}{folder}" * network.is_own_model,
        f" --dataset={shlex.quote(data.dataset)}" * data.is_own_dataset,
    )


def cost_of_ranks(run: TrainingRun, ranks: list[RankResults], seconds: float) -> dict[str, float]:
    """Return what a command of so many seconds cost, and which share of their time its cores and GPUs were used."""
    cores = sum(rank.threads for rank in ranks)
    cost = summarize_cost(
        cores,
        0 if run.group.device.type == "cpu" else len(ranks),
        [rank.joules for rank in ranks if rank.joules is not None],
        seconds,
        run.trainer.meter.steps * run.settings.optim.batch_size,
        run.model_builder.plan.nodes.nnodes * (run.settings.run.price_per_hour or 0),
    )
    cost["cpu_utilization"] = round(sum(rank.cpu_seconds for rank in ranks) / (cores * seconds), 4)
    if busy := [rank.times.gpu["gpu_utilization"] for rank in ranks if "gpu_utilization" in rank.times.gpu]:
        cost["gpu_utilization"] = round(fmean(busy), 4)
    return cost


def results_of_rank(run: TrainingRun) -> RankResults:
    """Return what this rank knows."""
    group, trainer = run.group, run.trainer
    on_cpu = group.device.type == "cpu"
    trainer.energy.sample()
    return RankResults(
        threads=torch.get_num_threads(),
        cpu_wait_share=run.cpu_wait.share(),
        times=RankTimes(group.rank, group.node_of(group.rank), trainer.meter, on_cpu, trainer.gpu_clock.to_json()),
        loading=run.source.load_report(trainer.state.seconds),
        skipped=run.source.skipped,
        mistakes=named_mistakes(run),
        sample=run.mistakes.sample if run.mistakes else [],
        joules=trainer.energy.joules,
        cpu_seconds=time.process_time(),
    )


def named_mistakes(run: TrainingRun) -> list[Mistake]:
    """Return this rank's surest mistakes on the test images, with the names of their files where these are known.

    Images in memory without those that could not be read have no such place in the list.
    """
    kept, listings, rows = run.mistakes.kept if run.mistakes else [], run.dataset.listings, run.source.rows.test
    if not listings or (run.dataset.skipped and isinstance(run.dataset.test, ImageTensors)):
        return kept
    tested = range(len(listings[1])) if rows is None else rows.tolist()
    own = tested[shard_slice(len(tested), run.group.rank, run.group.world_size)]
    return [replace(mistake, file=str(listings[1].files[own[mistake.place]])) for mistake in kept]


def slowest_loading(ranks: list[RankResults]) -> LoadReport | None:
    """Return the report of the rank that waited longest for data, None if none loads any."""
    return max((rank.loading for rank in ranks if rank.loading), default=None)


def rebuild_model(run: TrainingRun, eval_state: Mapping[str, Tensor]) -> nn.Module | None:
    """Return a plain model with the evaluated weights where the run's own is sharded or of IPEX, else None."""
    if not is_sharded(run.trainer.state.model) and not run.model_builder.plan.the_trainer().use_ipex:
        return None
    model = run.model_builder.create_model()
    if run.trainer.state.pruned:
        resize_to_state(model, eval_state)
    model.load_state_dict(restore_state_metadata(model, eval_state))
    return model


def summarize_scores(
    run: TrainingRun, score: EvalResult, val: EvalResult | None, best_epoch: int | None
) -> dict[str, Any]:
    """Return the results of the weights that the run leaves, and the best accuracy."""
    best, name = run.trainer.state.best, run.settings.data.score
    return {
        f"test_{name}": round(score.accuracy, 4),
        "test_loss": score.loss,
        "test_images": score.images,
        **({"test_top5_accuracy": round(score.top5, 4)} if score.top5 else {}),
        **{f"test_{other}": value for other, value in score.others.items()},
        **({f"val_{name}": round(val.accuracy, 4), "val_loss": val.loss, "val_images": val.images} if val else {}),
        "score": name,
        f"best_{name}": round(best, 4) if best > NO_BEST else None,
        "best_chosen_on": run.choice,
        "best_epoch": best_epoch,
    }


def summarize_training(run: TrainingRun, state: Mapping[str, Tensor], rebuilt: nn.Module | None) -> dict[str, Any]:
    """Return what was trained, on what, and how fast; an early stop leaves fewer epochs than asked for."""
    trainer, done, settings = run.trainer, run.trainer.state, run.settings
    model = rebuilt or done.model
    later = done.seconds - trainer.first_step_seconds
    return {
        "epochs": min(run.epochs, -(-done.step // run.source.steps_per_epoch)),
        "steps": done.step,
        "skipped_steps": done.skipped_steps,
        "train_seconds": round(done.seconds, 3),
        "step_seconds": round(later / (done.step - 1), 6) if done.step > 1 else 0.0,
        "images_per_second": round(done.step * settings.optim.batch_size / done.seconds, 1) if done.seconds else 0.0,
        "first_step_seconds": round(trainer.first_step_seconds, 4),
        "parameters": count_parameters(model),
        "all_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_sha256": weights_sha256(state),
        "model": settings.network.model,
        "dataset": settings.data.dataset,
        "classes": list(run.data.classes),
        "batch_size": settings.optim.batch_size,
        "world_size": run.group.world_size,
        "reserved_cpus": run.model_builder.plan.binding.reserved_cpus,
        "feed": run.model_builder.plan.the_trainer().data_source,
        "device": str(run.group.device),
        "precision": trainer.precision,
        "seed": settings.optim.seed,
        "doubts": list(run.model_builder.plan.the_trainer().doubts),
    }


def peak_share(run: TrainingRun, model: nn.Module, step_seconds: float) -> dict[str, float]:
    """Return which share of what a rank's hardware reaches a step reaches, where all steps have images of one size."""
    if not step_seconds or run.settings.data.size_schedule:
        return {}
    with original_convolutions(model):
        flops = count_training_flops(model, run.model_builder.shape)
    if not flops:
        return {}
    reached = flops * run.settings.optim.batch_size / run.group.world_size / step_seconds
    dtype = CAST_TO.get(run.trainer.precision, torch.float32)
    share = round(reached / peak_flops(dtype, run.group.device), 4)
    return {"peak_share": share} if share <= 1 else {}  # else others computed while the peak was measured


def summarize_ranks(ranks: list[RankResults], skipped: int) -> dict[str, Any]:
    """Return what the ranks waited for, and how many images were `skipped`."""
    summary: dict[str, Any] = {
        "images_skipped": skipped,
        "threads": min(rank.threads for rank in ranks),
        "cpu_wait_share": round(max(rank.cpu_wait_share for rank in ranks), 3),
    }
    if stragglers := summarize([rank.times for rank in ranks]):
        summary["stragglers"] = stragglers
    if loading := slowest_loading(ranks):
        summary |= {
            "data_share": round(loading.share, 3),
            "data_slow_part": loading.part,
            "loader_workers": loading.workers,
            "read_ms": round(loading.read_ms, 3),
            "decode_ms": round(loading.decode_ms, 3),
        }
    return summary


def write_files(
    run: TrainingRun,
    metrics: MetricsWriter,
    summary: dict[str, Any],
    evaluation: dict[str, Any],
    eval_state: Mapping[str, Tensor],
) -> None:
    """Write the run's last files; raises `UserError` for a disk."""
    with disk_errors_as_user_errors(run.folder):
        metrics.close()
        run.progress.close()
        atomic_write_text(run.folder / "evaluation.json", json.dumps(evaluation, allow_nan=False) + "\n")
        # Made from the weights that a run had before it was resumed.
        old = (*FORMATS.values(), "model.bin", INT8_FILE, AVERAGE_FILE, "model.json")
        for file in old if run.trainer.meter.steps else ():
            (run.folder / file).unlink(missing_ok=True)
        write_weights(run, eval_state)
        metrics.summary(summary)
        atomic_write_text(run.folder / COST_FILE, prometheus_text(summary, run.folder.name))
        metrics.end_tracker(FINISHED)
        with metrics.without_failing(REPORT_FILE):
            write_report(run.folder)


def write_weights(run: TrainingRun, state: Mapping[str, Tensor]) -> None:
    """Write model.safetensors: the weights that were evaluated last, with classes and normalization; raises OSError."""
    origin = WeightsOrigin(
        classes=run.data.classes,
        normalization=run.source.normalize.to_metadata(),
        settings=run.settings.to_json(),
        shape=run.model_builder.plan.the_trainer().image_shape,
    )
    with atomic_path(run.folder / WEIGHTS_FILE) as path:
        write_tensors(path, {name: value.detach().cpu() for name, value in state.items()}, origin_header(origin))


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """Return a digest of a model's parameters and buffers; equal digests mean bitwise identical models."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
