"""What a sharded step derives once from a layout, and the optimizer's update with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .groups import labelled
from .layout import Layout
from .optim.base import split_fused
from .options import Options
from .sharded import Sharded
from .state_plan import StatePlan, plan_state
from .step import TrainStep
from .tree import PyTree, same_structure


class Prepared:
    """What a sharded step derives once from a layout."""

    def __init__(self, step: TrainStep, layout: Layout, options: Options):
        group = options.axes.optimizer
        self.layout = layout
        self.across = Sharded(layout, labelled(group, "optimizer/update"), donate=options.donate)
        self.plan: StatePlan = plan_state(step.optimizer.init, layout, layout.trainable, group.size)
        self._optimizer = step.optimizer
        self._split = None if "update_norm" in step.metrics else split_fused(step.optimizer)

    def update(self, grads: PyTree[Tensor], state: Any, params: PyTree[Tensor]) -> tuple[PyTree[Tensor] | None, Any]:
        """The updates and the optimizer's next state; no updates where a fused kernel has applied them already."""
        if self._split is not None and self.across.fuses(self._split[1], params):
            head, tail = self._split
            if head is None:
                return None, self.across.fused(tail, grads, state, params)
            grads, first = head.update(grads, state[:-1], params, self.across)
            return None, (*first, self.across.fused(tail, grads, state[-1], params))
        updates, state = self._optimizer.update(grads, state, params, self.across)
        state = self.across.keep(state, params)
        same_structure(params, updates, what="the optimizer's updates")
        return updates, state
