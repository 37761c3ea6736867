"""L-BFGS: directions from a bounded history, with all inner products of a step in one question.

Note [Recursion on numbers]: the two-loop recursion needs inner products of the history only with
itself and with the gradient. Those of the history with itself are in the state. So a step asks for
the ones with the newest pair and with the gradient, 5m + 1 numbers, in one collective; and the
recursion runs on numbers, the same on every rank (Chen et al., 2014, "Large-scale L-BFGS using
MapReduce").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..across import Across
from ..arithmetic import Tree, device_of, elementwise, identity, pick
from ..base import (
    NumberOrSchedule,
    Transform,
    chain,
    real_only,
    step_count,
    tree_zeros_like,
    with_statistics,
)
from ..naming import named
from ..transforms.scaling import scale_by_learning_rate


class ScaleByLBFGSState(NamedTuple):
    """The last pairs of a step s and a change of gradient y, oldest first, and their products."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    # Copies: s and y are known when the next step brings new params and gradients
    params: Any  # like params: those of the step before
    updates: Any  # like params: the gradients of the step before
    diff_params: tuple[Any, ...]  # memory_size trees like params: s, differences of params
    diff_updates: tuple[Any, ...]  # memory_size trees like params: y, differences of gradients
    s_y: Tensor  # (memory_size, memory_size) fp64, every rank: s_i . y_j
    y_y: Tensor  # (memory_size, memory_size) fp64, every rank: y_i . y_j


class Products(NamedTuple):
    """The inner products that the recursion needs, fp64, the same on every rank; m pairs."""

    s_y: Tensor  # (m, m): s_i . y_j
    y_y: Tensor  # (m, m): y_i . y_j
    s_g: Tensor  # (m,): s_i . gradient
    y_g: Tensor  # (m,): y_i . gradient
    g_g: Tensor  # 0-d: gradient . gradient


class Coefficients(NamedTuple):
    """The direction as a combination: `of_g * g + sum(of_s[i] * s_i + of_y[i] * y_i)`."""

    of_g: Tensor  # 0-d
    of_s: Tensor  # (m,)
    of_y: Tensor  # (m,)


def paired(trees: tuple[Tree, ...], other: Tree) -> list[tuple[Tree, Tree]]:
    """Each of the trees with `other`, for `across.dots`."""
    # Trees, not products: `across` multiplies leaf by leaf
    return [(tree, other) for tree in trees]


def inner_products(
    across: Across, state: ScaleByLBFGSState, s: tuple[Tree, ...], y: tuple[Tree, ...], g: Tree
) -> Products:
    """The inner products of a history whose newest pair is new. See Note [Recursion on numbers].

    Args:
        across: answers for trees like params.
        state: of the step before.
        s: steps, oldest first; the last is new.
        y: changes of gradient, likewise.
        g: the gradient.
    """
    m = len(s)
    newest_s, newest_y = s[-1], y[-1]
    # In the order in which the answers are taken apart below
    pairs = paired(s, g) + paired(y, g)
    pairs += paired(s, newest_y) + paired(y, newest_y) + paired(y, newest_s)
    pairs.append((g, g))
    # One all-reduce, whatever m is; each answer is 0-d and the same on every rank
    answers = across.dots(*pairs)
    numbers = torch.stack([answer.double() for answer in answers])  # (5m + 1,)
    s_g, y_g, s_new_y, y_new_y, new_s_y = numbers[: 5 * m].reshape(5, m).unbind()  # each (m,)
    return Products(
        # Rows by s_i, columns by y_j: the newest y is a column, the newest s a row
        s_y=shifted(state.s_y, column=s_new_y, row=new_s_y),
        y_y=shifted(state.y_y, column=y_new_y, row=y_new_y),
        s_g=s_g,
        y_g=y_g,
        g_g=numbers[-1],
    )


def shifted(old: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """A table (m, m) one step on: without the oldest pair, with a new last column and row (m,)."""
    # (m - 1, m): the rows that stay, each with its product with the newest
    above = torch.cat([old[1:, 1:], column[:-1, None]], dim=1)
    return torch.cat([above, row[None, :]])


def two_loops(products: Products, scale: Tensor) -> Coefficients:
    """The two-loop recursion (Nocedal and Wright, 2006, Algorithm 7.4), on numbers.

    The algorithm's vectors q and r stay combinations of g, s and y:

        q = g - sum(alpha[i] * y_i)
        r = scale * q + sum(of_s[i] * s_i)

    Args:
        products: of a history of m pairs, oldest first.
        scale: 0-d: the recursion's first matrix is this number times the identity.
    """
    s_y, y_y, s_g, y_g, _ = products
    # Loops of m steps on small tables: nothing of a leaf's size
    m = len(s_g)
    curvature = s_y.diagonal()  # (m,): s_i . y_i
    # A pair without curvature has no part: its rho is 0
    rho = torch.where(curvature == 0, torch.zeros_like(curvature), 1 / curvature)
    # at[i] is 1 at i: adding a multiple of it sets one element of a new tensor, not of the old one
    at = identity(m, rho.dtype, rho.device)
    # First loop, from the newest pair to the oldest; q's products come from the tables
    alpha = torch.zeros_like(rho)
    for i in reversed(range(m)):
        s_q = s_g[i] - s_y[i] @ alpha  # 0-d: s_i . q
        alpha = alpha + at[i] * (rho[i] * s_q)
    # Second loop, from the oldest pair to the newest
    of_s = torch.zeros_like(rho)
    for i in range(m):
        y_q = y_g[i] - y_y[i] @ alpha  # 0-d: y_i . q
        # y_i . r as a sum: that of scale * q, and that of the steps added so far
        beta = rho[i] * (scale * y_q + s_y[:, i] @ of_s)
        of_s = of_s + at[i] * (alpha[i] - beta)
    return Coefficients(scale, of_s, -scale * alpha)


@named
def scale_by_lbfgs(memory_size: int = 10, scale_init_precond: bool = True) -> Transform:
    """Multiply the gradient g by L-BFGS's estimate H of the inverse Hessian, over the whole tree.

        s = p - p before, y = g - g before    (the last memory_size pairs)
        update = H g, by the two-loop recursion

    Source: Nocedal and Wright, 2006 (Numerical Optimization), Algorithms 7.4 and 7.5;
    optax.scale_by_lbfgs, with its first scale. Pairs without curvature (s . y = 0) don't count.
    Line search is yours: updates are the direction.

    Needs: statistics, one all-reduce of 5 memory_size + 1 scalars in all. State:
    2 (memory_size + 1) tensors like params, two small tables and a step count.

    Args:
        memory_size: the number of pairs that are remembered.
        scale_init_precond: begin the recursion from `s . y / y . y` of the newest pair, in the
            first step from `min(1, 1 / norm(g))`; else from 1.
    """
    if memory_size < 1:
        raise ValueError(f"memory_size must be at least 1, got {memory_size}")

    def init(params: Tree) -> ScaleByLBFGSState:
        # Zeros are pairs without curvature, which the recursion leaves out
        def history() -> tuple[Tree, ...]:
            return tuple(tree_zeros_like(params) for _ in range(memory_size))

        # Tables lie where `across` answers, so that no step copies them
        table = torch.zeros(memory_size, memory_size, dtype=torch.float64, device=device_of(params))
        return ScaleByLBFGSState(
            count=step_count(),
            params=tree_zeros_like(params),
            updates=tree_zeros_like(params),
            diff_params=history(),
            diff_updates=history(),
            s_y=table,
            y_y=table.clone(),
        )

    def init_scale(products: Products, first: Tensor) -> Tensor:
        """The `scale` (0-d) of `two_loops`."""
        s_y, y_y = products.s_y[-1, -1], products.y_y[-1, -1]
        # The identity itself
        if not scale_init_precond:
            return torch.ones_like(s_y)
        # The newest pair's estimate of the inverse curvature
        later = torch.where(y_y > 0, s_y / y_y, torch.ones_like(y_y))
        return pick(first, products.g_g.rsqrt().clamp(max=1), later)

    def update(
        updates: Tree, state: ScaleByLBFGSState, params: Tree, across: Across
    ) -> tuple[Tree, ScaleByLBFGSState]:
        first = state.count == 0  # 0-d bool: there is no step before to differ from

        def change(new: Tensor, old: Tensor) -> Tensor:
            return pick(first, torch.zeros_like(new), new - old)

        # The oldest pair goes, the newest comes last
        s = (*state.diff_params[1:], tree_map(change, params, state.params))
        y = (*state.diff_updates[1:], tree_map(change, updates, state.updates))
        # The one collective of a step
        products = inner_products(across, state, s, y, updates)
        of_g, of_s, of_y = two_loops(products, init_scale(products, first))

        def combine(g: Tensor, *history: Tensor) -> Tensor:
            direction = g * of_g
            # One by one: a stack of all would take 2 memory_size + 1 times the leaf's room
            for one, factor in zip(history, (*of_s, *of_y), strict=True):
                direction = direction + one * factor
            return direction

        directions = elementwise(combine, updates, *s, *y)
        return directions, ScaleByLBFGSState(
            count=state.count + 1,
            # Copies: a step may write over params and gradients where they lie
            params=tree_map(torch.clone, params),
            updates=tree_map(torch.clone, updates),
            diff_params=s,
            diff_updates=y,
            s_y=products.s_y,
            y_y=products.y_y,
        )

    return real_only(with_statistics(init, update))


@named
def lbfgs(
    learning_rate: NumberOrSchedule = 1.0, memory_size: int = 10, scale_init_precond: bool = True
) -> Transform:
    """L-BFGS with a step size of your own (g gradient).

        update = -learning_rate * scale_by_lbfgs(g)

    Source: Nocedal and Wright, 2006, Algorithms 7.4 and 7.5; optax.lbfgs without its line search.

    Needs: statistics, one all-reduce of 5 memory_size + 1 scalars in all. State:
    2 (memory_size + 1) tensors like params.

    Args:
        learning_rate: the step's length over the direction's; a number or a schedule.
        memory_size: the number of pairs that are remembered. Others: see `scale_by_lbfgs`.
    """
    return chain(
        scale_by_lbfgs(memory_size, scale_init_precond),
        scale_by_learning_rate(learning_rate),
    )
