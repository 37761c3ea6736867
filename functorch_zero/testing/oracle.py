"""The unsharded run that sharded ones are held to: on whole batches, or on each rank's part by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..step.loss import Metrics, Outcome, as_metric
from ..step.state import TrainState
from ..step.train import TrainStep
from ..tree import PyTree

JITTER = 16  # last places of a leaf's largest gradient, about what sums in another order differ by


class Step(NamedTuple):
    """What one step led to."""

    state: TrainState
    buffers: list[PyTree[Tensor]]  # by rank; one where all have the same
    metrics: Metrics


class Run(NamedTuple):
    """A run from the first state on."""

    start: TrainState
    steps: list[Step]
    weighted: bool = True  # whether the loss says how much a batch counts

    @property
    def states(self) -> list[TrainState]:
        """The first state, and the one after each step."""
        return [self.start, *(step.state for step in self.steps)]


class Start(NamedTuple):
    """What a run begins with."""

    params: PyTree[Tensor]
    buffers: PyTree[Tensor] | None
    seed: int | None


def split(batch: Any, num_ranks: int) -> list[Any]:
    """Each rank's part of a batch: consecutive rows, as equal in number as possible."""
    leaves, treedef = optree.tree_flatten(batch)
    rows = {x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()}
    if rows and min(rows) < num_ranks:
        raise ValueError(f"a batch of {min(rows)} can't be split over {num_ranks} ranks. Remedy: pass larger batches")
    cut = [x.tensor_split(num_ranks) if isinstance(x, Tensor) and x.dim() else [x] * num_ranks for x in leaves]
    return [treedef.unflatten([parts[rank] for parts in cut]) for rank in range(num_ranks)]


def run_whole(step: TrainStep, start: Start, batches: Sequence[Any]) -> Run:
    """The unsharded step as it is, on whole batches."""
    first = state = step.init(start.params, start.buffers, seed=start.seed)
    steps = []
    for batch in batches:
        state, metrics = step(state, batch)
        steps.append(Step(state, [state.buffers], metrics))
    weighted = not batches or step.loss_and_grads(first, batches[0])[1].weight is not None
    return Run(first, steps, weighted)


def run_in_parts(
    step: TrainStep, start: Start, batches: Sequence[list[Any]], *, rule: str = "mean", jitter: int | None = None
) -> Run:
    """The unsharded step with each batch in parts: their gradients and metrics averaged, buffers by `shard`'s rule.

    `jitter` seeds changes of the gradients in their last places.
    """
    first = state = step.init(start.params, start.buffers, seed=start.seed)
    held = [state.buffers] * (len(batches[0]) if batches else 1)
    g = None if jitter is None else torch.Generator().manual_seed(jitter)
    steps = []
    for parts in batches:
        results = []
        for rank, (own, part) in enumerate(zip(held, parts, strict=True)):
            results.append(step.loss_and_grads(state._replace(buffers=own), part, rank))
        outcomes = [outcome for _, outcome in results]
        shares = _shares(outcomes)
        grads = tree_map(lambda *gs, s=shares: _mean(gs, s), *(grads for grads, _ in results))
        held, before = _combine_buffers(rule, [outcome.buffers for outcome in outcomes], shares), held
        metrics, old = _average_metrics(outcomes, shares), state
        grads = grads if g is None else _jittered(grads, g)
        state, measured = step.update_measured(old, grads, held[0], metrics["loss"])
        held = before if _skipped(old, state) else held
        steps.append(Step(state, held, metrics | measured))
    return Run(first, steps)


def _skipped(old: TrainState, new: TrainState) -> bool:
    return old.finite is not None and new.finite is not None and bool(new.finite.skipped > old.finite.skipped)


def _shares(outcomes: Sequence[Outcome]) -> list[float]:
    weights = [1.0 if outcome.weight is None else float(outcome.weight) for outcome in outcomes]
    return [weight / (sum(weights) or 1.0) for weight in weights]


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    first, *rest = [value * share for value, share in zip(values, shares, strict=True)]
    for value in rest:
        first = first + value
    return first


def _average_metrics(outcomes: Sequence[Outcome], shares: Sequence[float]) -> Metrics:
    seen = [{"loss": as_metric(o.loss), **{k: as_metric(v) for k, v in o.metrics.items()}} for o in outcomes]
    return {name: _mean([metrics[name] for metrics in seen], shares) for name in seen[0]}


def _combine_buffers(rule: str, held: list[PyTree[Tensor]], shares: Sequence[float]) -> list[PyTree[Tensor]]:
    """What each rank holds after a step, from what each rank's loss made; what weighs nothing isn't averaged."""

    def mean(*buffers: Tensor) -> Tensor:
        counting = [b for b, share in zip(buffers, shares, strict=True) if share] or [buffers[0]]
        if rule == "rank0":
            return buffers[0]
        if not counting[0].is_floating_point() or all(torch.equal(counting[0], b) for b in buffers):
            return counting[0]
        return torch.stack(counting).mean(0)

    return held if rule == "local" else [tree_map(mean, *held)] * len(held)


def _jittered(grads: PyTree[Tensor], g: torch.Generator) -> PyTree[Tensor]:
    leaves = optree.tree_leaves(grads)
    coarsest = max((torch.finfo(x.dtype).eps for x in leaves), default=0.0)

    def jitter(x: Tensor) -> Tensor:
        if not x.numel():
            return x
        noise = 2 * torch.rand(x.shape, generator=g, dtype=torch.float64) - 1
        return x + (JITTER * coarsest * x.abs().max() * noise.to(x.device)).to(x.dtype)

    return tree_map(jitter, grads)
