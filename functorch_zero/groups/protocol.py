"""The protocol of a group: some ranks, and the collectives among them.

Every collective may be asynchronous: it returns a `Work` at once and the tensors it was given must
not be touched until `Work.wait()` has returned. All ranks call the same collectives in the same
order. All tensors are contiguous and 1-D unless said otherwise. A group of one rank is a group like
any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

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


class Collectives:
    """The collectives of a `Group`, told apart by name: `_start` and `_meet` make them all."""

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return self._start("all_gather", out, piece)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return self._start("reduce_scatter", out, whole)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start("all_reduce", tensor, op)

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return self._start("all_to_all", out, out_sizes, source, in_sizes)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor, source)

    def exchange(self, payload: bytes) -> list[bytes]:
        payloads: list[bytes] = self._meet("exchange", payload)
        return payloads

    def barrier(self) -> None:
        self._meet("barrier")

    def _start(self, kind: str, *arguments: Any) -> Work:
        """Start the collective of this name; its output comes first."""
        raise NotImplementedError

    def _meet(self, kind: str, *payload: bytes) -> Any:
        """The result of an exchange or a barrier, which wait in the call itself."""
        raise NotImplementedError
