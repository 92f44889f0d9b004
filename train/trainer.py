"""One run from settings and plan to its summary: data, model, epochs, and what they leave."""

from __future__ import annotations

import os

import torch

from entrypoint.errors import Refused
from entrypoint.plan import Plan
from entrypoint.variables import Given
from entrypoint.verify import mismatches, observe
from train import checkpoint, runfolder
from train.batches import Feed
from train.checkpoint import Checkpoint
from train.datasets import DataSet, Images, load
from train.evaluate import Score, evaluate
from train.files import Listing
from train.group import Group, join
from train.loop import Learner, train_epoch
from train.memory import MemoryFeed
from train.models import build_model
from train.optim import build_optimizer, lr_schedule, with_ipex
from train.peers import naming_the_lost
from train.progress import build_progress
from train.record import Recorder
from train.run import Run
from train.saving import check_weights, preempt, save
from train.settings import TrainSettings
from train.stopping import STOPPING
from train.stream import StreamFeed
from train.summary import finish
from train.workers import Crew


def train(given: Given[TrainSettings], plan: Plan, started: float) -> None:
    """Train as the settings say, on this rank's share; `started` is the whole command's start (Unix time, s).

    Raises `Refused` for input that cannot be trained on, and where the loss is no number.
    """
    settings = given.values
    make_deterministic(settings)
    data = load_data(settings, plan)
    group = join(plan)
    try:
        with naming_the_lost(group.rank, group.peers):
            run = prepare(given, plan, data, group)
            try:
                with STOPPING.deferred(worth_saving=settings.checkpoint_every > 0):
                    score = train_epochs(run)
                    finish(run, score, plan, started)
            finally:
                run.progress.close()
    finally:
        group.leave()


def make_deterministic(settings: TrainSettings) -> None:
    """Seed what the model draws from, and keep to reproducible kernels where that is asked for."""
    torch.manual_seed(settings.seed)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    elif torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True


def load_data(settings: TrainSettings, plan: Plan) -> DataSet:
    """Return the data set; refuses one that is smaller than a batch."""
    crew = Crew(frozenset(cpu for rank in plan.ranks for cpu in rank.cpus), sum(rank.threads for rank in plan.ranks))
    channels, height, width = plan.training["shape"]
    data = load(settings, (channels, height, width), plan.training["feed"], crew)
    count = len(data.train.files) if isinstance(data.train, Listing) else len(data.train)
    if count < settings.batch_size:
        raise Refused(
            f"TRAIN_BATCH_SIZE={settings.batch_size}: larger than the training set of {count} images; lower it"
        )
    return data


def prepare(given: Given[TrainSettings], plan: Plan, data: DataSet, group: Group) -> Run:
    """Build the model and all around it, and go on from a checkpoint where the settings say so."""
    settings = given.values
    feed = build_feed(data, settings, group, plan)
    model = build_model(settings.model, data.shape, len(data.classes), bias=settings.bias)
    model = model.to(group.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    total_steps = settings.epochs * feed.steps_per_epoch
    optimizer = build_optimizer(settings, model)
    if plan.training["ipex"]:
        model, optimizer = with_ipex(model, optimizer)
    schedule = lr_schedule(settings, total_steps)
    learner = Learner(model, optimizer, schedule, settings, group, plan.training["precision"])
    folder, start = group.from_leader(lambda: runfolder.open_folder(settings))
    wanted = settings.model_dump(mode="json")
    # Read once and sent on: the folder may lie on the first node's own disk.
    first_epoch = resume(learner, group.from_leader(lambda: checkpoint.load(start, wanted))) if start else 0
    seen = observe(plan)
    ranks = group.from_all(seen)
    surprises = group.from_all(mismatches(plan, seen))  # each against the plan of its own node
    recorder: Recorder | None = None
    if group.leads:
        runfolder.write_provenance(folder, given, plan, os.environ)
        runfolder.write_ranks(folder, ranks)
        recorder = Recorder(folder, tensorboard=settings.tensorboard)
    progress = build_progress(settings, total_steps, leads=group.leads, relayed=plan.launcher == "rank")
    for line in (line for lines in surprises for line in lines):
        progress.say(f"warning: {line}")
    if data.skipped:
        progress.say(f"{len(data.skipped)} pictures left out that cannot be read, first {data.skipped[0]}")
    if start:
        progress.say(f"going on from {start}, epoch {first_epoch + 1}, step {learner.step}")
    return Run(settings, group, feed, learner, folder, recorder, progress, first_epoch)


def build_feed(data: DataSet, settings: TrainSettings, group: Group, plan: Plan) -> Feed:
    """Return the feed for how the data came."""
    if isinstance(data.train, Images) and isinstance(data.test, Images):
        return MemoryFeed(data.train, data.test, data.shape, settings, group)
    assert isinstance(data.train, Listing)
    assert isinstance(data.test, Listing)
    sharing = plan.ranks if plan.bind == "none" else (plan.ranks[group.local_rank],)
    crew = Crew(frozenset(cpu for rank in sharing for cpu in rank.cpus), plan.training["workers"])
    return StreamFeed((data.train, data.test), data.shape, settings, group, crew)


def resume(learner: Learner, saved: Checkpoint) -> int:
    """Put a checkpoint's state into the learner; return the epoch to go on in."""
    learner.model.load_state_dict(dict(saved.model))
    learner.optimizer.load_state_dict(dict(saved.optimizer))
    learner.step, learner.seconds, learner.losses = saved.step, saved.seconds, list(saved.losses)
    return saved.epoch


def train_epochs(run: Run) -> Score:
    """Train what is left, with evaluation, log and checkpoint after each epoch; return the last score.

    Raises `Preempted` where a signal asked any rank to end, with a checkpoint of where all of them stood.
    """
    score: Score | None = None
    total = run.settings.epochs * run.feed.steps_per_epoch
    for epoch in range(run.first_epoch, run.settings.epochs):

        def report(step: int, loss: float, speed: float, epoch: int = epoch) -> None:
            left_s = (total - step) * run.settings.batch_size / speed
            run.progress.at(epoch, step, loss, speed, left_s)
            if run.recorder:
                place = epoch + (step - epoch * run.feed.steps_per_epoch) / run.feed.steps_per_epoch
                values = {"epoch": round(place, 4), "loss": loss, "images_per_second": round(speed, 1)}
                run.recorder.line("step", step, {**values, "lr": run.learner.lr(step - 1)})

        if not train_epoch(run.learner, run.feed, epoch, run.log_interval, report, lambda: STOPPING.asked):
            preempt(run, epoch)
        score = judge(run, epoch)
        close_epoch(run, epoch + 1, score)
    return score or judge(run, run.settings.epochs)


def judge(run: Run, epochs: int) -> Score:
    """Evaluate the model as it stands, `epochs` of its epochs closed; raises `Preempted` as `train_epochs` does."""
    score = evaluate(
        run.learner.model, run.feed.test_batches(), run.group, run.learner.precision, lambda: STOPPING.asked
    )
    if score is None:
        preempt(run, epochs)
    return score


def close_epoch(run: Run, epoch: int, score: Score) -> None:
    """Log a finished epoch and save a checkpoint, unless the weights are no numbers any more."""
    loss = sum(run.learner.losses) / max(1, len(run.learner.losses))
    run.learner.losses = []
    run.progress.say(
        f"epoch {epoch}/{run.settings.epochs}  train loss {loss:.4f}  test loss {score.loss:.4f}"
        f"  test accuracy {score.accuracy:.2f} %"
    )
    if run.recorder:
        values = {
            "epoch": epoch,
            "train_loss": loss,
            "test_loss": score.loss,
            "test_accuracy": score.accuracy,
        }
        run.recorder.line("epoch", run.learner.step, values)
    every = run.settings.checkpoint_every
    if every and (epoch % every == 0 or epoch == run.settings.epochs):
        check_weights(run.learner)
        if run.recorder:
            save(run, epoch)
