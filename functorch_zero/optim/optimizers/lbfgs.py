"""L-BFGS directions from a bounded history, with all inner products of a step in one question.

The two-loop recursion needs inner products of the history only with itself and with the gradient.
Those of the history with itself are kept; a step asks for the newest ones, and runs the recursion
on numbers (Chen et al., 2014, "Large-scale L-BFGS using MapReduce").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from ...tree import PyTree
from ..across import Across
from ..arithmetic import Number, elementwise, pick
from ..base import Schedule, Transform, chain, step_count, tree_zeros_like, with_statistics
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate

Tree = PyTree[Tensor]


class ScaleByLBFGSState(NamedTuple):
    """The last steps and changes of gradient, oldest first, and their inner products."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    params: Any  # like params: those of the step before
    updates: Any  # like params: the gradients of the step before
    diff_params: tuple[Any, ...]  # memory_size trees like params: s, differences of params
    diff_updates: tuple[Any, ...]  # memory_size trees like params: y, differences of gradients
    s_y: Tensor  # (memory_size, memory_size) fp64, every rank: s_i . y_j
    y_y: Tensor  # (memory_size, memory_size) fp64, every rank: y_i . y_j


class Products(NamedTuple):
    """The inner products that the recursion needs, in fp64."""

    s_y: Tensor  # (m, m)
    y_y: Tensor  # (m, m)
    s_g: Tensor  # (m,)
    y_g: Tensor  # (m,)
    g_g: Tensor  # 0-d


class Coefficients(NamedTuple):
    """The direction as a combination: `of_g * g + sum(of_s[i] * s_i + of_y[i] * y_i)`."""

    of_g: Tensor  # 0-d
    of_s: Tensor  # (m,)
    of_y: Tensor  # (m,)


def ask(
    across: Across, state: ScaleByLBFGSState, s: tuple[Tree, ...], y: tuple[Tree, ...], g: Tree
) -> Products:
    """The inner products of a history whose newest pair is new: 5m numbers, one collective."""
    m = len(s)
    pairs = [(one, g) for one in s] + [(one, g) for one in y] + [(one, y[-1]) for one in (*s, *y)]
    pairs += [(s[-1], one) for one in y] + [(g, g)]
    answers = torch.stack([x.double() for x in across.dots(*pairs)])
    s_g, y_g, s_y_new, y_y_new, s_new_y = answers[: 5 * m].reshape(5, m).unbind()
    return Products(
        shifted(state.s_y, s_y_new, s_new_y),
        shifted(state.y_y, y_y_new, y_y_new),
        s_g,
        y_g,
        answers[-1],
    )


def shifted(old: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """A table one step on: without the oldest, with a new last column and row."""
    above = torch.cat([old[1:, 1:], column[:-1, None]], dim=1)
    return torch.cat([above, row[None, :]])


def two_loops(products: Products, scale: Tensor) -> Coefficients:
    """Nocedal and Wright, Algorithm 7.4, on numbers."""
    s_y, y_y, s_g, y_g, _ = products
    m, curvature = len(s_g), s_y.diagonal()
    rho = torch.where(curvature == 0, torch.zeros_like(curvature), 1 / curvature)
    alpha = torch.zeros_like(rho)
    at = torch.eye(m, dtype=rho.dtype, device=rho.device)
    for i in reversed(range(m)):
        alpha = alpha + at[i] * (rho[i] * (s_g[i] - s_y[i] @ alpha))
    of_s = torch.zeros_like(rho)
    for i in range(m):
        beta = rho[i] * (scale * (y_g[i] - y_y[i] @ alpha) + s_y[:, i] @ of_s)
        of_s = of_s + at[i] * (alpha[i] - beta)
    return Coefficients(scale, of_s, -scale * alpha)


@named
def scale_by_lbfgs(memory_size: int = 10, scale_init_precond: bool = True) -> Transform:
    """Multiply the gradient by L-BFGS's estimate of the inverse Hessian, over the whole tree.

    Source: Nocedal and Wright, Algorithms 7.4 and 7.5; optax.scale_by_lbfgs, with its first scale.
    Pairs without curvature (s . y = 0) don't count. Line search is yours: updates are the
    direction.

    State: 2 (memory_size + 1) tensors like params. Sharded: one all-reduce of 5 memory_size + 1
    scalars per leaf.

    Args:
        memory_size: how many pairs are remembered.
        scale_init_precond: begin from `s . y / y . y` of the newest pair, in the first step from
            `min(1, 1 / norm(g))`; else from 1.
    """
    if memory_size < 1:
        raise ValueError(f"memory_size must be at least 1, got {memory_size}")

    def init_scale(products: Products, first: Tensor) -> Tensor:
        newest, size = products.s_y[-1, -1], products.y_y[-1, -1]
        if not scale_init_precond:
            return torch.ones_like(newest)
        later = torch.where(size > 0, newest / size, torch.ones_like(size))
        return pick(first, products.g_g.rsqrt().clamp(max=1), later)

    def init(params: Tree) -> ScaleByLBFGSState:
        def trees() -> tuple[Tree, ...]:
            return tuple(tree_zeros_like(params) for _ in range(memory_size))

        device = next((leaf.device for leaf in tree_leaves(params)), None)
        table = torch.zeros(memory_size, memory_size, dtype=torch.float64, device=device)
        before = tree_zeros_like(params), tree_zeros_like(params)
        return ScaleByLBFGSState(step_count(), *before, trees(), trees(), table, table.clone())

    def update(
        updates: Tree, state: ScaleByLBFGSState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByLBFGSState]:
        first = state.count == 0

        def change(new: Tensor, old: Tensor) -> Tensor:
            return pick(first, torch.zeros_like(new), new - old)

        s = (*state.diff_params[1:], tree_map(change, params, state.params))
        y = (*state.diff_updates[1:], tree_map(change, updates, state.updates))
        products = ask(across, state, s, y, updates)
        of_g, of_s, of_y = two_loops(products, init_scale(products, first))

        def combine(g: Tensor, *history: Tensor) -> Tensor:
            direction = g * of_g
            for one, factor in zip(history, (*of_s, *of_y), strict=True):
                direction = direction + one * factor
            return direction

        directions = elementwise(combine, updates, *s, *y)
        kept = tree_map(torch.clone, params), tree_map(torch.clone, updates)
        return directions, ScaleByLBFGSState(
            state.count + 1, *kept, s, y, products.s_y, products.y_y
        )

    return with_statistics(init, update)


@named
def lbfgs(
    learning_rate: Number | Schedule = 1.0, memory_size: int = 10, scale_init_precond: bool = True
) -> Transform:
    """L-BFGS with a step size of your own: optax.lbfgs without its line search. See
    `scale_by_lbfgs`.

    State: 2 (memory_size + 1) tensors like params. Sharded: one all-reduce of 5 memory_size + 1
    scalars.
    """
    return chain(
        scale_by_lbfgs(memory_size, scale_init_precond), scale_by_learning_rate(learning_rate)
    )
