"""`fz.data`: which rows of a dataset each step takes, and which of these are this rank's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import StructureError
from ..groups import as_group, labelled
from ..groups.protocol import Group
from ..step.rows import part_of_rows, without_rows
from .agreement import agree
from .failures import sharing_failures
from .loop import any_rank

__all__ = ["GlobalOrder", "equalize_batches", "share"]

_Batch = TypeVar("_Batch")


def share(batch: _Batch, group: Any) -> _Batch:
    """This rank's rows of a batch that every rank has: consecutive ones, as views; no
    communication.

    Args:
        batch: a tree of tensors, arrays and lists with a row per example, and of numbers and texts,
            which all ranks get; the same on all ranks.
        group: as for `shard`. The ranks of a mesh's axis of the same data get the same rows.

    Returns:
        The same tree. Of B rows and N ranks each gets B / N; where that doesn't divide, the first
        ranks get one more, and the loss must return its weight: `Aux(weight=len(x))`.

    Raises:
        StructureError: leaves have unequal rows, or one can't be cut.

    >>> from functorch_zero.testing import run_ranks
    >>> run_ranks(lambda group: share({"x": torch.arange(5), "name": "a"}, group)["x"].tolist(), 2)
    [[0, 1, 2], [3, 4]]
    """
    data = _of_data(as_group(group))
    made: _Batch = part_of_rows(batch, data.rank, data.size)
    return made


def _of_data(group: Group) -> Group:
    """The ranks whose parts of a batch differ."""
    data: Group = getattr(group, "data", group)  # a mesh says which of its ranks they are
    return data


class GlobalOrder:
    """The rows of each batch of a run: a `batch_sampler` for torch's DataLoader.

    The sequence of batches over all ranks is a function of the arguments alone: it is the same on
    any number of ranks, and after any restart, also on other ranks. A rank loads its `share` of
    each batch. The whole state is two integers, the next step's `epoch` and `step`; workers that
    load ahead don't change them, `advance` does.

        order = fz.data.GlobalOrder(len(dataset), 256, group, seed=0)
        loader = DataLoader(dataset, batch_sampler=order, num_workers=4)
        while order.epoch < 3:
            for batch in loader:  # the rest of the epoch
                state, metrics = step(state, batch)
                order.advance()

    A rank holds the order of one epoch: 8 bytes per row of the dataset. Making it takes one
    exchange of 32 bytes, in which ranks compare the arguments.

    Args:
        num_rows: of the dataset.
        batch_size: rows of a batch over all ranks, at least one per rank. Where the ranks don't
            divide it, shares differ by a row, and the loss must return its weight.
        group: as for `shard`; `fz.groups.SingleRank()` in one process.
        seed: of the shuffling. Each epoch has an order of its own.
        shuffle: False: the dataset's own order, in each epoch.
        drop_last: leave out an epoch's last rows where they don't fill a batch. False: they are a
            smaller one, whose loss must return its weight.

    Attributes:
        epoch, step: of the batch that comes next; `step` counts within the epoch.

    Raises:
        ValueError: an epoch has no batch, or one with fewer rows than ranks.
        MismatchError: the ranks were given different arguments.

    >>> from functorch_zero.testing import run_ranks
    >>> run_ranks(lambda group: list(GlobalOrder(7, 4, group, shuffle=False)), 2)
    [[[0, 1]], [[2, 3]]]
    """

    epoch: int
    step: int

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        group: Any,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ):
        self._group = as_group(group)
        arguments: dict[str, Any] = dict(
            num_rows=num_rows,
            batch_size=batch_size,
            seed=seed,
            shuffle=bool(shuffle),
            drop_last=bool(drop_last),
        )
        with sharing_failures(self._group, call="GlobalOrder", settles=True):
            agree(labelled(self._group, "GlobalOrder/agreement"), arguments)
            self._check_sizes(**arguments)
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self._shuffle, self._drop_last = shuffle, drop_last
        self._shuffled: tuple[int, Tensor] | None = None  # an epoch, and its order
        self.epoch = self.step = 0

    def _check_sizes(self, num_rows: int, batch_size: int, drop_last: bool, **others: Any) -> None:
        ranks = _of_data(self._group).size
        if batch_size < ranks:
            raise ValueError(
                f"GlobalOrder: a batch of {batch_size} rows has none for some of {ranks} ranks. "
                f"Remedy: batch_size counts the rows of all ranks; at least {ranks}"
            )
        last = num_rows % batch_size
        if not num_rows or (num_rows < batch_size and drop_last):
            raise ValueError(
                f"GlobalOrder: {num_rows} rows don't fill a batch of {batch_size}, so an epoch has "
                "none. Remedy: a smaller batch_size, or drop_last=False"
            )
        if 0 < last < ranks and not drop_last:
            raise ValueError(
                f"GlobalOrder: the last batch of an epoch has {last} of {num_rows} rows, and none "
                f"for some of {ranks} ranks. Remedy: drop_last=True, or another batch_size"
            )

    @property
    def num_batches(self) -> int:
        """The batches of an epoch."""
        whole, last = divmod(self.num_rows, self.batch_size)
        return whole + (last > 0 and not self._drop_last)

    def rows(self, epoch: int, step: int) -> Tensor:
        """The rows of one batch over all ranks: a function of the arguments alone. (rows,) int64 on
        the CPU."""
        start = step * self.batch_size
        stop = min(start + self.batch_size, self.num_rows)
        if not self._shuffle:
            return torch.arange(start, stop, device="cpu")
        return self._order_of(epoch)[start:stop]

    def _order_of(self, epoch: int) -> Tensor:
        """(rows of the dataset,) int64 on the CPU."""
        if self._shuffled is None or self._shuffled[0] != epoch:
            # Both go into the number, so that no epoch of one seed is one of another's
            number = random.Random(f"{self.seed}, {epoch}").getrandbits(63)
            generator = torch.Generator().manual_seed(number)
            order = torch.randperm(self.num_rows, generator=generator, device="cpu")
            self._shuffled = epoch, order
        return self._shuffled[1]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's rows of each batch that is left of the epoch."""
        epoch = self.epoch
        for step in range(self.step, self.num_batches):
            yield share(self.rows(epoch, step), self._group).tolist()

    def __len__(self) -> int:
        """How many batches are left of the epoch."""
        return self.num_batches - self.step

    def advance(self) -> None:
        """Count the batch that was trained on."""
        self.step += 1
        if self.step == self.num_batches:
            self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the run is, for a checkpoint's `user`: two integers, which know of no ranks."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a run was that had the same arguments, besides the group."""
        epoch, step = state["epoch"], state["step"]
        if epoch < 0 or not 0 <= step < self.num_batches:
            raise ValueError(
                f"GlobalOrder: step {step} of epoch {epoch} is none of {self.num_batches} steps "
                "of an epoch. Remedy: the dataset's rows and the batch_size of the run that saved"
            )
        self.epoch, self.step = epoch, step


def equalize_batches(
    batches: Iterable[_Batch], group: Any = None, *, empty: _Batch | None = None
) -> Iterator[_Batch]:
    """This rank's batches, and then empty ones for as long as another rank has some: all ranks take
    as many steps.

    One all-reduce of a number per batch. An empty batch joins a step with weight 0, so the loss (or
    evaluation) must return a weight, `Aux(weight=len(batch))`. Then metrics and gradients are those
    of the batches there are.

    Args:
        batches: of this rank; the numbers of them may differ between ranks.
        group: as for `shard`.
        empty: the batch of a rank that has no more. None: its last batch with 0 rows.

    Raises:
        StructureError: a rank that has no batch at all was not given `empty`, or its batch has
            leaves that can't be cut along rows; PeerError on the others.

    >>> from functorch_zero.testing import run_ranks
    >>> def sizes(group):
    ...     own = [torch.ones(2)] * (1 + group.rank)
    ...     return [len(batch) for batch in equalize_batches(own, group)]
    >>> run_ranks(sizes, 2)
    [[2, 0], [2, 2]]
    """
    group, waiting = as_group(group), iter(batches)
    last: _Batch | None = None  # of this rank
    while True:
        with sharing_failures(group):  # users' code reads the batches
            batch = next(waiting, None)
        # Every rank asks before every batch, so all stop after the same number
        if not any_rank(batch is not None, group):
            return
        if batch is None and empty is None:
            # The others go on to the step, and hear of an error in their next collective
            with sharing_failures(group):
                empty = _empty_like(last, group.rank)
        last = batch
        yield empty if batch is None else batch  # type: ignore[misc]


def _empty_like(batch: _Batch | None, rank: int) -> _Batch:
    """A batch like this one with 0 rows."""
    if batch is None:
        raise StructureError(
            f"rank {rank} has no batch at all, and others have. Remedy: "
            "equalize_batches(batches, group, empty=...), a batch with 0 rows"
        )
    try:
        made: _Batch = without_rows(batch)
    except StructureError as error:
        error.add_note("equalize_batches(batches, group, empty=...) takes a batch with 0 rows")
        raise
    return made
