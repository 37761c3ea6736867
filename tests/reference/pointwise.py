"""Oracles for pointwise optimizers, from the papers: one element at a time, in Python floats, slow
and clear.

Each takes an element's first value and its gradients, and returns what is added to it in each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from functorch_zero import optim


def sign(x: float) -> float:
    return math.copysign(1.0, x) if x else 0.0


def adam(
    x: float, grads: Sequence[float], lr: float, b1: float, b2: float, eps: float
) -> list[float]:
    """Kingma and Ba, 2015, Algorithm 1."""
    m = v = 0.0
    moves = []
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        moves.append(-lr * m_hat / (math.sqrt(v_hat) + eps))
    return moves


def lion(
    x: float, grads: Sequence[float], lr: float, b1: float, b2: float, weight_decay: float
) -> list[float]:
    """Chen et al., 2023, Algorithm 2."""
    m = 0.0
    moves = []
    for g in grads:
        c = b1 * m + (1 - b1) * g
        moves.append(-lr * (sign(c) + weight_decay * x))
        x += moves[-1]
        m = b2 * m + (1 - b2) * g
    return moves


def adabelief(
    x: float, grads: Sequence[float], lr: float, b1: float, b2: float, eps: float
) -> list[float]:
    """Zhuang et al., 2020, Algorithm 2; its eps stands in two places."""
    m = s = 0.0
    moves = []
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m) ** 2 + eps
        m_hat, s_hat = m / (1 - b1**t), s / (1 - b2**t)
        moves.append(-lr * m_hat / (math.sqrt(s_hat) + eps))
    return moves


def yogi(
    x: float, grads: Sequence[float], lr: float, b1: float, b2: float, eps: float, start: float
) -> list[float]:
    """Zaheer et al., 2018, Algorithm 2, with Adam's bias correction and both moments from `start`,
    as in optax."""
    m = v = start
    moves = []
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * sign(v - g**2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        moves.append(-lr * m_hat / (math.sqrt(v_hat) + eps))
    return moves


def ademamix(
    x: float,
    grads: Sequence[float],
    lr: float,
    b1: float,
    b2: float,
    b3: float,
    alpha: float,
    eps: float,
    decay: float,
) -> list[float]:
    """Pagliardini et al., 2024, Algorithm 1, without its schedulers."""
    m1 = m2 = v = 0.0
    moves = []
    for t, g in enumerate(grads, 1):
        m1 = b1 * m1 + (1 - b1) * g
        m2 = b3 * m2 + (1 - b3) * g
        v = b2 * v + (1 - b2) * g**2
        m1_hat, v_hat = m1 / (1 - b1**t), v / (1 - b2**t)
        moves.append(-lr * ((m1_hat + alpha * m2) / (math.sqrt(v_hat) + eps) + decay * x))
        x += moves[-1]
    return moves


def adamax(
    x: float, grads: Sequence[float], lr: float, b1: float, b2: float, eps: float
) -> list[float]:
    """Kingma and Ba, 2015, Algorithm 2, with torch's eps beside the gradient's size."""
    m = u = 0.0
    moves = []
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        u = max(b2 * u, abs(g) + eps)
        moves.append(-lr / (1 - b1**t) * m / u)
    return moves


def schedule_free_sgd(x: float, grads: Sequence[float], lr: float, beta: float) -> list[float]:
    """Defazio et al., 2024, equations 1 to 3, at a constant rate; the moves of y, where gradients
    are taken."""
    y = z = x
    moves = []
    for t, g in enumerate(grads, 1):
        z = z - lr * g
        x = (1 - 1 / t) * x + z / t
        new = (1 - beta) * z + beta * x
        moves.append(new - y)
        y = new
    return moves


def lookahead(x: float, grads: Sequence[float], lr: float, k: int, alpha: float) -> list[float]:
    """Zhang et al., 2019, Algorithm 1, around gradient descent."""
    slow = x
    moves = []
    for t, g in enumerate(grads, 1):
        fast = x - lr * g
        if t % k == 0:
            slow = slow + alpha * (fast - slow)
            fast = slow
        moves.append(fast - x)
        x = fast
    return moves


# The library's transform, and its oracle of one element: (x, its gradients) -> updates
ORACLES: dict[str, tuple[optim.Transform, Any]] = {
    "adam": (
        optim.adam(0.1, 0.8, 0.9, 1e-3),
        lambda x, g: adam(x, g, 0.1, 0.8, 0.9, 1e-3),
    ),
    "adamax": (
        optim.adamax(0.1, 0.8, 0.9),
        lambda x, g: adamax(x, g, 0.1, 0.8, 0.9, 1e-8),
    ),
    "lion": (
        optim.lion(0.1, weight_decay=0.2),
        lambda x, g: lion(x, g, 0.1, 0.9, 0.99, 0.2),
    ),
    "adabelief": (
        optim.contrib.adabelief(0.1, eps=1e-8, eps_root=1e-8),
        lambda x, g: adabelief(x, g, 0.1, 0.9, 0.999, 1e-8),
    ),
    "yogi": (
        optim.contrib.yogi(0.1),
        lambda x, g: yogi(x, g, 0.1, 0.9, 0.999, 1e-3, 1e-6),
    ),
    "ademamix": (
        optim.contrib.ademamix(0.1, weight_decay=0.2),
        lambda x, g: ademamix(x, g, 0.1, 0.9, 0.999, 0.9999, 5.0, 1e-8, 0.2),
    ),
    "schedule_free_sgd": (
        optim.schedule_free_sgd(0.1, b1=0.8),
        lambda x, g: schedule_free_sgd(x, g, 0.1, 0.8),
    ),
    "lookahead": (
        optim.lookahead(optim.sgd(0.1), 3, 0.4),
        lambda x, g: lookahead(x, g, 0.1, 3, 0.4),
    ),
}
