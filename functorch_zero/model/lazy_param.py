"""`LazyParam`: a sharded parameter as a loss sees it, before its unit is entered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import make_wrapper, version_of, without_torch_function
from ..errors import StructureError
from ..tree import PyTree


class Entrance(Protocol):
    """How a unit is entered. Whole leaves are given in the unit's own order."""

    def enter(self, module: str) -> Sequence[Tensor]:
        """The unit's whole leaves, for a call of the module of this path."""
        ...

    def leave(self, module: str) -> None:
        """That call has returned."""
        ...

    def touch(self) -> Sequence[Tensor]:
        """The whole leaves, outside any call: they stay until the unit's gradient has been
        taken."""
        ...

    def watch(self) -> AbstractContextManager[None]:
        """Around a call of the unit: tensors of gathered storage that autograd would save are
        remembered, not kept."""
        ...


_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf")
# Attributes reach `__torch_function__` as their getters
_GETTERS = [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES]
# Questions that shape and dtype answer: they gather nothing
_METADATA = {
    *_GETTERS,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
}


class LazyParam(torch.Tensor):
    """A leaf that is not whole here yet. Its shape and dtype are the whole leaf's; a torch operator
    on it gathers it.

    Pass it to `apply`, or make it whole and differentiable with `fz.unshard`. `make_lazy_param`
    makes one.
    """

    entrance: Entrance  # of the leaf's unit, for one pass
    number: int  # of this leaf among the entrance's

    def whole(self) -> Tensor:
        """The whole leaf, differentiable. At level 3 an all-gather of its unit, unless that is here
        already."""
        return self.entrance.touch()[self.number]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_torch_function():
            shape = tuple(self.shape)
            return f"LazyParam(shape={shape}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # As of a plain tensor: shape and dtype are right, though there is no storage
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        if func is torch.autograd.grad or func is torch.autograd.backward:
            raise StructureError(
                "a sharded parameter can't be differentiated by hand inside a loss. "
                "Remedy: make it whole first, `whole = fz.unshard(params)`, and differentiate by "
                "that"
            )
        # Also those in lists and keywords; the operator then runs on whole leaves
        args, kwargs = tree_map(_make_whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # No TypeError: Python's binary operators would replace it by one of their own
        raise StructureError(
            f"a sharded parameter reached {func} without having been gathered, as happens when a "
            "torch.func transform is given it as an argument. Remedy: make it whole first, "
            "`fz.unshard(params)`, and pass that"
        )


def make_lazy_param(
    entrance: Entrance,
    number: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> LazyParam:
    """A lazy parameter without storage: number `number` among the entrance's leaves. Shape, dtype
    and device are those of the whole leaf in use."""
    # No storage: an operator that got through would find nothing to read
    lazy: LazyParam = make_wrapper(
        LazyParam, shape, None, None, None, dtype, torch.strided, device, False, requires_grad
    )
    lazy.entrance = entrance
    lazy.number = number
    return lazy


def make_lazy_params(
    entrances: Iterable[Entrance],
    numbers: Iterable[int],
    shapes: Iterable[Sequence[int]],
    dtypes: Iterable[torch.dtype],
    devices: Iterable[torch.device],
    trainable: Iterable[bool],
) -> list[LazyParam]:
    """A lazy parameter for each leaf.

    The arguments are in the leaves' order; those that all leaves have in common may go on for ever.
    """
    # Not strict: what all leaves share is repeated without end
    leaves = zip(entrances, numbers, shapes, dtypes, devices, trainable, strict=False)
    return [make_lazy_param(*leaf) for leaf in leaves]


def _make_whole(leaf: Any) -> Any:
    return leaf.whole() if type(leaf) is LazyParam else leaf


def make_whole(tree: PyTree[Any]) -> PyTree[Any]:
    """The same tree with whole, differentiable leaves; leaves that are whole already stay as they
    are. At level 3 an all-gather per unit touched."""
    return tree_map(_make_whole, tree)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each has been written to; tensors of inference mode don't count."""
    return [version_of(x) for x in tensors if not x.is_inference()]


def check_unchanged(params: Sequence[Tensor], versions: list[int]) -> None:
    """Raise if a loss or an evaluation has written to params, by the versions from before it ran.

    The write would change the state, or be lost, depending on the level.
    """
    if params and versions_of(params) != versions:
        raise StructureError(
            "a leaf of params was changed in place, and a step is a pure function. "
            "Remedy: make a new tensor, `p = p * 0.5` instead of `p *= 0.5`"
        )
