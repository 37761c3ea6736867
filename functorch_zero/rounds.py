"""Going on and stopping together: what a loop on N ranks must agree on, so that none waits for one that has left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from optree import tree_map
from torch import Tensor

from .errors import StructureError
from .groups import as_group, labelled
from .options import told

Batch = TypeVar("Batch")


def any_rank(flag: bool, group: Any = None) -> bool:
    """Whether any rank says so: every rank calls it, and every rank gets the same answer. One all-reduce of a number.

    For early exit: a rank that leaves a loop alone would keep the others waiting in the next step.

    Args:
        flag: what this rank says: its time is up, it was told to stop, its metric has stopped falling.
        group: as for `shard`.

    >>> from functorch_zero.testing import run_ranks
    >>> run_ranks(lambda group: any_rank(group.rank == 1, group), 3)
    [True, True, True]
    """
    group = labelled(as_group(group), "any_rank")
    raised = torch.tensor([int(bool(flag))])
    group.all_reduce(raised, "max").wait()
    return bool(raised.item())


def rounds(batches: Iterable[Batch], group: Any = None, *, empty: Batch | None = None) -> Iterator[Batch]:
    """This rank's batches, and then empty ones for as long as another rank has some: all ranks take as many steps.

    One all-reduce of a number a batch. An empty batch joins a step with weight 0, so the loss (or evaluation) must
    return a weight, `Aux(weight=len(batch))`; then metrics and gradients are those of the batches there are.

    Args:
        batches: of this rank; the numbers of them may differ between ranks.
        group: as for `shard`.
        empty: what a rank without batches passes. None: its first batch with 0 rows.

    Raises:
        StructureError: a rank that has no batch at all was not given `empty`; PeerError on the others.

    >>> from functorch_zero.testing import run_ranks
    >>> run_ranks(lambda group: [len(x) for x in rounds([torch.ones(2)] * (1 + group.rank), group)], 2)
    [[2, 0], [2, 2]]
    """
    group, waiting = as_group(group), iter(batches)
    while True:
        with told(group):
            batch = next(waiting, None)
        if not any_rank(batch is not None, group):
            return
        if batch is None and empty is None:
            with told(group):
                raise StructureError(
                    f"rank {group.rank} has no batch at all, and others have. Remedy: rounds(batches, group, "
                    "empty=...), a batch with 0 rows"
                )
        if empty is None:
            empty = tree_map(lambda x: x[:0] if isinstance(x, Tensor) and x.dim() else x, batch)
        yield empty if batch is None else batch
