"""What a sharded step derives once from a layout, and the optimizer's update with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..groups import labelled
from ..layout.layout import Layout
from ..layout.sharded_tree import ShardedTree
from ..optim.base import split_fused
from ..sharded_optim.across import Sharded
from ..sharded_optim.state_plan import StatePlan, plan_state
from ..step.train import TrainStep
from ..tree import PyTree, same_structure
from .options import Options
from .parts import ReductionParts
from .storage import fetched, stored


class PreparedUpdate:
    """What a sharded step derives once from a layout."""

    def __init__(self, step: TrainStep, layout: Layout, options: Options):
        group = options.axes.optimizer
        self.layout = layout
        self.parts = ReductionParts(options.reduction, layout, options.axes)
        self.across = Sharded(layout, labelled(group, "optimizer/update"), donate=options.donate)
        self.plan: StatePlan = plan_state(step.optimizer.init, layout, layout.trainable, group.size)
        self._optimizer, self._storage = step.optimizer, options.state_storage
        self._split = None if "update_norm" in step.metrics else split_fused(step.optimizer)

    def update(
        self, grads: ShardedTree, state: Any, params: ShardedTree
    ) -> tuple[PyTree[Tensor] | None, Any]:
        """The updates and the optimizer's next state; no updates where a fused kernel has applied
        them already."""
        flats = _trained(params)
        if self._split is not None and self.across.fuses(self._split[1], flats):
            head, tail = self._split
            if head is None:
                return None, self.across.fused(tail, _trained(grads), state, flats)
            updates, first = head.update(grads.tree, state[:-1], params.tree, self.across)
            return None, (
                *first,
                self.across.fused(tail, self.across.flats(updates), state[-1], flats),
            )
        updates, state = self._optimizer.update(grads.tree, state, params.tree, self.across)
        state = self.across.keep(state, params.tree)
        same_structure(params.tree, updates, what="the optimizer's updates")
        return updates, state

    def fetched(self, state: Any) -> Any:
        """The optimizer's state, beside the params."""
        return fetched(self._storage, state)

    def stored(self, state: Any, old: Any = None) -> Any:
        """The optimizer's state, where it lies between steps: in the storage of `old`, if given."""
        return stored(self._storage, state, old)


def _trained(pieces: ShardedTree) -> list[Tensor]:
    """The flats (piece,) of the trained buckets."""
    return [flat for flat in pieces.flats() if flat is not None]
