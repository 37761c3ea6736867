"""Norms of gradients, params and updates, with one collective for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from ..errors import StructureError
from ..params import engine_of
from ..tree import PyTree, same_structure, trained_leaves
from .across import Across, norms_of
from .arithmetic import on_numbers
from .local import Local


def norms(*, grads: Any = None, params: Any = None, updates: Any = None) -> dict[str, Tensor]:
    """The norms of a program's trees, 0-d each: those that `train_step(metrics=...)` reports.

    They are "grad_norm", "param_norm" and "update_norm", of the trees that were given; of params
    the trained leaves count. Sharded, they are of the whole trees, the same on every rank, in at
    least float32; every rank calls it. One all-reduce, of one number per norm.

    Args:
        grads: as of `fz.value_and_grad`.
        params: as a step holds them.
        updates: of the same params, as of `Transform.update`.

    Raises:
        StructureError: the trees aren't of the same params, or no leaf is trained.

    >>> grads = {"w": torch.tensor([3.0, 4.0]), "frozen": None}
    >>> params = {"w": torch.tensor([2.0, 0.0], requires_grad=True), "frozen": torch.ones(2)}
    >>> norms(grads=grads, params=params)
    {'grad_norm': tensor(5.), 'param_norm': tensor(2.)}
    """
    found = Norms()
    found.take(grads=grads, params=params, updates=updates)
    return found.values()


class Norms:
    """Norms, as of `norms`, of trees that aren't there at one time: each is taken where its tree
    is, and `values` is the one all-reduce for all of them. An optimizer that is given the gradients
    writes over them, say.

    >>> found = Norms()
    >>> found.take(grads={"w": torch.tensor([3.0, 4.0])})
    >>> found.take(updates={"w": torch.tensor([0.0, 1.0])})
    >>> found.values()
    {'grad_norm': tensor(5.), 'update_norm': tensor(1.)}
    """

    def __init__(self) -> None:
        self._first: Any = None  # sharded, the first tree; whole, the sums of its leaves
        self._squares: dict[str, PyTree[Tensor]] = {}

    def take(self, *, grads: Any = None, params: Any = None, updates: Any = None) -> None:
        """Take the norms of this rank's parts of these trees. No communication.

        Raises:
            StructureError: as `norms`.
        """
        given = {"grad_norm": grads, "param_norm": params, "update_norm": updates}
        for name, tree in given.items():
            if tree is None:
                continue
            engine = engine_of((tree, self._first))
            if engine is not None:
                first = tree if self._first is None else self._first
                self._squares[name], self._first = engine.squares(name, tree, first), first
                continue
            if name == "param_norm":
                tree = trained_leaves(params)
                if not optree.tree_leaves(tree):
                    raise without_trained(params)
            own = squares_of(tree)
            if self._first is None:
                self._first = own
            what = f"the tree of {name}"
            same_structure(self._first, own, what=what, none_is_leaf=True, remedy=_OF_ONE)
            self._squares[name] = own

    def values(self) -> dict[str, Tensor]:
        """The norms, 0-d, by name. One all-reduce; none where no tree was taken."""
        engine = engine_of(self._first)
        if engine is None:
            return roots_of_totals(self._squares, Local(self._first))
        found: dict[str, Tensor] = engine.norms(self._squares, self._first)
        return found


_OF_ONE = "pass gradients, params and updates of one tree; of others by another call"


def squares_of(tree: PyTree[Tensor]) -> PyTree[Tensor]:
    """The sum of each leaf's squares, 0-d: of this rank's part of it."""
    leaves, treedef = optree.tree_flatten(tree)
    # By norms, which make no tensor of the squares
    return treedef.unflatten(on_numbers(torch.square, norms_of(leaves)))


def roots_of_totals(squares: Mapping[str, PyTree[Tensor]], across: Across) -> dict[str, Tensor]:
    """The norms of whole trees, 0-d, from the sums of squares of this rank's parts. One collective
    for all together, of one number per norm; none where there is no tree."""
    if not squares:
        return {}
    # `across` adds up the shares of leaves that are cut; others are whole on every rank
    totals = across.totals([(tree,) for tree in squares.values()])
    return {name: x.sqrt() for name, x in zip(squares, totals, strict=True)}


def without_trained(params: Any, rank: int | None = None) -> StructureError:
    """The error for params of which no leaf is trained, where those of trained ones are wanted."""
    return StructureError(
        "the norm was asked of params of which no leaf is trained",
        expected="leaves with requires_grad=True",
        got=f"a {type(params).__name__}",
        rank=rank,
        remedy="pass the params that are trained; gradients and updates as grads=, updates=",
    )
