"""The number format of the forward pass, and the memory format of images and filters.

Weights, loss and optimizer state stay in fp32.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from entrypoint.core.errors import UserError

# Tensor cores multiply fp8 matrices whose sizes are multiples of this (torchao.float8's manual).
MULTIPLE = 16
CAST_TO = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def configure_tf32(precision: str, device: torch.device) -> None:
    """Allow TF32 and 16-bit reductions in the device's libraries only if the precision asks for them."""
    tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = precision in ("bf16", "fp8")
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = precision == "fp16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass: autocast for 16 and 8 bits, a null context for others."""
    return torch.autocast(device.type, CAST_TO[precision]) if precision in CAST_TO else nullcontext()


def memory_format(*, channels_last: bool) -> torch.memory_format:
    """Return the memory format of the images."""
    return torch.channels_last if channels_last else torch.contiguous_format


def set_memory_format(model: nn.Module, *, channels_last: bool) -> nn.Module:
    """Return the model with its filters in the memory format of the images."""
    return model.to(memory_format=memory_format(channels_last=channels_last))


def use_fp8(model: nn.Module, head: Collection[str], *, emulate: bool = False) -> nn.Module:
    """Return the model with its linear layers but the head in fp8, by torchao; raises `UserError` if none can be.

    Convolutions, normalization and the head stay in bf16. `emulate` computes the same on a device without fp8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name not in head
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    }
    if not names:
        raise UserError(
            f"TRAIN_PRECISION=fp8: the model has no linear layer whose sizes are multiples of {MULTIPLE}, besides the"
            " last one. Set TRAIN_PRECISION=bf16."
        )
    config = Float8LinearConfig(emulate=emulate)
    converted: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in names
    )
    return converted
