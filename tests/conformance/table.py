"""The conformance table: one row for every public optimizer, transform and wrapper, schedule and
weight decay on.

A row's name is the public name, and after a comma what is special about it. Adding an optimizer is
adding its row; `test_conformance.py` fails while `functorch_zero.optim` has one without. There is
no column for skipping.

The grade follows from what a transform needs: bitwise where it is pointwise, since nothing is
summed across ranks then, else reordered. A row states an `Equality` of its own where it meets more
than that; one that met less would state a bound and a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.optim import Needs, Transform
from functorch_zero.testing import Equality

rate = optim.warmup_cosine_decay_schedule(0.02, 0.08, 2, 6, 0.01)
decay = optim.linear_schedule(0.1, 0.3, 4)


@dataclass(frozen=True)
class Row:
    """One optimizer.

    Attributes:
        make: makes it, anew for every rank.
        grade: of equality; None for what its kind must meet.
        between: what a user does to its state between steps, on every rank alike:
            `(opt_state, step, metrics)`.
    """

    make: Callable[[], Transform]
    grade: Equality | None = None
    between: Callable[[Any, int, Any], Any] = lambda state, step, metrics: state

    def equality(self) -> Equality:
        """The grade it must meet."""
        return self.grade or Equality(
            "bitwise" if self.make().needs == Needs.POINTWISE else "reordered"
        )


def finished(part: Transform) -> Transform:
    """A part made an optimizer: decayed, times the learning rate, both scheduled."""
    return optim.chain(part, optim.add_decayed_weights(decay), optim.scale_by_learning_rate(rate))


def decayed(optimizer: Transform) -> Transform:
    """An optimizer without weight decay of its own, with the kind that joins the gradient."""
    return optim.chain(optim.add_decayed_weights(decay), optimizer)


def taking_turns(optimizer: Transform) -> Transform:
    """Matrices have updates of zeros in the second step, and the fourth."""
    return optim.chain(optim.maybe_update(optim.freeze(is_matrix), lambda t: t % 2 == 1), optimizer)


def is_matrix(path: str, leaf: Tensor) -> bool:
    """By the whole shape."""
    return leaf.ndim >= 2


def by_dims(path: str, leaf: Tensor) -> str:
    """Labels by the whole shape."""
    return "matrix" if leaf.ndim >= 2 else "vector"


def lamb() -> Transform:
    """Something with statistics to put into wrappers."""
    return optim.lamb(rate, weight_decay=decay)


def muon() -> Transform:
    """Something with whole leaves to put into wrappers."""
    return optim.muon(rate, weight_decay=decay, adam_weight_decay=decay)


# What a user may write with the five constructors, and bring along.


def own_pointwise() -> Transform:
    def init(params: Any) -> Any:
        return tree_map(torch.zeros_like, params)

    def update(updates: Any, mu: Any, params: Any) -> tuple[Any, Any]:
        directions = tree_map(lambda m, g: torch.lerp(g, m, 0.9).sign(), mu, updates)
        return directions, tree_map(lambda m, g: torch.lerp(g, m, 0.99), mu, updates)

    return optim.pointwise(init, update)


def own_statistics() -> Transform:
    def init(params: Any) -> Any:
        return tree_map(lambda p: p.new_zeros(()), params)

    def update(updates: Any, nu: Any, params: Any, across: Any) -> tuple[Any, Any]:
        nu = tree_map(lambda v, n: 0.9 * v + 0.1 * n**2, nu, across.norm(updates))
        return tree_map(lambda u, v: u / (v.sqrt() + 1e-8), updates, nu), nu

    return optim.with_statistics(init, update)


def own_user_tree_map() -> Transform:
    """Numbers as users write them: 0-d tensors in float64, times whatever the leaf is."""

    def init(params: Any) -> Any:
        return torch.zeros((), dtype=torch.int64), tree_map(torch.zeros_like, params)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        count, factor = state[0] + 1, 1 / (2 + state[0].double())
        mu = tree_map(
            lambda m, u, p: m * factor + (u + p) * (1 - factor), state[1], updates, params
        )
        return tree_map(lambda m: m * (-0.1 * factor), mu), (count, mu)

    return optim.pointwise(init, update)


def own_every_question() -> Transform:
    """Asks `across` all it answers."""

    def last(shape: tuple[int, ...]) -> int | tuple[int, ...]:
        return len(shape) - 1 if shape else ()

    def change(u: Tensor, row: Tensor, peak: Tensor, *numbers: Tensor) -> Tensor:
        factor = 1 + sum(0.1 * n.clamp(-5, 5) for n in numbers)
        return (u * factor + 0.1 * (row + peak)).to(u.dtype)

    def update(updates: Any, state: Any, params: Any, across: Any) -> tuple[Any, Any]:
        sums, others = across.sum(updates, params)
        means, norms, largest = across.mean(params), across.norm(updates), across.max(updates)
        rows, peaks = (
            across.sum_dims((updates, last), (params, last))[0],
            across.max_dim(params, last),
        )
        inner = across.dot(updates, params) / (1 + across.total(tree_map(torch.abs, params)))
        numbers = (sums, others, means, norms, largest, tree_map(lambda u: inner, updates))
        beside = across.spread(rows, last), across.spread(peaks, last)
        return tree_map(change, updates, *beside, *numbers), state

    return optim.with_statistics(lambda params: (), update)


def own_whole_leaves() -> Transform:
    def update(u: Tensor, count: Tensor, param: Tensor) -> tuple[Tensor, Tensor]:
        flat = (u + 0.1 * param).reshape(-1)
        return (flat.cumsum(0).flip(0) / (1 + count.double())).to(u.dtype).reshape(
            u.shape
        ), count + 1

    return optim.with_whole_leaves(lambda param: torch.zeros((), dtype=torch.int64), update)


def own_whole_rows() -> Transform:
    """Its own count of a row's touches, the param, and two numbers in a row of the state."""

    def init(param: Tensor) -> dict[str, Tensor]:
        return {"touched": param.new_zeros(len(param)), "two": param.new_ones(len(param), 2)}

    def update(u: Tensor, state: Any, param: Tensor) -> tuple[Tensor, Any]:
        touched = state["touched"] + 1
        two = 0.5 * state["two"] + torch.stack([u.abs().amax(1), param.square().mean(1)], 1)
        return u / (two.sum(1) + touched)[:, None], {"touched": touched, "two": two}

    return optim.with_whole_rows(init, update)


def own_whole_tree() -> Transform:
    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        flat = torch.cat([u.reshape(-1) for u in optree.tree_leaves(updates)])
        median = flat.median()
        return tree_map(lambda u: torch.where(u.abs() > median.abs(), u, 0.5 * u), updates), state

    return optim.with_whole_tree(lambda params: (), update)


def optax_pair(update_of_leaf: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A two-function pair in optax's form."""

    def init(params: Any) -> Any:
        return tree_map(torch.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = tree_map(lambda m, u: 0.9 * m + u, state, updates)
        return tree_map(update_of_leaf, new, params), new

    return init, update


def torchopt_pair() -> Any:
    """A two-function pair in torchopt's form."""
    init, inner = optax_pair(lambda m, p: m + 0.1 * p)
    return init, lambda updates, state, *, params=None, inplace=True: inner(updates, state, params)


def every_schedule() -> Transform:
    """Their product."""
    schedules = [
        optim.constant_schedule(0.9),
        optim.linear_schedule(1.0, 0.5, 4),
        optim.cosine_decay_schedule(1.0, 6),
        optim.contrib.cosine_onecycle_schedule(6, 1.5),
        optim.contrib.linear_onecycle_schedule(6, 1.5),
        optim.exponential_decay(1.0, 3, 0.9),
        optim.polynomial_schedule(1.0, 0.5, 2, 5),
        optim.piecewise_constant_schedule(1.0, {2: 0.5}),
        optim.contrib.piecewise_interpolate_schedule("cosine", 1.0, {2: 0.5, 4: 0.5}),
        optim.contrib.sgdr_schedule(
            [{"init_value": 0.5, "peak_value": 1.0, "decay_steps": 3, "warmup_steps": 1}] * 3
        ),
        optim.warmup_constant_schedule(0.5, 1.0, 3),
        optim.warmup_cosine_decay_schedule(0.5, 1.0, 2, 6),
        optim.warmup_exponential_decay_schedule(0.5, 1.0, 2, 2, 0.9),
        optim.warmup_stable_decay_schedule(0.5, 1.0, 2, 2, 2),
        optim.join_schedules(
            [optim.constant_schedule(1.0), optim.linear_schedule(1.0, 0.5, 3)], [2]
        ),
    ]
    return optim.chain(*(optim.scale_by_schedule(s) for s in schedules), optim.scale(30.0))


def reduced_then_raised(state: Any, step: int, metrics: Any) -> Any:
    return optim.with_hyperparams(state, b1=0.5) if step == 2 else state


def watched(state: Any, step: int, metrics: Any) -> Any:
    return optim.observe(state, round(float(metrics["loss"]), 3))


POINTWISE: dict[str, Row] = {
    "sgd": Row(lambda: optim.sgd(rate, weight_decay=decay)),
    "sgd, momentum": Row(lambda: optim.sgd(rate, 0.9, dampening=0.3, weight_decay=decay)),
    "sgd, nesterov": Row(lambda: optim.sgd(rate, 0.9, nesterov=True, weight_decay=decay)),
    "adam": Row(lambda: optim.adam(rate, weight_decay=decay)),
    "adamw": Row(lambda: optim.adamw(rate, weight_decay=decay)),
    "adamw, masked decay": Row(lambda: optim.adamw(rate, weight_decay=decay, mask=is_matrix)),
    "amsgrad": Row(lambda: optim.amsgrad(rate, weight_decay=decay)),
    "adamax": Row(lambda: optim.adamax(rate, weight_decay=decay)),
    "adamaxw": Row(lambda: optim.contrib.adamaxw(rate, weight_decay=decay)),
    "nadam": Row(lambda: optim.nadam(rate, weight_decay=decay)),
    "nadamw": Row(lambda: optim.contrib.nadamw(rate, weight_decay=decay)),
    "radam": Row(
        lambda: optim.radam(rate, b2=0.9, weight_decay=decay)
    ),  # b2: rectified from the fifth step on
    "adagrad": Row(lambda: optim.adagrad(rate, lr_decay=0.1, weight_decay=decay)),
    "adadelta": Row(lambda: optim.adadelta(rate, eps=1e-2, weight_decay=decay)),
    "rmsprop": Row(lambda: optim.rmsprop(rate, weight_decay=decay)),
    "rmsprop, centered": Row(
        lambda: optim.rmsprop(rate, centered=True, momentum=0.9, weight_decay=decay)
    ),
    "rprop": Row(
        lambda: optim.chain(
            decayed(optim.contrib.rprop(0.01)), optim.scale_by_schedule(lambda t: 1 / (1 + t))
        )
    ),
    "sign_sgd": Row(lambda: decayed(optim.contrib.sign_sgd(rate))),
    "lion": Row(lambda: optim.lion(rate, weight_decay=decay)),
    "adabelief": Row(lambda: decayed(optim.contrib.adabelief(rate))),
    "yogi": Row(lambda: decayed(optim.contrib.yogi(rate))),
    "ademamix": Row(lambda: optim.contrib.ademamix(rate, alpha=rate, weight_decay=decay)),
    "schedule_free": Row(lambda: optim.schedule_free(decayed(optim.sgd(rate)), rate)),
    "schedule_free_sgd": Row(lambda: optim.schedule_free_sgd(0.05, 3, weight_decay=decay)),
    "schedule_free_adamw": Row(lambda: optim.schedule_free_adamw(0.05, 3, weight_decay=decay)),
    "scale_by_adam": Row(lambda: finished(optim.scale_by_adam())),
    "scale_by_amsgrad": Row(lambda: finished(optim.scale_by_amsgrad())),
    "scale_by_adamax": Row(lambda: finished(optim.scale_by_adamax())),
    "scale_by_nadam": Row(lambda: finished(optim.scale_by_nadam())),
    "scale_by_radam": Row(lambda: finished(optim.scale_by_radam(b2=0.9))),
    "scale_by_rss": Row(lambda: finished(optim.scale_by_rss())),
    "scale_by_adadelta": Row(lambda: finished(optim.scale_by_adadelta(eps=1e-2))),
    "scale_by_rms": Row(lambda: finished(optim.scale_by_rms(initial_scale=0.1, eps_in_sqrt=True))),
    "scale_by_stddev": Row(lambda: finished(optim.contrib.scale_by_stddev(bias_correction=True))),
    "scale_by_rprop": Row(lambda: finished(optim.contrib.scale_by_rprop(0.1))),
    "scale_by_lion": Row(lambda: finished(optim.scale_by_lion())),
    "scale_by_belief": Row(lambda: finished(optim.contrib.scale_by_belief())),
    "scale_by_yogi": Row(lambda: finished(optim.contrib.scale_by_yogi())),
    "scale_by_ademamix": Row(lambda: finished(optim.contrib.scale_by_ademamix())),
    "scale_by_sign": Row(lambda: finished(optim.scale_by_sign())),
    "trace": Row(lambda: finished(optim.trace(0.9))),
    "ema": Row(lambda: finished(optim.ema(0.9))),
    "identity": Row(lambda: finished(optim.identity())),
    "set_to_zero": Row(lambda: finished(optim.set_to_zero())),
    "scale": Row(lambda: finished(optim.scale(0.3))),
    "scale_by_schedule": Row(lambda: finished(optim.scale_by_schedule(lambda t: 1 / (1 + t)))),
    "scale_by_schedule, all of them": Row(lambda: finished(every_schedule())),
    "scale_by_learning_rate": Row(
        lambda: optim.chain(optim.scale_by_learning_rate(rate), optim.trace(0.5))
    ),
    "scale_by_label": Row(
        lambda: finished(optim.scale_by_label({"matrix": 0.5, "vector": rate}, by_dims))
    ),
    "add_noise": Row(lambda: finished(optim.add_noise(0.01, 0.55, seed=3)), Equality("bitwise")),
    "add_noise, injected, and once more on some leaves": Row(
        lambda: finished(
            optim.chain(
                optim.inject_hyperparams(optim.add_noise)(eta=0.01, gamma=0.55),
                optim.masked(optim.add_noise(0.02, 0.55, seed=1), is_matrix),
            )
        )
    ),
    "add_decayed_weights": Row(lambda: decayed(optim.scale_by_learning_rate(rate))),
    "clip": Row(lambda: finished(optim.clip(0.2))),
    "nan_to_num": Row(lambda: finished(optim.nan_to_num())),
    "zero_nans": Row(lambda: finished(optim.zero_nans())),
    "pointwise": Row(lambda: finished(own_pointwise())),
    "pointwise, by a 0-d number": Row(own_user_tree_map),
    "from_optax": Row(
        lambda: finished(optim.from_optax(optax_pair(torch.add), needs=Needs.POINTWISE))
    ),
    "from_torchopt": Row(
        lambda: finished(optim.from_torchopt(torchopt_pair(), needs=Needs.POINTWISE))
    ),
    "from_torch": Row(
        lambda: optim.chain(
            optim.from_torch(torch.optim.Adamax, lr=0.05, weight_decay=0.1),
            optim.scale_by_schedule(lambda t: 1 / (1 + t)),
        )
    ),
}

STATISTICS: dict[str, Row] = {
    "clip_by_global_norm": Row(lambda: finished(optim.clip_by_global_norm(0.5))),
    "clip_by_block_rms": Row(lambda: finished(optim.contrib.clip_by_block_rms(0.1))),
    "adaptive_grad_clip": Row(lambda: finished(optim.adaptive_grad_clip(0.1))),
    "lamb": Row(lambda: optim.lamb(rate, weight_decay=decay)),
    "lars": Row(
        lambda: optim.lars(rate, decay, is_matrix, 0.5, nesterov=True)
    ),  # 0.001 would be lost in float32
    "fromage": Row(lambda: decayed(optim.contrib.fromage(rate))),
    "novograd": Row(lambda: optim.contrib.novograd(rate, weight_decay=decay)),
    "adafactor": Row(lambda: optim.adafactor(rate, weight_decay_rate=decay)),
    "adafactor, momentum": Row(
        lambda: optim.adafactor(rate, 3, momentum=0.9, clipping_threshold=0.5)
    ),
    "adafactor, absolute step": Row(
        lambda: optim.adafactor(
            rate,
            relative_step=False,
            multiply_by_parameter_scale=False,
            clipping_threshold=None,
            weight_decay_rate=decay,
            weight_decay_mask=is_matrix,
        )
    ),
    "adafactor, not factored": Row(
        lambda: optim.adafactor(rate, factored=False, weight_decay_rate=decay)
    ),
    "sm3": Row(lambda: decayed(optim.contrib.sm3(rate))),
    "lbfgs": Row(lambda: decayed(optim.lbfgs(rate, 3))),
    "prodigy": Row(lambda: optim.prodigy(rate, estim_lr0=0.5, weight_decay=0.1)),
    "scale_by_trust_ratio": Row(lambda: finished(optim.scale_by_trust_ratio(0.1))),
    "scale_by_param_block_norm": Row(lambda: finished(optim.contrib.scale_by_param_block_norm())),
    "scale_by_param_block_rms": Row(lambda: finished(optim.contrib.scale_by_param_block_rms())),
    "scale_by_novograd": Row(lambda: finished(optim.contrib.scale_by_novograd())),
    "scale_by_adafactor": Row(
        lambda: optim.chain(optim.scale_by_adafactor(rate), optim.add_decayed_weights(decay))
    ),
    "scale_by_factored_rms": Row(
        lambda: finished(optim.scale_by_factored_rms(min_dim_size_to_factor=2))
    ),
    "scale_by_sm3": Row(lambda: finished(optim.contrib.scale_by_sm3())),
    "scale_by_lbfgs": Row(lambda: finished(optim.scale_by_lbfgs(3))),
    "with_statistics": Row(lambda: finished(own_statistics())),
    "with_statistics, every question": Row(lambda: finished(own_every_question())),
}

WHOLE: dict[str, Row] = {
    "muon": Row(muon),
    "muon, match_rms_adamw": Row(
        lambda: optim.muon(rate, weight_decay=decay, scaling="match_rms_adamw", nesterov=False)
    ),
    "orthogonalize": Row(lambda: optim.masked(finished(optim.orthogonalize()), is_matrix)),
    "shampoo": Row(lambda: optim.shampoo(rate, weight_decay=decay)),
    "shampoo, blocks": Row(
        lambda: optim.shampoo(
            rate,
            b2=0.9,
            weight_decay=decay,
            block_size=4,
            precondition_frequency=2,
            graft="rmsprop",
            nesterov=True,
        )
    ),
    "scale_by_shampoo": Row(lambda: finished(optim.scale_by_shampoo(graft="sgd"))),
    "soap": Row(lambda: optim.soap(rate, weight_decay=decay, precondition_frequency=2)),
    "scale_by_soap": Row(
        lambda: finished(optim.scale_by_soap(max_precond_dim=5, precondition_frequency=1))
    ),
    "full_matrix_adagrad": Row(lambda: optim.contrib.full_matrix_adagrad(rate, weight_decay=decay)),
    "full_matrix_adagrad, whole tree": Row(
        lambda: optim.contrib.full_matrix_adagrad(rate, weight_decay=decay, whole_tree=True)
    ),
    "scale_by_full_matrix_adagrad": Row(
        lambda: finished(optim.contrib.scale_by_full_matrix_adagrad())
    ),
    "scale_by_full_matrix_adagrad_tree": Row(
        lambda: finished(optim.contrib.scale_by_full_matrix_adagrad_tree())
    ),
    "with_whole_leaves": Row(lambda: finished(own_whole_leaves())),
    "with_whole_tree": Row(lambda: finished(own_whole_tree())),
    "from_optax, whole leaf": Row(
        lambda: finished(
            optim.from_optax(
                optax_pair(lambda m, p: m - m.sum() / (1 + m.numel()) + p), needs=Needs.WHOLE_LEAF
            )
        )
    ),
    "from_optax, whole tree": Row(
        lambda: finished(
            optim.from_optax(optax_pair(lambda m, p: m + p.sum() / 100), needs=Needs.WHOLE_TREE)
        )
    ),
}

WRAPPERS: dict[str, Row] = {
    "chain": Row(lambda: optim.chain(optim.clip(0.3), optim.clip_by_global_norm(0.5), muon())),
    "named_chain": Row(
        lambda: optim.named_chain(("clip", optim.clip_by_global_norm(0.5)), ("lamb", lamb()))
    ),
    "named_chain, pointwise": Row(
        lambda: optim.named_chain(("clip", optim.clip(0.3)), ("adam", optim.adam(rate)))
    ),
    "masked": Row(
        lambda: optim.chain(optim.masked(lamb(), is_matrix), optim.scale_by_schedule(rate))
    ),
    "masked, pointwise": Row(lambda: finished(optim.masked(optim.scale_by_adam(), is_matrix))),
    "partition": Row(
        lambda: optim.partition(
            {"matrix": muon(), "vector": optim.adamw(rate, weight_decay=decay)}, by_dims
        )
    ),
    "partition, of every kind": Row(
        lambda: optim.partition(
            {
                "a": muon(),
                "b": lamb(),
                "c": optim.adafactor(rate),
                "d": optim.nadam(rate, weight_decay=decay),
            },
            lambda path, leaf: "abcd"[(leaf.ndim + len(path)) % 4],
        )
    ),
    "freeze": Row(lambda: finished(optim.freeze(is_matrix))),
    "inject_hyperparams": Row(
        lambda: optim.inject_hyperparams(optim.adamw)(rate, weight_decay=decay),
        between=reduced_then_raised,
    ),
    "inject_hyperparams, statistics": Row(
        lambda: optim.inject_hyperparams(optim.lamb)(rate, weight_decay=decay)
    ),
    "inject_hyperparams, whole leaf": Row(
        lambda: optim.inject_hyperparams(optim.muon)(rate, weight_decay=decay)
    ),
    "apply_if_finite": Row(lambda: optim.apply_if_finite(optim.adamw(rate, weight_decay=decay), 2)),
    "apply_if_finite, whole leaf": Row(lambda: optim.apply_if_finite(muon(), 2)),
    "multi_steps": Row(lambda: optim.multi_steps(lamb(), 2)),
    "multi_steps, pointwise": Row(
        lambda: optim.multi_steps(optim.adamw(rate, weight_decay=decay), lambda done: 1 + done)
    ),
    "maybe_update": Row(
        lambda: finished(optim.maybe_update(optim.clip_by_global_norm(0.3), lambda t: t % 2 == 0))
    ),
    "maybe_update, pointwise": Row(
        lambda: finished(optim.maybe_update(optim.trace(0.9), lambda t: t > 1))
    ),
    "lookahead": Row(lambda: optim.lookahead(muon(), 2, 0.5)),
    "lookahead, pointwise": Row(
        lambda: optim.lookahead(optim.adamw(rate, weight_decay=decay), 3, 0.5)
    ),
    "params_ema": Row(lambda: optim.params_ema(lamb(), decay)),
    "params_ema, pointwise": Row(
        lambda: optim.params_ema(optim.adamw(rate, weight_decay=decay), 0.9)
    ),
    "schedule_free, statistics": Row(
        lambda: optim.schedule_free(
            optim.chain(optim.clip_by_global_norm(0.5), decayed(optim.sgd(rate))), rate
        )
    ),
    "sam": Row(lambda: optim.sam(lamb(), 0.1)),
    "reduce_on_plateau": Row(
        lambda: optim.chain(optim.adamw(rate, weight_decay=decay), optim.reduce_on_plateau(0.5, 1)),
        between=watched,
    ),
    "apply_if_nonzero": Row(
        lambda: taking_turns(optim.apply_if_nonzero(optim.adamw(rate, weight_decay=decay)))
    ),
    "apply_if_nonzero, by label, whole leaf": Row(
        lambda: taking_turns(optim.apply_if_nonzero(muon(), by_dims))
    ),
}

ROWS: dict[str, Row] = {
    "rows.sgd": Row(lambda: optim.rows.sgd(rate)),
    "rows.adagrad": Row(lambda: decayed(optim.rows.adagrad(rate))),
    "rows.adagrad_by_row": Row(lambda: decayed(optim.rows.adagrad_by_row(rate, 0.1))),
    "rows.lazy_adam": Row(lambda: taking_turns(optim.rows.lazy_adam(rate))),
    "with_whole_rows": Row(lambda: finished(own_whole_rows())),
}

TABLE = POINTWISE | STATISTICS | WHOLE | WRAPPERS | ROWS
assert len(TABLE) == sum(map(len, (POINTWISE, STATISTICS, WHOLE, WRAPPERS, ROWS)))
