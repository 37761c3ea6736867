"""Buffers that ranks have changed differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import storage_id
from ..groups.protocol import Group
from ..tree import PyTree

SyncBuffers = Literal["mean", "rank0", "local"]


def check_sync_buffers(rule: Any) -> SyncBuffers:
    """The rule, if it is one."""
    if rule not in get_args(SyncBuffers):
        raise ValueError(f"sync_buffers must be one of {get_args(SyncBuffers)}, got {rule!r}")
    return rule  # type: ignore[no-any-return]


def replaced(old: PyTree[Tensor], new: PyTree[Tensor]) -> list[bool]:
    """Which buffers this rank's loss replaced, in flatten order. Ranks may differ in it."""
    return [
        a is not b for a, b in zip(optree.tree_leaves(old), optree.tree_leaves(new), strict=True)
    ]


def apart(buffers: PyTree[Tensor], flats: Sequence[Tensor]) -> PyTree[Tensor]:
    """The buffers, those that lie in the storage of params (a target network, say) copied: it may
    be overwritten."""
    if not optree.tree_leaves(buffers):
        return buffers
    taken = {storage_id(flat) for flat in flats}
    return tree_map(lambda b: b.clone() if storage_id(b) in taken else b, buffers)


def synchronize(
    old: PyTree[Tensor],
    new: PyTree[Tensor],
    changed: Sequence[bool],
    rule: SyncBuffers,
    group: Group,
    num_weighty: int | None = None,
    weighty: bool = True,
) -> PyTree[Tensor]:
    """Make the buffers that any rank's loss has `changed` the same on every rank, by the rule. One
    collective a dtype.

    "mean" averages floating-point buffers, each rank counting the same (but those whose batch
    weighs nothing, which have changed nothing; `num_weighty` are the others, this one among them if
    it is `weighty`); integers (BatchNorm's count of batches) are those of the first rank that
    counts. What no rank has changed keeps its value to the bit. An exchange more where some ranks'
    batches weigh nothing.
    """
    if rule == "local" or group.size == 1 or not any(changed):
        return new
    before, treedef = optree.tree_flatten(old)
    after = list(optree.tree_leaves(new))
    chosen = [i for i, flag in enumerate(changed) if flag and after[i].numel()]
    num, source = group.size if num_weighty is None else num_weighty, 0
    if chosen and rule == "mean" and 0 < num < group.size:
        source = group.exchange(b"1" if weighty else b"").index(b"1")
    for dtype in dict.fromkeys(after[i].dtype for i in chosen):
        some = [i for i in chosen if after[i].dtype == dtype]
        packed = torch.cat([after[i].reshape(-1) for i in some])
        if rule == "mean" and dtype.is_floating_point:
            old = torch.cat([before[i].reshape(-1) for i in some])
            packed = _mean(old, packed, group, num, counts=weighty)
        else:
            group.broadcast(packed.view(torch.uint8), source).wait()
        for i, part in zip(some, packed.split([after[i].numel() for i in some]), strict=True):
            after[i] = part.view(after[i].shape)
    return treedef.unflatten(after)


def _mean(old: Tensor, new: Tensor, group: Group, num: int, *, counts: bool) -> Tensor:
    """The mean of `new` (k,) over the `num` ranks that count; `old` to the bit where no rank has
    changed it.

    Not `old` and the mean of the changes: beside a large or infinite `old` those are rounded away.
    """
    dtype = torch.promote_types(old.dtype, torch.float32)
    changed = new != old
    share = new.to(dtype) / num if counts else torch.zeros_like(new, dtype=dtype)
    packed = torch.cat([share, changed.to(dtype)])
    group.all_reduce(packed).wait()
    mean, num_changes = packed.chunk(2)
    return torch.where(num_changes == 0, old, mean.to(old.dtype))
