"""Leaves that a pointwise author's functions see in another form.

A 0-d leaf is seen as (1,). Sharded, it is one element of a flat. In one process, were it 0-d there,
a 0-d float64 number would promote it by torch's rules, as in
`x * torch.tensor(0.1, dtype=torch.float64)`. So the two would have other bits.

A complex leaf is seen, where the author asks for it, as pairs of real numbers, as in torch.optim: a
real leaf (..., 2) has the real and the imaginary parts. So Adam, say, keeps a second moment of each
part.

State that follows such a leaf is seen in that form, too, and kept in the leaf's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import TransformError
from ..tree import PyTree, named_leaves
from .across import Pointwise, Tree


class _Form(NamedTuple):
    """How a leaf is seen."""

    in_parts: bool  # a complex one, as a real one (..., 2)
    as_vector: bool  # a 0-d one, as (1,)


def in_forms(part: Pointwise, *, in_parts: bool) -> Pointwise:
    """A pointwise author's functions, of leaves as they are kept; `in_parts`: whether the functions
    see complex leaves as real ones."""

    def form(x: Any, as_vector: bool) -> _Form:
        return _Form(in_parts and isinstance(x, Tensor) and x.is_complex(), as_vector)

    def forms_of(tree: Tree) -> PyTree[_Form]:
        return tree_map(lambda x: form(x, x.ndim == 0), tree)

    def forms_of_state(params: Tree) -> PyTree[_Form]:
        def made_of(size: int) -> Any:
            # On the meta device: `init` makes shapes and no values, whatever the leaf's size
            def resized(p: Tensor) -> Tensor:
                return p.new_empty((size,) if p.ndim == 0 else p.shape, device="meta")

            return part.init(tree_map(resized, params))

        # A leaf that is no larger for two elements than for one is a count or its like. One that
        # has several numbers for each element is as it is seen
        def form_of(one: Any, two: Any) -> _Form:
            return form(one, isinstance(one, Tensor) and one.shape == (1,) != two.shape)

        return tree_map(form_of, made_of(1), made_of(2))

    def are_seen_as_kept(params: Tree) -> bool:
        leaves = optree.tree_leaves(params)
        return not any(x.ndim == 0 or (in_parts and x.is_complex()) for x in leaves)

    def init(params: Tree) -> Any:
        if are_seen_as_kept(params):
            return part.init(params)
        made = part.init(tree_map(_seen, params, forms_of(params)))
        return tree_map(_kept, made, forms_of_state(params))

    def of_kept(update: Callable[..., Any]) -> Callable[..., Any]:
        def run(updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
            if are_seen_as_kept(params):
                return update(updates, state, params)  # type: ignore[no-any-return]
            own, of_state = forms_of(updates), forms_of_state(params)
            given = tree_map(_seen, updates, own), tree_map(_seen, state, of_state)
            new, after = update(*given, tree_map(_seen, params, forms_of(params)))
            return tree_map(_kept, new, own), tree_map(_kept, after, of_state)

        return run

    in_place = of_kept(part.in_place) if part.in_place else None
    return Pointwise(init, of_kept(part.update), in_place)


def _seen(x: Any, form: _Form) -> Any:
    x = x.reshape(1) if form.as_vector else x
    return torch.view_as_real(x.resolve_conj()) if form.in_parts else x


def _kept(x: Any, form: _Form) -> Any:
    """The inverse of `_seen`."""
    if form.in_parts:
        x = torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous())
    return x.reshape(()) if form.as_vector else x


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
