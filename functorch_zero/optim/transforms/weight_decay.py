"""Weight decay: a multiple of the params, added to the updates.

Where the decay stands in a chain decides its kind. Note [Coupled and decoupled weight decay]:

Coupled, as in torch.optim's optimizers without a "W": the decay joins the gradient, in front of
everything else. Momentum and the second moment see it, as if the loss had a term
`weight_decay / 2 * p**2`.

Decoupled (Loshchilov and Hutter, 2019, 1711.05101): the decay stands between the direction and the
learning rate, so a step shrinks the params by `learning_rate * weight_decay`, whatever the
optimizer divides gradients by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..arithmetic import Number, Tree, add_scaled, add_scaled_, elementwise, is_zero
from ..base import NumberOrSchedule, Transform, pointwise, value_of
from ..naming import named
from ..states import CountState, init_count
from ..wrappers.masking import Mask, masked


@named
def add_decayed_weights(
    weight_decay: NumberOrSchedule = 0.0, mask: Mask | None = None
) -> Transform:
    """Add `weight_decay * p` to each update, for the params p. As optax.add_decayed_weights.

    Needs: pointwise. State: a step count.

    Args:
        weight_decay: a number, or a schedule, which is given the number of steps before this one.
        mask: which leaves decay, as for `masked`; None for all.
    """

    def update(
        updates: Tree,
        state: CountState,
        params: Tree,
        *,
        add: Callable[[Tensor, Tensor, Number], Tensor] = add_scaled,
    ) -> tuple[Tree, CountState]:
        # A schedule's value may be a 0-d tensor on the CPU, a number stays one
        decay = value_of(weight_decay, state.count)
        decayed = elementwise(lambda u, p: add(u, p, decay), updates, params)
        return decayed, CountState(state.count + 1)

    # In place it writes over the updates only; params are read
    everywhere = pointwise(init_count, update, in_place=partial(update, add=add_scaled_))
    return everywhere if mask is None else masked(everywhere, mask)


def coupled_decay(
    weight_decay: NumberOrSchedule, mask: Mask | None = None
) -> tuple[Transform, ...]:
    """Decay for the front of a chain: see Note [Coupled and decoupled weight decay].

    The number 0 gives no transform at all, so a state without decay has no part for it. Checkpoint
    files depend on that.
    """
    if is_zero(weight_decay):
        return ()
    return (add_decayed_weights(weight_decay, mask),)
