"""What a sharded step derives once from a layout, and the optimizer's update with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..groups import labelled
from ..layout.flat_buffers import Pieces, Recall, flats_of_leaves
from ..layout.layout import Layout
from ..optim.base import split_fused
from ..sharded_optim.across import Sharded
from ..sharded_optim.state_plan import StatePlan, plan_state
from ..step.train import TrainStep
from ..tree import PyTree, same_structure
from .options import Options


class PreparedUpdate:
    """What a sharded step derives once from a layout."""

    def __init__(self, step: TrainStep, layout: Layout, options: Options):
        group = options.axes.optimizer
        self.layout = layout
        self.across = Sharded(layout, labelled(group, "optimizer/update"), donate=options.donate)
        self.plan: StatePlan = plan_state(step.optimizer.init, layout, layout.trainable, group.size)
        self.flats = Recall(lambda leaves: flats_of_leaves(leaves, layout, options.axes.number))
        self._optimizer = step.optimizer
        self._split = None if "update_norm" in step.metrics else split_fused(step.optimizer)

    def update(
        self, grads: Pieces, state: Any, params: Pieces
    ) -> tuple[PyTree[Tensor] | None, Any]:
        """The updates and the optimizer's next state; no updates where a fused kernel has applied
        them already."""
        if self._split is not None and self.across.fuses(self._split[1], params.flats):
            head, tail = self._split
            if head is None:
                return None, self.across.fused(tail, grads.flats, state, params.flats)
            updates, first = head.update(grads.tree, state[:-1], params.tree, self.across)
            return None, (
                *first,
                self.across.fused(tail, self.across.flats(updates), state[-1], params.flats),
            )
        updates, state = self._optimizer.update(grads.tree, state, params.tree, self.across)
        state = self.across.keep(state, params.tree)
        same_structure(params.tree, updates, what="the optimizer's updates")
        return updates, state
