"""Optimizers of rows, for embeddings of which a batch names few rows: these alone move, and their
state alone is read and written.

A row is touched if its update so far, the gradient of the whole batch, isn't all zeros. torch's
optimizers of sparse gradients go by ids instead. So the two differ where a batch names a row whose
gradient is all zeros: torch's SparseAdam moves it by its old momentum, and here it rests.

A transform before these may touch all rows, as `add_decayed_weights` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import Number, bias_correction, ema, ema_of_squares, full_like
from .base import NumberOrSchedule, Transform, chain, real_only, step_count, with_whole_rows
from .naming import named
from .transforms.scaling import scale_by_learning_rate

__all__ = ["adagrad", "adagrad_by_row", "lazy_adam", "sgd"]


class AdagradState(NamedTuple):
    """Adagrad's sums, of one leaf."""

    sum_of_squares: Tensor  # (rows, columns), or (rows,) where a row has one


class LazyAdamState(NamedTuple):
    """The moments of one leaf's rows, each as it was when the row was last touched."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU: of all steps
    mu: Tensor  # (rows, columns)
    nu: Tensor  # (rows, columns)


@named
def sgd(learning_rate: NumberOrSchedule) -> Transform:
    """SGD without momentum: a row of zeros doesn't move (g gradient).

        update = -learning_rate * g

    Source: torch.optim.SGD on sparse gradients. Its momentum moves all rows, as that of `optim.sgd`
    does.

    Needs: pointwise. State: none but the count of steps.

    Args:
        learning_rate: a number or a schedule.
    """
    return chain(scale_by_learning_rate(learning_rate))


@named
def adagrad(
    learning_rate: NumberOrSchedule, initial_accumulator_value: Number = 0.0, eps: Number = 1e-10
) -> Transform:
    """Adagrad of touched rows (g gradient).

        sum_of_squares = sum_of_squares + g**2
        update = -learning_rate * g / (sqrt(sum_of_squares) + eps)

    Source: Duchi et al., 2011 (JMLR 12); torch.optim.Adagrad on sparse gradients, with its
    defaults. The numbers are those of `optim.adagrad`, at less work.

    Needs: whole rows. State: 1 tensor like params.

    Args:
        learning_rate: a number or a schedule.
        initial_accumulator_value: each sum begins at it.
        eps: added to the root, against division by zero.
    """

    def init(param: Tensor) -> AdagradState:
        return AdagradState(full_like(param, initial_accumulator_value))

    def update(g: Tensor, state: AdagradState) -> tuple[Tensor, AdagradState]:
        sums = torch.addcmul(state.sum_of_squares, g, g)
        return g / (sums.sqrt() + eps), AdagradState(sums)

    return chain(real_only(with_whole_rows(init, update)), scale_by_learning_rate(learning_rate))


@named
def adagrad_by_row(
    learning_rate: NumberOrSchedule, initial_accumulator_value: Number = 0.0, eps: Number = 1e-10
) -> Transform:
    """Adagrad of touched rows, with one sum for each row (g gradient).

        sum_of_squares = sum_of_squares + mean(g**2)
        update = -learning_rate * g / (sqrt(sum_of_squares) + eps)

    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; Mudigere et al., 2022 (2104.05158).

    Needs: whole rows. State: one number per row.

    Args:
        learning_rate: a number or a schedule.
        initial_accumulator_value: each sum begins at it.
        eps: added to the root, against division by zero.
    """

    def init(param: Tensor) -> AdagradState:
        return AdagradState(full_like(param.new_zeros(len(param)), initial_accumulator_value))

    def update(g: Tensor, state: AdagradState) -> tuple[Tensor, AdagradState]:
        sums = state.sum_of_squares + g.square().mean(1)
        return g / (sums.sqrt() + eps)[:, None], AdagradState(sums)

    return chain(real_only(with_whole_rows(init, update)), scale_by_learning_rate(learning_rate))


@named
def lazy_adam(
    learning_rate: NumberOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
) -> Transform:
    """Adam of touched rows (g gradient, t the step from 1, whichever rows it touches).

        mu = b1 * mu + (1 - b1) * g
        nu = b2 * nu + (1 - b2) * g**2
        update = -learning_rate * sqrt(1 - b2**t) / (1 - b1**t) * mu / (sqrt(nu) + eps)

    A row's moments rest while no batch touches it: this is another optimizer than Adam.

    Source: torch.optim.SparseAdam; Kingma and Ba, 2014 (1412.6980).

    Needs: whole rows. State: 2 tensors like params, and a count for each.

    Args:
        learning_rate: a number or a schedule.
        b1: decay of the mean of a row's gradients, per step that touches it.
        b2: decay of the mean of their squares, likewise.
        eps: added to the root, against division by zero.
    """

    def init(param: Tensor) -> LazyAdamState:
        return LazyAdamState(step_count(), torch.zeros_like(param), torch.zeros_like(param))

    def update(g: Tensor, state: LazyAdamState) -> tuple[Tensor, LazyAdamState]:
        count = state.count + 1
        mu, nu = ema(state.mu, g, b1), ema_of_squares(state.nu, g, b2)
        size = bias_correction(b2, count).sqrt() / bias_correction(b1, count)
        return size * mu / (nu.sqrt() + eps), LazyAdamState(count, mu, nu)

    return chain(real_only(with_whole_rows(init, update)), scale_by_learning_rate(learning_rate))
