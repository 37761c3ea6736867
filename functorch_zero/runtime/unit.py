"""Entering and leaving a unit: one autograd node, gathered storage remembered instead of kept,
prefetch.

A `Pass` is one forward and backward of a loss. It makes one `UnitRun` a unit, whose *source* gives
whole leaves (resident ones, or gathered ones) and whose *sink* takes their gradients. The node is
made at entry, so the engine runs it right after the unit's own backward: it orders ready nodes by
creation, newest first.

Note [peak of backward]: a unit's backward needs most memory when it begins: its activations are all
there. So the reduction under way and the next gather wait until it asks for its second saved leaf;
most of its work still hides them. One whose first was nearly all of it, such as a head, has no work
left to hide them: there they wait until it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch_private import (
    NO_BACKWARD,
    backward_number,
    innermost_saved_tensors_hooks,
    outside_transforms,
    running_node_number,
    storage_id,
    transforms_active,
    version_of,
)
from ..layout.flat_buffers import is_flat, pack
from ..layout.layout import Layout, Unit, UnitContent
from ..model.lazy_param import check_unchanged, make_lazy_params, versions_of
from ..profiling import NOTHING
from .reduce import Entry, Grads, Sink
from .unshard import Source


class Scale(Protocol):
    """A pass's factor of its packed gradients, known when the loss has returned."""

    @property
    def writes(self) -> bool:
        """Whether a flat is scaled in place, so that it must not be autograd's own."""
        ...

    def __call__(self, flat: Tensor) -> Tensor:
        """The scaled flat (numel,) of a bucket's gradients."""
        ...


class Unscaled:
    """The scale of a pass whose loss has not returned."""

    writes = False

    def __call__(self, flat: Tensor) -> Tensor:
        return flat


class UnitRun:
    """One unit during one pass: the `Entrance` of its leaves' lazy parameters."""

    _leaves: Sequence[Tensor] | None = None
    _tracked = False  # whether gradients flow back from those leaves
    _depth = 0
    entry: Entry | None = None  # the last one
    entered = False  # whether there has been one
    _at_work = False  # whether it runs again for the backward of its own last open entry

    def __init__(self, unit: Unit, content: UnitContent, source: Source, around: Pass):
        self.name, self._modules = unit.name or "root", unit.modules
        self.content, self.source, self._around = content, source, around
        self.trained: Sequence[int] = content.trained
        self._left: set[str] = set()
        # By entry: elements that its backward will ask for
        self.saved: Counter[Entry | None] = Counter()

    def enter(self, module: str) -> Sequence[Tensor]:
        if self._depth == 0 and module in self._left:
            self._leaves = None
        leaves = self.touch()
        self._depth += 1
        return leaves

    def leave(self, module: str) -> None:
        self._depth -= 1
        self._left.add(module)
        if self._depth == 0 and self._left.issuperset(self._modules):
            self._close()

    def touch(self) -> Sequence[Tensor]:
        tracked = self._around.anchor is not None and torch.is_grad_enabled()
        if self._leaves is None or (tracked and not self._tracked):
            with _no_transforms():
                if tracked and self.trained:
                    self._leaves = Enter.apply(self._around.anchor, self)  # type: ignore[no-untyped-call]
                else:
                    self._leaves = self.whole_leaves(tracked)
            self._tracked, self._left = tracked, set()
        return self._leaves

    def watch(self) -> AbstractContextManager[None]:
        return self._around.watch() if self.source.drops else NOTHING

    def _close(self) -> None:
        self._leaves = None
        if self.source.drops and not (self._at_work or self._around.stays(self)):
            self.drop()

    def whole_leaves(self, tracked: bool) -> tuple[Tensor, ...]:
        """The leaves, whole, bucket by bucket, for the loss alone. Of what is `tracked` the sink is
        told."""
        # a recomputation, which brings no gradients of its own; its flats stay until they have come
        if backward_number() != NO_BACKWARD:
            self.entry, self._at_work = None, self._around.reach() is self
        elif tracked:
            self.entry = self._join()
        self._around.fetch(self)
        return (*map(Tensor.detach, self.source.leaves()),)

    def drop(self) -> None:
        """The flats are not needed for now."""
        if self.source.drops:
            self._around.forget(self)
            self.source.drop()

    def _join(self) -> Entry:
        """Tell the sink of an entry."""
        self.entered = True
        entry: Entry = self._around.sink.enter(self)
        if self.source.drops and _hooked_by_others():
            self.saved[entry] += 1  # backward will run the unit again
        return entry

    def replay(self, entry: Entry, *, last: bool) -> None:
        """That entry's backward is over: start those of its gathers that it has not started
        itself."""
        if entry in self.saved:
            self._around.fetch(self)
        self._leaves = None
        if last or not self._around.keeps:
            self.drop()  # before the next unit comes
        self._around.prefetch()

    def give(self, entry: Entry | None, grads: Grads) -> None:
        """Hand that entry's gradients to the sink; the next unit is on its way at the latest
        now."""
        self._around.sink.take(entry, self, grads)
        self._around.pass_on()

    def pack(self, grads: Grads | None, lent: Container[int] = ()) -> Iterator[tuple[int, Tensor]]:
        """The trained buckets' gradients as whole flats; `grads` None is zeros.

        Those of the buckets in `lent` may be autograd's own, not to be written to.
        """
        around = self._around
        for b, which in zip(self.trained, self.content.slices, strict=True):
            bucket = around.layout.buckets[b]
            own = [None] * len(bucket.leaves) if grads is None else grads[which]
            dtype, alone = None if bucket.dtypes is None else bucket.reduce, own[0]
            if b in lent and not around.scale.writes and is_flat(alone, bucket, dtype):
                flat = alone.detach().view(-1)
            else:
                flat = pack(own, bucket, device=around.device, dtype=dtype)
            yield b, around.scale(flat)

    def let_go(self) -> None:
        """What was made for one use, a gather or a cast, can go; leaves that are always here
        stay."""
        if self.source.drops:
            self.done()

    def done(self) -> None:
        """The unit's gradient has been taken, or the pass is over: what was kept of it can go."""
        self._leaves = None
        self.drop()


class Enter(torch.autograd.Function):
    """Forward: a unit's whole leaves. Backward: their gradients, to the sink; nothing goes back to
    autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: UnitRun) -> tuple[Tensor, ...]:
        leaves = run.whole_leaves(tracked=True)
        ctx.run, ctx.entry = run, run.entry
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*map(leaves.__getitem__, run.content.frozen))
        return leaves

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.run.give(ctx.entry, grads)
        return None, None


class Pass:
    """One forward and backward of a loss on lazy parameters.

    Args:
        layout: how the tree is cut.
        sources: one for each unit.
        sink: where gradients go; None when none will be taken.
        device: of the leaves.
        keeps: keep gathered flats from forward to backward (`reshard_after_forward=False`).
        ahead: the `trace` of the pass before, for prefetch: while one unit is used the next is on
            its way.
        last: whether no other pass will give gradients to the same sink.
    """

    def __init__(
        self,
        layout: Layout,
        sources: Sequence[Source],
        sink: Sink | None,
        *,
        device: torch.device,
        keeps: bool = False,
        ahead: Sequence[str] = (),
        last: bool = True,
    ):
        self.layout, self.device = layout, device
        self.sink: Any = sink
        self.keeps = keeps and sink is not None
        self.anchor: Any = (
            torch.zeros((), device=device, requires_grad=True) if sink is not None else None
        )
        self.runs = [*map(UnitRun, layout.units, layout.contents, sources, repeat(self))]
        self._staying = [flat for source in sources if not source.drops for flat in source.flats()]
        self._versions = versions_of(self._staying)
        if sink is not None:
            sink.begin(self.runs, last=last)
        self.trace: list[str] = []  # the units in the order they had to be fetched
        # The last pass may have been over another tree
        by_name = {run.name: run for run in self.runs} if ahead else {}
        self._ahead: Iterator[UnitRun | None] = map(by_name.get, ahead)
        self._next = next(self._ahead, None)  # the unit to be fetched next, it seems
        self._storages: dict[int, tuple[UnitRun, int]] = {}
        self._ended = False  # whether the loss has returned, and a backward is the pass's own
        self.scale: Scale = Unscaled()  # of gradients, once the loss has returned
        self._in_use: tuple[UnitRun, Entry | None] | None = (
            None  # the unit and entry that backward is at
        )
        self._asked = 0  # how many of its saved leaves it has asked for,
        self._to_come = 0  # and how many elements of them it has yet to ask for

    def lazy_params(self) -> Any:
        """The tree the loss sees."""
        seen, entrances = self.layout.seen, map(self.runs.__getitem__, self.layout.seen.units)
        trainable = seen.trainable if self.anchor is not None else repeat(False)
        lazy = make_lazy_params(
            entrances, seen.numbers, seen.shapes, seen.dtypes, repeat(self.device), trainable
        )
        return self.layout.treedef.unflatten(lazy)

    def fetch(self, run: UnitRun) -> list[Tensor]:
        """The unit's flats; the one that was fetched after it the last time is on its way."""
        flats = run.source.here
        if flats is None:
            flats = run.source.flats()
            self._follow(run)
            for k, (flat, passes) in enumerate(zip(flats, run.source.passing, strict=True)):
                if passes and flat.numel():
                    self._storages[storage_id(flat)] = (run, k)
        if backward_number() == NO_BACKWARD:
            self.prefetch()
        return flats

    def prefetch(self) -> None:
        """Bring the unit here that was fetched next the last time."""
        if self._next is not None:
            self._next.source.start()

    def pass_on(self) -> None:
        """Backward has left a unit."""
        self._in_use = None
        self.prefetch()

    def _follow(self, run: UnitRun) -> None:
        """Add to the trace; where it leaves the last pass's, that one is no guide any more."""
        if self._next is not run:
            self._ahead = iter(())
        self.trace.append(run.name)
        self._next = next(self._ahead, None)

    def reach(self) -> Any:
        """A unit runs again for backward, which has passed by what came after its node. Whose entry
        is next."""
        node = running_node_number() if self._ended else None
        return None if node is None else self.sink.reach(node)

    def stays(self, run: UnitRun) -> bool:
        """Whether a unit's flats stay when it is left: asked for, or because it is the next to be
        fetched again."""
        if self.keeps:
            return True
        again = self._next is run
        if again:
            self._follow(run)
        return again

    def forget(self, run: UnitRun) -> None:
        """The unit's flats are about to go: another storage may be known by the same number."""
        self._storages = {
            storage: owner for storage, owner in self._storages.items() if owner[0] is not run
        }

    def watch(self) -> AbstractContextManager[None]:
        """Saved tensors that lie in gathered storage are kept as (unit, bucket, offset, size,
        stride)."""
        if self.anchor is None or self.keeps or _hooked_by_others() or transforms_active():
            return NOTHING
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        owner = self._storages.get(storage_id(tensor))
        if owner is None:
            return tensor, version_of(tensor)
        run, k = owner
        run.saved[run.entry] += tensor.numel()
        place = (
            (run, run.entry),
            k,
            tensor.dtype,
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        return place, None

    def _unpack(self, packed: tuple[Any, int | None]) -> Any:
        saved, version = packed
        if version is None:
            return self._again(*saved)
        if version_of(saved) != version:  # checked as autograd checks what no hook has seen
            raise _changed(saved, version)
        return saved

    def _again(
        self,
        at: tuple[UnitRun, Entry | None],
        k: int,
        dtype: torch.dtype,
        offset: int,
        size: Any,
        stride: Any,
    ) -> Tensor:
        """A view of the k-th flat of a unit, for the backward of an entry."""
        run, entry = at
        if at != self._in_use:
            self._in_use, self._asked, self._to_come = at, 0, run.saved[entry]
            if entry is not None and self._ended:
                self.sink.pass_by(entry)
        flat: Tensor = (run.source.here or self.fetch(run))[k]
        self._asked += 1
        if self._asked == 2 and 8 * self._to_come > run.saved[entry]:  # see Note [peak of backward]
            self.sink.settle()
            self.prefetch()
        self._to_come -= size.numel()
        return (flat if flat.dtype is dtype else flat.view(dtype)).as_strided(size, stride, offset)

    def loss_ended(self, scale: Scale) -> None:
        """The loss has returned, and packed gradients are to be scaled like this."""
        check_unchanged(self._staying, self._versions)
        self._ended, self.scale, self._in_use = True, scale, None

    def finish(self) -> None:
        """The pass, its backward included, is over."""
        if self.sink is not None:
            self.sink.end()
        for run in self.runs:
            run.done()
        check_unchanged(self._staying, self._versions)
        self.runs, self._ahead = [], iter(())  # no cycle, so that pieces need not wait for gc
        self._next = self._in_use = None


def _no_transforms() -> AbstractContextManager[Any]:
    return outside_transforms() if transforms_active() else NOTHING


def _changed(saved: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {tuple(saved.shape)} is at version {version_of(saved)}; "
        f"expected version {version} instead. Remedy: don't change in place what the loss still "
        "needs; torch.autograd.set_detect_anomaly(True) finds it in the unsharded step"
    )


def _hooked_by_others() -> bool:
    """Whether the innermost saved-tensor hooks are someone else's: torch.utils.checkpoint's, say,
    which recompute."""
    top = innermost_saved_tensors_hooks()
    return top is not None and not isinstance(getattr(top[0], "__self__", None), Pass)
