"""BatchNorm over the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tree import has_values
from .batch_on_ranks import BatchOnRanks, batch_of_loss

_NAME = "fz.batch.sync_batch_norm"


class SyncBatchNorm(nn.SyncBatchNorm):
    """Torch's, with its params and buffers, but for the ranks: those of the loss that runs."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dims, got {input.dim()}")
        is_tracked = self.running_mean is not None and self.running_var is not None
        of_batch = self.training or not is_tracked
        batch = batch_of_loss(_NAME) if of_batch else None
        momentum = self._next_momentum() if self.training and self.track_running_stats else 0.0
        updates = is_tracked and (not self.training or self.track_running_stats)
        mean, var = (self.running_mean, self.running_var) if updates else (None, None)
        if batch is None:
            return F.batch_norm(
                input, mean, var, self.weight, self.bias, of_batch, momentum, self.eps
            )
        return self._of_whole_batch(input, batch, momentum, mean, var)

    def _next_momentum(self) -> float:
        """The part of the new statistics in the running ones: None means their plain average."""
        num = self.num_batches_tracked
        if num is not None:
            num.add_(1)
        if self.momentum is not None or num is None:
            return self.momentum or 0.0
        return 1.0 / float(num)

    def _of_whole_batch(
        self,
        x: Tensor,
        batch: BatchOnRanks,
        momentum: float,
        running_mean: Tensor | None,
        running_var: Tensor | None,
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        num = x.numel() // x.size(1)  # values per feature
        # By Chan et al. (1983), of each rank's number, mean, and squares around that mean
        own_mean = wide.sum(dims) / max(num, 1)
        centered = wide - _along_features(own_mean, x)
        own = torch.cat([wide.new_full((1,), num), own_mean, centered.square().sum(dims)])
        by_rank = batch.one_each(own, _NAME, gives=num > 0)  # (N, 1 + 2 C)
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
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((square / (total - 1)).to(running_var.dtype), momentum)
        normed = (wide - _along_features(mean, x)) * _along_features(scale, x)
        if self.weight is not None:
            normed = normed * _along_features(self.weight, x)
        if self.bias is not None:
            normed = normed + _along_features(self.bias, x)
        return normed.to(x.dtype)


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
