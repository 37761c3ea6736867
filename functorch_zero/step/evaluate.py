"""The evaluation step for one process: no gradients, on the params or on other leaves of the
state, such as averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from ..errors import StructureError
from ..model.casting import CastParams
from ..model.untouched import Untouched, is_looked_at
from ..tree import PyTree, merge, same_structure
from .loss import Aux, Metrics, as_metric, check_has_values, check_weight, if_weighty
from .rng import replayed
from .state import State
from .train import optimizer_view


@dataclass(frozen=True)
class EvalStep:
    """`step(state, batch) -> metrics` for one process, without gradients. Made by `eval_step`."""

    fn: Callable[[Any, Any, Any], Any]  # (params, buffers, batch) -> metrics or Aux
    # (opt_state, trained leaves) -> the leaves to evaluate on; None: the params
    params: Callable[[Any, PyTree[Tensor]], PyTree[Tensor]] | None = None

    @torch.no_grad()
    def __call__(self, state: State, batch: Any) -> Metrics:
        """Metrics of a whole batch, 0-d; the state stays as it is."""
        if state.sharding is not None:
            raise StructureError(
                "an unsharded eval step was given a sharded state. Remedy: `fz.shard(eval_step, "
                "...)`"
            )
        # The state's own leaves: nothing here writes to them
        params = state.params
        if self.params is not None:
            trained_params, _ = optimizer_view(params)
            # Frozen leaves stay the state's own
            params = merge(self.chosen(state.opt_state, trained_params), params)
        leaves = optree.tree_leaves(params)
        # Data 0's random numbers, as the first rank's are
        with replayed(state.seed, state.step, 0, leaves[0].device):
            look = is_looked_at(int(state.step))
            untouched = Untouched(leaves, look=look)  # they are the state's own
            cast = CastParams(params, look=look)
            given, weight = call_eval(self.fn, cast.params, state.buffers, batch)
            cast.finish()
            untouched.check(params)
        # A weightless batch has metrics 0, as in training
        metrics = {}
        for name, value in given.items():
            metrics[name] = if_weighty(as_metric(value), weight)
        return metrics

    def chosen(self, opt_state: Any, params: PyTree[Tensor]) -> PyTree[Tensor]:
        """The trained leaves that `self.params` chooses to evaluate on, in the form of those given:
        whole, or this rank's pieces."""
        assert self.params is not None
        found = self.params(opt_state, params)
        # A tree of another structure would be evaluated with wrong leaves
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
        fn: the function to evaluate.
        params: leaves to evaluate it on instead of the params: `(opt_state, params) -> params`, of
            the trained leaves (None elsewhere), such as `optim.ema_params`. Sharded, it sees and
            gives 1-D pieces at every level; at level 0 a piece is all of its leaf. Levels 1 and 2
            gather them, one all-gather per trained bucket. With `state_axes="both"` there is one
            more along the replicate axis, at level 3 too.
    """
    return EvalStep(fn, params)


def call_eval(
    fn: Any, params: Any, buffers: Any, batch: Any
) -> tuple[Mapping[str, Any], Tensor | float | None]:
    """Call a user's evaluation and check its results: metrics and weight."""
    result = fn(params, buffers, batch)
    # A plain mapping is metrics without a weight
    if isinstance(result, Aux):
        check_weight(result.weight)
        check_has_values(result.metrics, params, None)
        return result.metrics, result.weight
    if not isinstance(result, Mapping):
        got = type(result).__name__
        raise TypeError(
            f"an eval function returns metrics by name, or fz.Aux(metrics=...); got {got}"
        )
    check_has_values(result, params, None)
    return result, None
