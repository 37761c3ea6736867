"""Yogi."""

from __future__ import annotations

from torch import Tensor

from ..arithmetic import Number, Tree, elementwise, ema, full_like
from ..base import Schedule, Transform, chain, pointwise, step_count
from ..naming import named
from ..optimizers.adam import adam_directions
from ..transforms.moments import ScaleByAdamState
from ..transforms.scaling import scale_by_learning_rate


@named
def scale_by_yogi(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-3,
    eps_root: Number = 0.0,
    initial_accumulator_value: Number = 1e-6,
) -> Transform:
    """Rescale updates as Yogi (Zaheer et al., 2018, Algorithm 2) does. As optax.

    State: 2 tensors like params, and a step count.

    Args:
        initial_accumulator_value: what both moments begin at. Others: see `scale_by_adam`.
    """

    def init(params: Tree) -> ScaleByAdamState:
        mu, nu = (full_like(params, initial_accumulator_value) for _ in range(2))
        return ScaleByAdamState(step_count(), mu, nu)

    def towards(v: Tensor, g: Tensor) -> Tensor:
        squares = g * g
        return v - (v - squares).sign() * squares * (1 - b2)

    def update(
        updates: Tree, state: ScaleByAdamState, params: Tree
    ) -> tuple[Tree, ScaleByAdamState]:
        mu = elementwise(lambda m, g: ema(m, g, b1), state.mu, updates)
        new = ScaleByAdamState(state.count + 1, mu, elementwise(towards, state.nu, updates))
        return adam_directions(new, b1, b2, eps, eps_root), new

    return pointwise(init, update)


@named
def yogi(
    learning_rate: Number | Schedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-3
) -> Transform:
    """Yogi (Zaheer et al., 2018). As optax.yogi. State: 2 tensors like params."""
    return chain(scale_by_yogi(b1, b2, eps), scale_by_learning_rate(learning_rate))
