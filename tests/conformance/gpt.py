"""The leaves of a decoder language model, by shape: for counting what an optimizer keeps and
sends."""

from __future__ import annotations

import torch
from torch import Tensor


def gpt_shapes(
    vocab: int, width: int, layers: int, length: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Unit -> leaf -> shape, as GPT-2 has them; the head is the embedding."""
    block = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "qkv.weight": (3 * width, width),
        "qkv.bias": (3 * width,),
        "out.weight": (width, width),
        "out.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }
    blocks = {f"block{i:02}": dict(block) for i in range(layers)}
    return (
        {"embed": {"token": (vocab, width), "place": (length, width)}}
        | blocks
        | {"norm": {"weight": (width,)}}
    )


def gpt_tree(
    vocab: int,
    width: int,
    layers: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, dict[str, Tensor]]:
    """Such a tree of params; on the meta device it costs nothing, whatever its size."""
    g = torch.Generator().manual_seed(0)

    def leaf(shape: tuple[int, ...]) -> Tensor:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device).requires_grad_()
        return torch.randn(shape, generator=g, dtype=dtype).requires_grad_()

    shapes = gpt_shapes(vocab, width, layers, length)
    return {
        unit: {name: leaf(shape) for name, shape in leaves.items()}
        for unit, leaves in shapes.items()
    }
