"""In which number format the model computes: weights, loss and optimizer stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def computing(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for the model's forward pass: PyTorch's autocast for bf16, nothing for fp32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
