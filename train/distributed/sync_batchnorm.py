"""BatchNorm over the batches of all ranks: equal statistics, and so equal models, on any number of ranks."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm, pad
from torch.nn.modules.batchnorm import _BatchNorm

from entrypoint.core.errors import UserError
from train.distributed.process_group import ProcessGroup
from train.distributed.shared_memory import SharedMemoryGroup


class SyncBatchNormFunction(torch.autograd.Function):
    """Normalization by mean and variance over all ranks, with one all-reduce in each direction.

    The passes over the images use the vectorized kernels of torch's own BatchNorm; `var_mean` is much slower.
    The gradient of the statistics is a linear function of the values (Ioffe and Szegedy, 2015, arXiv:1502.03167,
    section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor, eps: float, memory: SharedMemoryGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalized batch, then mean, variance and number of values over all ranks."""
        channels = values.shape[1]
        own_count = values.numel() / channels
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        mean, variance = mean.double(), variance.double()
        # The count is padding, not a tensor of its own in the sums.
        # Why: inductor merges the equal counts of several layers into one, and reads it after the first all-reduce has
        # changed it (torch 2.8 to 2.13).
        sums = pad(torch.cat((mean, variance + mean.square())).mul(own_count), (1, 0), value=own_count)
        all_reduce_sum(sums, memory)
        count, mean = sums[:1], sums[1 : channels + 1] / sums[0]
        variance = (sums[channels + 1 :] / count - mean.square()).clamp(min=0)
        mean, variance = mean.to(values.dtype), variance.to(values.dtype)
        ctx.save_for_backward(values, weight, mean, variance, count)
        ctx.eps, ctx.memory = eps, memory
        ctx.mark_non_differentiable(mean, variance, count)
        return batch_norm(values, mean, variance, weight, bias, momentum=0.0, eps=eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of this rank's values, and this rank's part of those of weight and bias."""
        grad = grads[0]
        values, weight, mean, variance, count = ctx.saved_tensors
        _, weight_grad, bias_grad = torch.ops.aten.native_batch_norm_backward(
            grad, values, weight, mean, variance, None, None, train=False, eps=ctx.eps, output_mask=[False, True, True]
        )
        sums = torch.cat((weight_grad, bias_grad)).double()
        all_reduce_sum(sums, ctx.memory)
        mean_scale_grad, mean_shift_grad = (sums / count).to(values.dtype).chunk(2)
        inverse = torch.rsqrt(variance + ctx.eps)
        scale = weight * inverse
        # The gradient through mean and variance: a linear function of the values, per channel.
        slope, shift = -scale * inverse * mean_scale_grad, -scale * mean_shift_grad
        stats_grad = batch_norm(values, mean, torch.ones_like(mean), slope, shift, momentum=0.0, eps=0.0)
        values_grad = stats_grad.addcmul_(grad, scale.view(-1, *[1] * (values.ndim - 2)))
        return values_grad, weight_grad, bias_grad, None, None


def all_reduce_sum(sums: Tensor, memory: SharedMemoryGroup | None) -> None:
    """Sum over all ranks in place, through shared memory if there is any."""
    if memory:
        memory.sum(sums)
    else:
        dist.all_reduce(sums)


class SyncBatchNorm(_BatchNorm):
    """Synchronized BatchNorm for CPU tensors, which PyTorch's own rejects; (N, C, …), any number of ranks."""

    memory: SharedMemoryGroup | None = None

    def _check_input_dim(self, _: Tensor) -> None:
        """Accept any number of dimensions from two on, as PyTorch's does."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the batch normalized by mean and variance over all ranks; in evaluation by the running ones."""
        if not self.training:
            return batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, momentum=0.0, eps=self.eps
            )
        values = input.float()
        weight = self.weight if self.affine else values.new_ones(self.num_features)
        bias = self.bias if self.affine else values.new_zeros(self.num_features)
        normalized, mean, variance, count = SyncBatchNormFunction.apply(values, weight, bias, self.eps, self.memory)
        self.update_running_stats(mean, variance * (count / (count - 1).clamp(min=1)).float())
        result: Tensor = normalized.to(input.dtype)
        return result

    @torch.no_grad()
    def update_running_stats(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as BatchNorm does; `variance` is the unbiased one."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


class SyncBatchNormAct(SyncBatchNorm):
    """The same with the dropout and the activation that timm's `BatchNormAct2d` has after it."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Return the activations of the normalized batch."""
        result: Tensor = self.act(self.drop(super().forward(input)))
        return result


def has_activation(module: nn.Module) -> bool:
    """Return whether a module is timm's BatchNorm with an activation after it."""
    return type(module).__name__ == "BatchNormAct2d" and hasattr(module, "act") and hasattr(module, "drop")


PLAIN_BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm, SyncBatchNormAct)


def check_batchnorm_classes(model: nn.Module) -> None:
    """Raise `UserError` for a BatchNorm with a forward pass of its own, which synchronization would replace."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and type(module) not in PLAIN_BATCHNORM and not has_activation(module):
            raise UserError(
                f"TRAIN_SYNC_BATCHNORM: {name or 'the model'} is a {type(module).__name__}, which cannot be"
                " synchronized over ranks. Set TRAIN_SYNC_BATCHNORM=0, or use nn.BatchNorm2d."
            )


def convert_sync_batchnorm(model: nn.Module, group: ProcessGroup, *, compiled: bool = False) -> nn.Module:
    """Return the model with every BatchNorm over all ranks, with its weights and statistics.

    On a CPU only its class changes, so parameters, hooks and every place in the model stay as they are.
    A model to be compiled uses the process group, because the compiler cannot trace shared memory.
    """
    check_batchnorm_classes(model)
    if group.device.type == "cuda":
        if any(has_activation(module) for module in model.modules()):
            layers: Any = importlib.import_module("timm.layers")
            with_activations: nn.Module = layers.convert_sync_batchnorm(model)
            return with_activations
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SyncBatchNormAct if has_activation(module) else SyncBatchNorm
            module.memory = None if compiled else group.memory  # type: ignore[assignment]
    return model
