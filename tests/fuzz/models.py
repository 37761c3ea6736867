"""Small networks made of drawn blocks: each block has one feature that a library may trip over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

INPUTS, WIDTH, OUTPUTS = 3, 5, 2  # no number of ranks divides all of them


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The dtype of new floating-point tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def complex_dtype() -> torch.dtype:
    """The complex numbers that go with the network's floats."""
    return torch.get_default_dtype().to_complex()


class Block(nn.Module):
    """Rows (n, WIDTH) -> the same shape: the rows, and something learnt beside them.

    The linear layer is there in every block, so that units have leaves of several shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


# Leaves


class Tied(Block):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.linear(x)))


class SharedModule(Block):
    """One module under two names, and called under both."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.linear

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.again(self.linear(x)))


class Twice(Block):
    """A block that is run twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Unused(Block):
    """A leaf that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


class Frozen(Block):
    """A layer that isn't trained, before one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.fixed(x))


class EmptyLeaf(Block):
    """A leaf without elements, which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.nothing.t()).sum(-1, keepdim=True)


class ScalarLeaf(Block):
    """A 0-d leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gain * x)


class ComplexLeaf(Block):
    """A complex leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=complex_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.phase).abs())


class HalfLeaf(Block):
    """A bfloat16 leaf among others."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Parameter(torch.randn(WIDTH).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.coarse.to(x.dtype)


class SingleLeaf(Block):
    """A float32 leaf among others."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(WIDTH).float())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.single.to(x.dtype))


class TurnedLeaf(Block):
    """A leaf that isn't contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.turned.t()) @ self.turned


class LeafLists(Block):
    """A ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])
        self.gains = nn.ParameterDict({"a": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.gains["a"] + self.shifts[0]) + self.shifts[1]


class WeightNormed(Block):
    """A layer whose weight is computed from two leaves."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.linear)


class SpectralNormed(Block):
    """A layer whose weight is computed from a leaf and from buffers, which change each time."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.linear)


# References to leaves and modules outside of nn.Module's own dicts


@dataclass
class Record:
    """Something of a user's own that holds a leaf."""

    leaf: Tensor


class InTuple(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.kept = (self.shift, self.linear)

    def forward(self, x: Tensor) -> Tensor:
        shift, linear = self.kept
        return x + torch.tanh(linear(x + shift))


class InList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Callable[[Tensor], Tensor]] = [self.linear, torch.tanh]

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for function in self.kept:
            y = function(y)
        return x + y


class InDict(Block):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"weight": self.linear.weight, "layer": [self.linear]}

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.kept["layer"][0](x) @ self.kept["weight"])


class InDataclass(Block):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.kept = Record(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.kept.leaf)


class InClosure(Block):
    def __init__(self) -> None:
        super().__init__()
        linear = self.linear
        self.function = lambda x: torch.tanh(linear(x) @ linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(x)


class BoundMethod(Block):
    """A module's own method, kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = self.inner

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.chosen(x)


# Hooks


class ForwardHook(Block):
    """A hook that reads another leaf of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.linear.register_forward_hook(lambda module, args, output: output * self.gain)


class PreHook(Block):
    """A hook before a layer that reads the layer's own weight."""

    def __init__(self) -> None:
        super().__init__()
        linear = self.linear
        linear.register_forward_pre_hook(lambda module, args: (args[0] + linear.weight.mean(0),))


class BackwardHook(Block):
    """A hook that changes a layer's gradient on its way back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


class LeafHook(Block):
    """A hook on a leaf, which changes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda grad: 0.5 * grad)


# Buffers


class Norm(Block):
    """BatchNorm, whose statistics are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias, whose gradient would be nothing but rounding
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class RunningMean(Block):
    """A buffer that each forward updates in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x) - 0.1 * self.mean.clone()


class Reassigned(Block):
    """A buffer that each forward replaces, and that isn't part of a state dict."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return super().forward(x) - 0.1 * self.mean


class Counter(Block):
    """An integer buffer that counts calls, and that the output depends on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + 0.1 * self.calls.to(x.dtype)))


class ComplexBuffer(Block):
    """A complex buffer that each forward updates by the rows it is given."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.ones(WIDTH, dtype=complex_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        self.turn = 0.9 * self.turn + 0.1j * x.detach().mean(0)
        return super().forward(x * self.turn.abs())


class BufferIsLeaf(Block):
    """A buffer that shares its storage with a leaf at the start."""

    start: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", self.linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.start


# Autograd and control flow


class ScaledByLeaf(torch.autograd.Function):
    """x * leaf, with a backward written by hand, in the form for torch.func."""

    @staticmethod
    def forward(x: Tensor, leaf: Tensor) -> Tensor:
        return x * leaf

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x, leaf) = grads, ctx.saved_tensors
        return grad * leaf, (grad * x).sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, leaf: Tensor) -> Any:
        return ScaledByLeaf.apply(x, leaf), in_dims[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError


class OwnFunction(Block):
    """A leaf is given to an autograd.Function in its own unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(ScaledByLeaf.apply(x, self.gain))


class InPlace(Block):
    """In-place work on activations."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 0] = 0.3
        y.mul_(2).add_(self.linear.bias)
        return x + torch.tanh_(y)


class Recomputed(Block):
    """A checkpoint of the model's own, around a part of a unit."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class ByTheData(Block):
    """A layer that only some batches go through."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.other(x) if len(x) and x[0, 0] > 0 else x)


class Experts(Block):
    """Two layers of one shape, of which each batch goes through one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        expert = self.other if len(x) and x[0, 0] > 0 else self.linear
        return x + torch.tanh(expert(x))


class WritesLeaf(Block):
    """A forward that renormalises its weight in place, counted by autograd."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.div_(self.linear.weight.norm())
        return super().forward(x)


class WritesLeafData(Block):
    """The same through `.data`, which autograd doesn't see."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.div_(self.linear.weight.data.norm())
        return super().forward(x)


class Recurrent(Block):
    """torch's GRU, which keeps its leaves in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gru(x[:, None])[0][:, 0])


class Attention(Block):
    """torch's attention, whose functional part reads its leaves one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.stack([x, torch.tanh(x)], 1)
        return super().forward(self.attention(pairs, pairs, pairs)[0].mean(1))


BLOCKS: dict[str, Callable[[], Block]] = {
    "plain": Block,
    "tied": Tied,
    "shared": SharedModule,
    "twice": Twice,
    "unused": Unused,
    "frozen": Frozen,
    "empty": EmptyLeaf,
    "scalar": ScalarLeaf,
    "complex": ComplexLeaf,
    "half": HalfLeaf,
    "single": SingleLeaf,
    "turned": TurnedLeaf,
    "lists": LeafLists,
    "weight norm": WeightNormed,
    "spectral norm": SpectralNormed,
    "in tuple": InTuple,
    "in list": InList,
    "in dict": InDict,
    "in dataclass": InDataclass,
    "in closure": InClosure,
    "bound method": BoundMethod,
    "hook": ForwardHook,
    "pre-hook": PreHook,
    "backward hook": BackwardHook,
    "leaf hook": LeafHook,
    "batch norm": Norm,
    "running mean": RunningMean,
    "reassigned": Reassigned,
    "counter": Counter,
    "complex buffer": ComplexBuffer,
    "buffer is leaf": BufferIsLeaf,
    "own function": OwnFunction,
    "in place": InPlace,
    "recomputed": Recomputed,
    "by the data": ByTheData,
    "experts": Experts,
    "writes leaf": WritesLeaf,
    "writes leaf data": WritesLeafData,
    "recurrent": Recurrent,
    "attention": Attention,
}

# Their output for a row depends on the other rows of the batch
COUPLING = {
    "batch norm", "running mean", "reassigned", "complex buffer", "by the data",
    "experts",
}  # fmt: skip
# Their numbers depend on how often they have run
COUNTING = {"counter", "spectral norm", "running mean", "reassigned", "complex buffer"}


class Net(nn.Module):
    """A layer in, the drawn blocks, a layer out."""

    def __init__(self, blocks: Sequence[str]):
        super().__init__()
        self.inp = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList([BLOCKS[name]() for name in blocks])
        self.out = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:  # (n, INPUTS) -> (n, OUTPUTS)
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def make(blocks: Sequence[str], dtype: torch.dtype, seed: int) -> Net:
    """The network with its drawn values, in `dtype` where a block doesn't say otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with default_dtype(dtype):
            return Net(blocks)
