"""Recomputation: a unit's forward that runs again in backward, instead of keeping activations.

torch.utils.checkpoint does it, in its variant that is not re-entrant: it keeps the arguments, draws
random numbers again as they were, and runs the region again when backward first asks for something
saved in it. The region holds the whole unit, its entering included. So at level 3 the gather is
inside, and a gathered leaf is not kept either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._torch_private import transforms_active
from .slots import Place, leaves_for, put, tensors_in


def recomputed(forward: Callable[..., Any], buffers: Sequence[Place]) -> Callable[..., Any]:
    """The same function, computed again in backward, each time on the buffers of the first time.

    Args:
        forward: of a unit's module.
        buffers: the places of all buffers in it.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # Nothing is saved without gradients; torch.func refuses the hooks that checkpoint takes
        if not torch.is_grad_enabled() or transforms_active():
            return forward(*args, **kwargs)
        return checkpoint(_Region(forward, buffers), *args, use_reentrant=False, **kwargs)

    return run


class _Region:
    """One call of a unit's forward, to be run once or more."""

    def __init__(self, forward: Callable[..., Any], buffers: Sequence[Place]):
        self._forward = forward
        self._places = buffers
        self._before: list[Tensor] | None = None  # the buffers as the first run found them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is None:
            self._before = [buffer.detach().clone() for buffer in tensors_in(self._places)]
            return self._forward(*args, **kwargs)
        # In backward: on the first run's buffers, and the changes to them don't count twice
        after = tensors_in(self._places)
        copies: dict[str, Tensor] = {}  # by leaf: a buffer in several places stays one tensor
        for place, buffer in zip(self._places, self._before, strict=True):
            copies.setdefault(place.leaf, buffer.clone())
        put(self._places, leaves_for(self._places, copies))
        try:
            return self._forward(*args, **kwargs)
        finally:
            put(self._places, after)
