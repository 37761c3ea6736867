"""Oracles of the optimizers that need whole tensors, one matrix at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import Arrays

Schedule = Callable[[int], float]


def each_matrix(x: np.ndarray) -> list[np.ndarray]:
    """A leaf's matrices: experts apart, a kernel as (out, in * kernel), a vector as one column."""
    if x.ndim == 3:
        return list(x)
    return [x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(-1, 1)]


class Muon:
    """torch.optim.Muon, in float64: momentum, five quintic Newton-Schulz steps, decoupled decay;
    AdamW for the rest."""

    def __init__(
        self, lr: Schedule, decay: Schedule, *, nesterov: bool = True, match_rms: bool = False
    ):
        self.lr, self.decay, self.nesterov, self.match_rms = lr, decay, nesterov, match_rms
        self.m: Arrays = {}
        self.v: Arrays = {}

    @staticmethod
    def orthogonal(x: np.ndarray) -> np.ndarray:
        """The quintic acts on singular values: p(s) = a s + b s^3 + c s^5, five times."""
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        s = s / max(np.sqrt((s**2).sum()), 1e-7)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return (u * s) @ vt

    def scaled(self, x: np.ndarray) -> np.ndarray:
        rows, cols = x.shape
        scale = 0.2 * np.sqrt(max(rows, cols)) if self.match_rms else np.sqrt(max(1.0, rows / cols))
        return scale * self.orthogonal(x)

    def adam(self, t: int, k: str, g: np.ndarray) -> np.ndarray:
        self.m[k] = 0.9 * self.m.get(k, 0 * g) + 0.1 * g
        self.v[k] = 0.999 * self.v.get(k, 0 * g) + 0.001 * g**2
        return (
            self.m[k] / (1 - 0.9 ** (t + 1)) / (np.sqrt(self.v[k] / (1 - 0.999 ** (t + 1))) + 1e-8)
        )

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            if g.ndim < 2:
                updates[k] = -self.lr(t) * self.adam(t, k, g)
                continue
            self.m[k] = 0.95 * self.m.get(k, 0 * g) + 0.05 * g
            ahead = 0.95 * self.m[k] + 0.05 * g if self.nesterov else self.m[k]
            direction = np.stack([self.scaled(x) for x in each_matrix(ahead)]).reshape(g.shape)
            updates[k] = -self.lr(t) * (direction + self.decay(t) * params[k])
        return updates


class Shampoo:
    """Gupta et al., 2018, Algorithm 1 (order 1 for vectors), in blocks, with grafting and
    momentum."""

    def __init__(
        self,
        lr: Schedule,
        decay: Schedule,
        *,
        block: int = 1024,
        b2: float = 1.0,
        every: int = 1,
        graft: str | None = "adagrad",
        eps: float = 1e-6,
    ):
        self.lr, self.decay, self.block, self.b2, self.every, self.graft = (
            lr,
            decay,
            block,
            b2,
            every,
            graft,
        )
        self.eps = eps
        self.stats: dict[Any, np.ndarray] = {}
        self.roots: dict[Any, np.ndarray] = {}
        self.squares: Arrays = {}
        self.m: Arrays = {}

    def root(self, t: int, key: Any, outer: np.ndarray, power: float) -> np.ndarray:
        share = 1.0 if self.b2 == 1 else 1 - self.b2
        self.stats[key] = self.b2 * self.stats.get(key, 0 * outer) + share * outer
        if t % self.every == 0:
            values, vectors = np.linalg.eigh(self.stats[key])
            values[values < len(values) * np.finfo(np.float64).eps * values.max()] = 0  # rounding
            self.roots[key] = (
                vectors @ np.diag((values + self.eps * values.max()) ** power) @ vectors.T
            )
        return self.roots[key]

    def matrix(self, t: int, key: Any, x: np.ndarray, is_vector: bool) -> np.ndarray:
        out = np.zeros_like(x)
        for i in range(0, x.shape[0], self.block):
            for j in range(0, x.shape[1], self.block):
                at = np.s_[i : i + self.block, j : j + self.block]
                g = x[at]
                left = self.root(t, (*key, i, j, "left"), g @ g.T, -1 / 2 if is_vector else -1 / 4)
                out[at] = (
                    left @ g
                    if is_vector
                    else left @ g @ self.root(t, (*key, i, j, "right"), g.T @ g, -1 / 4)
                )
        return out

    def size(self, t: int, k: str, g: np.ndarray) -> float:
        """The norm of the grafted optimizer's step."""
        if self.graft == "sgd":
            return float(np.linalg.norm(g))
        if self.graft == "adagrad":
            self.squares[k] = self.squares.get(k, 0 * g) + g**2
            return float(np.linalg.norm(g / (np.sqrt(self.squares[k]) + 1e-8)))
        self.squares[k] = 0.99 * self.squares.get(k, 0 * g) + 0.01 * g**2
        return float(np.linalg.norm(g / (np.sqrt(self.squares[k] / (1 - 0.99 ** (t + 1))) + 1e-8)))

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            parts = [self.matrix(t, (k, n), x, g.ndim < 2) for n, x in enumerate(each_matrix(g))]
            direction = np.stack(parts).reshape(g.shape)
            if self.graft is not None:
                direction = direction * self.size(t, k, g) / np.linalg.norm(direction)
            self.m[k] = 0.9 * self.m.get(k, 0 * g) + direction
            updates[k] = -self.lr(t) * (self.m[k] + self.decay(t) * params[k])
        return updates


class Soap:
    """Vyas et al., 2024, Algorithms 3 and 4, with our start and shift of the basis; Adam for
    vectors."""

    def __init__(
        self,
        lr: Schedule,
        decay: Schedule,
        *,
        every: int = 10,
        most: int = 10000,
        shift: float = 1e-3,
    ):
        self.lr, self.decay, self.every, self.most, self.shift = lr, decay, every, most, shift
        self.m: Arrays = {}
        self.v: dict[Any, np.ndarray] = {}
        self.stats: dict[Any, np.ndarray] = {}
        self.bases: dict[Any, np.ndarray] = {}

    def learn(self, t: int, key: Any, outer: np.ndarray) -> None:
        self.stats[key] = outer if t == 0 else 0.95 * self.stats[key] + 0.05 * outer
        turns = 10 if t == 0 else int(t % self.every == 0)
        for _ in range(turns):
            matrix = self.stats[key] / np.linalg.norm(self.stats[key]) + self.shift * np.eye(
                len(outer)
            )
            self.bases[key] = np.linalg.qr(matrix @ self.bases.get(key, np.eye(len(outer))))[0]

    def basis(self, key: Any, size: int) -> np.ndarray:
        return self.bases.get(key, np.eye(size))

    def matrix(self, t: int, key: Any, g: np.ndarray, m: np.ndarray, is_vector: bool) -> np.ndarray:
        left, right = (
            self.basis((*key, "left"), g.shape[0]),
            self.basis((*key, "right"), g.shape[1]),
        )
        direction = 0 * g
        if t > 0:
            rotated, momentum = left.T @ g @ right, left.T @ m @ right
            if (*key, "left") in self.bases or (*key, "right") in self.bases:
                for x in (rotated, momentum):
                    x[np.abs(x) < 4 * np.finfo(np.float64).eps * np.linalg.norm(x)] = 0  # rounding
            self.v[key] = 0.95 * self.v.get(key, 0 * g) + 0.05 * rotated**2
            c = 1 - 0.95**t
            direction = left @ (momentum / c / (np.sqrt(self.v[key] / c) + 1e-8)) @ right.T
        for side, outer in (("left", g @ g.T), ("right", g.T @ g)):
            if not is_vector and len(outer) <= self.most:
                self.learn(t, (*key, side), outer)
        return direction

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            self.m[k] = 0 * g if t == 0 else 0.95 * self.m[k] + 0.05 * g
            pairs = zip(each_matrix(g), each_matrix(self.m[k]), strict=True)
            parts = [self.matrix(t, (k, n), x, m, g.ndim < 2) for n, (x, m) in enumerate(pairs)]
            updates[k] = -self.lr(t) * (
                np.stack(parts).reshape(g.shape) + self.decay(t) * params[k]
            )
        return updates


class FullMatrixAdagrad:
    """Duchi et al., 2011, Figure 1: H = delta I + G^(1/2), with the pseudo-inverse where G has a
    null space."""

    def __init__(
        self, lr: Schedule, decay: Schedule, delta: float = 1e-8, whole_tree: bool = False
    ):
        self.lr, self.decay, self.delta, self.whole_tree = lr, decay, delta, whole_tree
        self.seen: dict[str, list[np.ndarray]] = {}

    def direction(self, k: str, g: np.ndarray) -> np.ndarray:
        """From the singular vectors of the matrix whose columns are the gradients so far."""
        self.seen.setdefault(k, []).append(g)
        u, s, _ = np.linalg.svd(np.stack(self.seen[k], axis=1), full_matrices=False)
        return u @ ((u.T @ g) / (self.delta + s))

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        decayed = {k: g + self.decay(t) * params[k] for k, g in gradients.items()}
        if not self.whole_tree:
            return {
                k: -self.lr(t) * self.direction(k, g.ravel()).reshape(g.shape)
                for k, g in decayed.items()
            }
        direction = self.direction("", np.concatenate([g.ravel() for g in decayed.values()]))
        updates, start = {}, 0
        for k, g in decayed.items():
            updates[k] = -self.lr(t) * direction[start : start + g.size].reshape(g.shape)
            start += g.size
        return updates


class AdagradByRow:
    """Mudigere et al., 2022, as in FBGEMM's EXACT_ROWWISE_ADAGRAD: one sum per row, row by row."""

    def __init__(self, lr: Schedule, initial: float):
        self.lr, self.initial = lr, initial
        self.sums: dict[tuple[str, int], float] = {}

    def __call__(self, t: int, gradients: Arrays, params: Arrays) -> Arrays:
        updates = {}
        for k, g in gradients.items():
            update = np.zeros_like(g)
            out = np.atleast_1d(update)  # a view
            for i, row in enumerate(np.atleast_1d(g)):
                if row.any():
                    self.sums[k, i] = self.sums.get((k, i), self.initial) + (row**2).mean()
                    out[i] = -self.lr(t) * row / (np.sqrt(self.sums[k, i]) + 1e-10)
            updates[k] = update
        return updates
