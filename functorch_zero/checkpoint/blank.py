"""A state to read into: like another one, in storage of its own, or in that one's storage where it is given up."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from ..step.state import TrainState


def blank_state(like: TrainState, *, reuse: bool) -> TrainState:
    """A state of the same structure whose values are to be overwritten, all of them.

    Leaves that are views of one flat are so again. With `reuse` they are `like`'s own tensors, but for scalars (the
    step counter tells states apart), for leaves that don't lie row by row, and for a second use of the same storage.
    """
    leaves, treedef = optree.tree_flatten(like)
    flats: dict[int, Tensor] = {}  # by the id of the one that like's leaves are views of
    used: set[int] = set()
    made = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            made.append(leaf)
        elif reuse and leaf.dim() and leaf.is_contiguous() and leaf.data_ptr() not in used:
            used.update([leaf.data_ptr()] if leaf.numel() else [])
            made.append(leaf)
        else:
            made.append(_blank(leaf, flats))
    state: TrainState = treedef.unflatten(made)
    return state


def _blank(leaf: Tensor, flats: dict[int, Tensor]) -> Tensor:
    base = leaf._base
    if base is None or not (leaf.is_contiguous() and base.is_contiguous()) or base.dtype != leaf.dtype:
        new = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    else:
        if id(base) not in flats:
            flats[id(base)] = torch.zeros(base.shape, dtype=base.dtype, device=base.device)
        new = flats[id(base)].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset() - base.storage_offset())
    return new.requires_grad_() if leaf.requires_grad else new


def in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A copy whose dims lie in memory in this order, from the slowest to the fastest."""
    copy = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
