"""A small zoo of models with hostile shapes, each with a loss and batches; float64, so that
differences show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo

# with sympy; both once, not in every forked rank: that takes seconds
import torch.fx.experimental.symbolic_shapes
import torch.nn.functional as F
from torch import Tensor, nn

from functorch_zero.model.functionalize import functionalize
from functorch_zero.model.units import Units
from functorch_zero.step.loss import Aux

Batch = dict[str, Tensor]


class MLP(nn.Module):
    """Dims that nothing divides."""

    def __init__(self, dims: tuple[int, ...] = (7, 5, 3)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(dims))
        self.norm = nn.LayerNorm(dims[1])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 0:
                x = self.norm(torch.tanh(x))
        return x


class Block(nn.Module):
    """A pre-norm transformer block. Keys have no bias: its gradient is zero but for rounding."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        batch, length, width = x.shape
        split = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(*split, is_causal=causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(
        self, vocab: int = 11, width: int = 6, depth: int = 2, length: int = 5, tied: bool = True
    ):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """With BatchNorm. No convolution has a bias: BatchNorm takes it away."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(3, 5, 2, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.head = nn.Linear(5 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).flatten(1))


class Shared(nn.Module):
    """One block called twice, another between."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.block, self.between = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.block(x))
        x = torch.tanh(self.between(x))
        return self.head(torch.tanh(self.block(x)))


class Unused(nn.Module):
    """A layer, and a leaf of a used module, that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.head = nn.Linear(7, 4), nn.Linear(4, 4), WithSpare(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.used(x)))


class WithSpare(nn.Linear):
    """A Linear with a leaf that forward doesn't read."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__(num_in, num_out)
        self.spare = nn.Parameter(torch.randn(3))


class Scalars(nn.Module):
    """0-d and 1-element leaves, and hardly any others: more ranks than elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.3]))
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(self.line(x)) + self.shift


def frozen_mlp() -> MLP:
    """A frozen layer, and a frozen bias beside a trained weight."""
    model = MLP((7, 6, 5, 3))
    model.layers[1].requires_grad_(False)
    model.layers[2].bias.requires_grad_(False)
    return model


def rows(num_in: int, num_out: int) -> Callable[[int], Batch]:
    """Batches for regression."""
    return lambda n: {"x": torch.randn(n, num_in).double(), "y": torch.randn(n, num_out).double()}


def tokens(n: int) -> Batch:
    """Batches for GPT."""
    return {"x": torch.randint(11, (n, 5)), "y": torch.randint(11, (n, 5))}


def images(n: int) -> Batch:
    """Batches for ConvNet."""
    return {"x": torch.randn(n, 1, 6, 6).double(), "y": torch.randint(3, (n,))}


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    return ((output - y) ** 2).mean()


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Case:
    """A model with all that training it takes."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]  # of n rows
    units: Units = None
    criterion: Callable[[Tensor, Tensor], Tensor] = squared_error
    unused: tuple[str, ...] = ()  # trained leaves that no loss reaches
    by_rank: bool = (
        False  # whether the loss of a batch isn't the mean of its parts' losses, as with BatchNorm
    )
    seed: int = field(default=0, compare=False)

    def build(self, *, weighted: bool = False) -> tuple[Any, Any, dict[str, Tensor]]:
        """(loss_fn, params, buffers), always the same."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            apply, params, buffers = functionalize(self.model().double(), units=self.units)

        def loss_fn(params: Any, buffers: Any, batch: Batch) -> tuple[Tensor, Aux]:
            output, new = apply(params, buffers, batch["x"])
            loss = self.criterion(output, batch["y"])
            metrics = {"size": output.detach().abs().mean()}
            return loss, Aux(
                buffers=new, metrics=metrics, weight=len(batch["x"]) if weighted else None
            )

        return loss_fn, params, buffers

    def batches(self, num: int, n: int) -> list[Batch]:
        """`num` batches of `n` rows, always the same."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + 1)
            return [self.batch(n) for _ in range(num)]


ZOO = {
    case.name: case
    for case in (
        Case("mlp", MLP, rows(7, 3)),
        Case("gpt", GPT, tokens, Block, cross_entropy),
        Case("convnet", ConvNet, images, None, cross_entropy, by_rank=True),
        Case("shared", Shared, rows(5, 2)),
        Case("frozen", frozen_mlp, rows(7, 3)),
        Case("unused", Unused, rows(7, 2), unused=("never.weight", "never.bias", "head.spare")),
        Case("scalars", Scalars, rows(1, 1)),
    )
}


def split(batch: Batch, sizes: list[int]) -> list[Batch]:
    """Consecutive parts of a batch."""
    parts = {name: x.split(sizes) for name, x in batch.items()}
    return [{name: xs[i] for name, xs in parts.items()} for i in range(len(sizes))]


def even(n: int, ranks: int) -> list[int]:
    """Equal parts."""
    assert n % ranks == 0
    return [n // ranks] * ranks


def uneven(n: int, ranks: int) -> list[int]:
    """Parts of which no two are equal, the last one the largest."""
    sizes = [i + 1 for i in range(ranks)]
    sizes[-1] += n - sum(sizes)
    return sizes
