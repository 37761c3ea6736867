"""The arithmetic that pointwise transforms share.

Hyperparameters may be numbers or, with `inject_hyperparams` and schedules, 0-d float64 tensors on
the CPU. Every helper takes both, reads no value on the host, and gives the same bits however the
elements are cut. That leaves out `pow`, and in half precision `rsqrt` and `add` with alpha: on the
CPU their vector body and tail round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..devices import number_on
from ..tree import PyTree, grouped

Tree = PyTree[Tensor]  # leaves whole, pieces, or flats: elementwise work sees no difference
Number = float | Tensor  # a Tensor is 0-d, float64, on the CPU

# Elements that an elementwise function sees at a time on a CPU, whose caches then hold its
# temporaries
IN_CACHE = 2**17  # 512 KiB of float32, per operand
# The same on a GPU, where many flats at once save the host's time, and temporaries take memory
ON_A_GPU = 2**24  # 64 MiB of float32, per operand


def elementwise(fn: Callable[..., Tensor], tree: Tree, *rest: Tree) -> Tree:
    """`tree_map` of an elementwise function; 0-d leaves are seen as (1,).

    Otherwise a 0-d float64 hyperparameter would promote a 0-d float32 leaf, but not the same leaf
    in a bucket.

    >>> elementwise(lambda x: x * torch.tensor(0.5, dtype=torch.float64), torch.ones(())).dtype
    torch.float32
    """

    return tree_map(lambda x, *others: on_leaf(fn, x, *others), tree, *rest)


def on_leaf(fn: Callable[..., Tensor], x: Tensor, *rest: Tensor) -> Tensor:
    """An elementwise function of one leaf, which it sees as (1,) if it is 0-d."""
    if x.ndim:
        return fn(x, *rest)
    # Views of one element, so the leaf's dtype decides the result's, as it does in a bucket
    wide = [y.reshape(1) for y in rest]
    return fn(x.reshape(1), *wide).reshape(())


def on_numbers(fn: Callable[..., Tensor], tree: Tree, *rest: Tree) -> Tree:
    """`tree_map` of an elementwise function of 0-d leaves, which it sees all at once, as a vector.

    On a GPU each operator is then one kernel, however many leaves there are.

    Args:
        fn: from a vector (n,) for each tree to one (n,). Leaves of another dtype or device come in
            a call of their own.

    >>> on_numbers(torch.sqrt, {"w": torch.tensor(4.0), "b": torch.tensor(9.0)})
    {'w': tensor(2.), 'b': tensor(3.)}
    """
    leaves, treedef = optree.tree_flatten(tree)
    columns = [leaves, *map(treedef.flatten_up_to, rest)]
    # The dtypes and devices of a leaf and of its fellows -> the positions of such leaves
    rows = enumerate(zip(*columns, strict=True))
    kinds = grouped((tuple((x.dtype, x.device) for x in row), i) for i, row in rows)
    made = list(leaves)
    for positions in kinds.values():
        vectors = [torch.stack([column[i] for i in positions]) for column in columns]
        for i, result in zip(positions, fn(*vectors).unbind(), strict=True):
            made[i] = result
    return treedef.unflatten(made)


def in_batches(fn: Callable[..., Sequence[Tensor]], tree: Tree, *rest: PyTree[Any]) -> Tree:
    """`tree_map` of a function that torch's foreach operators make of many leaves at once.

    On a GPU it sees all leaves, so that each operator is one kernel; on a CPU as many as its caches
    hold, since what one operator makes is read by the next.

    Args:
        fn: from a list of leaves, and of what lies in their places in `rest`, to new leaves.

    >>> double = lambda leaves: torch._foreach_mul(leaves, 2)
    >>> in_batches(double, {"w": torch.ones(2), "b": torch.ones(1)})
    {'w': tensor([2., 2.]), 'b': tensor([2.])}
    """
    leaves, treedef = optree.tree_flatten(tree)
    columns = [leaves, *map(treedef.flatten_up_to, rest)]
    made: list[Tensor] = []
    for batch in _batches(leaves):
        made += fn(*(column[batch] for column in columns))
    return treedef.unflatten(made)


def _batches(leaves: Sequence[Tensor]) -> Iterator[slice]:
    start, numel = 0, 0
    for i, leaf in enumerate(leaves):
        numel += leaf.numel()
        if leaf.device.type == "cpu" and numel >= IN_CACHE:
            yield slice(start, i + 1)
            start, numel = i + 1, 0
    if start < len(leaves):
        yield slice(start, None)


def ema(mean: Tree, tree: Tree, decay: Number) -> Tree:
    """`decay * mean + (1 - decay) * tree`, as torch.optim takes means of gradients."""

    def one(old: Tensor, new: Tensor) -> Tensor:
        # Operators that take tensors: no host waits for the decay
        if isinstance(decay, Tensor):
            return old + (new - old) * (1 - decay)
        # One kernel, without temporaries; torch.optim has these bits
        return old.lerp(new, 1 - decay)

    return elementwise(one, mean, tree)


def ema_of_squares(mean: Tree, tree: Tree, decay: Number) -> Tree:
    """`decay * mean + (1 - decay) * tree**2`, as torch.optim takes means of squares."""

    def one(old: Tensor, new: Tensor) -> Tensor:
        # `value` of addcmul is a number: a tensor there would be read on the host
        if isinstance(decay, Tensor):
            return old * decay + new * new * (1 - decay)
        return torch.addcmul(old * decay, new, new, value=1 - decay)

    return elementwise(one, mean, tree)


def add_scaled(x: Tensor, y: Tensor, factor: Number) -> Tensor:
    """`x + factor * y`. In half precision `torch.add` with alpha has other bits in a tensor's
    tail."""
    # `alpha` is a number, too: a tensor would be read on the host
    if isinstance(factor, Tensor) or _is_half(x):
        return x + y * factor
    return torch.add(x, y, alpha=factor)


def add_scaled_(x: Tensor, y: Tensor, factor: Number) -> Tensor:
    """`add_scaled` to the bit, in `x` where its dtype is the result's."""
    # The result may be wider than x, and not fit there
    if x.dtype != y.dtype:
        return add_scaled(x, y, factor)
    if isinstance(factor, Tensor) or _is_half(x):
        return x.add_(y * factor)
    return x.add_(y, alpha=factor)


def _is_half(x: Tensor) -> bool:
    return x.element_size() < 4  # bytes per element: float16, bfloat16


def bias_correction(decay: Number, count: Tensor) -> Tensor:
    """`1 - decay**count`, 0-d float64: the weight of all `count` updates in a mean that began at
    zero."""
    # In float64: for a decay near 1 the first steps' difference keeps few digits in float32
    return 1 - decay ** count.double()


def pick(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where the 0-d `condition` holds, else `b`; on the leaf's device, whatever the
    condition's."""
    return torch.where(number_on(a.device, condition, torch.bool), a, b)


def is_zero(number: Any) -> bool:
    """Whether a hyperparameter is the number 0, so that its term may be left out."""
    return isinstance(number, int | float) and number == 0


def number(x: Any) -> Tensor:
    """A hyperparameter as a 0-d float64 tensor on the CPU."""
    return torch.as_tensor(x, dtype=torch.float64, device="cpu")


def device_of(tree: Tree) -> torch.device:
    """Where a tree's leaves lie, and answers about them; the CPU for a tree without leaves."""
    return next((leaf.device for leaf in optree.tree_leaves(tree)), torch.device("cpu"))


def full_like(tree: Tree, value: Number) -> Tree:
    """Leaves shaped like those of `tree`, full of one number."""
    if not isinstance(value, Tensor):
        # Not a sum: torch's first one on meta imports torch._dynamo
        return elementwise(lambda x: torch.full_like(x, value), tree)
    # A sum, since full_like would read the tensor's value on the host
    return elementwise(lambda x: torch.zeros_like(x) + value, tree)


def clamp(x: Tensor, least: Number, most: Number) -> Tensor:
    """`x` within [least, most]; NaNs stay."""
    if isinstance(least, Tensor) or isinstance(most, Tensor):
        # Both as tensors: of a mixed pair torch would read the tensor on the host
        return x.clamp(number(least), number(most))
    return x.clamp(least, most)


def identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The identity matrix (size, size). `torch.eye` on the meta device imports the compiler."""
    unit = torch.zeros(size, size, dtype=dtype, device=device)
    unit.diagonal().fill_(1)
    return unit
