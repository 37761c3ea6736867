"""Saying where in a step a collective belongs: in errors and, when asked, to the other ranks before
it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..errors import GroupError, LostPeerError, PeerError
from .checks import ranks_text
from .forwarding import Forwarding
from .protocol import Group, ReduceOp, Work
from .thread_scheduler import Signature


class LabelledGroup(Forwarding):
    """Forwards to `inner`; the errors of its collectives begin with `label`, "blocks.1/gather";
    `labelled` makes it."""

    def __init__(self, inner: Group, label: str = "") -> None:
        self.inner, self.label = inner, label

    def at(self, label: str) -> LabelledGroup:
        """The same group, for collectives of another label."""
        return type(self)(self.inner, label)

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return _LabelledWork(self._call("all_gather", out, piece), self.label)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return _LabelledWork(self._call("reduce_scatter", out, whole), self.label)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return _LabelledWork(self._call("all_reduce", tensor, op), self.label)

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        return _LabelledWork(self._call("all_to_all", out, out_sizes, source, in_sizes), self.label)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return _LabelledWork(self._call("broadcast", tensor, source), self.label)

    def exchange(self, payload: bytes) -> list[bytes]:
        payloads: list[bytes] = self._call("exchange", payload)
        return payloads

    def barrier(self) -> None:
        self._call("barrier")

    def _call(self, kind: str, *arguments: Any) -> Any:
        """What `inner` makes of this collective."""
        try:
            return getattr(self.inner, kind)(*arguments)
        except GroupError as error:
            _tell_where(error, self.label)
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

    def __init__(self, work: Work, label: str) -> None:
        self._work, self._label = work, label

    def wait(self) -> None:
        try:
            self._work.wait()
        except GroupError as error:
            _tell_where(error, self._label)
            raise


def _tell_where(error: GroupError, label: str) -> None:
    """Put the label before an error's text; another rank's own words stay as they are."""
    if label and not isinstance(error, PeerError):
        where = f"lost peer in {label}" if isinstance(error, LostPeerError) else label
        error.args = (f"{where}: {error}",)
