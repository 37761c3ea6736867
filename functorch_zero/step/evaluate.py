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
from ..model.lazy_param import check_unchanged, versions_of
from ..tree import PyTree, merge, same_structure
from .loss import Aux, Metrics, as_metric, check_weight, if_weighty
from .rng import replayed
from .state import State, trained
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
        params = state.params
        if self.params is not None:
            trained_params, _ = optimizer_view(params, trained(state))
            # Frozen leaves stay the state's own
            params = merge(self.chosen(state.opt_state, trained_params), params)
        leaves = optree.tree_leaves(params)
        with replayed(state.seed, state.step, 0, leaves[0].device):
            versions = versions_of(leaves)
            cast = CastParams(params)
            given, weight = call_eval(self.fn, cast.params, state.buffers, batch)
            cast.finish()
            check_unchanged(leaves, versions)  # they are the state's own
        metrics = {}
        for name, value in given.items():
            metrics[name] = if_weighty(as_metric(value), weight)
        return metrics

    def chosen(self, opt_state: Any, params: PyTree[Tensor]) -> PyTree[Tensor]:
        """The trained leaves that `self.params` chooses to evaluate on, in the form of those given:
        whole, or this rank's pieces."""
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
        fn: the function to evaluate.
        params: leaves to evaluate it on instead of the params: `(opt_state, params) -> params`, of
            the trained leaves (None elsewhere), such as `optim.ema_params`. At levels 1 to 3 it
            sees and gives this rank's pieces; levels 1 and 2 gather them, one all-gather per
            bucket.
    """
    return EvalStep(fn, params)


def call_eval(
    fn: Any, params: Any, buffers: Any, batch: Any
) -> tuple[Mapping[str, Any], Tensor | float | None]:
    """Call a user's evaluation and check its results: metrics and weight."""
    result = fn(params, buffers, batch)
    if isinstance(result, Aux):
        check_weight(result.weight)
        return result.metrics, result.weight
    if not isinstance(result, Mapping):
        got = type(result).__name__
        raise TypeError(
            f"an eval function returns metrics by name, or fz.Aux(metrics=...); got {got}"
        )
    return result, None
