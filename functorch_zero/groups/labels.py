"""Saying where in a step a collective belongs: in errors and, when asked, to the other ranks before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..errors import GroupError, LostPeerError, PeerError
from .baton import Signature
from .checks import ranks_text
from .forwarding import Forwarding
from .protocol import Group, ReduceOp, Work


class LabelledGroup(Forwarding):
    """Forwards to `inner`; the errors of its collectives begin with `label`, "blocks.1/gather"; `labelled` makes it."""

    def __init__(self, inner: Group, label: str = "") -> None:
        super().__init__(inner)
        self.label = label

    def at(self, label: str) -> LabelledGroup:
        """The same group, for collectives of another label."""
        return type(self)(self.inner, label)

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        with self._calling(Signature("all_gather", piece.dtype, piece.numel())):
            return self._named(self.inner.all_gather(out, piece))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        with self._calling(Signature("reduce_scatter", whole.dtype, whole.numel())):
            return self._named(self.inner.reduce_scatter(out, whole))

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        with self._calling(Signature("all_reduce", tensor.dtype, tensor.numel(), op)):
            return self._named(self.inner.all_reduce(tensor, op))

    def all_to_all(self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]) -> Work:
        with self._calling(Signature("all_to_all", source.dtype)):  # sizes differ by rank
            return self._named(self.inner.all_to_all(out, out_sizes, source, in_sizes))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        with self._calling(Signature("broadcast", tensor.dtype, tensor.numel(), f"source={source}")):
            return self._named(self.inner.broadcast(tensor, source))

    def exchange(self, payload: bytes) -> list[bytes]:
        with self._calling(Signature("exchange")):
            return self.inner.exchange(payload)

    def barrier(self) -> None:
        with self._calling(Signature("barrier")):
            self.inner.barrier()

    @contextmanager
    def _calling(self, call: Signature) -> Iterator[None]:
        with _told_where(self.label):
            yield

    def _named(self, work: Work) -> Work:
        return _LabelledWork(work, self.label)


class CheckedGroup(LabelledGroup):
    """A debug mode: before each collective, ranks compare what they are about to call, and for which unit and phase.

    Ranks that call different things, or the same for different units, all raise `GroupError` with every rank's label,
    where gloo would add up the wrong tensors. Each collective costs an `exchange` more, and waits for all ranks.

    >>> from functorch_zero.groups import run_ranks
    >>> def meet(group):
    ...     CheckedGroup(group).at(f"block {group.rank}/reduce").barrier()
    >>> try:
    ...     run_ranks(meet, 2)
    ... except GroupError as error:
    ...     print(error)
    the ranks called different collectives: rank 0: block 0/reduce: barrier; rank 1: block 1/reduce: barrier. ...
    """

    def subgroup(self, ranks: Sequence[int]) -> CheckedGroup:
        """The checked group of these of its ranks, where its kind can be divided (for a `HybridGroup`)."""
        divide = getattr(self.inner, "subgroup", None)
        if divide is None:
            raise TypeError(f"a {type(self.inner).__name__} can't be divided. Remedy: check a group that can")
        return CheckedGroup(divide(ranks), self.label)

    @contextmanager
    def _calling(self, call: Signature) -> Iterator[None]:
        with _told_where(self.label):
            calls = [text.decode() for text in self.inner.exchange(f"{self.label or 'a call'}: {call}".encode())]
        if len(set(calls)) > 1:
            callers = {text: [r for r, other in enumerate(calls) if other == text] for text in dict.fromkeys(calls)}
            raise GroupError(
                "the ranks called different collectives: "
                + "; ".join(f"{ranks_text(who)}: {text}" for text, who in callers.items())
                + ". Remedy: make every rank's loss use the same units in the same order, and its loop make the same "
                "calls"
            )
        with super()._calling(call):
            yield


def labelled(group: Group, label: str) -> Group:
    """The group, for collectives that belong to `label`: a unit and a phase, as "blocks.1/gather"."""
    if group.size == 1:
        return group
    return group.at(label) if isinstance(group, LabelledGroup) else LabelledGroup(group, label)


class _LabelledWork:
    """A collective under way that knows where it belongs."""

    def __init__(self, work: Work, label: str) -> None:
        self._work, self._label = work, label

    def wait(self) -> None:
        with _told_where(self._label):
            self._work.wait()


@contextmanager
def _told_where(label: str) -> Iterator[None]:
    """Put the label before the text of a `GroupError`; another rank's own words stay as they are."""
    try:
        yield
    except PeerError:
        raise
    except GroupError as error:
        if label:
            where = f"lost peer in {label}" if isinstance(error, LostPeerError) else label
            error.args = (f"{where}: {error}",)
        raise
