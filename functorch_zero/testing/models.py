"""Small models with hostile shapes, each with its loss and its batches, for proving a step or an
optimizer.

All are float64 unless they mix dtypes, so that real differences stand out from round-off. No leaf
of a `Case` starts at zero, since `Case.module` adds noise to all. Every used leaf gets a gradient
that is more than round-off: no bias before a norm that takes it away, no ReLU, no LayerNorm of one
element.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.functionalize import functionalize
from ..model.units import Units
from ..optim.base import Transform
from ..params import Params
from ..step.loss import Aux
from ..step.train import TrainStep, train_step

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model with all that training it takes.

    Attributes:
        name: the kind of model and its sizes, for error texts.
        model: makes the module.
        make_batch: `(rows, generator) -> batch`; "x" goes into the model.
        criterion: `(output, batch) -> loss`, a mean over rows.
        units: for `functionalize`.
        unused: patterns of paths of trained leaves that the loss does not use.
        per_rank: whether the loss couples the rows of a batch, so that an oracle must average over
            ranks.
        min_rows: the fewest rows that one rank's loss takes.
        seed: of the model's values.
    """

    name: str
    model: Callable[[], nn.Module] = field(repr=False)
    make_batch: Callable[[int, torch.Generator], Batch] = field(repr=False)
    criterion: Callable[[Tensor, Batch], Tensor] = field(repr=False)
    units: Units = None
    unused: tuple[str, ...] = ()
    per_rank: bool = False
    min_rows: int = 1
    seed: int = 0

    def module(self) -> nn.Module:
        """The module, always the same."""
        with torch.random.fork_rng(devices=[]):  # the caller's generators stay as they were
            torch.manual_seed(self.seed)
            model = self.model()
            with torch.no_grad():
                for leaf in model.parameters():
                    # Norms' shifts start at zero, and zeros would hide wrong updates
                    leaf.add_(torch.randn_like(leaf), alpha=0.1)
            return model

    def step(
        self, optimizer: Transform, *, weighted: bool = False
    ) -> tuple[TrainStep, Params, dict[str, Tensor]]:
        """`(step, params, buffers)`; `weighted` makes the loss say how many rows its batch has."""
        apply, params, buffers = functionalize(self.module(), units=self.units)

        def loss_fn(params: Any, buffers: Any, batch: Batch) -> tuple[Tensor, Aux]:
            output, new = apply(params, buffers, batch["x"])
            # In float64, so that the metric tells small differences too
            metrics = {"size": output.detach().double().square().mean()}
            weight = len(batch["x"]) if weighted else None
            return self.criterion(output, batch), Aux(buffers=new, metrics=metrics, weight=weight)

        return train_step(loss_fn, optimizer), params, buffers

    def batches(self, num: int, rows: int, seed: int = 0) -> list[Batch]:
        """`num` batches of `rows` rows, always the same."""
        g = torch.Generator().manual_seed(seed)  # on the CPU, apart from the global generator
        return [self.make_batch(rows, g) for _ in range(num)]


class MLP(nn.Module):
    """Linear layers of any widths, smooth between them."""

    def __init__(self, dims: Sequence[int]):
        super().__init__()
        self.layers = nn.ModuleList()
        for num_in, num_out in itertools.pairwise(dims):
            self.layers.append(nn.Linear(num_in, num_out))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block, causal."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        hidden = 2 * width + 1  # odd, so that no even number of ranks divides it
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of keys would have no gradient
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (rows, length, width), and so is the result
        x = x + self._attend(self.norm1(x))
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden)  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        # (rows, length, 3 * width) -> queries, keys and values, head by head
        heads = self.qkv(x).view(rows, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (rows, heads, length, width / heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder whose head is its embedding, if `tied`."""

    def __init__(self, vocab: int, width: int, heads: int, depth: int, length: int, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            # One Parameter in two modules: `functionalize` makes it one leaf
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (rows, length) int64 -> (rows, length, vocab)
        places = torch.arange(tokens.shape[1], device=tokens.device)  # (length,) int64
        x = self.embed(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """A layer, and a leaf of a layer that is used, that no loss reaches."""

    def __init__(self, width: int):
        super().__init__()
        self.used = nn.Linear(width, 4)
        self.never = nn.Linear(4, width)
        self.head = nn.Linear(4, 2)
        # Registered on a module that is used: gathered with it, and without a gradient
        self.head.register_parameter("spare", nn.Parameter(torch.randn(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.used(x)))  # type: ignore[no-any-return]


class Scalars(nn.Module):
    """0-d, 1-element and empty leaves, and hardly any others: more ranks than elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))  # 0-d
        self.shift = nn.Parameter(torch.tensor([0.3]))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gain * torch.tanh(self.line(x))
        return x + self.shift + self.nothing.sum()  # an empty sum adds 0, and uses the leaf


class Mixed(nn.Module):
    """A float32 layer among float64 ones, as a model that keeps a part in another precision has."""

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Linear(width, width).double()
        self.last = nn.Linear(width, 2).double()
        self.single = nn.Linear(width, width).float()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        # Casts inside: gradients pass through float32, so its tolerance counts for all
        x = torch.tanh(self.single(x.float()).double())
        return self.last(x)  # type: ignore[no-any-return]


def mlp(dims: Sequence[int] = (7, 5, 3), seed: int = 0) -> Case:
    """An MLP for regression."""
    make = lambda: MLP(dims).double()
    name = f"mlp{tuple(dims)}"
    return _regression(name, make, dims[0], dims[-1], seed, units=nn.Linear)


def frozen_mlp(dims: Sequence[int] = (7, 6, 5, 3), seed: int = 0) -> Case:
    """An MLP with a frozen layer, and a frozen bias beside a trained weight. At least three
    layers."""

    def make() -> nn.Module:
        model = MLP(dims).double()
        model.layers[1].requires_grad_(False)  # weight and bias
        model.layers[-1].get_parameter("bias").requires_grad_(False)
        return model

    return _regression(f"frozen_mlp{tuple(dims)}", make, dims[0], dims[-1], seed)


def gpt(
    vocab: int = 11,
    width: int = 6,
    heads: int = 2,
    depth: int = 2,
    length: int = 5,
    tied: bool = True,
    seed: int = 0,
) -> Case:
    """A GPT that predicts the next token; its blocks are units."""

    def make_batch(rows: int, g: torch.Generator) -> Batch:
        # One token more than the model reads, so that each position has a next one
        tokens = torch.randint(vocab, (rows, length + 1), generator=g)
        inputs, nexts = tokens[:, :-1], tokens[:, 1:]  # (rows, length), int64
        return {"x": inputs, "y": nexts}

    sizes = f"vocab={vocab}, width={width}, heads={heads}, depth={depth}, length={length}"
    name = f"gpt({sizes}, tied={tied})"
    make = lambda: GPT(vocab, width, heads, depth, length, tied).double()
    return Case(name, make, make_batch, _cross_entropy, units=Block, seed=seed)


def _convolution(num_in: int, num_out: int, kernel: int) -> list[nn.Module]:
    # BatchNorm would take away a bias
    convolution = nn.Conv2d(num_in, num_out, kernel, bias=False)
    return [convolution, nn.BatchNorm2d(num_out), nn.Softplus()]


def convnet(
    channels: int = 3, kernel: int = 3, classes: int = 3, size: int = 6, seed: int = 0
) -> Case:
    """Convolutions with BatchNorm for classes of images."""

    def make() -> nn.Module:
        # Other numbers of channels, so that the two layers' leaves differ in shape
        layers = [*_convolution(1, channels, kernel), *_convolution(channels, channels + 1, 2)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(classes))
        with torch.no_grad():
            # Makes the lazy head; in eval mode, so that BatchNorm's statistics stay as they are
            model.eval()(torch.zeros(1, 1, size, size))
        return model.train().double()

    def make_batch(rows: int, g: torch.Generator) -> Batch:
        images = torch.randn(rows, 1, size, size, generator=g, dtype=torch.float64)
        labels = torch.randint(classes, (rows,), generator=g)
        return {"x": images, "y": labels}

    name = f"convnet(channels={channels}, kernel={kernel}, classes={classes}, size={size})"
    # BatchNorm couples the rows of a rank
    return Case(name, make, make_batch, _cross_entropy, per_rank=True, min_rows=2, seed=seed)


def shared(width: int = 5, seed: int = 0) -> Case:
    """A block that is called twice, another between."""

    def make() -> nn.Module:
        block, between, head = (nn.Linear(width, size) for size in (width, width, 2))
        tanh = nn.Tanh()
        return nn.Sequential(block, tanh, between, tanh, block, tanh, head).double()

    return _regression(f"shared({width})", make, width, 2, seed)


def unused(width: int = 7, seed: int = 0) -> Case:
    """A layer, and a leaf of another layer, that the loss does not use."""
    make = lambda: Unused(width).double()
    return _regression(f"unused({width})", make, width, 2, seed, unused=("never.*", "head.spare"))


def scalars(seed: int = 0) -> Case:
    """Leaves of one element and of none."""
    return _regression("scalars", lambda: Scalars().double(), 1, 1, seed)


def mixed(width: int = 5, seed: int = 0) -> Case:
    """Leaves of two dtypes."""
    return _regression(f"mixed({width})", lambda: Mixed(width), width, 2, seed)


def _regression(
    name: str, make: Callable[[], nn.Module], num_in: int, num_out: int, seed: int, **rest: Any
) -> Case:
    """A model from (rows, num_in) to (rows, num_out), with normal inputs and targets, float64."""

    def make_batch(rows: int, g: torch.Generator) -> Batch:
        x = torch.randn(rows, num_in, generator=g, dtype=torch.float64)
        y = torch.randn(rows, num_out, generator=g, dtype=torch.float64)
        return {"x": x, "y": y}

    return Case(name, make, make_batch, _squared_error, seed=seed, **rest)


def _squared_error(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch["y"]).square().mean()


def _cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    # (rows, length, vocab) and (rows, length), or (rows, classes) and (rows,)
    return F.cross_entropy(output.flatten(0, -2), batch["y"].flatten())
