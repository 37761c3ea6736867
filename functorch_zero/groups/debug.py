"""Saying where in a step a collective belongs: in errors and, when asked, to the other ranks before
it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import GroupError, LostPeerError, PeerError
from .checks import ranks_text
from .forwarding import Forwarding, ranks_of, ring_of
from .protocol import Group, ReduceOp, Work
from .ring import Entry
from .thread_scheduler import Signature


class LabelledGroup(Forwarding):
    """Forwards to `inner`; the errors of its collectives begin with `label`, "blocks.1/gather", and
    its rank's ring remembers them; `labelled` makes it."""

    def __init__(self, inner: Group, label: str = "") -> None:
        self.inner, self.label = inner, label

    def at(self, label: str) -> LabelledGroup:
        """The same group, for collectives of another label."""
        return type(self)(self.inner, label)

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return self._start("all_gather", piece, out, piece)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return self._start("reduce_scatter", whole, out, whole)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._start("all_reduce", tensor, tensor, op)

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return self._start("all_to_all", source, out, out_sizes, source, in_sizes)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._start("broadcast", tensor, tensor, source)

    def exchange(self, payload: bytes) -> list[bytes]:
        entry = self._remember("exchange", torch.uint8, len(payload))
        entry.state = "waiting"
        payloads: list[bytes] = self._call("exchange", payload)
        entry.state = "ended"
        return payloads

    def barrier(self) -> None:
        entry = self._remember("barrier")
        entry.state = "waiting"
        self._call("barrier")
        entry.state = "ended"

    def _start(self, kind: str, brought: Tensor, *arguments: Any) -> Work:
        entry = self._remember(kind, brought.dtype, brought.numel())
        return _LabelledWork(self._call(kind, *arguments), entry, self)

    def _remember(
        self, kind: str, dtype: torch.dtype | None = None, num_elements: int | None = None
    ) -> Entry:
        """Put the collective into this rank's ring, unless a labelled group around this one has."""
        if not self.label:
            return Entry(0, "", kind, dtype, num_elements, ())
        ring, ranks = ring_of(self.inner), ranks_of(self.inner)
        return ring.start(self.label, kind, dtype, num_elements, ranks)

    def _call(self, kind: str, *arguments: Any) -> Any:
        """What `inner` makes of this collective."""
        try:
            return getattr(self.inner, kind)(*arguments)
        except GroupError as error:
            _tell_where(error, self)
            raise


class CheckedGroup(LabelledGroup):
    """A debug mode: before each collective, ranks compare what they are about to call, and for
    which unit and phase.

    Ranks that call different things, or the same for different units, all raise `GroupError` with
    every rank's label, where gloo would add up the wrong tensors. Each collective costs an
    `exchange` more, and waits for all ranks.

    >>> from functorch_zero.groups import run_ranks
    >>> def meet(group):
    ...     CheckedGroup(group).at(f"block {group.rank}/reduce").barrier()
    >>> try:
    ...     run_ranks(meet, 2)
    ... except GroupError as error:
    ...     print(error)
    the ranks called different collectives: rank 0: block 0/reduce: barrier; rank 1: block 1/reduce:
        barrier. ...
    """

    def subgroup(self, ranks: Sequence[int]) -> CheckedGroup:
        """The checked group of these of its ranks, where its kind can be divided (for a
        `HybridGroup`)."""
        divide = getattr(self.inner, "subgroup", None)
        if divide is None:
            raise TypeError(
                f"a {type(self.inner).__name__} can't be divided. Remedy: check a group that can"
            )
        return CheckedGroup(divide(ranks), self.label)

    def _call(self, kind: str, *arguments: Any) -> Any:
        call = Signature(kind, *_FACTS[kind](*arguments))
        calls = [
            text.decode()
            for text in super()._call("exchange", f"{self.label or 'a call'}: {call}".encode())
        ]
        if len(set(calls)) > 1:
            callers = {
                text: [r for r, other in enumerate(calls) if other == text]
                for text in dict.fromkeys(calls)
            }
            raise GroupError(
                "the ranks called different collectives: "
                + "; ".join(f"{ranks_text(who)}: {text}" for text, who in callers.items())
                + ". Remedy: make every rank's loss use the same units in the same order, and its "
                "loop make the same calls"
            )
        return super()._call(kind, *arguments)


_FACTS: dict[
    str, Callable[..., tuple[Any, ...]]
] = {  # what ranks must agree on, of a collective's arguments
    "all_gather": lambda out, piece: (piece.dtype, piece.numel()),
    "reduce_scatter": lambda out, whole: (whole.dtype, whole.numel()),
    "all_reduce": lambda tensor, op: (tensor.dtype, tensor.numel(), op),
    "all_to_all": lambda out, out_sizes, source, in_sizes: (source.dtype,),  # sizes differ by rank
    "broadcast": lambda tensor, source: (tensor.dtype, tensor.numel(), f"source={source}"),
    "exchange": lambda payload: (),
    "barrier": lambda: (),
}


def labelled(group: Group, label: str) -> Group:
    """The group, for collectives that belong to `label`: a unit and a phase, as
    "blocks.1/gather"."""
    if group.size == 1:
        return group
    return group.at(label) if isinstance(group, LabelledGroup) else LabelledGroup(group, label)


class _LabelledWork:
    """A collective under way that knows where it belongs."""

    def __init__(self, work: Work, entry: Entry, group: LabelledGroup) -> None:
        self._work, self._entry, self._group = work, entry, group

    def wait(self) -> None:
        if self._entry.state == "started":
            self._entry.state = "waiting"
        try:
            self._work.wait()
        except GroupError as error:
            _tell_where(error, self._group, self._entry)
            raise
        self._entry.state = "ended"


def _tell_where(error: GroupError, group: LabelledGroup, entry: Entry | None = None) -> None:
    """Put the label before an error's text, and the last collectives after that of a lost rank.

    Another rank's own words stay as they are.
    """
    label = group.label
    if not label or isinstance(error, PeerError):
        return
    if isinstance(error, LostPeerError):
        last = ring_of(group).near(math.inf if entry is None else entry.number)
        error.args = (f"lost peer in {label}: {error}\n{last}",)
    else:
        error.args = (f"{label}: {error}",)
