"""Intel's extension: its import without what it prints, and a model and optimizer as it optimises them."""

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
    """Import it; what it prints of operators that it has twice is shown only where the import fails.

    Unless something is compiled it must not start a process for that, which takes 600 MB: it imports torch's compiler.
    """
    if not compiling:
        importlib.import_module("torch._inductor.config").compile_threads = 1  # type: ignore[attr-defined]
    with tempfile.TemporaryFile() as said:
        try:
            with redirected(STDERR, said.fileno()):
                return importlib.import_module(IPEX)
        except BaseException:
            said.seek(0)
            os.write(STDERR, said.read())
            raise


def optimize_with_ipex(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, compiling: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return both as it optimises them for training; weights keep their layout and stay fp32.

    Packed weights and a fused update would save little more, and change what a checkpoint holds.
    """
    ipex = import_ipex(compiling=compiling)
    options = {"weights_prepack": False, "fuse_update_step": False}
    optimized: tuple[nn.Module, torch.optim.Optimizer] = ipex.optimize(
        model.train(), optimizer=optimizer, dtype=torch.float32, **options
    )
    return optimized
