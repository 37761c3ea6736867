"""`BatchOnRanks`: the batch of a loss that runs on ranks, and its exchanges of rows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._torch_private import innermost_saved_tensors_hooks, memory_of_region
from ..errors import StructureError
from ..groups import labelled
from ..groups.mesh import Axes
from ..groups.torch_distributed import num_processes
from ..runtime.exchange import Exchange
from ..runtime.unit import Pass
from ..step.nonfinite import all_finite
from ..step.rows import leading_sizes, sizes_by_path
from ..step.scope import ALL_ROWS, batch_here, scope_here
from ..step.weights import check_weight_value, is_on_device


class BatchOnRanks:
    """This rank's part of a batch, and the way to the others' rows, during one pass.

    Args:
        axes: of the step.
        log: takes an entry per exchange, which ranks compare.
        part: of the batch, the loss's own.
        around: the pass.
        num_micro: of the micro-batches, of which the part is one.

    Attributes:
        exchanged: whether the loss has called a function of `fz.batch`.
        in_a_chunk: whether a function of `fz.batch.in_chunks` runs.
    """

    def __init__(self, axes: Axes, log: list[str], part: Any, around: Pass, *, num_micro: int = 1):
        self.group, self.rank, self.around = axes.data, axes.world.rank, around
        self.exchanged = self.in_a_chunk = False
        self._log, self._part, self._num_micro = log, part, num_micro
        self._gave_rows = False
        self._nums_of_batch: list[int] | None = None  # its rows by rank, once they have been told
        self._received: list[Tensor] = []  # by a rank without rows

    def exchange(self, exchange: Exchange, x: Tensor, *, gives: bool) -> Tensor:
        """The result of an exchange by this pass; `gives`: whether rows of this rank are in it."""
        self._check(exchange.word)
        self.exchanged = True
        self._gave_rows |= gives
        result = self.around.exchange(exchange, x)
        if self._lacks_rows:
            self._received.append(result.detach())
        return result

    def sum(self, x: Tensor, name: str) -> Tensor:
        """The sum over ranks of tensors of one shape."""
        return self.exchange(Sum(self, x, name), x, gives=self.num_rows != 0)

    @cached_property
    def num_rows(self) -> int | None:
        """Those of the part; None: its tensors tell no number."""
        sizes = {*leading_sizes(self._part)}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def _lacks_rows(self) -> bool:
        return 0 in leading_sizes(self._part)

    def tell(self, num: int, *, of_batch: bool) -> list[int]:
        """How many rows each rank has. By one exchange of the hosts: those of the batch once."""
        if of_batch and self._nums_of_batch is not None:
            return self._nums_of_batch
        told = labelled(self.group, "loss/rows").exchange(str(num).encode())
        nums = [*map(int, told)]
        if of_batch:
            self._nums_of_batch = nums
        return nums

    def begin(self, word: str, label: str) -> Any:
        """The group, for an exchange that begins now."""
        self._log.append(word)
        return labelled(self.group, f"loss/{label}")

    def check(
        self, values: Mapping[str, Tensor], weight: Tensor | float | None, *, look: bool
    ) -> None:
        """Refuse results that would count wrongly: the mean of nothing, NaN, as much as the others'
        values; rows that are in other ranks' losses, as nothing.

        Args:
            values: of the part, 0-d, by name: a loss and its metrics, or an evaluation's.
            weight: that came with them; None: every part counts the same.
            look: whether a device is asked for its weight.
        """
        if look:
            check_weight_value(weight, self.rank)
        if weight is None:
            self._check_not_empty(values)
        elif self._gave_rows and (look or not is_on_device(weight)) and float(weight) == 0:
            raise StructureError(
                "a loss gave rows to the other ranks by fz.batch, and has weight 0: it would "
                "count for nothing, and its rows would count in the others' losses",
                expected="a weight above 0, or no rows",
                rank=self.rank,
                remedy="leave those rows out before the exchange; return no weight where each "
                "rank has the loss of the whole batch",
            )

    def _check_not_empty(self, values: Mapping[str, Tensor]) -> None:
        if not self._lacks_rows:
            return
        # It may be NaN by other ranks' rows, as it is in one process
        if not all_finite([x for x in self._received if x.is_floating_point()]):
            return
        # An accelerator is waited for only here, where a leaf is empty
        for name, value in values.items():
            if bool(value.isnan()):
                raise StructureError(
                    f"the batch is empty, and its {name} NaN",
                    path=next(path for path, size in sizes_by_path(self._part) if size == 0),
                    rank=self.rank,
                    remedy="give batches a weight, fz.Aux(weight=len(x)): what weighs nothing "
                    "counts for nothing",
                )

    def _check(self, word: str) -> None:
        name = word.partition(",")[0]
        if self._num_micro > 1:
            raise StructureError(
                f"{name} was called in one of several micro-batches: rows of the other ones "
                "would be missing, and on ranks it is made of other rows than in one process",
                expected="accumulate=1",
                got=self._num_micro,
                rank=self.rank,
                remedy="fz.batch.in_chunks(function, k) around the model, and the loss of all "
                "rows after it: as little memory, and the whole batch",
            )
        if self.in_a_chunk:
            raise StructureError(
                f"{name} was called in a chunk of fz.batch.in_chunks, which on ranks is made "
                "of other rows than in one process",
                rank=self.rank,
                remedy="call it on what fz.batch.in_chunks returns",
            )


class AllRows:
    """All ranks' rows, in the order of their parts of the batch. One all-gather; in backward one
    reduce-scatter, which adds up what all losses say of this rank's rows.

    Args:
        nums: of the rows by rank; None: ranks tell each other.
    """

    def __init__(self, batch: BatchOnRanks, x: Tensor, name: str, nums: list[int] | None = None):
        self._batch, self._nums = batch, nums
        self._of_batch = nums is None and len(x) == batch.num_rows
        of = "its" if nums else "the batch's" if self._of_batch else "other"
        self.word = f"{name}, of {of} rows, {tuple(x.shape[1:])}, {x.dtype}"

    def there(self, x: Tensor) -> Tensor:
        group = self._batch.begin(self.word, "all_rows")
        if self._nums is None:
            self._nums = self._batch.tell(len(x), of_batch=self._of_batch)
        most, row = max(self._nums), x.shape[1:]
        arriving = x.new_empty(group.size * most * prod(row))
        group.all_gather(arriving, _filled_up(x, most).view(-1)).wait()
        by_rank = arriving.view(group.size, most, *row)
        if min(self._nums) == most:
            return by_rank.view(-1, *row)
        return torch.cat([rows[:n] for rows, n in zip(by_rank, self._nums, strict=True)])

    def back(self, grad: Tensor) -> Tensor:
        group = self._batch.begin(f"{self.word}, back", "all_rows")
        nums = self._nums
        assert nums is not None
        most, row = max(nums), grad.shape[1:]
        if min(nums) < most:
            grad = torch.cat([_filled_up(rows, most) for rows in grad.split(nums)])
        result = grad.new_empty(most * prod(row))
        group.reduce_scatter(result, grad.reshape(-1).clone()).wait()
        return result.view(most, *row)[: nums[group.rank]]


class NumRows:
    """How many rows each rank's tensor has, (N,) int64 on the CPU."""

    def __init__(self, batch: BatchOnRanks, x: Tensor):
        self._batch, self._of_batch = batch, len(x) == batch.num_rows
        self.word = f"fz.batch.own_rows, of {'the batch' if self._of_batch else 'others'}"

    def there(self, x: Tensor) -> Tensor:
        self._batch.begin(self.word, "own_rows")
        nums = self._batch.tell(len(x), of_batch=self._of_batch)
        return torch.tensor(nums, device="cpu")

    def back(self, grad: Tensor) -> Tensor:
        raise AssertionError("numbers have no gradient")


class Sum:
    """The sum over ranks. One all-reduce; in backward another one, of the gradients."""

    def __init__(self, batch: BatchOnRanks, x: Tensor, name: str):
        self._batch, self.word = batch, f"{name}, of {tuple(x.shape)}, {x.dtype}"

    def there(self, x: Tensor) -> Tensor:
        return self._summed(x, self.word)

    def back(self, grad: Tensor) -> Tensor:
        return self._summed(grad, f"{self.word}, back")

    def _summed(self, x: Tensor, word: str) -> Tensor:
        group = self._batch.begin(word, "sum")
        flat = x.reshape(-1).clone()
        group.all_reduce(flat).wait()
        return flat.view(x.shape)


def batch_of_loss(name: str) -> BatchOnRanks | None:
    """The batch of the loss or evaluation that runs, for this function; None in one process.

    Raises:
        StructureError: none runs here, and this process is one of several ranks, or may be one.
    """
    batch, step = batch_here(), scope_here()
    if isinstance(batch, BatchOnRanks):
        return None if batch.group.size == 1 else batch
    if batch is ALL_ROWS or (step is not None and step.rank is None):
        return None
    # By hand, without any step. Ranks may be threads, and threads of a loss know nothing of it; nor
    # does a GPU's, which runs a checkpoint's region again: so the region keeps what its first run
    # has found
    hooks = innermost_saved_tensors_hooks()
    region = None if hooks is None else memory_of_region(hooks)
    if region is not None and "is alone" in region:
        return None
    is_main = threading.current_thread() is threading.main_thread()
    if step is None and is_main and num_processes() == 1:
        if region is not None:
            region["is alone"] = True
        return None
    raise StructureError(
        f"{name} was called outside of a loss, where other ranks' rows can't be asked for",
        expected="a call in the forward of a loss, or in an evaluation, in its own thread",
        rank=None if step is None else step.rank,
        remedy="call it in the loss that a step or fz.value_and_grad is given. To try a loss "
        "by hand, call it in the main thread of one process",
    )


def _filled_up(rows: Tensor, num: int) -> Tensor:
    """(n, ...) -> (num, ...), contiguous, with zeros behind."""
    if len(rows) == num:
        return rows.contiguous()
    filled = rows.new_zeros(num, *rows.shape[1:])
    filled[: len(rows)] = rows
    return filled
