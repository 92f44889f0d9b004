"""Workarounds for torch, each with the versions that need it; remove one when the oldest supported torch has the fix.

Workarounds that are a line of an algorithm stay there, with the same note: search `train/` for `(torch 2`.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

# timm's function that makes an update of Muon orthogonal.
NEWTON_SCHULZ = "zeropower_via_newtonschulz"


def skip_dynamo_import() -> None:
    """Prevent torch's optimizers from importing torch.compile at their first call, which is slow.

    `torch._disable_dynamo` wraps their methods and caches the wrapper as an attribute (torch 2.8 to 2.13).
    Here the attribute is the method itself. Call it before an optimizer is created, and `unwrap_step` afterwards.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        method.__dynamo_disable = method  # noqa: SLF001  # where torch caches its wrapper


def unwrap_step(optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's `step` by the unwrapped one; see `skip_dynamo_import` (torch 2.8 to 2.13)."""
    bare_step = partial(inspect.unwrap(type(optimizer).step), optimizer)
    optimizer.step = torch.no_grad()(bare_step)  # type: ignore[method-assign]


def orthogonalize_in_fp32(optimizer: torch.optim.Optimizer) -> None:
    """Have timm's Muon iterate in fp32 from now on, in this process; no effect on other optimizers (timm 1.0.31).

    It iterates in bf16 and has no argument for that. CPUs without bf16 emulate it, at ten times the cost.
    """
    module = sys.modules[type(optimizer).__module__]
    iterate = getattr(module, NEWTON_SCHULZ, None)
    if iterate:
        setattr(module, NEWTON_SCHULZ, partial(getattr(iterate, "func", iterate), dtype=torch.float32))


def match_optimizer_state_format(optimizer: torch.optim.Optimizer) -> None:
    """Convert loaded optimizer state to the memory format of the current parameters.

    The state may come from another machine or other settings, and so have another format.
    Why: torch's fused optimizers iterate over parameter and state in memory order.
    They mix up values of different formats without an error (torch 2.8).
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


# A trimmed page costs a fault when it is used again, so short epochs do not trim each time.
TRIM_INTERVAL_S = 60.0


class HeapTrimmer:
    """Trims glibc's heap (malloc_trim(3)) at most once per interval.

    Why: the plan lets glibc keep freed memory. Training, evaluation and checkpoints need blocks of different sizes.
    A small object in a freed block makes the next large one grow the heap, epoch after epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.last = clock, clock()
        self.malloc_trim = ctypes.CDLL(None).malloc_trim

    def trim_if_due(self) -> None:
        """Return freed pages to the kernel if the interval has passed."""
        if self.clock() - self.last >= TRIM_INTERVAL_S:
            self.last = self.clock()
            self.malloc_trim(ctypes.c_size_t(0))
