"""Recomputation: a unit's forward that runs again in backward, instead of keeping activations.

torch.utils.checkpoint does it, in its variant that is not re-entrant: it keeps the arguments, draws
random numbers again as they were, and runs the region again when backward first asks for something
saved in it. The region holds the whole unit, its entering included. So at level 3 the gather is
inside, and a gathered leaf is not kept either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .._torch_private import transforms_active
from .references import unshared_copy
from .slots import Place, put, put_by_path, tensors_in

_PLAIN = frozenset([bool, int, float, str, type(None)])


def recomputed(
    forward: Callable[..., Any],
    params: Sequence[Place],
    buffers: Sequence[Place],
    modules: Sequence[nn.Module],
) -> Callable[..., Any]:
    """A forward that is computed again in backward, each time with the buffers and settings of the
    first time.

    Args:
        forward: of a unit's module.
        params: the places of the unit's leaves.
        buffers: the places of all buffers in it.
        modules: the unit's module, and those inside it.
    """

    # `wraps`, so that signatures and names stay for hooks and compilers
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Nothing is saved without gradients; torch.func refuses the hooks that checkpoint takes
        if not torch.is_grad_enabled() or transforms_active():
            return forward(*args, **kwargs)
        region = _Region(forward, params, buffers, modules)
        return checkpoint(region, *args, use_reentrant=False, **kwargs)

    return run


class _Region:
    """One call of a unit's forward, to be run once or more."""

    def __init__(
        self,
        forward: Callable[..., Any],
        params: Sequence[Place],
        buffers: Sequence[Place],
        modules: Sequence[nn.Module],
    ):
        self._forward = forward
        self._modules = modules
        # As they are now: functional_call may have put others in the places, for this call alone
        self._params, self._leaves = params, tensors_in(params)
        self._places = buffers
        self._before: list[Tensor] | None = None  # the buffers as the first run found them
        self._given: tuple[Any, Any] = ((), {})  # and what it was given, but for the tensors
        self._settings: list[dict[str, Any]] = []  # of the modules then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is None:
            return self._run_first(args, kwargs)
        return self._run_again(args, kwargs)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In forward."""
        # Copies: forward writes to the ones in the places
        self._before = [buffer.detach().clone() for buffer in tensors_in(self._places)]
        # It may write to a list or object, too: a cache of keys and values, say
        self._given = tuple(map(_unshared, args)), {k: _unshared(x) for k, x in kwargs.items()}
        # A forward around it may call it in both modes, say, one after the other
        self._settings = [_settings(module) for module in self._modules]
        return self._forward(*args, **kwargs)

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In backward: on the first run's buffers, whose changes don't count twice."""
        assert self._before is not None
        before, before_by_name = self._given
        args = tuple(map(_again, args, before))
        kwargs = {name: _again(x, before_by_name[name]) for name, x in kwargs.items()}
        # Those that training goes on with come back when this run is over
        after, leaves = tensors_in(self._places), tensors_in(self._params)
        copies: dict[str, Tensor] = {}  # by leaf: a buffer in several places stays one tensor
        for place, buffer in zip(self._places, self._before, strict=True):
            copies.setdefault(place.leaf, buffer.clone())
        put_by_path(self._places, copies)
        put(self._params, self._leaves)
        settings = [_settings(module) for module in self._modules]
        self._set(self._settings)
        try:
            return self._forward(*args, **kwargs)
        finally:
            put(self._places, after)
            put(self._params, leaves)
            self._set(settings)

    def _set(self, settings: Sequence[dict[str, Any]]) -> None:
        """Give each module its own of these: see `_settings`."""
        for module, own in zip(self._modules, settings, strict=True):
            # Not by setattr: a module's own may do more
            vars(module).update(own)


def _settings(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are plain values: its mode, a dropout's rate, a count.
    They are put back around a run in backward, which may add others: these stay."""
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}


def _unshared(argument: Any) -> Any:
    """An argument as it is before the first run, which checkpoint may not know later: containers
    and objects."""
    return None if isinstance(argument, Tensor) else unshared_copy(argument)


def _again(argument: Any, before: Any) -> Any:
    """The argument for a run in backward; tensors are as checkpoint gives them."""
    return argument if before is None else unshared_copy(before)
