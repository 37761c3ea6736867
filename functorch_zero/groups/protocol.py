"""The protocol of a group: some ranks, and the collectives among them.

Every collective may be asynchronous: it returns a `Work` at once and the tensors it was given must
not be touched until `Work.wait()` has returned. All ranks call the same collectives in the same
order. All tensors are contiguous and 1-D unless said otherwise. A group of one rank is a group like
any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

ReduceOp = Literal["sum", "max"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the outputs are ready to read, or raise the collective's error."""
        ...


class Done:
    """The `Work` of a collective that has already finished."""

    def wait(self) -> None:
        return None


@runtime_checkable
class Group(Protocol):
    """The ranks that share the work, with their collectives (N = `size`)."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        """`out` (N * k,) becomes the ranks' `piece`s (k,) in rank order. `piece` may be its own
        place in `out`."""
        ...

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        """`out` (k,) becomes the sum over ranks of this rank's slice of `whole` (N * k,), which may
        be overwritten."""
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """`tensor` (k,) becomes the sum or the maximum over ranks, in place; bitwise the same on
        every rank."""
        ...

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        """Rank j gets the j-th run of `source` (in_sizes[j] elements), and `out` takes the runs
        from all ranks j (out_sizes[j] elements)."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """`tensor` (k,) becomes rank `source`'s, in place."""
        ...

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload` in rank order; sizes may differ. Synchronous, and no pickle is
        involved."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed: none waits for it, and their collectives
        raise `PeerError`."""
        ...


def check_reducible(op: str, tensor: Tensor) -> None:
    """Refuse operations and dtypes that backends do not all reduce in the same way."""
    if op not in ("sum", "max"):
        raise ValueError(f"op must be 'sum' or 'max', got {op!r}")
    if tensor.dtype == torch.bool:
        raise TypeError("a bool tensor can't be reduced: convert it to an integer dtype first")
