"""Transforms around transforms, written once for every kind inside: a wrapper needs as much of a
tensor as its inside.

`masked`, `partition` and `freeze` are in `masking`; `inject_hyperparams` is in `hyperparams`.

Note: in a sharded step that donates, an inner update may overwrite the updates and the state that
it is given. So no wrapper looks at either after its inside has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from optree import tree_map
from torch import Tensor

from ..across import Across, Pointwise, Refusing
from ..arithmetic import Number, Tree, add_scaled, elementwise, ema, pick
from ..base import (
    Needs,
    NumberOrSchedule,
    Transform,
    chain,
    of_pointwise,
    step_count,
    tree_zeros_like,
    value_of,
)
from ..naming import named
from ..states import only_state

# For functions of leaves: it answers nothing, and runs what is inside as it is
_DIRECT: Any = Refusing()


def wrapper(
    inner: Transform,
    init: Callable[[Tree, Across], Any],
    update: Callable[[Tree, Any, Tree, Across], tuple[Tree, Any]],
    *,
    has_own_work: bool = True,
) -> Transform:
    """A transform around another one, whose own work is elementwise.

    If `inner` is pointwise, so is this, and runs by the bucket: on flats, not leaf by leaf.

    Args:
        inner: the transform inside.
        init: `(params, across) -> state`; it passes `across` on to `inner`, and asks it nothing.
        update: `(updates, state, params, across) -> (updates, state)`, likewise; but for vectors of
            its own, `across.beside`.
        has_own_work: whether it works on leaves at all.
    """
    # Not of any grouping inside, so `across` runs it as it would alone
    if inner.plain is None:
        return Transform(init, update, inner.needs, (inner,), takes_rows=not has_own_work)
    # The wrapper's own work joins its inside: one pass over each bucket. Without `in_place`, since
    # a wrapper's own work is not in place
    plain = Pointwise(
        lambda params: init(params, _DIRECT),
        lambda updates, state, params: update(updates, state, params, _DIRECT),
        keeps_zeros=inner.plain.keeps_zeros and not has_own_work,
    )
    return of_pointwise(plain, inner)  # `inner` for whoever checks the parts


@named
def named_chain(*transforms: tuple[str, Transform]) -> Transform:
    """As `chain`, of pairs (name, transform); the state is a dict from name to state. As
    optax.named_chain."""
    names = [name for name, _ in transforms]
    if len(set(names)) != len(names):
        raise ValueError(f"named_chain needs different names, got {names}")

    inner = chain(*(t for _, t in transforms))

    def init(params: Tree, across: Across) -> dict[str, Any]:
        return dict(zip(names, inner.init(params, across), strict=True))

    def update(
        updates: Tree, state: dict[str, Any], params: Tree, across: Across
    ) -> tuple[Tree, dict[str, Any]]:
        # chain's state is a tuple, in the order of the names
        own = tuple(state[name] for name in names)
        updates, states = inner.update(updates, own, params, across)
        return updates, dict(zip(names, states, strict=True))

    return wrapper(inner, init, update, has_own_work=False)


class ApplyIfFiniteState(NamedTuple):
    """Counts of updates that weren't finite."""

    notfinite_count: Tensor  # 0-d int64, on the CPU: steps in a row up to now
    last_finite: Tensor  # 0-d bool, on the CPU: whether the last updates were finite
    total_notfinite: Tensor  # 0-d int64, on the CPU: steps in all
    inner_state: Any  # untouched by steps that are skipped

    def report(self) -> dict[str, Tensor]:
        return {"skipped": self.total_notfinite.to(torch.get_default_dtype())}


@named
def apply_if_finite(inner: Transform, max_consecutive_errors: int) -> Transform:
    """Skip steps whose updates have a NaN or an infinity anywhere. As optax.apply_if_finite.

    A skipped step's updates are zero, and `inner` does not run. The decision is taken from one sum
    over all leaves of all ranks, so it is the same on all; the host waits for it. Communication:
    one all-reduce of a scalar, and `inner`'s.

    Args:
        inner: any transform.
        max_consecutive_errors: after as many skipped steps in a row, updates pass as they are.
    """

    def init(params: Tree, across: Across) -> ApplyIfFiniteState:
        # There are no last updates yet: they count as finite
        finite = torch.ones((), dtype=torch.bool, device="cpu")
        return ApplyIfFiniteState(step_count(), finite, step_count(), inner.init(params, across))

    def update(
        updates: Tree, state: ApplyIfFiniteState, params: Tree, across: Across
    ) -> tuple[Tree, ApplyIfFiniteState]:
        # 1 per element that isn't finite: a float32 sum of very many is rounded, but never to 0
        bad = tree_map(lambda u: torch.isfinite(u).logical_not().to(torch.float32), updates)
        # Here the host waits for the gradients
        finite = across.total(bad).cpu() == 0
        in_a_row = torch.where(finite, 0, state.notfinite_count + 1)
        total = torch.where(finite, state.total_notfinite, state.total_notfinite + 1)
        inner_state = state.inner_state
        # Every rank has the same answer of across, so all ranks branch alike
        if bool(finite | (in_a_row > max_consecutive_errors)):
            updates, inner_state = inner.update(updates, inner_state, params, across)
        else:
            updates = tree_zeros_like(updates)
        return updates, ApplyIfFiniteState(in_a_row, finite, total, inner_state)

    # The question about all leaves is its own, whatever `inner` needs
    return Transform(init, update, max(Needs.STATISTICS, inner.needs), (inner,))


class MultiStepsState(NamedTuple):
    """Gradients that wait for their step."""

    mini_step: Tensor  # 0-d int64, on the CPU: updates since the last step
    gradient_step: Tensor  # 0-d int64, on the CPU: steps taken
    acc_grads: Any  # like params: mean (or sum) of the updates since the last step
    inner_state: Any  # as of the last step of `inner`


@named
def multi_steps(
    inner: Transform, every_k: int | Callable[[Tensor], Any], use_grad_mean: bool = True
) -> Transform:
    """Gather `every_k` updates before each step of `inner`; between steps the updates are zero. As
    optax.MultiSteps.

    Only every k-th call runs `inner` and communicates. State: 1 tensor like params, and `inner`'s.
    The step's own `accumulate`, where it fits, costs no such tensor.

    Args:
        inner: any transform.
        every_k: how many, or a function of the number of steps taken.
        use_grad_mean: feed `inner` the mean of the updates; else their sum.
    """

    def init(params: Tree, across: Across) -> MultiStepsState:
        # Zeros, of which the first update's mean is that update
        return MultiStepsState(
            step_count(), step_count(), tree_zeros_like(params), inner.init(params, across)
        )

    def update(
        updates: Tree, state: MultiStepsState, params: Tree, across: Across
    ) -> tuple[Tree, MultiStepsState]:
        mini_step = state.mini_step + 1
        # The newest update's weight in the mean, 0-d float64
        share = 1 / mini_step.double() if use_grad_mean else None

        def accumulate(acc: Tensor, update: Tensor) -> Tensor:
            return acc + update if share is None else acc + (update - acc) * share

        acc = elementwise(accumulate, across.beside(state.acc_grads, params), updates)
        # Counts, on the CPU: all ranks branch alike
        if int(mini_step) < int(value_of(every_k, state.gradient_step)):
            waiting = state._replace(mini_step=mini_step, acc_grads=acc)
            return tree_zeros_like(updates), waiting
        # The k-th update: one step of `inner`, and the next round begins from zeros
        num_steps = state.gradient_step + 1
        new, inner_state = inner.update(acc, state.inner_state, params, across)
        return new, MultiStepsState(step_count(), num_steps, tree_zeros_like(acc), inner_state)

    return Transform(init, update, inner.needs, parts=(inner,))


class MaybeUpdateState(NamedTuple):
    """The number of steps, and the inner state."""

    step: Tensor  # 0-d int64, on the CPU: steps before this one
    inner_state: Any  # as of the last step that ran


@named
def maybe_update(inner: Transform, should_update_fn: Callable[[Tensor], Any]) -> Transform:
    """Run `inner` only at the steps where `should_update_fn(step)` holds. As optax.maybe_update.

    At the other steps updates pass unchanged (optax.conditionally_transform), and nothing is
    communicated.

    Args:
        inner: any transform.
        should_update_fn: `(step) -> bool`, of the number of steps before this one, 0-d int64.
    """

    def init(params: Tree, across: Across) -> MaybeUpdateState:
        return MaybeUpdateState(step_count(), inner.init(params, across))

    def update(
        updates: Tree, state: MaybeUpdateState, params: Tree, across: Across
    ) -> tuple[Tree, MaybeUpdateState]:
        inner_state = state.inner_state
        if bool(should_update_fn(state.step)):  # a count, on the CPU: all ranks branch alike
            updates, inner_state = inner.update(updates, inner_state, params, across)
        return updates, MaybeUpdateState(state.step + 1, inner_state)

    return Transform(init, update, inner.needs, parts=(inner,))


class LookaheadState(NamedTuple):
    """The slow params."""

    steps_since_sync: Tensor  # 0-d int64, on the CPU
    slow: Any  # like params
    fast_state: Any


@named
def lookahead(fast_optimizer: Transform, sync_period: int, slow_step_size: Number) -> Transform:
    """Let slow params follow fast ones: every `sync_period` steps both meet.

    Source: Zhang et al., 2019 (1907.08610), Algorithm 1.

    Unlike optax.lookahead it takes plain params, which are the fast ones. It must be the last of
    its chain, with the learning rate inside. State: 1 tensor like params, and that of the fast
    optimizer. No communication of its own.

    Args:
        fast_optimizer: any transform.
        sync_period: steps between meetings.
        slow_step_size: how far the slow params go towards the fast ones, 0 to 1.
    """

    def init(params: Tree, across: Across) -> LookaheadState:
        fast_state = fast_optimizer.init(params, across)
        return LookaheadState(step_count(), tree_map(torch.clone, params), fast_state)

    def update(
        updates: Tree, state: LookaheadState, params: Tree, across: Across
    ) -> tuple[Tree, LookaheadState]:
        old = across.beside(state.slow, params)
        updates, fast_state = fast_optimizer.update(updates, state.fast_state, params, across)
        count = state.steps_since_sync + 1
        # Meetings are computed in every step and taken in some, so no value is read on the host
        meets = count == sync_period  # 0-d bool, on the CPU

        def meet(slow: Tensor, param: Tensor, update: Tensor) -> Tensor:
            return add_scaled(slow, param + update - slow, slow_step_size)

        # slow + slow_step_size * (fast params after this step - slow)
        met = elementwise(meet, old, params, updates)
        slow = tree_map(lambda m, s: pick(meets, m, s), met, old)
        # At a meeting the params go to `met`, wherever the fast update would have led
        updates = tree_map(lambda m, p, u: pick(meets, m - p, u), met, params, updates)
        return updates, LookaheadState(torch.where(meets, 0, count), slow, fast_state)

    return wrapper(fast_optimizer, init, update)


class ParamsEmaState(NamedTuple):
    """A running mean of the params."""

    count: Tensor  # type: ignore[assignment]  # 0-d int64, on the CPU
    ema: Any  # like params
    inner_state: Any


@named
def params_ema(inner: Transform, decay: NumberOrSchedule) -> Transform:
    """Keep a running mean of the params that `inner`'s updates lead to (Polyak averaging). Updates
    are `inner`'s.

    It must be the last of its chain, with the learning rate inside. Read the mean with
    `ema_params`. State: 1 tensor like params, and `inner`'s. No communication of its own.

    Args:
        inner: any transform.
        decay: of the mean, per step; a number or a schedule. The mean begins at the first params.
    """

    def init(params: Tree, across: Across) -> ParamsEmaState:
        inner_state = inner.init(params, across)
        return ParamsEmaState(step_count(), tree_map(torch.clone, params), inner_state)

    def update(
        updates: Tree, state: ParamsEmaState, params: Tree, across: Across
    ) -> tuple[Tree, ParamsEmaState]:
        now, old = value_of(decay, state.count), across.beside(state.ema, params)
        updates, inner_state = inner.update(updates, state.inner_state, params, across)
        # p + u: the params as they will be after this step
        mean = elementwise(lambda m, p, u: ema(m, p + u, now), old, params, updates)
        return updates, ParamsEmaState(state.count + 1, mean, inner_state)

    return wrapper(inner, init, update)


def ema_params(state: Any, params: Any = None) -> Any:
    """The running mean that `params_ema` keeps, from an optimizer's state; of a sharded state, this
    rank's pieces.

    `params` is not needed: it is there so that this fits `eval_step(fn, params=optim.ema_params)`.

    Raises:
        ValueError: the state holds no params_ema, or several.
    """
    remedy = "read its state's `ema`"
    return only_state(state, ParamsEmaState, made_by="params_ema", remedy=remedy).ema


class SamState(NamedTuple):
    """The params before the ascent."""

    step: Tensor  # 0-d int64, on the CPU: even before an ascent
    cache: Any  # like params: the params before the ascent
    inner_state: Any  # of the steps that descend


@named
def sam(inner: Transform, rho: Number = 0.05) -> Transform:
    """Sharpness-aware minimisation: descend by the gradient at the worst point near by.

    Source: Foret et al., 2021 (2010.01412), Algorithm 1.

    A step sees one gradient, so two steps make one, as in optax.contrib.sam: the first moves the
    params by `rho * g / norm(g)`, the second takes the gradient there, goes back, and applies
    `inner`. Feed both the same batch, and read the params only after an even number of steps.
    State: 1 tensor like params, and `inner`'s. Communication: in the first an all-reduce of a
    scalar, in the second `inner`'s.

    Args:
        inner: any transform that ends with the learning rate.
        rho: how far away the worst point is looked for.
    """

    def init(params: Tree, across: Across) -> SamState:
        return SamState(step_count(), tree_map(torch.clone, params), inner.init(params, across))

    def ascend(
        updates: Tree, state: SamState, params: Tree, across: Across
    ) -> tuple[Tree, SamState]:
        # One factor for all leaves, from the norm of the whole gradient.
        # Of complex leaves, too: the product with the conjugate is real
        squares = across.total(tree_map(lambda u: (u * u.conj()).real, updates))
        factor = rho / (squares.double().sqrt() + 1e-12)  # finite, too, where all gradients are 0
        step = elementwise(lambda u: u * factor, updates)
        # A copy: the params themselves are about to move
        return step, SamState(state.step + 1, tree_map(torch.clone, params), state.inner_state)

    def descend(
        updates: Tree, state: SamState, params: Tree, across: Across
    ) -> tuple[Tree, SamState]:
        # The gradient is of the worst point, but the step starts from the params before the ascent
        cache = across.beside(state.cache, params)
        new, inner_state = inner.update(updates, state.inner_state, cache, across)
        # Added to the params at the worst point, it leads back and then along `new`
        back = tree_map(lambda c, u, p: c + u - p, cache, new, params)
        return back, SamState(state.step + 1, state.cache, inner_state)

    def update(
        updates: Tree, state: SamState, params: Tree, across: Across
    ) -> tuple[Tree, SamState]:
        ascending = int(state.step) % 2 == 0  # a count, on the CPU: all ranks branch alike
        return (ascend if ascending else descend)(updates, state, params, across)

    return Transform(init, update, max(Needs.STATISTICS, inner.needs), parts=(inner,))
