"""Where a unit's gradients go: reduced at every entry, or once a unit when all have come.

Note [order of reductions]: ranks must start the same collectives in the same order, even when one
rank's loss does not reach a unit. `Streaming` therefore starts in the reverse of the order of
entries; for an entry that backward has passed by it sends zeros, and gathers what its backward
would have gathered. `Accumulating` starts in the reverse of the layout's order, each unit once.

Note [where backward is]: autograd numbers its nodes as they are made, and runs the newest that is
ready. So when it runs a node, entries that are newer have been passed by if they have no gradients
by then. An entry's own number tells: it begins with that of the next node, and its place among the
open ones sets apart entries without a node between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from .._torch_private import next_node_number
from ..groups import labelled
from ..groups.mesh import Axes, Axis
from ..groups.protocol import Work
from ..layout.layout import Layout
from ..profiling import ranged

Grads = Sequence[Tensor | None]
Entry = tuple[int, ...]  # () is before all; see Note [where backward is]


class Giver(Protocol):
    """A unit, as sinks see it."""

    trained: Sequence[int]  # the numbers of its trained buckets

    def pack(self, grads: Grads | None, lent: Container[int] = ()) -> Iterator[tuple[int, Tensor]]:
        """Its trained buckets' gradients as whole flats, those in `lent` not to be written to; None
        is zeros."""
        ...

    def replay(self, entry: Entry, *, last: bool) -> None:
        """That entry's backward is over: start those of its gathers that it has not started itself.

        The `last` one: none of the unit's is open any more.
        """
        ...

    def let_go(self) -> None:
        """What was made for one use of it can go."""
        ...

    def done(self) -> None:
        """Its gradient has been taken."""
        ...


class Reducer:
    """Starts reductions of whole gradient flats, at most one unit's at a time, and adds up what
    they give.

    A bucket in pieces is reduce-scattered along the shard axis. What that gives adds up; along the
    replicate axis it is summed once, at the end. Ranks of the same data have the same gradients,
    and sum nothing; see Note [same data].
    """

    def __init__(self, layout: Layout, axes: Axes, log: list[str]):
        self._layout, self._axes, self._log = layout, axes, log
        self._under_way: list[tuple[int, Tensor, Work]] = []
        self._done: dict[int, Tensor] = {}

    def start(self, b: int, flat: Tensor) -> None:
        """Begin to reduce the gradients of bucket `b`; `flat` is given away. `settle` before the
        first of a unit.

        A flat of level 2 or 3 is only read.
        """
        self._log.append("reduce " + self._layout.buckets[b].name)
        with ranged("reduce", self._layout.buckets[b].name):
            flat = flat.to(self._layout.buckets[b].reduce)
            if self._is_cut(b):
                piece = flat.new_empty(flat.numel() // self._axes.shard.size)
                shard = self._axes.shard.at(self._label(b))
                self._under_way.append((b, piece, shard.sum_to_pieces(piece, flat)))
            else:
                data = labelled(self._axes.data, self._label(b))
                self._under_way.append((b, flat, data.all_reduce(flat)))

    def add(self, b: int, flat: Tensor, more: Tensor) -> Tensor:
        """The sum of two flats of gradients not reduced yet, in the storage dtype."""
        return flat.to(self._layout.buckets[b].dtype).add_(more)

    def settle(self) -> None:
        """Wait for what is under way, and let go of its flats."""
        while self._under_way:
            b, result, work = self._under_way.pop(0)
            with ranged("wait for reduce", self._layout.buckets[b].name):
                work.wait()
            result = result.to(self._layout.buckets[b].dtype)
            self._done[b] = self._done[b].add_(result) if b in self._done else result

    def finish(self) -> dict[int, Tensor]:
        """The reduced flats by bucket; buckets nobody reduced are missing."""
        self.settle()
        # Given away: a pass and its units refer to each other until gc finds them
        done, self._done = (
            self._done,
            {},
        )
        replicate = self._axes.replicate
        if replicate.size > 1 and (replicate.holds_different_data or self._axes.both):
            cut = {
                b: piece.to(self._layout.buckets[b].reduce)
                for b, piece in done.items()
                if self._is_cut(b)
            }
            started = [
                (b, *self._over_replicas(piece, replicate.at(self._label(b))))
                for b, piece in cut.items()
            ]
            for b, result, work in started:
                work.wait()
                done[b] = result.to(self._layout.buckets[b].dtype)
        return done

    def _over_replicas(self, piece: Tensor, replicate: Axis) -> tuple[Tensor, Work]:
        """A piece of the sum along the shard axis -> the same, or its part that is this rank's, of
        the sum over all."""
        if not self._axes.both:
            return piece, replicate.sum(piece)
        part = piece.new_empty(piece.numel() // replicate.size)
        return part, replicate.sum_to_pieces(part, piece)

    def _label(self, b: int) -> str:
        return f"{self._layout.buckets[b].name}/reduce"

    def _is_cut(self, b: int) -> bool:
        return self._layout.buckets[b].cut.level > 0


class Sink(Protocol):
    """Where a unit's gradients go."""

    def settle(self) -> None:
        """Wait for the reduction under way."""
        ...

    def enter(self, run: Giver) -> Entry:
        """The unit has been entered; the number of this entry."""
        ...

    def take(self, entry: Entry | None, run: Giver, grads: Grads) -> None:
        """The gradients of that entry's leaves, None for those that have none; no number for an
        entry in backward."""
        ...

    def pass_by(self, entry: Entry) -> None:
        """Backward is at that entry: entries after it that have no gradients by now get none."""
        ...

    def reach(self, node: int) -> Giver | None:
        """Backward runs autograd's node of that number, and has passed by what came after it. Whose
        entry is next."""
        ...

    def begin(self, runs: Sequence[Giver], *, last: bool) -> None:
        """A pass over a loss begins, the `last` one of the step or not; all units, in the layout's
        order."""
        ...

    def end(self) -> None:
        """Its backward is over."""
        ...

    def finish(self) -> dict[int, Tensor]:
        """After the last pass: the reduced flats by bucket."""
        ...


class Streaming:
    """Reductions in the order of entries; see Note [order of reductions].

    Args:
        streams: the buckets whose gradients are reduced at each entry, and freed: levels 2 and 3.
            Those of the other buckets add up whole, and are reduced once a unit, in the last pass's
            backward.
    """

    def __init__(self, reducer: Reducer, streams: frozenset[int]):
        self._reducer, self._streams = reducer, streams
        self._open: list[
            tuple[Entry, Giver]
        ] = []  # entries that backward has not come to, in order of entry
        self._pending: Counter[Giver] = Counter()  # how many of those entries a unit has
        self._flats: dict[int, Tensor] = {}  # whole gradients that add up
        self._last = True

    def enter(self, run: Giver) -> Entry:
        number = next_node_number(), len(self._open)
        self._open.append((number, run))
        self._pending[run] += 1
        return number

    def take(self, entry: Entry | None, run: Giver, grads: Grads) -> None:
        if entry is not None:
            self.pass_by(entry)
        if self._open and self._open[-1][0] == entry:
            self._close()
        else:
            run.done()
        self._send(run, grads)

    def pass_by(self, entry: Entry) -> None:
        while self._open and self._open[-1][0] > entry:
            self._send(self._close(), None)

    def reach(self, node: int) -> Giver | None:
        self.pass_by((node + 1,))
        return self._open[-1][1] if self._open else None

    def _close(self) -> Giver:
        """Backward has passed the last of the open entries: whose it is. Its leaves go before
        gradients are packed."""
        number, run = self._open.pop()
        self._pending[run] -= 1
        run.replay(number, last=not self._pending[run])
        return run

    def settle(self) -> None:
        self._reducer.settle()

    def _send(self, run: Giver, grads: Grads | None) -> None:
        self.settle()
        for b, flat in run.pack(grads, self._streams):
            if b in self._streams:
                self._reducer.start(b, flat)
            else:
                self._flats[b] = (
                    self._reducer.add(b, self._flats[b], flat) if b in self._flats else flat
                )
        if self._last and not self._pending[run]:
            self._send_whole(run.trained)

    def _send_whole(self, buckets: Iterable[int]) -> None:
        for b in buckets:
            if b in self._flats:
                self.settle()
                self._reducer.start(b, self._flats.pop(b))

    def begin(self, runs: Sequence[Giver], *, last: bool) -> None:
        self._last, self._pending = last, Counter()

    def end(self) -> None:
        self.pass_by(())
        self._pending.clear()  # units and sink refer to each other
        if self._last:  # what the last pass has not entered
            self._send_whole(sorted(self._flats, reverse=True))

    def finish(self) -> dict[int, Tensor]:
        return self._reducer.finish()


class Accumulating:
    """Levels 0 and 1 alone: a unit's gradients add up, and are reduced once, in the last pass's
    backward.

    See Note [order of reductions].
    """

    def __init__(self, reducer: Reducer):
        self._reducer = reducer
        self._pending: dict[Giver, int] = {}
        self._flats: dict[int, Tensor] = {}
        self._waiting: list[Giver] = []  # units still to be reduced, in the layout's order
        self._last = True

    def settle(self) -> None:
        self._reducer.settle()

    def begin(self, runs: Sequence[Giver], *, last: bool) -> None:
        self._waiting, self._last, self._pending = list(runs), last, {}

    def enter(self, run: Giver) -> Entry:
        self._pending[run] = self._pending.get(run, 0) + bool(run.trained)
        return ()

    def pass_by(self, entry: Entry) -> None:
        pass

    def reach(self, node: int) -> None:
        pass

    def take(self, entry: Entry | None, run: Giver, grads: Grads) -> None:
        run.let_go()
        for b, flat in run.pack(grads):
            self._flats[b] = (
                self._reducer.add(b, self._flats[b], flat) if b in self._flats else flat
            )
        if entry is not None:
            self._pending[run] -= 1
        while self._last and self._waiting and not self._pending.get(self._waiting[-1], 0):
            self._send(self._waiting.pop())

    def _send(self, run: Giver) -> None:
        self.settle()
        ready = {b: self._flats.pop(b) for b in run.trained if b in self._flats}
        for b, flat in ready.items() if ready else run.pack(None):
            self._reducer.start(b, flat)
        run.done()

    def end(self) -> None:
        while self._last and self._waiting:
            self._send(self._waiting.pop())
        self._waiting, self._pending = [], {}

    def finish(self) -> dict[int, Tensor]:
        return self._reducer.finish()
