"""NAdam and NAdamW: Adam with Nesterov's momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..arithmetic import Number, Tree, bias_correction, elementwise, number
from ..base import NumberOrSchedule, Transform, chain, pointwise
from ..naming import named
from ..transforms.moments import init_moments, update_moments
from ..transforms.scaling import scale_by_learning_rate
from ..transforms.weight_decay import add_decayed_weights, coupled_decay
from ..wrappers.masking import Mask


class ScaleByNadamState(NamedTuple):
    """Adam's moments, and the product of the momenta so far."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    mu_product: Tensor  # 0-d float64, on the CPU (torch's is float32 by default)
    mu: Any  # like params: running mean of the gradients
    nu: Any  # like params: running mean of the squared gradients


@named
def scale_by_nadam(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, momentum_decay: Number = 4e-3
) -> Transform:
    """Rescale the updates g as NAdam does, at step t (from 1).

        momentum(t) = b1 * (1 - 0.5 * 0.96**(t * momentum_decay))
        mu_product = mu_product * momentum(t)
        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        mu_hat = g * (1 - momentum(t)) / (1 - mu_product)
               + mu * momentum(t + 1) / (1 - mu_product * momentum(t + 1))
        update = mu_hat / (sqrt(nu / (1 - b2**t)) + eps)

    Source: Dozat, 2016 (Incorporating Nesterov Momentum into Adam), Algorithm 2;
    torch.optim.NAdam's numerics, with its warm-up of the momentum, which optax lacks.

    Needs: pointwise. State: 2 tensors like params, a step count and a number.

    Args:
        b1: decay of the mean of the gradients, per step, and the momentum after its warm-up.
        b2: decay of the mean of their squares, per step.
        eps: added to the root, against division by zero.
        momentum_decay: the speed of the warm-up, per step.
    """

    def init(params: Tree) -> ScaleByNadamState:
        count, mu, nu = init_moments(params)
        return ScaleByNadamState(count, number(1.0), mu, nu)

    # 0-d float64, on the CPU: from about b1 / 2 up to b1
    def momentum_at(count: Tensor) -> Any:
        return b1 * (1 - 0.5 * 0.96 ** (count.double() * momentum_decay))

    def update(
        updates: Tree, state: ScaleByNadamState, params: Tree
    ) -> tuple[Tree, ScaleByNadamState]:
        # `mu` decays by b1; only the weights below follow the momentum's warm-up
        count, mu, nu = update_moments(updates, state, b1, b2)
        momentum = momentum_at(count)
        momentum_next = momentum_at(count + 1)
        mu_product = state.mu_product * momentum
        # Both are corrected for having begun at zero, by the momenta that they have seen
        of_grad = (1 - momentum) / (1 - mu_product)
        of_mean = momentum_next / (1 - mu_product * momentum_next)
        c2 = bias_correction(b2, count)

        def direction(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            # Nesterov: the mean as the next step's momentum will weigh it
            ahead: Tensor = g * of_grad + m * of_mean
            return ahead / ((v / c2).sqrt() + eps)

        directions = elementwise(direction, updates, mu, nu)
        return directions, ScaleByNadamState(count, mu_product, mu, nu)

    return pointwise(init, update, in_parts=True)


@named
def nadam(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    momentum_decay: Number = 4e-3,
    *,
    weight_decay: NumberOrSchedule = 0.0,
) -> Transform:
    """NAdam, with coupled weight decay (g gradient, p param).

        g = g + weight_decay * p
        update = -learning_rate * scale_by_nadam(g)

    Source: Dozat, 2016; torch.optim.NAdam, with its warm-up of the momentum, which optax lacks.

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: coupled: joins the gradient. Others: see `scale_by_nadam`.
    """
    return chain(
        *coupled_decay(weight_decay),
        scale_by_nadam(b1, b2, eps, momentum_decay),
        scale_by_learning_rate(learning_rate),
    )


@named
def nadamw(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    momentum_decay: Number = 4e-3,
    *,
    weight_decay: NumberOrSchedule = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """NAdamW, NAdam with decoupled weight decay (g gradient, p param).

        update = -learning_rate * (scale_by_nadam(g) + weight_decay * p)

    Source: torch.optim.NAdam(decoupled_weight_decay=True); Dozat, 2016, with the decay of
    Loshchilov and Hutter, 2019 (1711.05101).

    Needs: pointwise. State: 2 tensors like params.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decoupled, times the learning rate: per step.
        mask: which leaves decay; None for all. Others: see `scale_by_nadam`.
    """
    return chain(
        scale_by_nadam(b1, b2, eps, momentum_decay),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
