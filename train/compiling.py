"""When torch.compile pays, and the compiled step."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from entrypoint.errors import Exit, Refused
from train.extension import import_extension
from train.loop import Learner
from train.precision import computing

# What compiling costs by a model's modules, and which part of a step it saves. On two AVX2 cores the first step cost
# 24 s (CNN, 8 modules) to 330 s (DenseNet121, about 430), for 0 to 10 %. For GPUs this is a guess.
BASE_S, MODULE_S = 18.0, 0.73
SAVED = {"cpu": 0.05, "cuda": 0.2}
TRIED_STEPS = 3


def compile_step(learner: Learner, steps_left: int, images: Tensor) -> str:
    """Compile the learner's step, on auto only where it pays; return what to tell.

    `images` is a batch of the rank's share; every rank takes rank 0's decision.
    """
    mode, backend = learner.settings.compile, learner.settings.compile_backend
    told = f"compiled by {backend}, mode {mode}"
    if mode == "auto":
        pays, told = learner.group.from_leader(lambda: weigh(learner, steps_left, images))
        mode = "default"
        if not pays:
            return told
    ready(backend)
    options: dict[str, Any] = {"mode": mode} if backend == "inductor" and mode != "default" else {}
    learner.compiler = partial(torch.compile, backend=backend, **options)
    learner.forward = learner.compiler(learner.shared)
    return told


def ready(backend: str) -> None:
    """See that torch knows the backend; raises `Refused` where this version does not."""
    if backend == "ipex":
        import_extension(compiling=True)
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise Refused(
            f"TRAIN_COMPILE_BACKEND={backend}: torch {torch.__version__} has no such backend; set inductor",
            Exit.MACHINE,
        )


def weigh(learner: Learner, steps_left: int, images: Tensor) -> tuple[bool, str]:
    """Return whether compiling pays for the steps that are left, and the figures."""
    step_s = time_of_step(learner, images)
    cost_s = BASE_S + MODULE_S * sum(1 for module in learner.model.modules() if not list(module.children()))
    saved = SAVED[learner.group.device.type]
    left_s, pays_from_s = step_s * steps_left, cost_s / saved
    figures = (
        f"{left_s:,.0f} s of steps are left, compiling costs about {cost_s:,.0f} s and saves about"
        f" {100 * saved:.0f} %: it pays from {pays_from_s:,.0f} s on"
    )
    return left_s > pays_from_s, f"{'compiled' if left_s > pays_from_s else 'not compiled'}: {figures}"


def time_of_step(learner: Learner, images: Tensor) -> float:
    """Return the seconds of one forward and backward pass of this rank, which leaves the model as it was."""
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    kept = {name: buffer.clone() for name, buffer in learner.model.named_buffers()}
    times = []
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
        for _ in range(TRIED_STEPS):
            began = time.perf_counter()
            run_once(learner, images, labels)
            times.append(time.perf_counter() - began)
    for name, buffer in learner.model.named_buffers():
        buffer.copy_(kept[name])
    return min(times)


def run_once(learner: Learner, images: Tensor, labels: Tensor) -> None:
    """Compute the gradients of one batch and throw them away."""
    with computing(learner.precision, images.device):
        logits = learner.model(images)
    loss = learner.loss(logits, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    loss.item()
    learner.model.zero_grad(set_to_none=True)
