"""The step for one process: pure, and the oracle that every sharded step is held to.

A step takes a `State` and returns the next one. In a sharded state, `params` is a `ShardedTree`:
whole leaves, or at level 3 pieces. State leaves that follow a param are this rank's pieces.
`sharding` says how they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..model.deferred_init import DeferredInit
from ..model.untouched import is_looked_at
from ..optim.across import Across
from ..optim.apply_updates import check_no_complex_for_real
from ..optim.arguments import check_is_transform, check_takes
from ..optim.base import Transform
from ..optim.local import Local
from ..tree import (
    PyTree,
    check_tensors,
    merge,
    named_leaves,
    paths,
    same_structure,
    select,
)
from .gradient import Trees, mean_gradients
from .loss import LossFn, Metrics, Outcome, as_metric
from .metrics import UpdateMetrics, check_names, check_reported
from .micro_batches import check_accumulate
from .nonfinite import LossScale, NonFinite, NonFinitePolicy, all_finite, not_finite, refusal
from .refit import carried, check_no_parts, check_own_leaves
from .reminder import Reminder
from .rng import replayed
from .state import (
    State,
    Trained,
    TrainValue,
    check_leaves,
    check_not_on_meta,
    check_params,
    check_policies,
    check_whole_state,
    marked,
    trained,
)
from .trainable import Trainable, check_trained, mark_trainable


@dataclass(frozen=True)
class TrainStep:
    """`step(state, batch) -> (state, metrics)` for one process. Made by `train_step`."""

    loss_fn: LossFn
    optimizer: Transform
    trainable: Trainable = None
    accumulate: int = 1  # micro-batches per batch
    metrics: tuple[str, ...] = ()  # names of those wanted beside the loss's own
    policy: NonFinitePolicy = field(default_factory=NonFinitePolicy)
    reminder: Reminder = field(default_factory=Reminder, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_accumulate(self.accumulate)

    def init(
        self,
        params: PyTree[Tensor],
        buffers: PyTree[Tensor] | None = None,
        *,
        seed: int | None = 0,
        values: DeferredInit | None = None,
    ) -> State:
        """The first state: copies of params and buffers, and the optimizer's state.

        The trained leaves are those that `trainable` names, or else those with `requires_grad`; the
        others are frozen.

        Args:
            params: whole leaves.
            buffers: those that the loss is given. None: there are none.
            seed: of each step's random numbers. None: the global random state is used.
            values: from `deferred_init`: the values of leaves and buffers on the meta device.

        Raises:
            StructureError: params hold no tensors, or none that is trained.
            ValueError: the optimizer has no metric of a name that was asked for.
        """
        buffers = {} if buffers is None else buffers
        check_params(params)
        check_tensors(buffers, "buffers")
        # Before anything else looks at leaves: those on meta have no values to copy
        if values is not None:
            params = values.fill(params)
            buffers = values.fill(buffers)
        # From here on `requires_grad` says which leaves are trained, all through the package
        params = mark_trainable(params, self.trainable)
        # Copies, so that nobody who holds the tensors given can change the state
        params = tree_map(lambda p: p.detach().clone().requires_grad_(p.requires_grad), params)
        buffers = tree_map(lambda buffer: buffer.detach().clone(), buffers)
        # None in place of frozen leaves: the optimizer keeps no state for them
        trained_params, across = optimizer_view(params, _with_grad(params))
        opt_state = self.optimizer.init_whole(trained_params, across)
        check_reported(self.metrics, opt_state)
        value = TrainValue(params, buffers, opt_state, self.policy.init())
        return State.first(value, seed, trained=Trained.of(params))

    def refit(
        self,
        state: State,
        params: PyTree[Tensor] | None = None,
        buffers: PyTree[Tensor] | None = None,
    ) -> State:
        """Another step's state as one of this step, which trains other leaves or has more of them.

        Leaves of params, of buffers and of the optimizer's state keep their values where the state
        has a leaf of that path. All others begin as `init` makes them, from the params as they are
        now. Step number, seed and loss scale go on. The state given stays valid.

        Args:
            state: of a step with this step's optimizer.
            params: whole leaves, as for `init`; values count only where the state has no such leaf.
                None: the state's own.
            buffers: the same of buffers.

        Raises:
            StructureError: the optimizer's state is another one's, or a leaf has another shape or
                dtype than before. Or other leaves are trained, and the optimizer's state has a
                tensor of all of them together, or an `init` that can't run on the meta device.
        """
        check_whole_state(state)
        view, _ = optimizer_view(state.params, trained(state))
        self.optimizer.check_whole(state.opt_state, view, what="state.opt_state")
        check_no_parts(state.parts)
        # Detached leaves of the state still say whether they are trained
        params = marked(state) if params is None else carried(params, state.params, "params")
        if buffers is not None:
            buffers = carried(buffers, state.buffers, "buffers")
        fresh = self.init(params, state.buffers if buffers is None else buffers, seed=None)
        now, _ = optimizer_view(fresh.params, trained(fresh))
        check_own_leaves(self.optimizer, view, now)
        opt_state = carried(fresh.opt_state, state.opt_state, "the optimizer's state")
        finite = carried(fresh.finite, state.finite, "the policy's state")
        return fresh.replace(step=state.step, seed=state.seed, opt_state=opt_state, finite=finite)

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step on a whole batch; the state given stays valid."""
        check_whole_state(state)
        check_leaves(state.params)
        check_policies(state, state.params)
        check_not_on_meta(state.params, batch)
        if is_looked_at(int(state.step)):
            check_trained(self.trainable, state.params, trained(state))
        # The step in two halves: gradients of a loss, and an update by them
        grads, outcome = self.loss_and_grads(state, batch)
        metrics = {"loss": outcome.loss.detach()}
        for name, value in outcome.metrics.items():
            metrics[name] = as_metric(value)
        state, measured = self.update_measured(state, grads, outcome.buffers, outcome.loss)
        return state, merged_metrics(metrics, measured)

    def loss_and_grads(
        self, state: State, batch: Any, part: int = 0, *, round_sums: bool = False
    ) -> tuple[PyTree[Tensor], Outcome]:
        """The gradients (None where frozen) of the loss on `batch`, and its results.

        The oracle of a sharded step calls this once for each part of a batch: `batch` is then the
        `part`-th one, and random numbers are those of a rank that has it. `round_sums` is for ranks
        that add up gradients whole before a `Precision` rounds them.
        """
        # Autograd leaves of this call's own, on the state's storage: nothing is left on the state
        params = marked(state)
        device = optree.tree_leaves(params)[0].device

        def loss_fn(trees: Trees, buffers: PyTree[Tensor], batch: Any) -> Any:
            return self.loss_fn(trees[0], buffers, batch)

        def stream(micro: int) -> AbstractContextManager[None]:
            return replayed(state.seed, state.step, part, device, micro)

        return mean_gradients(
            loss_fn,
            (params, None),
            state.buffers,
            batch,
            count=self.accumulate,
            streams=stream,
            look=is_looked_at(int(state.step)),
            reminder=self.reminder,
            scale=self.policy.scale(state.finite),
            round_sums=round_sums,
        )

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
        """The next state, from gradients, and the step's own metrics.

        Args:
            state: the one before; it stays valid.
            grads: of the trained leaves, whole; None where frozen.
            buffers: the next ones, which are kept unless the step is skipped.
            loss: 0-d, for the policy about numbers that aren't finite; None: it sees gradients
                only.
        """
        # First of all: nothing is made of numbers that aren't finite
        fine = self._check_finite(state, grads, loss)
        params, across = optimizer_view(state.params, trained(state))
        self.optimizer.check_whole(state.opt_state, params, what="state.opt_state")
        measured = UpdateMetrics(self.metrics, across)
        measured.see("grad_norm", lambda: grads)
        measured.see("param_norm", lambda: params)

        # The counter and the scale go on also where the step is skipped
        finite = self.policy.next(state.finite, fine=fine)
        next_state = state.replace(step=state.step + 1, finite=finite)
        if fine:
            # Updates have the params' structure, None where frozen
            updates, opt_state = self.optimizer.update(grads, state.opt_state, params, across)
            same_structure(params, updates, what="the optimizer's updates")
            check_no_complex_for_real(
                optree.tree_leaves(updates),
                optree.tree_leaves(params),
                lambda n: paths(params)[n],
            )
            # Sums in new tensors: the state given stays valid
            new = tree_map(lambda p, u: (p + u.to(p.dtype)).requires_grad_(), params, updates)
            next_state = next_state.replace(
                params=merge(new, state.params), buffers=buffers, opt_state=opt_state
            )
        else:
            updates = tree_map(torch.zeros_like, grads)  # for its norm
        measured.see("update_norm", lambda: updates)

        # After the update: rates and factors are reported by the new state
        of_update = measured.metrics(next_state.opt_state)
        return next_state, merged_metrics(of_update, self.policy.metrics(finite))

    def _check_finite(self, state: State, grads: PyTree[Tensor], loss: Tensor | None) -> bool:
        """Whether the loss and all gradients are finite, or nobody wants to know.

        Raises:
            NonFiniteError: they are not, and the policy is "raise".
        """
        # "pass" never waits for the numbers
        if not self.policy.looks:
            return True
        tensors = optree.tree_leaves(grads)
        if loss is not None:
            tensors.append(loss)
        fine = all_finite(tensors)
        if not fine and self.policy.nonfinite == "raise":
            # 0.0: only gradients were at fault
            loss_value = 0.0 if loss is None else float(loss)
            found = not_finite(named_leaves(grads))
            raise refusal(f"step {int(state.step)}", [(loss_value, found)])
        return fine


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
        accumulate: the number of micro-batches that a batch is cut into, along dim 0 of its tensors
            and numpy arrays. Lists of other things are cut if they are as long; objects are
            refused. Memory for activations is one micro-batch's. Gradients and metrics are averaged
            by the micro-batches' weights (without weights each counts the same). Buffers go from
            one to the next. Sharded, each rank cuts its own part of the batch: levels 0 and 1
            reduce gradients once per step. Levels 2 and 3 do so in each micro-batch, unless
            `shard(reduce_gradients="once")`.
        metrics: names of more metrics of each step. "grad_norm", "update_norm" and "param_norm" are
            of the trained leaves (sharded: one all-reduce of one number per norm, for all three
            together). The others are those that the optimizer's state reports: "learning_rate",
            "clip_factor", "clip_norm", "skipped" of `apply_if_finite`; see `optim.state_metrics`.
            A step with nonfinite="skip" reports its own "skipped" unasked.
        nonfinite: the answer to a NaN or an infinity in the loss or a gradient, the same on all
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
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn must be a function (params, buffers, batch) -> loss, got "
            f"{type(loss_fn).__name__}"
        )
    check_is_transform("optimizer", optimizer)
    if callable(trainable):
        check_takes(trainable, ("path", "leaf"), 2, by="trainable")
    if nonfinite is None:
        # A scale is found by letting gradients overflow, so such steps must be skipped
        nonfinite = "pass" if loss_scale is None else "skip"
    names = check_names(metrics)
    policy = NonFinitePolicy(nonfinite, loss_scale)
    return TrainStep(loss_fn, optimizer, trainable, accumulate, names, policy)


def merged_metrics(metrics: Metrics, others: Metrics) -> Metrics:
    """The metrics of two sources in one (the loss, the update, the policy for numbers that are not
    finite); raises if a name is in both."""
    twice = sorted(set(metrics) & set(others))
    if twice:
        raise StructureError(
            f"two of the loss, train_step(metrics=...) and the step give metrics named {twice}. "
            "Remedy: rename one"
        )
    return metrics | others


def _with_grad(params: PyTree[Tensor]) -> PyTree[bool]:
    return tree_map(lambda p: p.requires_grad, params)


def optimizer_view(params: PyTree[Tensor], trained: PyTree[bool]) -> tuple[PyTree[Tensor], Across]:
    """The trained leaves, detached (None where frozen), and the answers to an optimizer's questions
    about them."""
    # Detached: an update must not be differentiated, nor keep a graph alive
    view = select(tree_map(torch.detach, params), trained)
    return view, Local(view)
