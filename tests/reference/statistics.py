"""Oracles of the optimizers that need statistics of whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from . import Arrays

Schedule = Callable[[int], float]


def norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(x * x)))


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))


def clip_by_global_norm(gradients: Arrays, max_norm: float) -> Arrays:
    """Pascanu et al., 2013, Algorithm 1."""
    total = np.sqrt(sum(norm(g) ** 2 for g in gradients.values()))
    return {k: g * max_norm / total if total >= max_norm else g for k, g in gradients.items()}


def clip_by_block_rms(gradients: Arrays, threshold: float) -> Arrays:
    """Shazeer and Stern, 2018, Definition 2."""
    return {k: g / max(1.0, rms(g) / threshold) for k, g in gradients.items()}


def adaptive_grad_clip(
    gradients: Arrays, params: Arrays, clipping: float, eps: float = 1e-3
) -> Arrays:
    """Brock et al., 2021, equation 3, a row (of what one output is made of) at a time."""

    def rows(x: np.ndarray) -> np.ndarray:
        return (
            x.reshape(1, -1)
            if sum(size != 1 for size in x.shape) <= 1
            else x.reshape(x.shape[0], -1)
        )

    clipped = {}
    for name, g in gradients.items():
        out = rows(g).copy()
        for i, (row, param) in enumerate(zip(rows(g), rows(params[name]), strict=True)):
            most = clipping * max(norm(param), eps)
            if norm(row) >= most:
                out[i] = row * most / norm(row)
        clipped[name] = out.reshape(g.shape)
    return clipped


class Lamb:
    """You et al., 2020, Algorithm 2, with phi(z) = z."""

    def __init__(
        self, lr: Schedule, decay: Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6
    ):
        self.lr, self.decay, self.b1, self.b2, self.eps = lr, decay, b1, b2, eps
        self.m: Arrays = {}
        self.v: Arrays = {}

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            self.m[k] = self.b1 * self.m.get(k, 0 * g) + (1 - self.b1) * g
            self.v[k] = self.b2 * self.v.get(k, 0 * g) + (1 - self.b2) * g**2
            m, v = self.m[k] / (1 - self.b1 ** (t + 1)), self.v[k] / (1 - self.b2 ** (t + 1))
            direction = m / (np.sqrt(v) + self.eps) + self.decay(t) * params[k]
            x, r = norm(params[k]), norm(direction)
            updates[k] = -self.lr(t) * (x / r if x > 0 and r > 0 else 1.0) * direction
        return updates


class Lars:
    """You et al., 2017, Algorithm 1."""

    def __init__(
        self,
        lr: Schedule,
        decay: Schedule,
        trust: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
    ):
        self.lr, self.decay, self.trust, self.momentum, self.nesterov = (
            lr,
            decay,
            trust,
            momentum,
            nesterov,
        )
        self.v: Arrays = {}

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            g = g + self.decay(t) * params[k]
            x, r = norm(params[k]), norm(g)
            step = self.lr(t) * (self.trust * x / r if x > 0 and r > 0 else 1.0) * g
            self.v[k] = self.momentum * self.v.get(k, 0 * g) + step
            updates[k] = -(step + self.momentum * self.v[k] if self.nesterov else self.v[k])
        return updates


class Fromage:
    """Bernstein et al., 2020, Algorithm 1."""

    def __init__(self, lr: Schedule):
        self.lr = lr

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            moved = params[k] - self.lr(t) * norm(params[k]) / norm(g) * g
            updates[k] = moved / np.sqrt(1 + self.lr(t) ** 2) - params[k]
        return updates


class Novograd:
    """Ginsburg et al., 2019, Algorithm 1."""

    def __init__(
        self, lr: Schedule, decay: Schedule, b1: float = 0.9, b2: float = 0.25, eps: float = 1e-6
    ):
        self.lr, self.decay, self.b1, self.b2, self.eps = lr, decay, b1, b2, eps
        self.m: Arrays = {}
        self.v: dict[str, float] = {}

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            square = norm(g) ** 2
            self.v[k] = square if t == 0 else self.b2 * self.v[k] + (1 - self.b2) * square
            added = g / (np.sqrt(self.v[k]) + self.eps) + self.decay(t) * params[k]
            self.m[k] = added if t == 0 else self.b1 * self.m[k] + added
            updates[k] = -self.lr(t) * self.m[k]
        return updates


class Adafactor:
    """Shazeer and Stern, 2018, Algorithms 4 and 5, in torch.optim.Adafactor's variant; with optax's
    momentum."""

    def __init__(
        self, lr: Schedule, decay: Schedule, *, momentum: float | None = None, clip: float = 1.0
    ):
        self.lr, self.decay, self.momentum, self.clip = lr, decay, momentum, clip
        self.eps1, self.eps2 = np.finfo(np.float64).eps, 1e-3
        self.rows: Arrays = {}
        self.cols: Arrays = {}
        self.whole: Arrays = {}
        self.m: Arrays = {}

    def estimate(self, k: str, g: np.ndarray, share: float) -> np.ndarray:
        """V hat: of the last two dims the product of row and column means over the mean of all."""
        if g.ndim < 2:
            self.whole[k] = (1 - share) * self.whole.get(k, 0 * g) + share * g**2
            return self.whole[k]
        stack = g.reshape(-1, *g.shape[-2:])
        rows, cols = (stack**2).mean(axis=2), (stack**2).mean(axis=1)
        self.rows[k] = (1 - share) * self.rows.get(k, 0 * rows) + share * rows
        self.cols[k] = (1 - share) * self.cols.get(k, 0 * cols) + share * cols
        made = [
            np.outer(r, c) / max(r.mean(), self.eps1)
            for r, c in zip(self.rows[k], self.cols[k], strict=True)
        ]
        return np.stack(made).reshape(g.shape)

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            estimate = self.estimate(k, g, (t + 1.0) ** -0.8)
            direction = g / np.sqrt(np.maximum(estimate, self.eps1**2))
            direction = direction / max(1.0, rms(direction) / self.clip)
            step = max(self.eps2, rms(params[k])) * min(self.lr(t), (t + 1) ** -0.5) * direction
            if self.momentum is not None:
                self.m[k] = self.momentum * self.m.get(k, 0 * g) + (1 - self.momentum) * step
                step = self.m[k]
            updates[k] = -step - self.lr(t) * self.decay(t) * params[k]
        return updates


class FactoredRms:
    """Shazeer and Stern, 2018, Algorithm 4, of the two largest dims, if the smaller one is at least
    `least`."""

    def __init__(self, least: int):
        self.least = least
        self.rows: Arrays = {}
        self.cols: Arrays = {}
        self.whole: Arrays = {}

    def __call__(self, t: int, gradients: Arrays) -> Arrays:
        share, directions = (t + 1.0) ** -0.8, {}
        for k, g in gradients.items():
            largest = sorted(range(g.ndim), key=lambda d: (g.shape[d], d))[-2:]
            if g.ndim < 2 or g.shape[largest[0]] < self.least:
                self.whole[k] = (1 - share) * self.whole.get(k, 0 * g) + share * (g**2 + 1e-30)
                directions[k] = g / np.sqrt(self.whole[k])
                continue
            squares = np.moveaxis(g, largest, (-2, -1)) ** 2 + 1e-30
            rows, cols = squares.mean(axis=-1), squares.mean(axis=-2)
            self.rows[k] = (1 - share) * self.rows.get(k, 0 * rows) + share * rows
            self.cols[k] = (1 - share) * self.cols.get(k, 0 * cols) + share * cols
            product = self.rows[k][..., :, None] * self.cols[k][..., None, :]
            estimate = product / self.rows[k].mean(axis=-1)[..., None, None]
            directions[k] = g / np.sqrt(np.moveaxis(estimate, (-2, -1), largest))
        return directions


class Sm3:
    """Anil et al., 2019, SM3-II, element by element; the cover is the slices along each dim."""

    def __init__(self, lr: Schedule, momentum: float = 0.9, eps: float = 1e-8):
        self.lr, self.momentum, self.eps = lr, momentum, eps
        self.mu: dict[tuple[str, int, int], float] = {}
        self.m: Arrays = {}

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            new: dict[tuple[str, int, int], float] = {}
            direction = np.zeros_like(g)
            for number, at in enumerate(np.ndindex(g.shape)):
                sets = [(k, dim, i) for dim, i in enumerate(at)] if g.ndim > 1 else [(k, 0, number)]
                nu = min(self.mu.get(s, 0.0) for s in sets) + g[at] ** 2
                direction[at] = g[at] / np.sqrt(nu + self.eps) if nu > 0 else 0.0
                for s in sets:
                    new[s] = max(new.get(s, 0.0), nu)
            self.mu |= new
            self.m[k] = self.momentum * self.m.get(k, 0 * g) + (1 - self.momentum) * direction
            updates[k] = -self.lr(t) * self.m[k]
        return updates


class Prodigy:
    """Mishchenko and Defazio, 2023, Algorithm 4, with the authors' bias correction and weight
    decay."""

    def __init__(
        self, lr: Schedule, decay: float, d0: float = 1e-6, b1: float = 0.9, b2: float = 0.999
    ):
        self.lr, self.decay, self.d0, self.d, self.r = lr, decay, d0, d0, 0.0
        self.b1, self.b2, self.b3 = b1, b2, b2**0.5
        self.first: Arrays = {}
        self.m: Arrays = {}
        self.v: Arrays = {}
        self.s: Arrays = {}

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        self.first = self.first or params
        d, gamma = self.d, self.lr(t) * np.sqrt(1 - self.b2 ** (t + 1)) / (1 - self.b1 ** (t + 1))
        inner = sum(np.sum(g * (self.first[k] - params[k])) for k, g in gradients.items())
        for k, g in gradients.items():
            self.m[k] = self.b1 * self.m.get(k, 0 * g) + (1 - self.b1) * d * g
            self.v[k] = self.b2 * self.v.get(k, 0 * g) + (1 - self.b2) * d**2 * g**2
            self.s[k] = self.b3 * self.s.get(k, 0 * g) + d / self.d0 * d * gamma * g
        self.r = self.b3 * self.r + d / self.d0 * d * gamma * inner
        self.d = max(d, self.r / sum(np.abs(s).sum() for s in self.s.values()))
        return {
            k: -d
            * gamma
            * (self.m[k] / (np.sqrt(self.v[k]) + self.d * 1e-8) + self.decay * params[k])
            for k in gradients
        }


class Lbfgs:
    """Nocedal and Wright, equation 7.19: the inverse Hessian as a dense matrix, from the last
    pairs."""

    def __init__(self, lr: Schedule, memory: int, scaled: bool = True):
        self.lr, self.memory, self.scaled = lr, memory, scaled
        self.points: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        p, g = (np.concatenate([x.ravel() for x in tree.values()]) for tree in (params, gradients))
        self.points.append((p, g))
        pairs = [(p1 - p0, g1 - g0) for (p0, g0), (p1, g1) in pairwise(self.points)][-self.memory :]
        scale = min(1.0, 1 / norm(g))
        if pairs:
            s, y = pairs[-1]
            scale = s @ y / (y @ y)
        inverse = (scale if self.scaled else 1.0) * np.eye(len(g))
        for s, y in pairs:
            rho = 1 / (s @ y)
            v = np.eye(len(g)) - rho * np.outer(y, s)
            inverse = v.T @ inverse @ v + rho * np.outer(s, s)
        direction, updates, start = -self.lr(t) * inverse @ g, {}, 0
        for k, x in gradients.items():
            updates[k] = direction[start : start + x.size].reshape(x.shape)
            start += x.size
        return updates
