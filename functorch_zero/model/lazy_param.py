"""`LazyParam`: a sharded parameter as a loss sees it, before its unit is entered.

Note [asked what it is]: torch's transformer modules take their fast path in evaluation mode, unless
one of their params, also of modules inside, has a torch function. The fast path gives zeros for
padded rows, so a lazy parameter must not be what they ask. `fast_path.py` knows these modules, and
their params are whole before they ask. Other code may ask like them: a copy of such a module, say.
Torch looks for the function of an argument and then calls it; whoever only asks doesn't call. So a
lazy parameter notes that its function was looked for, until it is called, and `apply` refuses a
call that leaves a note behind. Where an operator on the same lazy parameter follows, nothing is
left: a unit that is entered runs none. `type(param)` is beyond us, since Python asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import compress
from operator import not_
from typing import Any, Protocol

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from .._torch_private import (
    make_wrapper,
    outside_transforms,
    transforms_active,
    without_torch_function,
)
from ..errors import StructureError
from ..in_a_loss import OF_THIS_RANK
from ..precision import Dtypes
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
        """The whole leaves, outside any call of the unit's modules: they stay until the unit's
        gradient has been taken."""
        ...

    def watch(self) -> AbstractContextManager[None]:
        """Around a call of the unit: tensors of gathered storage that autograd would save are
        remembered, not kept."""
        ...


def _getter(name: str) -> Any:
    """An attribute of a tensor as it reaches `__torch_function__` when it is read."""
    return getattr(torch.Tensor, name).__get__


def _setter(name: str) -> Any:
    """An attribute of a tensor as it reaches `__torch_function__` when it is written."""
    return getattr(torch.Tensor, name).__set__


# Answers as of the leaf that an unsharded step gives to the loss
_OF_A_LEAF = {_getter("is_leaf"): True, _getter("grad_fn"): None}
# They are about the gradient of the whole batch, or would change a leaf that nobody keeps
_REFUSED = {
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    torch.Tensor.retain_grad: "retain_grad",
    torch.Tensor.requires_grad_: "requires_grad_",
    _setter("requires_grad"): "requires_grad",
    _getter("grad"): "grad",
    _setter("grad"): "grad",
    _setter("data"): "data",
}
_DATA = _getter("data")
# Questions that shape and dtype answer: they gather nothing
METADATA = {
    *map(_getter, ("shape", "dtype", "device", "layout", "ndim", "is_meta", "requires_grad")),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
}


@contextmanager
def outside_modes() -> Iterator[None]:
    """Around the making of whole leaves: they are of the loss, and not of a torch.func transform or
    an inference mode inside of it, which they outlive. Gradients may be enabled."""
    transformed, inference = transforms_active(), torch.is_inference_mode_enabled()
    with (
        outside_transforms() if transformed else nullcontext(),
        torch.inference_mode(False) if inference else nullcontext(),
    ):
        yield


class _NotedWhenAsked:
    """The `__torch_function__` of lazy parameters. See Note [asked what it is]."""

    def __get__(self, lazy: LazyParam | None, cls: type[LazyParam]) -> Any:
        if lazy is not None:
            lazy.is_asked = True
        return cls.on_operator


class LazyParam(torch.Tensor):
    """A leaf that is not whole here yet. Its shape and dtype are the whole leaf's; a torch operator
    on it gathers it.

    Pass it to `apply`, or make it whole and differentiable with `fz.unshard`. `make_lazy_param`
    makes one.
    """

    entrance: Entrance  # of the leaf's unit, for one pass
    number: int  # of this leaf among the entrance's
    stored: torch.dtype
    dtypes: Dtypes | None  # by which its unit casts it; None: it is used as it is stored
    is_asked = False  # whether its torch function was looked for, and has not been called since

    def whole(self) -> Tensor:
        """The whole leaf, differentiable. At level 3 an all-gather of its unit, unless that is here
        already."""
        return self.entrance.touch()[self.number]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_torch_function():
            shape = tuple(self.shape)
            return f"LazyParam(shape={shape}, dtype={self.dtype}, device='{self.device}')"

    __torch_function__ = _NotedWhenAsked()

    @classmethod
    def is_answered(cls, func: Any) -> bool:
        """Whether a function needs no whole leaf: it is answered without one, or refused."""
        return func in METADATA or func in _OF_A_LEAF or func in _REFUSED

    @classmethod
    def on_operator(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, with whole leaves for lazy ones among its arguments."""
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, LazyParam):
                leaf.is_asked = False
        # As of a plain tensor: shape and dtype are right, though there is no storage
        if func in METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _OF_A_LEAF:
            return _OF_A_LEAF[func]
        if func in _REFUSED:
            raise StructureError(
                f"{_REFUSED[func]} of a sharded parameter was used in a loss. It would be about "
                "this rank's batch, or be lost. Remedy: differentiate whole leaves, "
                "`fz.unshard(params)`, by torch.func.grad; change gradients in the optimizer, and "
                f"params between steps. {OF_THIS_RANK}."
            )
        if func is torch.Tensor.__deepcopy__:
            # A leaf of its own, as of the leaf that an unsharded step gives to the loss
            lazy, memo = args
            with without_torch_function():
                requires_grad = lazy.requires_grad
            return deepcopy(lazy.whole().detach(), memo).requires_grad_(requires_grad)
        if func is _DATA:
            func = torch.Tensor.detach  # whose writes count, so that they are noticed
        if func is torch.autograd.grad or func is torch.autograd.backward:
            raise StructureError(
                "a sharded parameter can't be differentiated by hand inside a loss. "
                "Remedy: make it whole first, `whole = fz.unshard(params)`, compute with "
                f"`apply(whole, ...)`, and differentiate by that. {OF_THIS_RANK}."
            )
        # Also those in lists and keywords; the operator then runs on whole leaves
        of_whole: dict[int, LazyParam] = {}  # by the id of its whole leaf

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, LazyParam):
                return leaf
            made = leaf.whole()
            of_whole[id(made)] = leaf
            return made

        args, kwargs = tree_map(whole, (args, kwargs))
        result = func(*args, **kwargs)
        # `p.to(p.dtype)` is p itself, which has gradients even if this call was made without
        itself = of_whole.get(id(result))
        return result if itself is None else make_whole(itself)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # No TypeError: Python's binary operators would replace it by one of their own
        raise StructureError(
            f"a sharded parameter reached {func} without having been gathered, as happens when a "
            "torch.func transform is given it as an argument. Remedy: make it whole first, "
            f"`fz.unshard(params)`, and pass that. {OF_THIS_RANK}."
        )


def make_lazy_param(
    entrance: Entrance,
    number: int,
    shape: Sequence[int],
    stored: torch.dtype,
    dtypes: Dtypes | None,
    device: torch.device,
    kind: type[LazyParam] = LazyParam,
) -> LazyParam:
    """A lazy parameter without storage: number `number` among the entrance's leaves. It has the
    dtype that the whole leaf is used in. No gradient flows to it: see `handed_out`."""
    used = stored if dtypes is None else dtypes.compute
    # No storage: an operator that got through would find nothing to read
    lazy: LazyParam = make_wrapper(
        kind, shape, None, None, None, used, torch.strided, device, False, False
    )
    lazy.entrance, lazy.number = entrance, number
    lazy.stored, lazy.dtypes = stored, dtypes
    return lazy


# Gradients of lazy parameters, None where there is none -> those of the roots
TakeGrads = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


def handed_out(
    lazy: Sequence[LazyParam],
    trainable: Sequence[bool],
    roots: Sequence[Tensor],
    take: TakeGrads,
) -> Sequence[LazyParam]:
    """The lazy parameters as a loss gets them: trainable ones require grad.

    An operator on a lazy parameter is one on its whole leaf, and the gradient goes there. Only a
    custom `autograd.Function` has the lazy parameter itself for its input. Then backward gives the
    gradient to `take`, after all the rest of the loss.

    Args:
        lazy: as `make_lazy_param` makes them.
        trainable: of each.
        roots: tensors that require grad, for which `take` gives gradients. They
            are inputs of the node, which autograd runs only if some input asks for a gradient.
        take: called once at most in a backward, with the gradients of all lazy parameters.
    """
    handed: Sequence[LazyParam]
    with without_torch_function():
        handed = HandOut.apply(lazy, trainable, take, *roots)  # type: ignore[no-untyped-call]
    return handed


class HandOut(torch.autograd.Function):
    """The node behind lazy parameters that were handed out."""

    @staticmethod
    def forward(
        ctx: Any,
        lazy: Sequence[LazyParam],
        trainable: Sequence[bool],
        take: TakeGrads,
        *roots: Tensor,
    ) -> tuple[LazyParam, ...]:
        ctx.take = take
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*compress(lazy, map(not_, trainable)))
        return (*lazy,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.take(grads)


def _make_whole(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, LazyParam) else leaf


def make_whole(tree: PyTree[Any]) -> PyTree[Any]:
    """A tree with whole, differentiable leaves in place of lazy ones; leaves that are whole already
    stay as they are. At level 3 an all-gather per unit touched."""
    # A leaf that is in hand has gradients, wherever it was taken in hand
    with torch.enable_grad():
        return tree_map(_make_whole, tree)


def check_answered(params: Mapping[str, Any]) -> None:
    """Raise if a call has asked whether a lazy param among these, by path, has a torch function."""
    for path, leaf in params.items():
        if getattr(leaf, "is_asked", False):
            raise StructureError(
                "code outside of a unit asked whether its param has a torch function, and may "
                "then go another way than with a whole leaf, which has none",
                path=path,
                remedy="choose the module around that code as a unit, functionalize(units=...),"
                " or let it ask fz.unshard(param)",
            )
