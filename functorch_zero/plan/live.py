"""Bytes alive while fake tensors are computed with, by what they are for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WRITTEN_ANYWAY = {"running_mean", "running_var"}  # torch's batch_norm does not say that it writes to these


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator makes until it goes.

    Attributes:
        now: bytes alive, by kind.
        on_growth: called whenever there are more bytes than before.
    """

    def __init__(self, on_growth: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = {"gathered": 0, "gradients": 0, "activations": 0}
        self.on_growth = on_growth
        self._kinds: dict[int, tuple[str, int]] = {}  # by storage: its kind and bytes
        self._copies: dict[int, int] = {}  # storages that are copies, and of what
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note_writes(func, args, kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        if func is torch.ops.aten.clone.default:
            self._copies[key_of(out)] = key_of(args[0])
        return out

    def ignore(self, tensor: Tensor) -> None:
        """This storage is accounted for elsewhere."""
        self._kinds[key_of(tensor)] = ("", 0)
        self._forget_with(tensor)

    def is_for(self, kind: str, tensor: Tensor) -> None:
        """This storage is of that kind."""
        key = key_of(tensor)
        if key in self._kinds:
            before, size = self._kinds[key]
            if before:
                self.now[before] -= size
                self.now[kind] += size
                self._kinds[key] = (kind, size)

    def is_untouched_copy(self, tensor: Tensor, of: Tensor) -> bool:
        """Whether this is `of`, or a copy of it that nothing has written to."""
        key = key_of(tensor)
        return key not in self._written and key_of(of) in (key, self._copies.get(key))

    def _follow(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        if key in self._kinds:
            return
        size = tensor.untyped_storage().nbytes()
        self._kinds[key] = ("activations", size)
        self.now["activations"] += size
        self._forget_with(tensor)
        self.on_growth()

    def _forget_with(self, tensor: Tensor) -> None:
        weakref.finalize(tensor.untyped_storage(), self._gone, key_of(tensor)).atexit = False

    def _gone(self, key: int) -> None:
        kind, size = self._kinds.pop(key, ("", 0))
        if kind:
            self.now[kind] -= size
        self._copies.pop(key, None)
        self._written.discard(key)

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for i, argument in enumerate(func._schema.arguments):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or argument.name in _WRITTEN_ANYWAY:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                self._written.update(key_of(x) for x in tree_leaves(value) if isinstance(x, Tensor))


def key_of(tensor: Tensor) -> int:
    """A storage's identity while it lives; fake tensors have no addresses."""
    return int(tensor.untyped_storage()._cdata)
