"""Each leaf's update, clipped or scaled by a norm of the leaf: what Adafactor is made of in optax.

optax's Adafactor is `chain(scale_by_factored_rms(), clip_by_block_rms(1.0),
scale_by_learning_rate(rate), scale_by_param_block_rms())`. A block is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable

from optree import tree_map
from torch import Tensor

from ..across import Across
from ..arithmetic import Tree, on_numbers
from ..base import EmptyState, Schedule, Transform, init_empty, value_of, with_statistics
from ..naming import named
from ..states import CountState, init_count
from ..transforms.norms import block_rms, times


@named
def clip_by_block_rms(threshold: float | Schedule) -> Transform:
    """Scale each leaf's update u down so that its root mean square is at most `threshold`.

        update = u / max(1, rms(u) / threshold)

    Source: Shazeer and Stern, 2018 (1804.04235), section 6; optax.clip_by_block_rms.

    Needs: statistics, one all-reduce of a scalar per leaf. State: a step count.

    Args:
        threshold: a number, or a schedule, which is given the number of steps before this one.
    """

    def update(
        updates: Tree, state: CountState, params: Tree, across: Across
    ) -> tuple[Tree, CountState]:
        limit = value_of(threshold, state.count)  # a number, or 0-d

        # (n,), from the root mean squares of n leaves, the same on every rank
        def factor(rms: Tensor) -> Tensor:
            excess: Tensor = (rms / limit).clamp(min=1)
            return 1 / excess

        # One question for all leaves; the division by their sizes asks nothing
        factors = on_numbers(factor, block_rms(across.norm(updates), across))
        return tree_map(times, updates, factors), CountState(state.count + 1)

    return with_statistics(init_count, update)


@named
def scale_by_param_block_norm(min_scale: float = 1e-3) -> Transform:
    """Scale each leaf's update u by the norm of its params p.

        update = u * max(norm(p), min_scale)

    Source: optax.scale_by_param_block_norm.

    Needs: statistics, one all-reduce of a scalar per leaf. State: none.

    Args:
        min_scale: the least factor, so that zeros can move.
    """
    return _times_sizes(lambda params, across: across.norm(params), min_scale)


@named
def scale_by_param_block_rms(min_scale: float = 1e-3) -> Transform:
    """Scale each leaf's update u by the root mean square of its params p.

        update = u * max(rms(p), min_scale)

    Source: Shazeer and Stern, 2018 (1804.04235), section 8; optax.scale_by_param_block_rms.

    Needs: statistics, one all-reduce of a scalar per leaf. State: none.

    Args:
        min_scale: the least factor, so that zeros can move.
    """
    return _times_sizes(lambda params, across: block_rms(across.norm(params), across), min_scale)


def _times_sizes(sizes_of: Callable[[Tree, Across], Tree], least: float) -> Transform:
    """Each leaf's update times a size of its params, a number per leaf, at least this one."""

    def update(
        updates: Tree, state: EmptyState, params: Tree, across: Across
    ) -> tuple[Tree, EmptyState]:
        sizes = on_numbers(lambda x: x.clamp(min=least), sizes_of(params, across))
        return tree_map(times, updates, sizes), state

    return with_statistics(init_empty, update)
