"""Intel Extension for PyTorch (IPEX): its import without its messages, and its optimization of a model."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn

from entrypoint.core.console import STDERR, redirected
from entrypoint.machine.backends import IPEX


def import_ipex(*, compiling: bool) -> ModuleType:
    """Import IPEX; show its messages only if the import fails.

    IPEX prints a message for each operator that is registered twice.
    It also imports torch's compiler, which starts a process of 600 MB.
    One compile thread prevents that if nothing is compiled.
    """
    if not compiling:
        importlib.import_module("torch._inductor.config").compile_threads = 1  # type: ignore[attr-defined]
    with messages_on_failure():
        return importlib.import_module(IPEX)


@contextmanager
def messages_on_failure() -> Iterator[None]:
    """Keep what IPEX prints to standard error, and show it only if an error ends the block."""
    with tempfile.TemporaryFile() as messages:
        try:
            with redirected(STDERR, messages.fileno()):
                yield
        except BaseException:
            messages.seek(0)
            os.write(STDERR, messages.read())
            raise


def optimize_with_ipex(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, packs: bool, compiling: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer as IPEX optimizes them for training in fp32.

    `packs` is the book's use: weights in oneDNN's blocked layout and a fused optimizer step. Their state dicts hold
    plain layouts, so others can read the checkpoints. Load a checkpoint before this call: IPEX 2.8 does not pack an
    optimizer state that is loaded later, and writes into the tensors that it was given.
    """
    ipex = import_ipex(compiling=compiling)
    options = {"weights_prepack": packs, "fuse_update_step": packs}
    with messages_on_failure():  # it warns that `fuse_update_step` is deprecated
        optimized: tuple[nn.Module, torch.optim.Optimizer] = ipex.optimize(
            model.train(), optimizer=optimizer, dtype=torch.float32, **options
        )
    return optimized
