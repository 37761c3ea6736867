"""Each leaf's update, clipped or scaled by a norm of the leaf."""

from __future__ import annotations

from optree import tree_map

from ..across import Across
from ..arithmetic import Tree
from ..base import EmptyState, Schedule, Transform, init_empty, value_of, with_statistics
from ..naming import named
from ..states import CountState, init_count
from ..transforms.norms import block_rms, times


@named
def clip_by_block_rms(threshold: float | Schedule) -> Transform:
    """Scale each leaf's update down so that its root mean square is at most `threshold`.

    Source: Shazeer and Stern, 2018 (1804.04235), section 6; optax.clip_by_block_rms.

    State: a step count. Sharded: one all-reduce of a scalar per leaf.
    """

    def update(
        updates: Tree, state: CountState, params: Tree, across: Across
    ) -> tuple[Tree, CountState]:
        limit = value_of(threshold, state.count)
        rms = block_rms(across.norm(updates), across)
        clipped = tree_map(lambda u, r: times(u, 1 / (r / limit).clamp(min=1)), updates, rms)
        return clipped, CountState(state.count + 1)

    return with_statistics(init_count, update)


@named
def scale_by_param_block_norm(min_scale: float = 1e-3) -> Transform:
    """Scale each leaf's update by the norm of its params, at least `min_scale`. As
    optax.scale_by_param_block_norm.

    State: none. Sharded: one all-reduce of a scalar per leaf.
    """

    def update(
        updates: Tree, state: EmptyState, params: Tree, across: Across
    ) -> tuple[Tree, EmptyState]:
        norms = across.norm(params)
        return tree_map(lambda u, norm: times(u, norm.clamp(min=min_scale)), updates, norms), state

    return with_statistics(init_empty, update)


@named
def scale_by_param_block_rms(min_scale: float = 1e-3) -> Transform:
    """Scale each leaf's update by the root mean square of its params, at least `min_scale`.

    Source: Shazeer and Stern, 2018 (1804.04235), section 8; optax.scale_by_param_block_rms.

    State: none. Sharded: one all-reduce of a scalar per leaf.
    """

    def update(
        updates: Tree, state: EmptyState, params: Tree, across: Across
    ) -> tuple[Tree, EmptyState]:
        rms = block_rms(across.norm(params), across)
        return tree_map(lambda u, r: times(u, r.clamp(min=min_scale)), updates, rms), state

    return with_statistics(init_empty, update)
