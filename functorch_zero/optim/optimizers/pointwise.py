"""Pointwise optimizers by name: compositions of the transforms.

`weight_decay` of an optimizer whose name has no "w" is torch.optim's: `weight_decay * param` joins
the gradient before everything else. With a "w" (and in lion) it is decoupled: it joins just before
the learning rate (Loshchilov and Hutter, 2019), and `mask` says which leaves decay. None of these
communicates.
"""

from __future__ import annotations

from dataclasses import replace

from ..arithmetic import Number, is_zero, number
from ..base import Schedule, Transform, chain
from ..kernels.fused_adamw import fused_adamw
from ..naming import named
from ..transforms.scaling import (
    add_decayed_weights,
    identity,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    scale_by_sign,
    trace,
)
from ..wrappers.masking import Mask
from .adam import (
    scale_by_adam,
    scale_by_adamax,
    scale_by_ademamix,
    scale_by_amsgrad,
    scale_by_belief,
    scale_by_lion,
    scale_by_nadam,
    scale_by_radam,
    scale_by_yogi,
)
from .rmsprop import (
    scale_by_adadelta,
    scale_by_rms,
    scale_by_rprop,
    scale_by_rss,
    scale_by_stddev,
)


def _coupled(
    directions: Transform,
    weight_decay: Number | Schedule,
    learning_rate: Number | Schedule,
    mask: Mask | None = None,
) -> Transform:
    """Decay, as part of the gradient and left out where it is 0, then directions, then the learning
    rate."""
    decay = () if is_zero(weight_decay) else (add_decayed_weights(weight_decay, mask),)
    return chain(*decay, directions, scale_by_learning_rate(learning_rate))


def _decoupled(
    directions: Transform,
    weight_decay: Number | Schedule,
    mask: Mask | None,
    learning_rate: Number | Schedule,
) -> Transform:
    """Directions, then decay, then the learning rate."""
    return chain(
        directions, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    )


@named
def sgd(
    learning_rate: Number | Schedule,
    momentum: Number | None = None,
    nesterov: bool = False,
    *,
    dampening: Number = 0.0,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Gradient descent. torch.optim.SGD's numerics. State with momentum: 1 tensor like params, else
    none."""
    directions = identity() if momentum is None else trace(momentum, nesterov, dampening)
    return _coupled(directions, weight_decay, learning_rate)


@named
def adam(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Adam (Kingma and Ba, 2015). torch.optim.Adam's numerics. State: 2 tensors like params."""
    return _coupled(scale_by_adam(b1, b2, eps, eps_root), weight_decay, learning_rate)


@named
def adamw(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """AdamW (Loshchilov and Hutter, 2019). torch.optim.AdamW's numerics and default weight decay
    (optax: 1e-4).

    State: 2 tensors like params. On donated storage it runs as torch's fused kernel.
    """
    pure = _decoupled(scale_by_adam(b1, b2, eps, eps_root), weight_decay, mask, learning_rate)
    has_numbers = all(isinstance(x, int | float) for x in (b1, b2, eps))
    if mask is not None or not has_numbers or not is_zero(eps_root):
        return pure
    kernel = fused_adamw(learning_rate, b1, b2, eps, weight_decay)  # type: ignore[arg-type]
    return replace(pure, fused=kernel)


@named
def amsgrad(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """AMSGrad (Reddi et al., 2018). torch.optim.Adam(amsgrad=True)'s numerics. State: 3 tensors
    like params."""
    return _coupled(scale_by_amsgrad(b1, b2, eps, eps_root), weight_decay, learning_rate)


@named
def adamax(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """AdaMax (Kingma and Ba, 2015, Algorithm 2). torch.optim.Adamax's numerics. State: 2 tensors
    like params."""
    return _coupled(scale_by_adamax(b1, b2, eps), weight_decay, learning_rate)


@named
def adamaxw(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: Number | Schedule = 1e-4,
    mask: Mask | None = None,
) -> Transform:
    """AdaMax with decoupled weight decay. As optax.adamaxw. State: 2 tensors like params."""
    return _decoupled(scale_by_adamax(b1, b2, eps), weight_decay, mask, learning_rate)


@named
def nadam(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    momentum_decay: Number = 4e-3,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """NAdam (Dozat, 2016). torch.optim.NAdam's numerics, with its warm-up of the momentum, which
    optax lacks.

    State: 2 tensors like params.
    """
    return _coupled(scale_by_nadam(b1, b2, eps, momentum_decay), weight_decay, learning_rate)


@named
def nadamw(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    momentum_decay: Number = 4e-3,
    *,
    weight_decay: Number | Schedule = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """NAdam with decoupled weight decay. torch.optim.NAdam(decoupled_weight_decay=True)'s numerics;
    see `nadam`.

    State: 2 tensors like params.
    """
    return _decoupled(
        scale_by_nadam(b1, b2, eps, momentum_decay), weight_decay, mask, learning_rate
    )


@named
def radam(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    threshold: Number = 5.0,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Rectified Adam (Liu et al., 2020). torch.optim.RAdam's numerics. State: 2 tensors like
    params."""
    return _coupled(scale_by_radam(b1, b2, eps, eps_root, threshold), weight_decay, learning_rate)


@named
def adagrad(
    learning_rate: Number | Schedule,
    initial_accumulator_value: Number = 0.0,
    eps: Number = 1e-10,
    *,
    lr_decay: Number = 0.0,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """Adagrad with a diagonal (Duchi et al., 2011). torch.optim.Adagrad's numerics and defaults
    (optax: 0.1, 1e-7).

    State: 1 tensor like params. `lr_decay` divides the learning rate by `1 + steps * lr_decay`.
    """
    falling = (
        ()
        if is_zero(lr_decay)
        else (scale_by_schedule(lambda count: 1 / (1 + count * number(lr_decay))),)
    )
    directions = chain(scale_by_rss(initial_accumulator_value, eps), *falling)
    return _coupled(directions, weight_decay, learning_rate)


@named
def adadelta(
    learning_rate: Number | Schedule = 1.0,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: Number | Schedule = 0.0,
    weight_decay_mask: Mask | None = None,
) -> Transform:
    """Adadelta (Zeiler, 2012). torch.optim.Adadelta's numerics. State: 2 tensors like params."""
    return _coupled(scale_by_adadelta(rho, eps), weight_decay, learning_rate, weight_decay_mask)


@named
def rmsprop(
    learning_rate: Number | Schedule,
    decay: Number = 0.99,
    eps: Number = 1e-8,
    initial_scale: Number = 0.0,
    eps_in_sqrt: bool = False,
    centered: bool = False,
    momentum: Number | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
    *,
    weight_decay: Number | Schedule = 0.0,
) -> Transform:
    """RMSprop (Hinton, 2012; centred: Graves, 2013). torch.optim.RMSprop's numerics and defaults.

    optax differs: decay 0.9, eps under the root, and momentum after the learning rate, which
    matters while that changes. State: 1 tensor like params, one more if centred, one more with
    momentum. Arguments:
        see `scale_by_rms`.
    """
    rescale = scale_by_stddev if centered else scale_by_rms
    momenta = () if momentum is None else (trace(momentum, nesterov),)
    directions = chain(rescale(decay, eps, initial_scale, eps_in_sqrt, bias_correction), *momenta)
    return _coupled(directions, weight_decay, learning_rate)


@named
def rprop(
    learning_rate: Number,
    eta_minus: Number = 0.5,
    eta_plus: Number = 1.2,
    min_step_size: Number = 1e-6,
    max_step_size: Number = 50.0,
) -> Transform:
    """Rprop (Riedmiller and Braun, 1993). torch.optim.Rprop's numerics, not optax's. State: 2
    tensors like params.

    Arguments: see `scale_by_rprop`; `learning_rate` is the first step size.
    """
    return chain(
        scale_by_rprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size),
        scale(-1.0),
    )


@named
def sign_sgd(learning_rate: Number | Schedule) -> Transform:
    """Gradient descent by the gradient's sign (Bernstein et al., 2018). As optax.sign_sgd. No state
    like params."""
    return chain(scale_by_sign(), scale_by_learning_rate(learning_rate))


@named
def lion(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.99,
    *,
    weight_decay: Number | Schedule = 1e-3,
    mask: Mask | None = None,
) -> Transform:
    """Lion (Chen et al., 2023). As optax.lion. State: 1 tensor like params."""
    return _decoupled(scale_by_lion(b1, b2), weight_decay, mask, learning_rate)


@named
def adabelief(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-16,
    eps_root: Number = 1e-16,
) -> Transform:
    """AdaBelief (Zhuang et al., 2020). As optax.adabelief. State: 2 tensors like params."""
    return chain(scale_by_belief(b1, b2, eps, eps_root), scale_by_learning_rate(learning_rate))


@named
def yogi(
    learning_rate: Number | Schedule, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-3
) -> Transform:
    """Yogi (Zaheer et al., 2018). As optax.yogi. State: 2 tensors like params."""
    return chain(scale_by_yogi(b1, b2, eps), scale_by_learning_rate(learning_rate))


@named
def ademamix(
    learning_rate: Number | Schedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    b3: Number | Schedule = 0.9999,
    alpha: Number | Schedule = 5.0,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: Number | Schedule = 0.0,
    mask: Mask | None = None,
) -> Transform:
    """AdEMAMix (Pagliardini et al., 2024), with decoupled decay. As optax.contrib. State: 3 tensors
    like params."""
    return _decoupled(
        scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root), weight_decay, mask, learning_rate
    )
