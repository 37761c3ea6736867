"""The step for one process: pure, and the oracle that every sharded step is held to.

A step takes a `State` and returns the next one. In a sharded state, `params` is a `ShardedTree`
(whole leaves, or at level 3 pieces), state leaves that follow a param are this rank's pieces, and
`sharding` says how they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError, explain
from ..model.casting import CastParams
from ..model.deferred_init import DeferredInit
from ..model.lazy_param import check_unchanged, versions_of
from ..optim.across import Across
from ..optim.base import Transform
from ..optim.local import Local
from ..tree import PyTree, mask_of, merge, named_leaves, paths, same_structure, select
from .loss import (
    LossFn,
    Metrics,
    Outcome,
    as_metric,
    call_loss,
    if_weighty,
    independent,
    joined,
    micro_batches,
    weighted_mean,
)
from .metrics import UpdateMetrics, check_names, check_reported
from .nonfinite import LossScale, NonFinite, NonFinitePolicy, all_finite, not_finite, refusal
from .rng import replayed
from .state import State, TrainValue, check_state

Trainable = PyTree[bool] | Callable[[str, Tensor], bool] | None


@dataclass(frozen=True)
class TrainStep:
    """`step(state, batch) -> (state, metrics)` for one process. Made by `train_step`."""

    loss_fn: LossFn
    optimizer: Transform
    trainable: Trainable = None
    accumulate: int = 1
    metrics: tuple[str, ...] = ()
    finite: NonFinitePolicy = field(default_factory=NonFinitePolicy)

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}")

    def init(
        self,
        params: PyTree[Tensor],
        buffers: PyTree[Tensor] | None = None,
        *,
        seed: int | None = 0,
        values: DeferredInit | None = None,
    ) -> State:
        """The first state: copies of params and buffers, and the optimizer's state.

        Leaves that `trainable` says, or else those with `requires_grad`, are trained; the others
        are frozen. `values`, from `deferred_init`, gives those of leaves and buffers on the meta
        device.
        """
        if values is not None:
            params, buffers = values.fill(params), values.fill({} if buffers is None else buffers)
        params = mark_trainable(params, self.trainable)
        params = tree_map(lambda p: p.detach().clone().requires_grad_(p.requires_grad), params)
        opt_state = self.optimizer.init(*optimizer_view(params))
        check_reported(self.metrics, opt_state)
        buffers = tree_map(torch.clone, {} if buffers is None else buffers)
        return State(
            torch.zeros((), dtype=torch.int64),
            TrainValue(params, buffers, opt_state),
            None if seed is None else torch.tensor(seed),
            finite=self.finite.init(),
        )

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step on a whole batch; the state given stays valid."""
        check_state(state)
        if state.sharding is not None:
            raise StructureError(
                "an unsharded step was given a sharded state. Remedy: `sharded.unshard(state)` "
                "first"
            )
        grads, outcome = self.loss_and_grads(state, batch)
        metrics = {
            "loss": outcome.loss.detach(),
            **{k: as_metric(v) for k, v in outcome.metrics.items()},
        }
        state, measured = self.update_measured(state, grads, outcome.buffers, outcome.loss)
        return state, with_measured(metrics, measured)

    def loss_and_grads(
        self, state: State, batch: Any, rank: int = 0
    ) -> tuple[PyTree[Tensor], Outcome]:
        """The loss on `batch` as rank `rank` would draw its random numbers, and its gradients (None
        where frozen)."""
        taken = []
        for i, part in enumerate(micro_batches(batch, self.accumulate)):
            grads, outcome = self._on_micro_batch(state, part, rank, i)
            taken.append((grads, outcome))
            state = state.replace(buffers=outcome.buffers)
        if len(taken) == 1:
            return taken[0]
        outcomes = [outcome for _, outcome in taken]
        return tree_map(
            lambda *gs: weighted_mean(gs, outcomes), *(grads for grads, _ in taken)
        ), joined(outcomes)

    def _on_micro_batch(
        self, state: State, batch: Any, rank: int, i: int
    ) -> tuple[PyTree[Tensor], Outcome]:
        params = tree_map(lambda p: p.detach().requires_grad_(p.requires_grad), state.params)
        with (
            replayed(state.seed, state.step, rank, optree.tree_leaves(params)[0].device, i),
            torch.enable_grad(),
        ):
            versions, seen = versions_of(optree.tree_leaves(params)), CastParams(params)
            outcome = call_loss(self.loss_fn, seen.params, state.buffers, batch)
            seen.finish()
            check_unchanged(optree.tree_leaves(params), versions)
            leaves, treedef = optree.tree_flatten(select(params, trained(params)))
            scale = self.finite.scale(state.finite)
            seed = None if scale is None else outcome.loss.new_full((), scale)
            grads = torch.autograd.grad(outcome.loss, leaves, seed, allow_unused=True)
            if all(g is None for g in grads):
                raise independent()
        whole = [
            torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)
        ]
        whole = whole if scale is None else [g / scale for g in whole]
        whole = [if_weighty(g, outcome.weight) for g in whole]
        metrics = {
            name: if_weighty(as_metric(value), outcome.weight)
            for name, value in outcome.metrics.items()
        }
        loss = if_weighty(outcome.loss.detach(), outcome.weight)
        return treedef.unflatten(whole), outcome._replace(loss=loss, metrics=metrics)

    def update(self, state: State, grads: PyTree[Tensor], buffers: PyTree[Tensor]) -> State:
        """The next state, from gradients."""
        return self.update_measured(state, grads, buffers)[0]

    @torch.no_grad()
    def update_measured(
        self,
        state: State,
        grads: PyTree[Tensor],
        buffers: PyTree[Tensor],
        loss: Tensor | None = None,
    ) -> tuple[State, Metrics]:
        """The next state, from gradients, and the step's own metrics. A policy for what isn't
        finite sees the loss."""
        seen = [] if loss is None else [loss]
        fine = not self.finite.looks or all_finite([*optree.tree_leaves(grads), *seen])
        if not fine and self.finite.nonfinite == "raise":
            raise refusal(int(state.step), [(float(sum(seen)), not_finite(named_leaves(grads)))])
        params, across = optimizer_view(state.params)
        measures = UpdateMetrics(self.metrics, across)
        measures.see("grad_norm", lambda: grads)
        measures.see("param_norm", lambda: params)
        next_state = state.replace(
            step=state.step + 1, finite=self.finite.next(state.finite, fine=fine)
        )
        if fine:
            updates, opt_state = self.optimizer.update(grads, state.opt_state, params, across)
            same_structure(params, updates, what="the optimizer's updates")
            new = tree_map(lambda p, u: (p + u.to(p.dtype)).requires_grad_(), params, updates)
            next_state = next_state.replace(
                params=merge(new, state.params), buffers=buffers, opt_state=opt_state
            )
        else:
            updates = tree_map(torch.zeros_like, grads)
        measures.see("update_norm", lambda: updates)
        return next_state, with_measured(
            measures.metrics(next_state.opt_state), self.finite.metrics(next_state.finite)
        )


def train_step(
    loss_fn: LossFn,
    optimizer: Transform,
    *,
    trainable: Trainable = None,
    accumulate: int = 1,
    metrics: Sequence[str] = (),
    nonfinite: NonFinite | None = None,
    loss_scale: LossScale | None = None,
) -> TrainStep:
    """Make a training step for one process. `shard` turns it into the same step for N ranks.

    Args:
        loss_fn: `(params, buffers, batch) -> loss`, or `-> (loss, Aux(...))`; the loss is a 0-d
            tensor, the mean over the batch (or over what `Aux.weight` counts).
        optimizer: a transform, from `functorch_zero.optim` or of your own.
        trainable: which leaves are trained: a tree of bools or a function `(path, leaf) -> bool`.
            None: those with `requires_grad`, which `functionalize` takes over from the module.
        accumulate: into how many micro-batches a batch is cut, along dim 0 of its tensors. Their
            gradients and metrics are averaged by their weights (without weights each counts the
            same), and buffers go from one to the next, so that activations are a micro-batch's.
            Sharded, each rank cuts its own part of the batch: levels 0 and 1 reduce once a step, 2
            and 3 in every micro-batch.
        metrics: more metrics of each step, by name: "grad_norm", "update_norm" and "param_norm", of
            the trained leaves (sharded: one all-reduce of a number a leaf for all three together),
            and what the optimizer's state
            reports: "learning_rate", "clip_factor", "clip_norm", "skipped"; see
            `optim.state_metrics`.
        nonfinite: what to do when the loss or a gradient has a NaN or an infinity, the same on all
            ranks: "raise" `NonFiniteError`, "skip" the step (params, buffers and optimizer state
            stay; the metric `skipped` counts), or "pass", which doesn't look. None: "skip" with a
            loss scale, else "pass".
        loss_scale: multiply the loss before backward, for float16; the scale is part of the state,
            and a metric.

    >>> from functorch_zero import optim
    >>> def loss_fn(params, buffers, batch):
    ...     return ((params["w"] - batch) ** 2).mean()
    >>> step = train_step(loss_fn, optim.adamw(0.1))
    >>> state = step.init({"w": torch.zeros(3, requires_grad=True)})
    >>> state, metrics = step(state, torch.ones(3))
    >>> state.params["w"]
    tensor([0.1000, 0.1000, 0.1000], requires_grad=True)
    """
    if not isinstance(optimizer, Transform):
        raise TypeError(
            f"optimizer must be an optim.Transform, got {type(optimizer).__name__}. "
            "Remedy: use functorch_zero.optim, or wrap your own with optim.pointwise, "
            "with_statistics, with_whole_leaves or with_whole_tree, which declare what it must "
            "see of a tensor"
        )
    nonfinite = nonfinite or ("pass" if loss_scale is None else "skip")
    names, policy = check_names(metrics), NonFinitePolicy(nonfinite, loss_scale)
    return TrainStep(loss_fn, optimizer, trainable, accumulate, names, policy)


def with_measured(metrics: Metrics, measured: Metrics) -> Metrics:
    """A loss's metrics and those of the update; no name twice."""
    twice = sorted(set(metrics) & set(measured))
    if twice:
        raise StructureError(
            f"two of the loss, train_step(metrics=...) and the step give metrics named {twice}. "
            "Remedy: rename one"
        )
    return metrics | measured


def mark_trainable(params: PyTree[Tensor], trainable: Trainable) -> PyTree[Tensor]:
    """The same leaves, with `requires_grad` saying which are trained."""
    check_tensors(params)
    if trainable is not None:
        mask = mask_of(params, trainable)
        _check_floating(params, mask)
        params = tree_map(lambda p, train: p.detach().requires_grad_(train), params, mask)
    if not any(p.requires_grad for p in optree.tree_leaves(params)):
        raise StructureError(
            "no leaf of params is trained: none has requires_grad. "
            "Remedy: pass trainable=lambda path, leaf: True to train_step, or call "
            "requires_grad_() on the leaves"
        )
    return params


def check_tensors(params: PyTree[Any]) -> None:
    """Raise, naming the first leaf that is no tensor."""
    for i, leaf in enumerate(optree.tree_leaves(params)):
        if not isinstance(leaf, Tensor):
            raise StructureError(
                explain("params must be tensors", path=paths(params)[i], got=type(leaf).__name__)
            )


def _check_floating(params: PyTree[Tensor], mask: PyTree[bool]) -> None:
    for path, leaf in named_leaves(select(params, mask)).items():
        if not (leaf.is_floating_point() or leaf.is_complex()):
            remedy = "leave it out of `trainable`, or convert it"
            raise StructureError(
                explain(
                    "an integer leaf can't be trained", path=path, got=leaf.dtype, remedy=remedy
                )
            )


def trained(params: PyTree[Tensor]) -> PyTree[bool]:
    """Which leaves are trained."""
    return tree_map(lambda p: p.requires_grad, params)


def optimizer_view(params: PyTree[Tensor]) -> tuple[PyTree[Tensor], Across]:
    """The trained leaves, detached, and the questions about them."""
    view = select(tree_map(torch.detach, params), trained(params))
    return view, Local(view)
