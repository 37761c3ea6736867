"""Computing with tensors that have no values, and the bytes of those that are alive, by what they
are for.

A tensor without values is a fake one, which stands for one of a device, or one on the meta device,
whose operators are ten times as quick and not always those of a device. What depends on no such
tensor (step counts, learning rates) is computed as ever, so that the host can read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import (
    FakeTensorMode,
    QuickDispatchMode,
    arguments_of,
    reads_number,
    storage_id,
)
from ..sharded_optim.state_plan import is_placeholder
from ..tree import has_values
from .report import KINDS

_aten = torch.ops.aten
_MAKERS = {
    _aten.new_empty,
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
    _aten.new_empty_strided,
}
# Torch's batch_norm does not say that it writes to these
_WRITTEN_ANYWAY = {
    "running_mean",
    "running_var",
}


class ValueNeeded(Exception):
    """The host asked for the value of a tensor that has none."""


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
        self._kinds: dict[int, tuple[str | None, int]] = {}  # by storage: its kind and bytes
        self._refs: dict[
            int, weakref.ref[torch.UntypedStorage]
        ] = {}  # which tell when a storage goes
        self._copies: dict[int, int] = {}  # storages that are copies, and of what
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if self._paused or kind.views:
            return func(*args, **kwargs)
        given = [*_tensors(args), *(_tensors(kwargs.values()) if kwargs else ())]
        num_known = sum(map(has_values, given))
        if num_known == len(given):
            return self._known(func, args, kwargs, anew=kind.makes if given else kind.has_device)
        if reads_number(func):
            return self._answer(given[0])
        if self._fake is None:
            args = _on_meta(args) if num_known else args
            kwargs = _moved({k: _on_meta(v) for k, v in kwargs.items()}, "meta")
        if (
            func is _aten.new_empty.default and self._fake is None
        ):  # which torch does in Python, and slowly
            out = torch.empty(args[1], dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
        else:
            out = func(*args, **kwargs)
        for i, name in kind.writes:
            for x in _tensors([args[i] if i < len(args) else kwargs.get(name)]):
                self._written.add(storage_id(x))
        self._follow(out)
        if func is _aten.clone.default:
            source = storage_id(args[0])
            self._copies[storage_id(out)] = (
                source if source in self._written else self._copies.get(source, source)
            )
        return out

    def adopt(self, tensors: Iterable[Tensor], kind: str | None) -> None:
        """These storages are of that kind; None: they don't count."""
        for tensor in tensors:
            key = storage_id(tensor)
            if key in self._kinds:
                before, size = self._kinds[key]
                self._count(before, -size)
            else:
                size = tensor.untyped_storage().nbytes()
                self._refs[key] = weakref.ref(tensor.untyped_storage(), partial(self._gone, key))
            self._kinds[key] = (kind, size)
            self._count(kind, size)

    def is_untouched_copy(self, tensor: Tensor, of: Tensor) -> bool:
        """Whether this is `of`, or a copy of it that nothing has written to."""
        key = storage_id(tensor)
        return key not in self._written and storage_id(of) in (key, self._copies.get(key))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile tensors have values, and are not followed."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _known(self, func: Any, args: Any, kwargs: Any, *, anew: bool) -> Any:
        """An operator on values: single numbers, or what a loss brings along. New tensors of more
        get none."""
        if anew and self._fake is not None:
            with self._fake:
                made = func(*args, **kwargs)
        elif anew:
            made = func(*_on_meta(args), **kwargs | {"device": torch.device("meta")})
        if anew and made.dim() > 0:
            self._follow(made)
            return made
        return func(*args, **_moved(kwargs, "cpu"))

    def _answer(self, question: Tensor) -> Any:
        if question.dtype != torch.bool:
            raise ValueNeeded
        self.assumed += 1
        return True

    def _follow(self, out: Any) -> None:
        for tensor in _tensors(out if isinstance(out, tuple | list) else (out,)):
            # Also on a real rank
            empty = tensor.device.type == "meta" if self._fake else is_placeholder(tensor)
            if not empty and storage_id(tensor) not in self._kinds:
                self.adopt([tensor], "activations")
                self._on_growth()

    def _gone(self, key: int, _: Any) -> None:
        kind, size = self._kinds.pop(key, (None, 0))
        self._count(kind, -size)
        del self._refs[key]
        self._copies.pop(key, None)
        self._written.discard(key)

    def _count(self, kind: str | None, change: int) -> None:
        if kind is not None:
            self.now[kind] += change
            self.total += change


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _on_meta(value: Any) -> Any:
    """The same with every tensor on the meta device."""
    if isinstance(value, Tensor) and has_values(value):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(_on_meta, value)) if type(value) in (tuple, list) else value


def _moved(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    """Keyword arguments with another device, where one is named."""
    return kwargs | {"device": torch.device(device)} if kwargs.get("device") is not None else kwargs


class _Kind(NamedTuple):
    """What must be known of an operator."""

    views: bool  # it makes a view, and nothing new
    makes: bool  # it makes a new tensor, like one that it is given
    has_device: bool
    writes: tuple[tuple[int, str], ...]  # arguments it writes to: (position, name)


@cache
def _kind(func: Any) -> _Kind:
    arguments = arguments_of(func)
    writes = tuple(
        (i, a.name)
        for i, a in enumerate(arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in _WRITTEN_ANYWAY
    )
    has_device = any(a.name == "device" for a in arguments)
    return _Kind(func.is_view and not writes, func.overloadpacket in _MAKERS, has_device, writes)
