"""The step for one process: pure, and the oracle that every sharded step is held to.

A step takes a `State` and returns the next one. In a sharded state, `params` is a `ShardedTree`:
whole leaves, or at level 3 pieces. State leaves that follow a param are this rank's pieces.
`sharding` says how they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..errors import StructureError
from ..optim.arguments import check_is_transform, check_takes
from ..optim.base import Transform
from ..optim.naming import described
from ..optim.states import state_metrics
from ..optim.tree_norms import Norms
from ..tree import PyTree, trained_leaves
from .loss import LossFn, Metrics
from .metrics import NORMS, check_names, check_reported, chosen
from .micro_batches import check_accumulate
from .nonfinite import LossScale, NonFinite, NonFiniteGradient, NonFinitePolicy
from .program import value_and_grad, zero_updates
from .program_step import ProgramStep
from .state import State, TrainValue, check_whole_state, marked
from .trainable import Trainable


@dataclass(frozen=True)
class TrainProgram:
    """`program(value, batch) -> (value, metrics)`: a gradient of a loss, and an update by it. An
    example of a program, which uses nothing that others can't."""

    loss_fn: LossFn
    optimizer: Transform
    accumulate: int = 1  # micro-batches per batch
    metrics: tuple[str, ...] = ()  # names of those wanted beside the loss's own
    policy: NonFinitePolicy = field(default_factory=NonFinitePolicy)

    def init(self, params: PyTree[Tensor], buffers: PyTree[Tensor] | None = None) -> TrainValue:
        """The value that a run begins with."""
        opt_state = self.optimizer.init(params)
        check_reported(self.metrics, opt_state)
        buffers = {} if buffers is None else buffers
        return TrainValue(params, buffers, opt_state, self.policy.init())

    def __call__(self, value: TrainValue, batch: Any) -> tuple[TrainValue, Metrics]:
        """The next value, and the step's metrics."""
        if not isinstance(value, TrainValue):
            raise StructureError(
                "a training step was given the state of another program",
                expected="the value of step.init, a TrainValue",
                got=f"a {type(value).__name__}",
                remedy="step.init(params, buffers), with the params of that state",
            )
        params, buffers, opt_state, nonfinite_state = value
        gradient = value_and_grad(
            self._loss,
            accumulate=self.accumulate,
            scale=self.policy.scale(nonfinite_state),
            nonfinite=_ANSWERS[self.policy.nonfinite],
        )
        (loss, metrics, buffers, *told), grads = gradient(params, buffers=buffers, batch=batch)
        fine = all(told)  # told only where steps are skipped
        nonfinite_state = self.policy.next(nonfinite_state, fine=fine)
        seen, sees_updates = Norms(), "update_norm" in self.metrics
        if "grad_norm" in self.metrics:
            seen.take(grads=grads)
        if "param_norm" in self.metrics:
            seen.take(params=params)
        if fine:
            see = (lambda updates: seen.take(updates=updates)) if sees_updates else None
            # Without `see` perhaps by one kernel
            params, opt_state = self.optimizer.apply(grads, opt_state, params, see=see, donate=True)
        elif sees_updates:
            seen.take(updates=zero_updates(params))
        found = seen.values()
        if {*self.metrics} - {*NORMS}:
            found |= state_metrics(opt_state)
        metrics = merged_metrics({"loss": loss, **metrics}, chosen(self.metrics, found))
        metrics = merged_metrics(metrics, self.policy.metrics(nonfinite_state))
        return TrainValue(params, buffers, opt_state, nonfinite_state), metrics

    def _loss(self, params: Any, *, buffers: Any, batch: Any = None) -> Any:
        return self.loss_fn(params, buffers, batch)


_ANSWERS: dict[NonFinite, NonFiniteGradient] = {"raise": "raise", "skip": "tell", "pass": "pass"}


class TrainStep(ProgramStep):
    """`step(state, batch) -> (state, metrics)` for one process. Made by `train_step`.

    It is a `ProgramStep`, whose `init` is given `params` and, where there are any, `buffers`.
    """

    program: TrainProgram

    def __repr__(self) -> str:
        name = self.optimizer.name.rpartition(".")[2] or "a transform"
        return f"train_step({name})"

    @classmethod
    def of(cls, program: TrainProgram, trainable: Trainable = None) -> TrainStep:
        """The step of a program, which trains these leaves of params."""
        return cls(
            program,
            program.init,
            trainable={"params": trainable},
            buffers=("buffers",),
            facts={
                "optimizer": program.optimizer,
                "accumulate": program.accumulate,
                "metrics": list(program.metrics),
                "finite": described(program.policy),
            },
            num_gradients=1,
            # An optimizer may choose the dtype of its state by that of updates
            free=("buffers", "opt_state"),
            nameless="params",
        )

    @property
    def loss_fn(self) -> LossFn:
        """The loss that it was made with."""
        return self.program.loss_fn

    @property
    def optimizer(self) -> Transform:
        """The transform that it was made with."""
        return self.program.optimizer

    @property
    def accumulate(self) -> int:
        """The number of micro-batches per batch."""
        return self.program.accumulate

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of metrics that were asked for."""
        return self.program.metrics

    @property
    def policy(self) -> NonFinitePolicy:
        """The answer to numbers that are not finite."""
        return self.program.policy

    def refit(self, state: State, *args: Any, **named: Any) -> State:
        """As `ProgramStep.refit`, of a state whose optimizer is this step's."""
        check_whole_state(state)
        view = trained_leaves(marked(state))
        self.optimizer.check_whole(state.opt_state, view, what="state.opt_state")
        return super().refit(state, *args, **named)


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

    >>> import torch
    >>> from functorch_zero import optim
    >>> def loss_fn(params, buffers, batch):
    ...     return ((params["w"] - batch) ** 2).mean()
    >>> step = train_step(loss_fn, optim.adamw(0.1))
    >>> state = step.init({"w": torch.zeros(3, requires_grad=True)})
    >>> state, metrics = step(state, torch.ones(3))
    >>> state.params["w"]
    tensor([0.1000, 0.1000, 0.1000], requires_grad=True)
    """
    check_takes(loss_fn, ("params", "buffers", "batch"), 3, by="train_step's loss_fn")
    check_is_transform("optimizer", optimizer)
    if callable(trainable):
        check_takes(trainable, ("path", "leaf"), 2, by="trainable")
    if nonfinite is None:
        # A scale is found by letting gradients overflow, so such steps must be skipped
        nonfinite = "pass" if loss_scale is None else "skip"
    check_accumulate(accumulate)
    names = check_names(metrics)
    policy = NonFinitePolicy(nonfinite, loss_scale)
    program = TrainProgram(loss_fn, optimizer, accumulate, names, policy)
    return TrainStep.of(program, trainable)


def with_loss(step: TrainStep, loss_fn: LossFn) -> TrainStep:
    """A step with another loss, and all else as it was."""
    return TrainStep.of(replace(step.program, loss_fn=loss_fn), step.trainable["params"])


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
