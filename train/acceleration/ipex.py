"""Intel Extension for PyTorch (IPEX): its import without its messages, and its optimization of a model."""

from __future__ import annotations

import importlib
import os
import tempfile
from types import ModuleType

import torch
from torch import nn

from entrypoint.machine.compile_backends import IPEX
from train.fd_redirect import STDERR, redirected


def import_ipex(*, compiling: bool) -> ModuleType:
    """Import IPEX; show its messages only if the import fails.

    IPEX prints a message for each operator that is registered twice.
    It also imports torch's compiler, which starts a process of 600 MB.
    One compile thread prevents that if nothing is compiled.
    """
    if not compiling:
        importlib.import_module("torch._inductor.config").compile_threads = 1  # type: ignore[attr-defined]
    with tempfile.TemporaryFile() as messages:
        try:
            with redirected(STDERR, messages.fileno()):
                return importlib.import_module(IPEX)
        except BaseException:
            messages.seek(0)
            os.write(STDERR, messages.read())
            raise


def optimize_with_ipex(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, compiling: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer as IPEX optimizes them for training, in the same memory format and in fp32.

    Why no packed weights and no fused update: they save little, and change the content of checkpoints.
    """
    ipex = import_ipex(compiling=compiling)
    options = {"weights_prepack": False, "fuse_update_step": False}
    optimized: tuple[nn.Module, torch.optim.Optimizer] = ipex.optimize(
        model.train(), optimizer=optimizer, dtype=torch.float32, **options
    )
    return optimized
