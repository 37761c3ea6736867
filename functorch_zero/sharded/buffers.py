"""The buffers of a step: ranks may change them differently, and a rule makes them equal again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import storage_id, version_of
from ..devices import number_on
from ..errors import StructureError
from ..groups.protocol import Group
from ..model.buffer_copies import changed_between, written_in_backward
from ..step.host import host
from ..tree import PyTree, paths

SyncBuffers = Literal["mean", "rank0", "local"]


def check_synchronizable(
    old: PyTree[Tensor], new: PyTree[Tensor], rule: SyncBuffers, group: Group, rank: int
) -> None:
    """Refuse a buffer that this rank's loss has given another shape or dtype, since other ranks may
    send it as it was; and a sparse one that has changed, since a message has no place for it."""
    if rule == "local" or group.size == 1:
        return
    expected: object
    got: object
    leaves = zip(optree.tree_leaves(old), optree.tree_leaves(new), strict=True)
    for n, (before, after) in enumerate(leaves):
        if before is after:
            continue
        forms = [(tuple(x.shape), x.dtype) for x in (before, after)]
        layouts = [x.layout for x in (before, after) if x.layout != torch.strided]
        if layouts:
            what = "a loss has changed a sparse buffer, which ranks can't send each other"
            expected, got = torch.strided, layouts[0]
            remedy = "keep it dense, and make it sparse in the loss"
        elif forms[0] != forms[1]:
            what = "a loss has changed a buffer's shape or dtype"
            expected, got = forms
            remedy = "begin with a buffer of that shape and dtype"
        else:
            continue
        raise StructureError(
            what,
            path=paths(old)[n],
            expected=expected,
            got=got,
            rank=rank,
            remedy=f"{remedy}; {_OR_LOCAL}",
        )


_OR_LOCAL = 'or shard with sync_buffers="local", which lets each rank keep its own'


class Asked(NamedTuple):
    """A buffer about which a device is asked."""

    path: str
    before: Tensor
    after: Tensor
    version: int  # of `after`, when the loss had returned

    def check_unwritten(self, rank: int, *, look: bool) -> None:
        """Raise if backward has written to it: its old values are to stay. With `look`, values are
        compared once more, for which the host waits."""
        written = version_of(self.after) != self.version
        if written or (look and bool((self.after != self.before).any())):
            raise written_in_backward("a buffer", self.path, rank)


class Changes(NamedTuple):
    """Per buffer, in flatten order: whether this rank's loss has changed it. Ranks may differ in
    it."""

    known: Sequence[bool | Asked]  # by the host; else its device is asked
    answers: Mapping[str, float]  # of devices, by the buffer's number; to read them may wait

    def flags(self, rank: int, *, look: bool) -> list[bool]:
        """All of them. The host waits for the devices' answers, and for nothing behind those.

        Raises:
            StructureError: backward has written to a buffer that the loss had kept.
        """
        flags = []
        for n, known in enumerate(self.known):
            flag = bool(self.answers[str(n)] if isinstance(known, Asked) else known)
            if isinstance(known, Asked) and not flag:
                known.check_unwritten(rank, look=look)
            flags.append(flag)
        return flags


def ask_changes(
    old: PyTree[Tensor], new: PyTree[Tensor], rule: SyncBuffers, group: Group
) -> Changes:
    """Find the buffers that this rank's loss has changed, and ask devices about large ones that
    they alone know. Nobody waits yet.

    None has changed where nobody will synchronize.
    """
    before, after = optree.tree_leaves(old), optree.tree_leaves(new)
    if rule == "local" or group.size == 1:
        return Changes([False] * len(before), {})
    known: list[bool | Asked] = []
    answers: dict[str, Tensor] = {}
    for n, pair in enumerate(zip(before, after, strict=True)):
        found = changed_between(*pair)
        if isinstance(found, bool):
            known.append(found)
        else:
            known.append(Asked(paths(old)[n], *pair, version_of(pair[1])))
            answers[str(n)] = found
    return Changes(known, host(answers) if answers else {})


def apart_from(tree: PyTree[Any], flats: Sequence[Tensor]) -> PyTree[Any]:
    """The tree, with copies of tensors that lie in the params' storage, which a step overwrites: of
    a buffer that is a target network, say."""
    # Without leaves no storage need be looked up
    if not optree.tree_leaves(tree):
        return tree
    taken = {storage_id(flat) for flat in flats}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # A sparse one has no storage to look up: its values may lie anywhere
        is_part = leaf.layout != torch.strided or storage_id(leaf) in taken
        return leaf.clone() if is_part else leaf

    return tree_map(copied, tree)


def synchronize(
    old: PyTree[Tensor],
    new: PyTree[Tensor],
    changed: Sequence[bool],
    rule: SyncBuffers,
    group: Group,
    num_weighty: Tensor | None = None,
    weighty: Tensor | bool = True,
) -> PyTree[Tensor]:
    """Make the buffers that any rank's loss has changed the same on every rank, by the rule. One
    collective per dtype.

    "mean" averages floating-point and complex buffers over the ranks that count. Integers
    (BatchNorm's count of batches) are those of the first rank that counts. A rank whose batch
    weighs nothing has changed nothing, and doesn't count. Buffers that no rank has changed keep
    their values to the bit. Which ranks count may be known to the devices alone: the host does not
    wait for them.

    Args:
        old: before the step, the same on every rank.
        new: after this rank's loss.
        changed: per buffer in flatten order: whether any rank has changed it.
        group: the ranks whose data differ.
        num_weighty: the number of ranks that count, 0-d; None: all do.
        weighty: whether this rank counts, where not all do; 0-d.
    """
    if rule == "local" or group.size == 1:
        return new
    # The same on every rank, so all skip the collectives or none does
    if not any(changed):
        return old
    before: list[Tensor]
    before, treedef = optree.tree_flatten(old)
    after: list[Tensor] = []
    for first, given, flag in zip(before, optree.tree_leaves(new), changed, strict=True):
        after.append(given if flag else first)
    # All ranks go on with the same numbers: flags and shapes are the same on each
    chosen = [i for i, flag in enumerate(changed) if flag and after[i].numel()]
    # In the order of the buffers, the same on every rank; one message per dtype
    for dtype in dict.fromkeys(after[i].dtype for i in chosen):
        own = [i for i in chosen if after[i].dtype == dtype]
        packed = _pack(after, own)  # (k,), this rank's values
        if rule == "mean" and (dtype.is_floating_point or dtype.is_complex):
            packed = _mean(_pack(before, own), packed, group, num_weighty, weighty)
        elif rule == "mean" and num_weighty is not None:
            packed = _of_first_weighty(packed, group, weighty)
        else:
            # In place, as bytes: transports don't know every dtype
            group.broadcast(packed.view(torch.uint8), source=0).wait()
        values = packed.split([after[i].numel() for i in own])
        for i, value in zip(own, values, strict=True):
            # A view of the message, which the step's new buffers keep
            after[i] = value.view(after[i].shape)
    return treedef.unflatten(after)


def _pack(buffers: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """The buffers of these numbers, which share a dtype, flattened and joined: (k,)."""
    return torch.cat([buffers[i].reshape(-1) for i in numbers])


def _mean(
    old: Tensor,
    new: Tensor,
    group: Group,
    num_weighty: Tensor | None,
    weighty: Tensor | bool,
) -> Tensor:
    """The mean of `new` (k,) over the ranks that count; `old` (k,) to the bit where no rank has
    changed it.

    It isn't `old` plus the mean of the changes: beside a large or infinite `old` those are rounded
    away.

    Args:
        num_weighty: the number of ranks that count; None: all do.
        weighty: whether this rank counts, where not all do.
    """
    if old.is_complex():
        # As twice as many real numbers, since transports don't know complex ones
        old, new = (torch.view_as_real(x.resolve_conj()).flatten() for x in (old, new))
        mean = _mean(old, new, group, num_weighty, weighty)
        return torch.view_as_complex(mean.view(-1, 2))
    # Half precisions would round the shares, and float16 the number of changes from 2**11 on
    dtype = torch.float32 if old.dtype.itemsize < 4 else old.dtype
    # Divided before the sum, so that large buffers don't overflow in it
    if num_weighty is None:
        share = new.to(dtype) / group.size
    else:
        share = new.to(dtype) / number_on(new.device, num_weighty)
        share = torch.where(number_on(new.device, weighty, torch.bool), share, 0.0)
    changed = (new != old).to(dtype)
    packed = torch.cat([share, changed])  # (2k,): one message for both
    group.all_reduce(packed).wait()
    mean, num_changes = packed.chunk(2)
    return torch.where(num_changes == 0, old, mean.to(old.dtype))


def _of_first_weighty(values: Tensor, group: Group, weighty: Tensor | bool) -> Tensor:
    """The values (k,) of the first rank that counts, or of rank 0 where none does.

    The hosts may not know which rank that is, and so none can broadcast.
    """
    counts = number_on(values.device, weighty, torch.bool)
    # A number of each rank's own, the largest where it is the first that counts
    own = torch.where(counts, group.size - group.rank, -group.rank)
    largest = own.clone().view(1)
    group.all_reduce(largest, op="max").wait()
    # A sum in which the others bring zeros; as bytes, since transports don't know every dtype
    packed = torch.where(own == largest, values.view(torch.uint8), 0)
    group.all_reduce(packed).wait()
    return packed.view(values.dtype)
