"""Functions for a loop on N ranks. The ranks go on and stop together, so that none waits for one
that has left, and get one rank's values.
"""

from __future__ import annotations

from typing import Any

import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..groups import as_group, labelled
from ..groups.checks import check_source
from ..groups.protocol import Group
from ..tree import PyTree, named_leaves
from .agreement import agree
from .failures import sharing_failures


def any_rank(flag: bool, group: Any = None) -> bool:
    """Whether any rank raises its flag: every rank calls it, and every rank gets the same answer.
    One all-reduce of a number.

    For early exit: a rank that leaves a loop alone would keep the others waiting in the next step.

    Args:
        flag: this rank's: its time is up, it was told to stop, its metric has stopped falling.
        group: as for `shard`.

    >>> from functorch_zero.testing import run_ranks
    >>> run_ranks(lambda group: any_rank(group.rank == 1, group), 3)
    [True, True, True]
    """
    group = labelled(as_group(group), "any_rank")
    raised = torch.tensor([int(bool(flag))], device="cpu")  # (1,) int64
    group.all_reduce(raised, "max").wait()
    return bool(raised.item())


def broadcast(
    tree: PyTree[Tensor], group: Group | Any = None, *, source: int = 0
) -> PyTree[Tensor]:
    """One rank's values for a tree of tensors that every rank has, of the same shapes: new tensors
    on every rank.

    For ranks that have built the same model from different seeds, or of which one has read a file:
    `init` wants the same whole params on every rank, and compares them.

        params, buffers = fz.broadcast((params, buffers), group)

    Collectives: one exchange of 32 bytes, and one broadcast per leaf; S bytes arrive in all. `tree`
    stays as it is.

    Args:
        tree: tensors on the group's devices; on each rank the whole tree.
        group: as `shard` takes it; None: torch's default group.
        source: the rank whose values all get.

    Raises:
        MismatchError: on every rank: trees, shapes or dtypes differ.
    """
    group = as_group(group)
    check_source(group.size, source)
    with sharing_failures(group, call="broadcast", settles=True), torch.no_grad():
        # By path, as plain data
        shapes: dict[str, Any] = {}
        for path, leaf in named_leaves(tree).items():
            _check_has_values(path, leaf, group.rank)
            shapes[path] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        # Ranks that differ in it would hang in the broadcasts, or mix up leaves
        agree(labelled(group, "broadcast/agreement"), {"source": source, "leaves": shapes})
        values = labelled(group, "broadcast/values")
        return tree_map(lambda leaf: _broadcast_leaf(leaf, source, values), tree)


def _check_has_values(path: str, leaf: Any, rank: int) -> None:
    if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
        got = leaf.device if isinstance(leaf, Tensor) else type(leaf).__name__
        raise StructureError(
            "only tensors with values can be broadcast", path=path, got=got, rank=rank
        )


def _broadcast_leaf(leaf: Tensor, source: int, group: Group) -> Tensor:
    """The source's values of a leaf, in a new tensor. One broadcast, of bytes: transports don't
    know every dtype."""
    new = leaf.detach().clone(memory_format=torch.contiguous_format)
    group.broadcast(new.view(-1).view(torch.uint8), source).wait()
    return new.requires_grad_(leaf.requires_grad)
