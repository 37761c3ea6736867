"""`broadcast`: the values that one rank has, on every rank."""

from __future__ import annotations

from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from .errors import StructureError, explain
from .groups import as_group, labelled
from .groups.checks import check_source
from .groups.protocol import Group
from .handshake import agree
from .options import told
from .tree import PyTree, paths


def broadcast(tree: PyTree[Tensor], group: Group | Any = None, *, source: int = 0) -> PyTree[Tensor]:
    """One rank's values for a tree of tensors that every rank has, of the same shapes: new tensors on every rank.

    For ranks that have built the same model from different seeds, or of which one has read a file: `init` wants the
    same whole params on every rank, and compares them.

        params, buffers = fz.broadcast((params, buffers), group)

    Collectives: an exchange of 32 bytes, and one broadcast a leaf; S bytes arrive in all. `tree` stays as it is.

    Args:
        tree: tensors on the group's devices; on each rank the whole tree.
        group: as `shard` takes it; None: torch's default group.
        source: whose values.

    Raises:
        MismatchError: on every rank: trees, shapes or dtypes differ.
    """
    group = as_group(group)
    check_source(group.size, source)
    with told(group), torch.no_grad():
        named = dict(zip(paths(tree), optree.tree_leaves(tree), strict=True))
        for path, leaf in named.items():
            if not isinstance(leaf, Tensor) or leaf.device.type == "meta":
                got = leaf.device if isinstance(leaf, Tensor) else type(leaf).__name__
                raise StructureError(
                    explain("only tensors with values can be broadcast", path=path, got=got, rank=group.rank)
                )
        shapes = {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in named.items()}
        agree(labelled(group, "broadcast/agreement"), {"source": source, "leaves": shapes})
        return tree_map(lambda leaf: _from(source, leaf, labelled(group, "broadcast/values")), tree)


def _from(source: int, leaf: Tensor, group: Group) -> Tensor:
    new = leaf.detach().clone(memory_format=torch.contiguous_format)
    group.broadcast(new.view(-1).view(torch.uint8), source).wait()
    return new.requires_grad_(leaf.requires_grad)
