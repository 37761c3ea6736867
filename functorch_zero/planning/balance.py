"""The owners of whole leaves, found as the optimizer's `init` finds them."""

from __future__ import annotations

from ..layout.layout import Layout
from ..optim.base import Needs, Transform
from ..sharded_optim.state_plan import EVERYONE, make_planner
from .records import Balance, Owned


def balance_of(optimizer: Transform, layout: Layout) -> Balance | None:
    """How evenly whole leaves are spread over owners; None where the optimizer needs none."""
    if optimizer.needs < Needs.WHOLE_LEAF:
        return None
    planner = make_planner(layout, layout.trainable, layout.num_ranks)
    optimizer.init(planner.placeholders([leaf.dtype for leaf in layout.leaves]), planner)
    owned = [Owned(layout.leaves[n].path, owner, cost) for n, owner, cost in planner.owned if owner != EVERYONE]
    return Balance(tuple(owned), layout.num_ranks) if owned else None
