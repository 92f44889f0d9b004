"""Linear layers that multiply in fp8, by torchao; weights, gradients and checkpoints keep their format."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from entrypoint.core.errors import UserError

# Tensor cores multiply fp8 matrices whose sizes are multiples of this (torchao.float8's manual).
MULTIPLE = 16


def use_fp8(model: nn.Module, head: Collection[str], *, emulate: bool = False) -> nn.Module:
    """Return the model with its linear layers but the head in fp8; raises `UserError` if none can be.

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
