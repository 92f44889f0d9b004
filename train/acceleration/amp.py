"""In which number format the model computes; weights, loss and optimizer stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp.grad_scaler import GradScaler

CAST_TO = {"bf16": torch.bfloat16, "fp16": torch.float16}


def configure_tf32(precision: str, device: torch.device) -> None:
    """Let the device's libraries use what the precision allows: TF32 in products and convolutions, or none of it."""
    tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = precision == "bf16"
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = precision == "fp16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for the model's forward pass: PyTorch's autocast for bf16 and fp16, nothing for others."""
    return torch.autocast(device.type, CAST_TO[precision]) if precision in CAST_TO else nullcontext()


def gradient_scaler(precision: str, device: torch.device) -> GradScaler:
    """Return what keeps fp16's gradients from vanishing: the loss is scaled up, the gradients down before the step.

    For other precisions it does nothing.
    """
    return GradScaler(device.type, enabled=precision == "fp16")
