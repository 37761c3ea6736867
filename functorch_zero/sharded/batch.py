"""`fz.batch`: losses over the whole batch. On ranks each has a part of its rows; these functions of
a loss see all of them. In one process they do nothing.

Note [no factor]: the step differentiates each rank's loss with that rank's share of the mean as the
seed, and adds up gradients. So backward of `all_rows` adds up what all losses say of a row, and
gives it to the row's rank. Each rank may have the loss of the whole batch, or that of its own rows
against all: both are exact, and no gradient is divided by anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._torch_private import transforms_active
from ..errors import StructureError
from ..step.rows import split_rows
from ..step.scope import batch_here
from .batch_on_ranks import AllRows, BatchOnRanks, NumRows, batch_of_loss
from .sync_batch_norm import converted

__all__ = ["all_rows", "in_chunks", "mean", "own_rows", "sum", "sync_batch_norm"]


def all_rows(x: Tensor) -> Tensor:
    """The rows of the whole batch: on ranks (n, ...) -> (sum of n, ...), in the order of the ranks'
    parts. In one process `x` itself.

    Differentiable: gradients of this rank's rows by all ranks' losses are added up. It is called in
    the forward of a loss, or in an evaluation, by every rank, also by one without rows.

    Collectives: one all-gather of the rows, and in backward one reduce-scatter. Ranks with fewer
    rows than others fill up. One exchange of the hosts tells how many rows each has: in a pass once
    for tensors with a row per example of the batch, and for each other tensor.

    Raises:
        StructureError: outside of a loss on ranks; in one of several micro-batches, or a chunk; in
            a transform of torch.func; through it an inner gradient is taken.
        GroupError: other ranks' losses call something else, or with rows of another shape.

    >>> all_rows(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    name = "fz.batch.all_rows"
    batch = batch_of_loss(name)
    _check_rows(x, name)
    return x if batch is None else batch.exchange(AllRows(batch, x, name), x, gives=len(x) > 0)


def own_rows(x: Tensor) -> slice:
    """The place of this rank's rows `x` (n, ...) among all rows, for labels of a loss of its own
    rows: `torch.arange(len(all_rows(x)))[own_rows(x)]`. In one process all of them.

    Collectives: the exchange of the hosts of `all_rows`, once for both. Raises as `all_rows`.

    >>> own_rows(torch.zeros(3, 2))
    slice(0, 3, None)
    """
    batch = batch_of_loss("fz.batch.own_rows")
    _check_rows(x, "fz.batch.own_rows")
    if batch is None:
        return slice(0, len(x))
    nums = batch.exchange(NumRows(batch, x), x.detach(), gives=False)
    first = int(nums[: batch.group.rank].sum())
    return slice(first, first + len(x))


def sum(x: Tensor) -> Tensor:
    """The sum over ranks of what each has made of its own rows: `sum(x.sum(0))` is that over all
    rows. Any shape, the same on every rank; in one process `x` itself.

    Differentiable. Collectives: one all-reduce, and in backward another. Raises as `all_rows`.

    >>> sum(torch.tensor([[1.0], [2.0]]).sum(0))
    tensor([3.])
    """
    batch = batch_of_loss("fz.batch.sum")
    return x if batch is None else batch.sum(x, "fz.batch.sum")


def mean(x: Tensor) -> Tensor:
    """The mean of all rows: (n, ...) -> (...), by the ranks' numbers of rows, which may be 0 on
    some. In one process `x.mean(0)`.

    Differentiable. Sums are made in float32 at least. Collectives: one all-reduce, and in backward
    another. Raises as `all_rows`.

    >>> mean(torch.tensor([[1.0], [2.0]]))
    tensor([1.5000])
    """
    batch = batch_of_loss("fz.batch.mean")
    _check_rows(x, "fz.batch.mean")
    if batch is None or not (x.is_floating_point() or x.is_complex()):
        return x.mean(0)  # of integers torch's error
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    packed = torch.cat([wide.sum(0).view(-1), wide.new_full((1,), len(x))])
    total = batch.sum(packed, "fz.batch.mean")
    return (total[:-1] / total[-1]).view(x.shape[1:]).to(x.dtype)


def sync_batch_norm(model: torch.nn.Module) -> torch.nn.Module:
    """The model, whose `nn.BatchNorm1d`, `2d`, `3d` and `nn.SyncBatchNorm` modules are replaced by
    ones that take their statistics of the whole batch. Names, params and buffers stay.

    As `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, it changes the model given; call it before
    `fz.functionalize`. In evaluation mode, and in one process, they are torch's BatchNorm. The loss
    returns the new buffers as `fz.Aux(buffers=...)`: they are equal on all ranks.

    Collectives, per module and pass: one all-gather of 2 C + 1 numbers a rank, for C features, and
    in backward one reduce-scatter. A rank may have no rows. Raises as `all_rows`.

    >>> model = sync_batch_norm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    >>> [name for name, _ in model.named_buffers()]
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    """
    return converted(model)


def in_chunks(function: Callable[..., Any], k: int) -> Callable[..., Any]:
    """The function, of rows, computed chunk by chunk: `in_chunks(function, k)(*args)` cuts the rows
    of `args` into `k` parts, and joins the results' rows again.

    Each chunk is computed once more in backward, instead of keeping its activations (GradCache, Gao
    et al. 2021), with the random numbers of the first time. So a loss of the whole batch,
    `loss(all_rows(in_chunks(encode, 8)(x)))`, needs the activations of one chunk at a time. It is
    the way for what `accumulate` can't do.

    Args:
        function: of trees of tensors with a row per example; returns one, too. What it makes of a
            row must not depend on the others. It may call `apply`, whose new buffers are dropped.
        k: the number of chunks, the same on every rank.

    Collectives: at level 3 the units that the function uses are gathered for each chunk. Inside of
    a chunk the functions of `fz.batch` raise StructureError on ranks.

    >>> in_chunks(lambda x: x.square(), 2)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 4., 9.])
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"in_chunks takes a number of chunks of at least 1, got {k!r}")

    def of_chunk(*args: Any) -> Any:
        batch = batch_here()
        if not isinstance(batch, BatchOnRanks):
            return function(*args)
        outside, batch.in_a_chunk = batch.in_a_chunk, True
        try:
            return function(*args)
        finally:
            batch.in_a_chunk = outside

    def run(*args: Any) -> Any:
        # Nothing is kept without gradients; torch.func refuses a checkpoint's hooks
        again = torch.is_grad_enabled() and not transforms_active()
        found = []
        for part in split_rows(args, k):
            result = checkpoint(of_chunk, *part, use_reentrant=False) if again else of_chunk(*part)
            _check_results(result)
            found.append(result)
        return tree_map(lambda *rows: torch.cat(rows), *found)

    return run


def _check_rows(x: Any, name: str) -> None:
    if not isinstance(x, Tensor) or x.dim() == 0:
        got = f"shape (), {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise StructureError(
            f"{name} was given no rows",
            expected="a tensor (n, ...)",
            got=got,
            remedy="fz.batch.sum takes a tensor of any shape; x[None] is one row",
        )


def _check_results(result: Any) -> None:
    for leaf in optree.tree_leaves(result):
        _check_rows(leaf, "the end of fz.batch.in_chunks")
