"""This library's rows for a side-by-side harness: one class a level, as its adapters are written.

An adapter is built inside an initialised default process group, once per process, and does nothing
that a user of the library would not do: `functionalize`, `train_step`, `shard`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim


def adamw(lr: float) -> optim.Transform:
    """What the harness asks of everyone."""
    return optim.adamw(lr, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)


class Adapter:
    """A decoder language model, whose `forward(tokens, targets)` is the loss, under `shard`."""

    level = 3
    options: ClassVar[dict[str, Any]] = {}
    precision: Any = None

    def __init__(self, model_fn: Callable[[], nn.Module], lr: float, world: int, impl: str):
        model = model_fn()
        apply, params, buffers = fz.functionalize(model, units="blocks.*", precision=self.precision)

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            loss: Tensor = apply(params, buffers, *batch)[0]
            return loss

        step = self.step_of(loss_fn, self.optimizer(lr))
        self.run = fz.shard(step, level=self.level, **self.options)
        self.state = self.run.init(params, buffers, seed=None)
        del model, params, buffers
        gc.collect()

    def optimizer(self, lr: float) -> optim.Transform:
        return adamw(lr)

    def step_of(self, loss_fn: Any, optimizer: optim.Transform) -> Any:
        return fz.train_step(loss_fn, optimizer)

    def step(self, batch: Any) -> Tensor:
        self.state, metrics = self.run(self.state, batch)
        return metrics["loss"]

    def full_params(self) -> dict[str, Tensor]:
        whole = self.run.unshard(self.state)
        return {k: v.detach() for k, v in fz.named_leaves(whole.params).items()}

    def memory(self) -> dict[str, int]:
        here = fz.describe(self.run, self.state)
        return {"params": here.params_nbytes, "optim": here.state_nbytes}


class Level0(Adapter):
    level = 0


class Alone(Level0):
    """Each process by itself, for comparing with a step that does not communicate: do not look at
    its params."""

    options: ClassVar[dict[str, Any]] = {"group": fz.groups.SingleRank()}


class Level1(Adapter):
    level = 1


class Level2(Adapter):
    level = 2


class Level3(Adapter):
    level = 3


class Level3Keep(Adapter):
    level = 3
    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}


class Program0(Adapter):
    """The same training step, written as a program."""

    level = 0
    options: ClassVar[dict[str, Any]] = {"donate": True}

    def step_of(self, loss_fn: Any, optimizer: optim.Transform) -> Any:
        def init(params: Any, buffers: Any) -> Trained:
            return Trained(params, buffers, optimizer.init(params))

        def program(value: Trained, batch: Any) -> Any:
            params, buffers, opt_state = value
            gradient = fz.value_and_grad(loss_fn)
            (loss, metrics, buffers), grads = gradient(params, buffers=buffers, batch=batch)
            params, opt_state = optimizer.apply(grads, opt_state, params)
            return Trained(params, buffers, opt_state), {"loss": loss, **metrics}

        return fz.program_step(program, init=init, buffers=["buffers"], num_gradients=1)


class Trained(NamedTuple):
    """A program's value."""

    params: Any
    buffers: Any
    opt_state: Any


class Program1(Program0):
    level = 1


class Program2(Program0):
    level = 2


class Program3(Program0):
    level = 3


ADAPTERS = {
    "fz_alone": Alone,
    "fz_level0": Level0,
    "fz_level1": Level1,
    "fz_level2": Level2,
    "fz_level3": Level3,
    "fz_level3_keep": Level3Keep,
    "program_level0": Program0,
    "program_level1": Program1,
    "program_level2": Program2,
    "program_level3": Program3,
}
