"""Computing with tensors that have no values, and the bytes of those that are alive, by kind.

A tensor without values is a fake one, which stands for one of a device, or one on the meta device.
Operators on the meta device are ten times as quick, and not always those of a device. Numbers that
depend on no such tensor (step counts, learning rates) are computed as ever, so that the host can
read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import optree
import torch
from torch import Tensor

from .._torch_private import (
    FakeTensorMode,
    QuickDispatchMode,
    arguments_of,
    dynamo_imported,
    reads_number,
    storage_id,
    written_of,
)
from ..layout.operators import kind_of
from ..layout.piece import Piece
from ..sharded_optim.state_plan import is_placeholder
from ..tree import has_values, tensors_among
from .report import KINDS

_aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default


class ValueNeeded(Exception):
    """The host asked for the value of a tensor that has none."""


class Counting(Protocol):
    """A counter of the bytes that lie elsewhere, and take nothing of this memory."""

    def count(self, change: int) -> None:
        """There are so many bytes more."""
        ...


Kind = str | Counting | None  # of `KINDS`; None: it doesn't count


@dataclass
class _Followed:
    """A storage that is alive."""

    kind: Kind
    size: int
    reference: weakref.ref[torch.UntypedStorage]  # tells when it goes
    source: int | None = None  # of a copy, until it is written to: the storage's key
    is_written: bool = False


class LiveBytes(QuickDispatchMode):
    """Makes new tensors without values, and follows every storage until it goes.

    Args:
        fake: the mode of the tensors without values; None: the meta device.
        on_growth: called whenever there are more bytes than before.

    Attributes:
        now: bytes alive, by kind.
        total: bytes alive, of all kinds.
        assumed: how many yes-no questions about values the host has asked. They were answered with
            yes.
    """

    def __init__(self, fake: FakeTensorMode | None, on_growth: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.total = dict.fromkeys(KINDS, 0), 0
        self.assumed = 0
        self._fake, self._on_growth = fake, on_growth
        self._paused = False
        self._storages: dict[int, _Followed] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A leaf of a sharded tree runs operators on what is here
        if Piece in types:
            return NotImplemented
        kwargs = kwargs or {}
        # Every second operator asks a fake tensor for its device
        if self._paused or func is _DEVICE_OF:
            return func(*args, **kwargs)
        written = written_of(func, args, kwargs)
        # A view has the storage of its base, which is followed already
        if func.is_view and not written:
            return func(*args, **kwargs)
        given = [*tensors_among(*args, *kwargs.values())]
        num_known = sum(map(has_values, given))
        # All have values: a number such as a step count, which the host may read later
        if num_known == len(given):
            anew = kind_of(func).makes_new if given else _is_factory(func)
            return self._known(func, args, kwargs, anew=anew)
        # `item()` or `bool(x)` of a tensor without a value
        if reads_number(func):
            return self._answer(given[0])
        # The meta device wants all arguments there, so those with values lose them
        if self._fake is None:
            args = _on_meta(args) if num_known else args
            kwargs = _moved(_on_meta(kwargs) if num_known else kwargs, "meta")
        if func is _aten.new_empty.default and self._fake is None:
            # Torch does this one in Python, and slowly
            dtype = kwargs.get("dtype") or args[0].dtype
            out = torch.empty(args[1], dtype=dtype, device="meta")
        else:
            out = func(*args, **kwargs)
        written += [args[i] for i in _running_means(func)]
        for tensor in tensors_among(*written):
            own = self._storages.get(storage_id(tensor))
            if own is not None:
                own.is_written = True
        # New storages are counted when they first appear as a result
        self._follow(out)
        if func is _aten.clone.default:
            self._note_copy(out, args[0])
        return out

    def _note_copy(self, copy: Tensor, source: Tensor) -> None:
        """A copy of a copy is one of the first source, unless something was written in between."""
        key, made = storage_id(source), self._storages.get(storage_id(copy))
        before = self._storages.get(key)
        if before is not None and before.source is not None and not before.is_written:
            key = before.source
        if made is not None:
            made.source = key

    def adopt(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """These storages are of that kind, but for those that lie elsewhere."""
        for tensor in tensors:
            key = storage_id(tensor)
            own = self._storages.get(key)
            if own is None:
                # All of the storage, though the tensor may be a view of a part
                storage = tensor.untyped_storage()
                reference = weakref.ref(storage, partial(self._gone, key))
                own = self._storages[key] = _Followed(None, storage.nbytes(), reference)
            if own.kind is None or isinstance(own.kind, str):
                # It may change its kind, as an activation that turns out to be a gradient
                self._count(own.kind, -own.size)
                own.kind = kind
                self._count(kind, own.size)

    def discount_states(self) -> None:
        """States that are alive count no longer, until `adopt` says otherwise."""
        for own in self._storages.values():
            if own.kind == "state":
                self._count(own.kind, -own.size)
                own.kind = None

    def kind_of(self, tensor: Tensor) -> Kind:
        """That of a tensor's storage."""
        own = self._storages.get(storage_id(tensor))
        return None if own is None else own.kind

    def is_untouched_copy(self, tensor: Tensor, of: Tensor) -> bool:
        """Whether this is `of`, or a copy of it that nothing has written to."""
        key = storage_id(tensor)
        own = self._storages.get(key)
        if own is None:
            return tensor is of
        return not own.is_written and storage_id(of) in (key, own.source)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile tensors have values, and are not followed."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _known(self, func: Any, args: Any, kwargs: Any, *, anew: bool) -> Any:
        """An operator on values: single numbers, or tensors that a loss brings along.

        With `anew` it makes a new tensor, which gets no values, unless it is a single number.
        """
        # Made inside of the mode, which gives the result no values
        if anew and self._fake is not None:
            with self._fake:
                made = func(*args, **kwargs)
        elif anew:
            made = func(*_on_meta(args), **kwargs | {"device": torch.device("meta")})
        # A single number keeps its value: step counts and rates must stay readable
        if anew and made.dim() > 0:
            self._follow(made)
            return made
        return func(*args, **_moved(kwargs, "cpu"))

    def _answer(self, question: Tensor) -> Any:
        """The host asks for a value: a yes-no question gets yes, any other is refused."""
        # "Is everything finite?" and the like go on; any other number would decide the step
        if question.dtype != torch.bool:
            raise ValueNeeded
        self.assumed += 1
        return True

    def _follow(self, out: Any) -> None:
        """Count an operator's new tensors as activations, until `adopt` says otherwise."""
        for tensor in tensors_among(out):
            # Those that have no storage on a real rank either
            empty = tensor.device.type == "meta" if self._fake else is_placeholder(tensor)
            # A sparse gradient has no storage to follow; the dense one that it becomes is larger
            empty = empty or tensor.layout != torch.strided
            # Known ones were written in place, or are views
            if not empty and storage_id(tensor) not in self._storages:
                self.adopt([tensor], "activations")
                self._on_growth()

    def _gone(self, key: int, _: Any) -> None:
        """A storage has gone. Its key may come back as that of another."""
        own = self._storages.pop(key)
        self._count(own.kind, -own.size)

    def _count(self, kind: Kind, change: int) -> None:
        if isinstance(kind, str):
            self.now[kind] += change
            self.total += change
        elif kind is not None:
            kind.count(change)


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled regions run operator by operator: there is nothing to compile for without values."""
    return torch.compiler.set_stance("force_eager") if dynamo_imported() else nullcontext()


def _on_meta(values: Any) -> Any:
    """The values with every tensor in them on the meta device."""

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor) and has_values(x):
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        return x

    return optree.tree_map(moved, values)


def _moved(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    """Keyword arguments with another device, where one is named."""
    if kwargs.get("device") is None:
        return kwargs
    return kwargs | {"device": torch.device(device)}


@cache  # a plan calls few operators, each very often
def _is_factory(func: Any) -> bool:
    """Whether an operator without tensors makes one, on a device."""
    return any(argument.name == "device" for argument in arguments_of(func))


@cache
def _running_means(func: Any) -> list[int]:
    """The positions of a batch_norm's statistics, to which it writes without saying so."""
    names = "running_mean", "running_var"
    return [i for i, argument in enumerate(arguments_of(func)) if argument.name in names]
