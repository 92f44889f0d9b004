"""Compile the training step with torch.compile, if it pays off."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from entrypoint.core.errors import ExitCode, UserError, first_line
from train.acceleration.amp import autocast
from train.acceleration.ipex import import_ipex
from train.engine.train_step import Trainer
from train.setting_groups.compute import ComputeSettings

# Estimates of the compile time per module and of the share of a step that compiling saves. For GPUs this is a guess.
COMPILE_BASE_S, COMPILE_PER_MODULE_S = 18.0, 0.73
EXPECTED_SAVING = {"cpu": 0.05, "cuda": 0.2}
BENCHMARK_PASSES = 5

Forward = Callable[[Tensor], Tensor]


def compile_step(trainer: Trainer, steps_left: int, images: Tensor) -> str:
    """Compile the trainer's step; return the log line.

    With `auto`, compile only if the remaining steps can repay the compile time. Then keep the compiled step only if a
    benchmark finds it faster. `images` is a batch of this rank's share. Every rank takes the same decision.
    """
    mode, backend = trainer.settings.compute.compile, trainer.settings.compute.compile_backend
    auto = mode == "auto"
    message = f"compiled by {backend}, mode {mode}"
    if auto:
        weighed = estimate_break_even(
            trainer, steps_left, images
        )  # by each rank: BatchNorm's passes wait for those of all
        pays, figures = trainer.group.run_on_main(lambda: weighed, tuple[bool, str])
        mode = "default"
        if not pays:
            return f"not compiled: {figures}"
    if backend == "ipex":
        import_ipex(compiling=True)
    options: dict[str, Any] = {"mode": mode} if backend == "inductor" and mode != "default" else {}
    compiler = partial(torch.compile, backend=backend, **options)
    if auto:
        faster, message = benchmark_compiled(trainer, compiler(trainer.state.model), images)
        message += f"; {figures}"
        if not faster:
            return message
    trainer.compiler = compiler
    trainer.compiled_forward = compiler(trainer.ddp_model)
    return message


def estimate_break_even(trainer: Trainer, steps_left: int, images: Tensor) -> tuple[bool, str]:
    """Return whether compiling pays off for the remaining steps, and a text with the estimate."""
    step_s = min(time_passes(trainer, [trainer.state.model], images)[0])
    cost_s = COMPILE_BASE_S + COMPILE_PER_MODULE_S * sum(
        1 for module in trainer.state.model.modules() if not list(module.children())
    )
    saved = EXPECTED_SAVING[trainer.group.device.type]
    left_s, pays_from_s = step_s * steps_left, cost_s / saved
    return left_s > pays_from_s, (
        f"{left_s:,.0f} s of training remain, compiling takes about {cost_s:,.0f} s and saves about"
        f" {100 * saved:.0f} %: it pays off from {pays_from_s:,.0f} s on"
    )


def benchmark_compiled(trainer: Trainer, forward: Forward, images: Tensor) -> tuple[bool, str]:
    """Return whether the compiled model is faster over all ranks, and a text with the times."""
    problem, compiled_s, eager_s = "", [math.inf], [math.inf]
    try:
        compiled_s, eager_s = time_passes(trainer, [forward, trainer.state.model], images)
    except RuntimeError as error:
        refused = compile_error(trainer.settings.compute, error)
        if refused is None:
            raise
        problem = str(refused)
    fastest = torch.tensor([min(compiled_s), min(eager_s)], device=images.device)
    compiled, eager = trainer.group.sum(fastest).tolist()
    if math.isinf(compiled):
        return False, f"not compiled: {problem or 'another rank failed to compile'}"
    faster = compiled < eager
    figures = (
        f"compiling took {compiled_s[0]:,.0f} s, forward and backward take {compiled / eager:.2f} times the eager time"
    )
    return faster, f"{'compiled' if faster else 'not compiled'}: {figures}"


def time_passes(trainer: Trainer, forwards: Sequence[Forward], images: Tensor) -> list[list[float]]:
    """Return the seconds of several forward and backward passes of this rank, for each forward function.

    The functions alternate, so that a temporary load affects all of them. Parameters, statistics and random state
    are unchanged afterwards.
    """
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    kept = {name: buffer.clone() for name, buffer in trainer.state.model.named_buffers()}
    times: list[list[float]] = [[] for _ in forwards]
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
        for _ in range(BENCHMARK_PASSES):
            for forward, taken in zip(forwards, times, strict=True):
                began = time.perf_counter()
                forward_backward(trainer, forward, images, labels)
                taken.append(time.perf_counter() - began)
    for name, buffer in trainer.state.model.named_buffers():
        buffer.copy_(kept[name])
    return times


def forward_backward(trainer: Trainer, forward: Forward, images: Tensor, labels: Tensor) -> None:
    """Compute the gradients of one batch and discard them."""
    with autocast(trainer.precision, images.device):
        logits = forward(images)
    loss = trainer.loss(logits, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    loss.item()
    trainer.state.model.zero_grad(set_to_none=True)


def compile_error(settings: ComputeSettings, error: RuntimeError) -> UserError | None:
    """Return the error for a step that cannot be compiled, or None for an unrelated error.

    Compilers raise errors of torch's private modules, or NotImplementedError for a missing feature.
    """
    if settings.compile == "off":
        return None
    if not type(error).__module__.startswith("torch._") and not isinstance(error, NotImplementedError):
        return None
    cause = first_line(getattr(error, "inner_exception", error))  # the outer one's first line only names the backend
    backend = settings.compile_backend
    return UserError(
        f"TRAIN_COMPILE_BACKEND={backend}: the step cannot be compiled ({cause}). Set TRAIN_COMPILE=off.",
        ExitCode.MACHINE,
    )
