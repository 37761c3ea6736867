"""BatchNorm over the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..tree import has_values
from .batch_on_ranks import AllRows, BatchOnRanks, batch_of_loss

_NAME = "fz.batch.sync_batch_norm"


class SyncBatchNorm(nn.SyncBatchNorm):
    """Torch's, with its params and buffers, but for the ranks: those of the loss that runs."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        of_batch = self.training or self.running_mean is None or self.running_var is None
        batch = batch_of_loss(_NAME) if of_batch else None
        if batch is None:
            return super(nn.SyncBatchNorm, self).forward(input)  # of one process
        return self._of_whole_batch(input, batch)

    def _of_whole_batch(self, x: Tensor, batch: BatchOnRanks) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        num = x.numel() // x.size(1)  # values per feature
        # By Chan et al. (1983), of each rank's number, mean, and squares around that mean
        own_mean = wide.sum(dims) / max(num, 1)
        centered = wide - _along_features(own_mean, x)
        own = torch.cat([wide.new_full((1,), num), own_mean, centered.square().sum(dims)])[None]
        exchange = AllRows(batch, own, _NAME, nums=[1] * batch.group.size)
        by_rank = batch.exchange(exchange, own, gives=num > 0)  # (N, 1 + 2 C)
        nums, means, squares = by_rank.split([1, x.size(1), x.size(1)], dim=1)
        total = nums.sum()
        # As torch's. A rank with two values knows that there are enough
        if num <= 1 and has_values(total) and total <= 1:
            raise ValueError(
                f"BatchNorm takes at least two values per feature of the whole batch, got {total:g}"
            )
        mean = (nums * means).sum(0) / total
        square = (squares + nums * (means - mean).square()).sum(0)
        scale = (square / total + self.eps).rsqrt()
        if self.training and self.track_running_stats:
            self._track(mean, square / (total - 1))
        normed = (wide - _along_features(mean, x)) * _along_features(scale, x)
        if self.weight is not None:
            normed = normed * _along_features(self.weight, x)
        if self.bias is not None:
            normed = normed + _along_features(self.bias, x)
        return normed.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Count a batch, whose statistics (C,) these are."""
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # their plain average
                momentum = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:
                running.lerp_(new.to(running.dtype), momentum or 0.0)


def converted(model: nn.Module) -> nn.Module:
    """The model with such modules, in place of torch's."""
    converted_model: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in converted_model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm
    return converted_model


def _along_features(x: Tensor, like: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, ...)."""
    return x.view(1, -1, *[1] * (like.dim() - 2))
