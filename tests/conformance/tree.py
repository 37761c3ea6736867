"""The tree that every optimizer is run on, and a loss whose gradients have the same bits however
they are summed.

The loss is linear in params, and its coefficients are small integers over powers of two. So every
product and sum in backward, and every sum over ranks, is exact, in float32 too: the sharded step
and the unsharded one are fed the same gradients, and what is then compared is the optimizer, not
the order in which rows were added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero.params import Params

NUM_ROWS = 8  # a power of two: dividing by it is exact
VOCAB, WIDTH, LENGTH = 5, 3, 4
Batch = dict[str, Any]


class Tied(nn.Module):
    """An embedding that is the head, too, between a convolution and a stack of experts; and a
    frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(2, 3, (2, 1))  # 4-D, and 1-D with fewer elements than ranks
        self.experts = Experts(3, 4, 2)
        self.thin = nn.Linear(7, 1)
        self.frozen = nn.Linear(3, 2)
        self.frozen.requires_grad_(False)

    def forward(self, batch: Batch) -> list[Tensor]:
        return [
            self.embed(batch["tokens"]),
            self.head(batch["hidden"]),
            self.conv(batch["image"]),
            self.experts(batch["routed"]),
            self.thin(batch["wide"]),
            self.frozen(batch["hidden"]),
        ]


class Experts(nn.Module):
    """A stack of matrices in one 3-D leaf."""

    def __init__(self, count: int, num_out: int, num_in: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, num_out, num_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("beij,bej->bei", self.weight.expand(len(x), -1, -1, -1), x)


def loose_leaves() -> dict[str, Any]:
    """Leaves that no module has: 0-d, empty, of one element, None, a matrix that nothing divides,
    and its double."""
    return {
        "layers": [{"w": torch.randn(7, 5)}, {"w": torch.randn(7, 5), "b": torch.randn(13)}],
        "scale": torch.tensor(1.5),
        "one": torch.randn(1),
        "empty": torch.zeros(0, 3),
        "nothing": None,
        "tall": torch.randn(9, 1),
        "stuck": torch.randn(3),  # frozen
    }


def hostile(dtype: torch.dtype) -> tuple[Any, Callable[..., Any]]:
    """`(params, loss_fn)`; the leaves are the same numbers in every dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        apply, inside, _ = fz.functionalize(Tied(), units=Experts)
        loose = loose_leaves()
    params = {"loose": loose, "model": Params(inside, inside.units)}
    params = optree.tree_map(lambda p: p.detach().to(dtype).requires_grad_(p.requires_grad), params)
    for path, leaf in fz.named_leaves(params).items():
        leaf.requires_grad_(not ("frozen" in path or "stuck" in path))

    def loss_fn(params: Any, buffers: Any, batch: Batch) -> Any:
        outputs, _ = apply(params["model"], {}, batch["model"])
        total = sum((y * c).sum() for y, c in zip(outputs, batch["outputs"], strict=True))
        leaves = optree.tree_leaves(fz.unshard(params["loose"]))
        total = total + sum(
            (p * c.sum(0)).sum() for p, c in zip(leaves, batch["loose"], strict=True)
        )
        rows = len(batch["loose"][0])
        return total / rows, fz.Aux(weight=rows)

    return params, loss_fn


def batches(params: Any, num: int, dtype: torch.dtype) -> list[Batch]:
    """`num` batches of `NUM_ROWS` rows, of numbers with few bits."""
    g = torch.Generator().manual_seed(7)

    def few_bits(*shape: int) -> Tensor:
        return torch.randint(-15, 16, (NUM_ROWS, *shape), generator=g).to(dtype) / 8

    def one() -> Batch:
        return {
            "model": {
                "tokens": torch.randint(VOCAB, (NUM_ROWS, LENGTH), generator=g),
                "hidden": few_bits(WIDTH),
                "image": few_bits(2, 3, 2),
                "routed": few_bits(3, 2),
                "wide": few_bits(7),
            },
            "outputs": [
                few_bits(LENGTH, WIDTH),
                few_bits(VOCAB),
                few_bits(3, 2, 2),
                few_bits(3, 4),
                few_bits(1),
                few_bits(2),
            ],
            "loose": [few_bits(*p.shape) for p in optree.tree_leaves(params["loose"])],
        }

    return [one() for _ in range(num)]


ROWS = {1: [8], 2: [4, 4], 3: [4, 2, 2], 5: [2, 2, 2, 1, 1]}  # by ranks; powers of two, too


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's rows: unequal numbers of them, which the loss's weight accounts for."""
    return optree.tree_map(lambda x: x.split(ROWS[ranks])[rank], batch)
