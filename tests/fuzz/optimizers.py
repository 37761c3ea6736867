"""The drawn optimizers: those of torch, or written out here, and the same of the package.

Those of the conformance table that torch doesn't have are drawn, too. The plain loop then trains
by SGD: it is compared for the loss and the gradients, and the sharded step with the unsharded one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from functorch_zero import optim
from tests.conformance.table import TABLE

RATE = 0.05
MATRIX_RATE = 0.02


class Optimizer(Protocol):
    """Moves the leaves that it was made for, by their `.grad`."""

    def step(self) -> object: ...


class Twins(NamedTuple):
    """One optimizer twice."""

    ours: Callable[[], optim.Transform]
    torchs: Callable[[Sequence[Tensor]], Optimizer]


def is_matrix(path: str, leaf: Tensor) -> bool:
    return leaf.ndim >= 2


def kind(path: str, leaf: Tensor) -> str:
    return "matrix" if leaf.ndim >= 2 else "vector"


def matrices(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf.ndim >= 2]


def vectors(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf.ndim < 2]


class Clipped:
    """Gradients clipped by their global norm."""

    def __init__(self, leaves: Sequence[Tensor], max_norm: float, inner: Optimizer):
        self.leaves, self.max_norm, self.inner = leaves, max_norm, inner

    def step(self) -> None:
        # torch's own adds 1e-6 to the norm
        grads = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if norm > self.max_norm:
            for grad in grads:
                grad.mul_(self.max_norm / norm)
        self.inner.step()


class Several:
    """Optimizers of different leaves."""

    def __init__(self, *parts: Optimizer):
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()


class EverySecond:
    """An optimizer that is given the mean gradient of two steps."""

    def __init__(self, leaves: Sequence[Tensor], inner: Optimizer):
        self.leaves, self.inner = leaves, inner
        self.kept: list[Tensor] = []

    def step(self) -> None:
        grads = [leaf.grad.clone() for leaf in self.leaves if leaf.grad is not None]
        if not self.kept:
            self.kept = grads
            return
        for leaf, first, second in zip(self.leaves, self.kept, grads, strict=True):
            leaf.grad = (first + second) / 2
        self.kept = []
        self.inner.step()


class Lookahead:
    """Every second step goes half of the way from where the last one ended."""

    def __init__(self, leaves: Sequence[Tensor], inner: Optimizer):
        self.leaves, self.inner, self.count = leaves, inner, 0
        self.slow = [leaf.detach().clone() for leaf in leaves]

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for leaf, slow in zip(self.leaves, self.slow, strict=True):
                slow.add_(leaf - slow, alpha=0.5)
                leaf.copy_(slow)


class Lion:
    """Chen et al., 2023, Algorithm 2."""

    def __init__(self, leaves: Sequence[Tensor]):
        self.leaves = leaves
        self.mu = [torch.zeros_like(leaf) for leaf in leaves]

    @torch.no_grad()
    def step(self) -> None:
        for leaf, mu in zip(self.leaves, self.mu, strict=True):
            assert leaf.grad is not None
            leaf.sub_(RATE * (0.9 * mu + 0.1 * leaf.grad).sign())
            mu.mul_(0.99).add_(leaf.grad, alpha=0.01)


def falling(leaves: Sequence[Tensor]) -> Optimizer:
    """SGD at a rate that falls with each step."""
    optimizer = torch.optim.SGD(leaves, RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW

TWINS: dict[str, Twins] = {
    "sgd": Twins(lambda: optim.sgd(RATE), lambda p: SGD(p, RATE)),
    "momentum": Twins(
        lambda: optim.sgd(RATE, 0.9, dampening=0.3, weight_decay=0.1),
        lambda p: SGD(p, RATE, 0.9, 0.3, 0.1),
    ),
    "nesterov": Twins(
        lambda: optim.sgd(RATE, 0.9, nesterov=True), lambda p: SGD(p, RATE, 0.9, nesterov=True)
    ),
    "schedule": Twins(lambda: optim.sgd(lambda count: RATE / (1 + count.double())), falling),
    "adam": Twins(
        lambda: optim.adam(RATE, eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, RATE, eps=1e-3, weight_decay=0.1),
    ),
    "adamw": Twins(lambda: optim.adamw(RATE, eps=1e-3), lambda p: ADAMW(p, RATE, eps=1e-3)),
    "amsgrad": Twins(
        lambda: optim.amsgrad(RATE, b2=0.5, eps=1e-3),
        lambda p: torch.optim.Adam(p, RATE, (0.9, 0.5), 1e-3, amsgrad=True),
    ),
    "adamax": Twins(
        lambda: optim.adamax(RATE, eps=1e-3), lambda p: torch.optim.Adamax(p, RATE, eps=1e-3)
    ),
    "nadam": Twins(
        lambda: optim.nadam(RATE, eps=1e-3), lambda p: torch.optim.NAdam(p, RATE, eps=1e-3)
    ),
    "radam": Twins(
        lambda: optim.radam(RATE, eps=1e-3), lambda p: torch.optim.RAdam(p, RATE, eps=1e-3)
    ),
    "adagrad": Twins(
        lambda: optim.adagrad(RATE, 0.1, 1e-3),
        lambda p: torch.optim.Adagrad(p, RATE, 0, 0, 0.1, 1e-3),
    ),
    "adadelta": Twins(
        lambda: optim.adadelta(1.0, eps=1e-3), lambda p: torch.optim.Adadelta(p, 1.0, eps=1e-3)
    ),
    "rmsprop": Twins(
        lambda: optim.rmsprop(RATE, eps=1e-3, momentum=0.8),
        lambda p: torch.optim.RMSprop(p, RATE, eps=1e-3, momentum=0.8),
    ),
    "from_torch": Twins(
        lambda: optim.from_torch(torch.optim.Adamax, lr=RATE, eps=1e-3),
        lambda p: torch.optim.Adamax(p, RATE, eps=1e-3),
    ),
    "lion": Twins(lambda: optim.lion(RATE, weight_decay=0.0), Lion),
    "clip + sgd": Twins(
        lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(RATE)),
        lambda p: Clipped(p, 0.1, SGD(p, RATE)),
    ),
    "clip + adamw": Twins(
        lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(RATE, eps=1e-3)),
        lambda p: Clipped(p, 0.1, ADAMW(p, RATE, eps=1e-3)),
    ),
    "partition": Twins(
        lambda: optim.partition(
            {"matrix": optim.adamw(RATE, eps=1e-3), "vector": optim.sgd(RATE, 0.9)}, kind
        ),
        lambda p: Several(ADAMW(matrices(p), RATE, eps=1e-3), SGD(vectors(p), RATE, 0.9)),
    ),
    "masked decay": Twins(
        lambda: optim.adamw(RATE, eps=1e-3, weight_decay=0.5, mask=is_matrix),
        lambda p: Several(
            ADAMW(matrices(p), RATE, eps=1e-3, weight_decay=0.5),
            ADAMW(vectors(p), RATE, eps=1e-3, weight_decay=0.0),
        ),
    ),
    "masked": Twins(
        lambda: optim.chain(optim.masked(optim.scale(3.0), is_matrix), optim.sgd(RATE)),
        lambda p: Several(SGD(matrices(p), 3 * RATE), SGD(vectors(p), RATE)),
    ),
    "labels": Twins(
        lambda: optim.chain(
            optim.scale_by_label({"matrix": MATRIX_RATE, "vector": RATE}, kind), optim.scale(-1.0)
        ),
        lambda p: Several(SGD(matrices(p), MATRIX_RATE), SGD(vectors(p), RATE)),
    ),
    "freeze": Twins(
        lambda: optim.chain(optim.sgd(RATE), optim.freeze(is_matrix)),
        lambda p: SGD(vectors(p), RATE),
    ),
    "lookahead": Twins(
        lambda: optim.lookahead(optim.sgd(RATE, 0.9), 2, 0.5),
        lambda p: Lookahead(p, SGD(p, RATE, 0.9)),
    ),
    "multi_steps": Twins(
        lambda: optim.multi_steps(optim.adamw(RATE, eps=1e-3), 2),
        lambda p: EverySecond(p, ADAMW(p, RATE, eps=1e-3)),
    ),
    "ema of params": Twins(
        lambda: optim.params_ema(optim.sgd(RATE, 0.9), 0.9), lambda p: SGD(p, RATE, 0.9)
    ),
    "apply_if_finite": Twins(
        lambda: optim.apply_if_finite(optim.sgd(RATE, 0.9), 2), lambda p: SGD(p, RATE, 0.9)
    ),
    "hyperparams": Twins(
        lambda: optim.inject_hyperparams(optim.adamw)(RATE, eps=1e-3),
        lambda p: ADAMW(p, RATE, eps=1e-3),
    ),
}  # eps: a gradient that is a cancelled sum is not blown up to a whole learning rate

# These blow round-off up by design, where a gradient has no full rank or is nearly its own mean
AMPLIFYING = ("shampoo", "soap", "full_matrix", "belief", "stddev")
# The conformance table's optimizers that don't, and that have no twin of the name
TABLED = [
    name for name in TABLE if name not in TWINS and not any(word in name for word in AMPLIFYING)
]


def ours(name: str) -> optim.Transform:
    """The package's."""
    return TWINS[name].ours() if name in TWINS else TABLE[name].make()


def torchs(name: str, leaves: Sequence[Tensor]) -> Optimizer:
    """torch's, or one written out here."""
    return TWINS[name].torchs(leaves)
