"""A training step as a program: one gradient of a loss, and one update by an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..optim.naming import described
from ..optim.states import state_metrics
from ..optim.tree_norms import norms
from ..tree import PyTree
from .loss import Metrics
from .metrics import NORMS, check_reported, chosen
from .nonfinite import NonFiniteGradient
from .program import value_and_grad, zero_updates
from .program_step import ProgramStep
from .state import TrainValue
from .train import TrainStep, merged_metrics


def as_program(step: TrainStep) -> ProgramStep:
    """The same step as a program, which gives the same numbers, to the bit."""
    program = TrainProgram(step)
    return ProgramStep(
        program,
        program.first_value,
        trainable={} if step.trainable is None else {"params": step.trainable},
        buffers=("buffers",),
        facts={
            "accumulate": step.accumulate,
            "metrics": list(step.metrics),
            "finite": described(step.policy),
        },
        num_gradients=1,
        # An optimizer may choose the dtype of its state by that of updates
        free=("buffers", "opt_state"),
        nameless="params",
    )


def training_step_of(step: TrainStep | ProgramStep) -> TrainStep | None:
    """The training step that an unsharded step is, or is the program of; None: it is neither."""
    if isinstance(step, TrainStep):
        return step
    return step.program.step if isinstance(step.program, TrainProgram) else None


_ANSWERS: dict[str, NonFiniteGradient] = {"raise": "raise", "skip": "tell", "pass": "pass"}


@dataclass(frozen=True)
class TrainProgram:
    """`program(value, batch) -> (value, metrics)` of a training step."""

    step: TrainStep

    def first_value(
        self, params: PyTree[Tensor], buffers: PyTree[Tensor] | None = None
    ) -> TrainValue:
        """The value that a run begins with."""
        opt_state = self.step.optimizer.init(params)
        check_reported(self.step.metrics, opt_state)
        buffers = {} if buffers is None else buffers
        return TrainValue(params, buffers, opt_state, self.step.policy.init())

    def __call__(self, value: TrainValue, batch: Any) -> tuple[TrainValue, Metrics]:
        """The next value, and the step's metrics."""
        params, buffers, opt_state, finite = value
        optimizer, policy = self.step.optimizer, self.step.policy
        gradient = value_and_grad(
            self._loss,
            accumulate=self.step.accumulate,
            scale=policy.scale(finite),
            nonfinite=_ANSWERS[policy.nonfinite],
        )
        (loss, of_loss, buffers, *told), grads = gradient(params, buffers=buffers, batch=batch)
        # Told only where steps are skipped
        fine = all(told)
        finite = policy.next(finite, fine=fine)
        found: dict[str, Tensor] = {}

        def see(updates: Any) -> None:
            # Before updates are added, which may write over params
            found.update(self._norms(grads=grads, params=params, updates=updates))

        if not fine:
            see(zero_updates(params))
        elif "update_norm" in self.step.metrics:
            # The norm of gradients is asked for with it, if at all
            donate = "grad_norm" not in self.step.metrics
            params, opt_state = optimizer.apply(grads, opt_state, params, see=see, donate=donate)
        else:
            see(None)
            params, opt_state = optimizer.apply(grads, opt_state, params, donate=True)
        if not set(self.step.metrics) <= set(NORMS):
            found |= state_metrics(opt_state)
        measured = chosen(self.step.metrics, found)
        metrics = merged_metrics({"loss": loss, **of_loss}, measured)
        metrics = merged_metrics(metrics, policy.metrics(finite))
        return TrainValue(params, buffers, opt_state, finite), metrics

    def _loss(self, params: Any, *, buffers: Any, batch: Any = None) -> Any:
        return self.step.loss_fn(params, buffers, batch)

    def _norms(self, **trees: Any) -> dict[str, Tensor]:
        """Those that were asked for, by one all-reduce."""
        wanted = [name.removesuffix("_norm") + "s" for name in NORMS if name in self.step.metrics]
        chosen_trees = {name: trees[name] for name in wanted if name in trees}
        return norms(**chosen_trees) if chosen_trees else {}
