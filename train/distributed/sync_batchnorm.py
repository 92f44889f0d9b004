"""BatchNorm over the batches of all ranks: the same statistics, and so the same model, on any number of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm, pad
from torch.nn.modules.batchnorm import _BatchNorm

from train.distributed.process_group import ProcessGroup
from train.distributed.shared_memory import SharedMemoryGroup


class SyncBatchNormFunction(torch.autograd.Function):
    """The normalization with mean and variance over all ranks: one exchange forwards, one backwards.

    Both ways the passes over the images are those of torch's own BatchNorm, which are vectorised: `var_mean` takes 20
    times as long for its statistics. The gradient of these is a line through the values (Ioffe and Szegedy, 2015,
    arXiv:1502.03167, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor, eps: float, memory: SharedMemoryGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the batch normalized, then mean, variance and number of values of all ranks' batches."""
        channels = values.shape[1]
        own_count = values.numel() / channels
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        mean, variance = mean.double(), variance.double()
        # The count is no tensor that stands in the sums: of several layers' equal ones inductor makes one, and takes it
        # from where the first exchange has already changed it (torch 2.8 to 2.13).
        sums = pad(torch.cat((mean, variance + mean.square())).mul(own_count), (1, 0), value=own_count)
        all_reduce_sum(sums, memory)
        count, mean = sums[:1], sums[1 : channels + 1] / sums[0]
        variance = (sums[channels + 1 :] / count - mean.square()).clamp(min=0)
        mean, variance = mean.to(values.dtype), variance.to(values.dtype)
        ctx.save_for_backward(values, weight, mean, variance, count)
        ctx.eps, ctx.memory = eps, memory
        ctx.mark_non_differentiable(mean, variance, count)
        return batch_norm(values, mean, variance, weight, bias, False, 0.0, eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of this rank's values, and of its part of weight and bias."""
        grad = grads[0]
        values, weight, mean, variance, count = ctx.saved_tensors
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, values, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        sums = torch.cat((of_weight, of_bias)).double()
        all_reduce_sum(sums, ctx.memory)
        by_scale, by_shift = (sums / count).to(values.dtype).chunk(2)
        inverse = torch.rsqrt(variance + ctx.eps)
        scale = weight * inverse
        # What each value changes of mean and variance: a line through the values, channel by channel.
        slope, shift = -scale * inverse * by_scale, -scale * by_shift
        line = batch_norm(values, mean, torch.ones_like(mean), slope, shift, False, 0.0, 0.0)
        of_values = line.addcmul_(grad, scale.view(-1, *[1] * (values.ndim - 2)))
        return of_values, of_weight, of_bias, None, None


def all_reduce_sum(sums: Tensor, memory: SharedMemoryGroup | None) -> None:
    """Sum over all ranks, in place: through the memory that they share, where they do."""
    if memory:
        memory.sum(sums)
    else:
        dist.all_reduce(sums)


class SyncBatchNorm(_BatchNorm):
    """PyTorch's own for what it refuses to do: tensors on the CPU. Takes (N, C, …), as many ranks as there are."""

    memory: SharedMemoryGroup | None = None

    def _check_input_dim(self, _: Tensor) -> None:
        """Take any number of dimensions from two on, as PyTorch's does."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the batch normalized by mean and variance over all ranks; in evaluation by the running ones."""
        if not self.training:
            return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        values = input.float()
        weight = self.weight if self.affine else values.new_ones(self.num_features)
        bias = self.bias if self.affine else values.new_zeros(self.num_features)
        normalized, mean, variance, count = SyncBatchNormFunction.apply(values, weight, bias, self.eps, self.memory)  # type: ignore[no-untyped-call]
        self.follow(mean, variance * (count / (count - 1).clamp(min=1)).float())
        result: Tensor = normalized.to(input.dtype)
        return result

    @torch.no_grad()
    def follow(self, mean: Tensor, variance: Tensor) -> None:
        """Let the running statistics follow, as BatchNorm does; `variance` is the unbiased one."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance, share)


def convert_sync_batchnorm(model: nn.Module, group: ProcessGroup, *, compiled: bool = False) -> nn.Module:
    """Return the model with every BatchNorm replaced by one over all ranks, weights and statistics kept.

    One that is to be compiled exchanges by the process group, since the compiler cannot see through anything else.
    """
    if group.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    if isinstance(model, _BatchNorm):
        return of(model, None if compiled else group.memory)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child, group, compiled=compiled))
    return model


def of(norm: Any, memory: SharedMemoryGroup | None = None) -> SyncBatchNorm:
    """Return the synchronized twin of a BatchNorm, with its own parameters."""
    twin = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(twin, name, getattr(norm, name))
    twin.memory = memory
    return twin.train(norm.training)


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether any of the model's modules is a BatchNorm."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())
