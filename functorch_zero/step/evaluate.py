"""The evaluation step for one process: no gradients, on the params or on something else that the
state holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..errors import StructureError
from ..model.casting import CastParams
from ..tree import PyTree, merge, same_structure
from .loss import Aux, Metrics, as_metric, if_weighty
from .rng import replayed
from .state import State
from .train import optimizer_view


@dataclass(frozen=True)
class EvalStep:
    """`step(state, batch) -> metrics` for one process, without gradients. Made by `eval_step`."""

    fn: Callable[[Any, Any, Any], Any]
    params: Callable[[Any, PyTree[Tensor]], PyTree[Tensor]] | None = None

    @torch.no_grad()
    def __call__(self, state: State, batch: Any) -> Metrics:
        if state.sharding is not None:
            raise StructureError(
                "an unsharded eval step was given a sharded state. Remedy: `fz.shard(eval_step, "
                "...)`"
            )
        params = state.params
        if self.params is not None:
            params = merge(self.chosen(state.opt_state, optimizer_view(params)[0]), params)
        with replayed(state.seed, state.step, 0, optree.tree_leaves(params)[0].device):
            metrics, weight = call_eval(self.fn, CastParams(params).params, state.buffers, batch)
        return {k: if_weighty(as_metric(v), weight) for k, v in metrics.items()}

    def chosen(self, opt_state: Any, params: PyTree[Tensor]) -> PyTree[Tensor]:
        """The leaves that `self.params` chooses, from an optimizer's state and the trained leaves;
        all whole, or all in pieces."""
        assert self.params is not None
        found = self.params(opt_state, params)
        same_structure(params, found, what="what eval_step(params=...) gave")
        return found


def eval_step(
    fn: Callable[[Any, Any, Any], Any],
    *,
    params: Callable[[Any, PyTree[Tensor]], PyTree[Tensor]] | None = None,
) -> EvalStep:
    """Make an evaluation step: `fn(params, buffers, batch)` returns metrics by name, or
    `Aux(metrics=…, weight=…)`.

    Sharded, metrics are averaged over ranks as a train step's are.

    Args:
        fn: what to evaluate.
        params: what to evaluate it on instead of the params: `(opt_state, params) -> params`, of
            the trained leaves (None elsewhere), such as `optim.ema_params`. At levels 1 to 3 it
            sees and gives this rank's pieces; levels 1 and 2 gather them, one all-gather a bucket.
    """
    return EvalStep(fn, params)


def call_eval(
    fn: Any, params: Any, buffers: Any, batch: Any
) -> tuple[Mapping[str, Any], Tensor | float | None]:
    """Call a user's evaluation and check what it returns: metrics and weight."""
    result = fn(params, buffers, batch)
    if isinstance(result, Aux):
        return result.metrics, result.weight
    if not isinstance(result, Mapping):
        got = type(result).__name__
        raise TypeError(
            f"an eval function returns metrics by name, or fz.Aux(metrics=...); got {got}"
        )
    return result, None
