"""Recompute activations in the backward pass instead of keeping them: less memory for about a third more time.

The results are bitwise identical: a block is recomputed from the same inputs, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module) -> int:
    """Have the blocks of a model recompute their activations; return how many there are.

    A block is a part of an nn.Sequential or nn.ModuleList that has parts itself, or else a part of the model with
    parameters. Blocks inside of a block are left alone.
    """
    blocks = list(iter_blocks(model)) or [one for one in model.children() if has_parameters(one)]
    for block in blocks:
        block.forward = MethodType(forward_without_keeping, block)
    return len(blocks)


def iter_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks."""
    holds_blocks = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child in module.children():
        is_container = isinstance(child, (nn.Sequential, nn.ModuleList)) and any(
            isinstance(one, (nn.Sequential, nn.ModuleList)) or len(list(one.children())) > 1 for one in child
        )
        if holds_blocks and not is_container and has_parameters(child) and any(True for _ in child.children()):
            yield child
        else:
            yield from iter_blocks(child)


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module has any parameter."""
    return next(module.parameters(), None) is not None


def forward_without_keeping(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    """Return what a block makes of its inputs; while it trains, only the inputs are kept for the backward pass."""
    forward = type(module).forward
    if not module.training or not torch.is_grad_enabled():
        return forward(module, *inputs, **named)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), statistics_kept(module)  # of the first pass, and of the one that recomputes

    return checkpoint(forward, module, *inputs, use_reentrant=False, context_fn=contexts, **named)


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Have BatchNorm update copies of its running statistics: the first pass has updated them already.

    Why copies: the recomputation must save as many tensors as the first pass.
    """
    norms = [one for one in module.modules() if isinstance(one, _BatchNorm) and one.training]
    kept = [dict(norm.named_buffers(recurse=False)) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        for name, value in buffers.items():
            setattr(norm, name, value.clone())
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            for name, value in buffers.items():
                setattr(norm, name, value)
