"""Complex leaves, which an author's functions see as pairs of real numbers, as in torch.optim.

A real leaf (..., 2) has the real and the imaginary parts. So Adam, say, keeps a second moment of
each part. The state is complex where it follows a complex leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import TransformError
from ..tree import named_leaves
from .across import Pointwise, Tree


def in_real_parts(part: Pointwise) -> Pointwise:
    """A pointwise author's functions, which see a complex leaf's real and imaginary parts."""

    def init(params: Tree) -> Any:
        state = part.init(params)
        if not _has_complex(params):
            return state
        # What is complex when made of complex leaves follows one
        return _joined_like(state, part.init(_in_parts(params)))

    def joining(update: Callable[..., Any]) -> Callable[..., Any]:
        def run(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
            if not _has_complex(params):
                return update(updates, state, params)  # type: ignore[no-any-return]
            new, after = update(_in_parts(updates), _in_parts(state), _in_parts(params))
            return _joined_like(updates, new), _joined_like(state, after)

        return run

    in_place = joining(part.in_place) if part.in_place else None
    return Pointwise(init, joining(part.update), in_place, part.keeps_zeros)


def _has_complex(tree: Tree) -> bool:
    return any(x.is_complex() for x in optree.tree_leaves(tree))


def refuse_complex(params: Tree) -> None:
    """Raise, naming the first complex leaf, for a transform that is of real leaves only."""
    for path, leaf in named_leaves(params).items():
        if leaf.is_complex():
            remedy = (
                "leave it to another optimizer by optim.partition, or keep its parts as a real "
                "leaf, torch.view_as_real(leaf)"
            )
            story = "this optimizer takes real leaves only"
            raise TransformError(story, path=path, got=leaf.dtype, remedy=remedy)


def _in_parts(tree: Any) -> Any:
    return tree_map(lambda x: torch.view_as_real(x.resolve_conj()) if _is_complex(x) else x, tree)


def _joined_like(like: Any, tree: Any) -> Any:
    def join(old: Any, x: Any) -> Any:
        if not _is_complex(old):
            return x
        return torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous())

    return tree_map(join, like, tree)


def _is_complex(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_complex()
