"""Random numbers of a leaf that don't depend on how it is cut.

Note [random numbers by block]: element e of a leaf is a function of a key, the leaf's path and e.
So a rank draws its piece alone, and nothing is sent. A flattened leaf is a row of blocks of `BLOCK`
elements, the last one shorter. Each block has a generator of its own, seeded by the key, the path
and the block's number. torch's numbers depend on how many are drawn together, so a block is always
drawn whole, and a piece that ends inside of it keeps its part. This takes 1.2 to 1.4 times as long
as `torch.randn`, and at most two blocks more per piece. A counter-based generator made of torch's
operators would draw no element in vain, and takes longer.

Paths, and not numbers, name leaves: a masked part of the tree draws what the whole tree draws.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch_private import generator_of
from ..errors import TransformError
from ..layout.extent import Extent
from ..tree import has_values

Kind = Literal["normal", "uniform", "rademacher"]
Number = int | Tensor  # an integer; as a tensor 0-d

BLOCK = 2**16  # elements: enough that seeding takes a tenth of the time
_KINDS: tuple[Kind, ...] = ("normal", "uniform", "rademacher")
# Other floating-point leaves are drawn in float32, and rounded
_DRAWN_AS_THEY_ARE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def key_of(seed: Number, step: Number, *draw: int) -> int:
    """The key of one draw of numbers, for `draw_leaf`; `draw` tells it from others of the step."""
    return mix(index(seed), index(step), *draw)


@torch.no_grad()
def draw_leaf(
    kind: Kind, key: int, path: str, like: Tensor, extent: Extent | None = None
) -> Tensor:
    """This rank's part of a leaf's random numbers, in the shape, dtype and device of `like`.

    See Note [random numbers by block].

    Args:
        kind: "normal" with mean 0 and variance 1; "uniform" in [0, 1), which rounding keeps below
            1; "rademacher", which is -1 or 1. Of complex leaves as `torch.randn` and `torch.rand`.
        key: of the draw, from `key_of`.
        path: of the leaf in its tree.
        like: the leaf or its piece. Its values are not read.
        extent: the part of the leaf that it is; None: all of it.

    Raises:
        TransformError: `like` is no floating-point tensor, or no tensor of this extent.
    """
    extent = _checked(kind, path, like, extent)
    made = torch.empty(extent.num_here, dtype=like.dtype, device=like.device)
    if not has_values(like):  # a plan asks for memory alone
        return made.view(like.shape)
    of_leaf = mix(key, _KINDS.index(kind), _number_of(path))
    here = extent.in_leaf
    for number in range(here.start // BLOCK, -(-here.stop // BLOCK)):
        first = number * BLOCK
        block = range(first, min(first + BLOCK, extent.numel))
        start, stop = max(first, here.start), min(block.stop, here.stop)
        out = made[start - here.start : stop - here.start]
        generator = generator_of(mix(of_leaf, number), like.device)
        # A whole block is drawn where it belongs, if nothing is left to round
        if len(out) == len(block) and like.dtype == _drawn_dtype(kind, like.dtype):
            _fill(kind, out, generator)
        else:
            whole = out.new_empty(len(block), dtype=_drawn_dtype(kind, like.dtype))
            _fill(kind, whole, generator)
            if kind == "uniform":
                reals = torch.view_as_real(whole) if whole.is_complex() else whole
                reals.clamp_(max=_below_one(like.dtype))
            out.copy_(whole[start - first : stop - first])
    return made.view(like.shape)


def _checked(kind: Kind, path: str, like: Any, extent: Extent | None) -> Extent:
    """The extent of a leaf that numbers can be drawn like."""
    if not isinstance(like, Tensor) or not (like.is_floating_point() or like.is_complex()):
        raise TransformError(
            f"{kind} numbers are drawn like floating-point tensors",
            path=path,
            got=getattr(like, "dtype", type(like).__name__),
            remedy="draw like gradients or updates, where such a leaf is None",
        )
    extent = Extent.of(like) if extent is None else extent
    if like.numel() != extent.num_here:
        raise TransformError(
            f"{kind} numbers are drawn like trees of params or updates",
            path=path,
            expected=f"{extent.num_here} elements",
            got=f"{like.numel()}",
            remedy="pass params or updates as they are given to the transform",
        )
    return extent


def mix(*numbers: int) -> int:
    """One 63-bit seed of several numbers (splitmix64's finaliser, after each)."""
    # Mixed, and not added: (step 1, rank 0) and (step 0, rank 1) must differ
    mixed = 0
    # Python's integers don't overflow: `&` keeps the arithmetic in 64 bits
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed >> 1  # 63 bits: positive as a signed integer too


def _number_of(path: str) -> int:
    """64 bits of a path, the same in every process (Python's `hash` isn't)."""
    return int.from_bytes(blake2b(path.encode(), digest_size=8).digest(), "little")


def _drawn_dtype(kind: Kind, dtype: torch.dtype) -> torch.dtype:
    if kind == "rademacher":  # which any dtype has
        return torch.float32
    if dtype in _DRAWN_AS_THEY_ARE:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


def _fill(kind: Kind, out: Tensor, generator: torch.Generator) -> None:
    if kind == "normal":
        out.normal_(generator=generator)
    elif kind == "uniform":
        out.uniform_(generator=generator)
    else:
        torch.copysign(torch.ones_like(out[:1]), out.uniform_(-1, 1, generator=generator), out=out)


def _below_one(dtype: torch.dtype) -> float:
    """The largest number below 1, to which a number near 1 is rounded."""
    return 1 - torch.finfo(dtype).eps / 2
