"""Codecs: leaves and gradients on their way between ranks in fewer bytes than a dtype takes.

`Precision(gather=..., reduce=...)` takes one in place of a dtype. Layouts begin leaves and pieces
at multiples of its block, so that a block is the same elements of a leaf at every level and number
of ranks. One process rounds leaf by leaf, then, to the numbers that ranks find in what they
receive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._torch_private import storage_id
from .errors import StructureError, explain

__all__ = ["Blocks", "Codec"]


@runtime_checkable
class Codec(Protocol):
    """A form in which numbers travel, and to which they are rounded.

    It is a value: frozen, hashable, and compared across ranks by how it prints. Of equal numbers it
    makes equal bytes. A plan calls both methods with tensors that have no values. `Precision` tries
    both on a CPU.

    Attributes:
        block: how many consecutive elements of a leaf are rounded together, and without regard to
            any others. A leaf's last block is filled up with zeros.
    """

    @property
    def block(self) -> int: ...

    def encode(self, x: Tensor) -> Tensor:
        """Messages (num, m), of any dtype, where m follows from n; blocks with infinities or NaN
        must come back with some.

        Args:
            x: (num, n), in the leaf's dtype, n a multiple of `block`. It is only read.
        """
        ...

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers (num, n) of these messages, a new tensor.

        Args:
            messages: (num, m), as `encode` made them.
            dtype: of the numbers.
        """
        ...


Form = torch.dtype | Codec  # to which numbers are rounded on their way

# The largest magnitudes of the 8-bit dtypes
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class Blocks:
    """8-bit numbers, and one scale per block of a leaf's elements, in the leaf's dtype: 1/4 + 1/B
    of float32's bytes, for blocks of B elements.

    The largest magnitude of a block becomes the largest of the dtype, and each number is rounded to
    the nearest. So int8 is off by at most 1/254 of a block's largest, float8_e4m3fn by 1/16 of each
    number. A block with an infinity or a NaN comes back as NaN. After Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization" (2022), with equal steps.

    Attributes:
        dtype: int8, float8_e4m3fn or float8_e5m2.
        block: elements that share a scale.

    >>> codec = Blocks(torch.int8, 4)
    >>> message = codec.encode(torch.tensor([[1.0, -0.5, 0.0, 0.126]]))
    >>> message.shape, codec.decode(message, torch.float32)
    (torch.Size([1, 8]), tensor([[ 1.0000, -0.5039,  0.0000,  0.1260]]))
    """

    dtype: torch.dtype = torch.int8
    block: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in _LIMITS:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _LIMITS)
            raise ValueError(
                explain("Blocks.dtype", expected=names, got=repr(self.dtype), remedy="take int8")
            )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} by {self.block}"

    def encode(self, x: Tensor) -> Tensor:
        limit = _LIMITS[self.dtype]
        blocks = x.view(len(x), x.shape[1] // self.block, self.block)
        # In x's own dtype, so that rounding and a rank's share in a mean commute
        scale = blocks.abs().amax(-1, keepdim=True).div_(limit)  # (num, blocks, 1)
        # Where the scale is 0 or not finite, some are NaN: the product with it is right with 0
        scaled = (blocks / scale).clamp_(-limit, limit).nan_to_num_(0.0)
        if not self.dtype.is_floating_point:
            scaled.round_()
        numbers = scaled.to(self.dtype).view(x.shape)
        # Scales first: they lie at multiples of their size, also in a part of the messages
        return torch.cat([scale.squeeze(-1).view(torch.uint8), numbers.view(torch.uint8)], 1)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        num, length = messages.shape
        num_blocks = length // (dtype.itemsize + self.block)
        scales, numbers = messages.split([num_blocks * dtype.itemsize, num_blocks * self.block], 1)
        # A copy: bytes in a row of messages lie at no multiple of a number's size
        scale = scales.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
        blocks: Tensor = numbers.view(self.dtype).to(dtype).view(num, num_blocks, self.block)
        return blocks.mul_(scale.view(num, num_blocks, 1)).view(num, num_blocks * self.block)


def block_of(form: Form) -> int:
    """How many elements are rounded together."""
    return 1 if isinstance(form, torch.dtype) else form.block


def dtype_of(form: Form, storage: torch.dtype) -> torch.dtype:
    """The dtype that numbers of a leaf stored in `storage` have before they are encoded, and after:
    a codec keeps it."""
    return form if isinstance(form, torch.dtype) else storage


def encoded(flat: Tensor, codec: Codec, num: int = 1) -> Tensor:
    """`num` messages (num * m,) in a row, of as many equal parts of a flat (num * n,), n a multiple
    of the block."""
    return codec.encode(flat.view(num, flat.numel() // num)).reshape(-1)


def decoded(messages: Tensor, codec: Codec, num: int, dtype: torch.dtype) -> Tensor:
    """The flat (num * n,) of `num` messages (num * m,), in this dtype."""
    return _decoded(messages.view(num, messages.numel() // num), codec, dtype).reshape(-1)


def _decoded(messages: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """The numbers (num, n) of messages (num, m). Raises StructureError where they can't be."""
    numbers = codec.decode(messages, dtype)
    is_fine = numbers.dtype == dtype and numbers.dim() == 2 and len(numbers) == len(messages)
    if is_fine and numbers.shape[1] % codec.block == 0:
        return numbers
    raise StructureError(
        f"decode of {codec} has returned other numbers than were encoded",
        expected=f"({len(messages)}, n), n a multiple of {codec.block}, {dtype}",
        got=f"{tuple(numbers.shape)}, {numbers.dtype}",
        remedy="decode(messages (num, m), dtype) returns (num, n) in that dtype",
    )


def rounded(leaf: Tensor, form: Form) -> Tensor:
    """A whole leaf, or a flat of leaves at multiples of the block, as it would arrive. Its
    derivative is that of a cast: rounding is passed over."""
    if isinstance(form, torch.dtype):
        return leaf.to(form)
    found: Tensor = _Rounded.apply(leaf.reshape(1, leaf.numel()), form)  # type: ignore[no-untyped-call]
    return found.view(leaf.shape)


class _Rounded(torch.autograd.Function):
    """Rows (num, n), each through a codec and back, for every transform of torch.func."""

    @staticmethod
    def forward(rows: Tensor, codec: Codec) -> Tensor:
        n, missing = rows.shape[1], -rows.shape[1] % codec.block
        filled = pad(rows, (0, missing)) if missing else rows.contiguous()
        found = _decoded(codec.encode(filled), codec, rows.dtype)[:, :n].contiguous()
        # What views the leaf must not be freed with its use
        return found.clone() if storage_id(found) == storage_id(rows) else found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, rows: Tensor, codec: Codec) -> tuple[Tensor, int]:
        batch = rows.movedim(in_dims[0], 0)  # (batch, num, n)
        found: Tensor = _Rounded.apply(batch.flatten(0, 1), codec)  # type: ignore[no-untyped-call]
        return found.view(batch.shape), 0


def check_codec(name: str, codec: Any) -> None:
    """Raise, in the words of the field `name`, unless this is a codec that rounds each block by
    itself, the same way every time, to messages whose length doesn't depend on the numbers.

    Else ranks would receive other numbers than one process computes with, or messages of lengths
    that they don't expect. It is tried on a few numbers on the CPU.
    """
    fault = _fault_of(codec)
    if fault is not None:
        story, expected, got = fault
        raise ValueError(
            explain(
                f"{name} is no codec: {story}",
                expected=expected,
                got=got,
                remedy="compress.Blocks(torch.int8, 256); docs/howto/compression.md has one "
                "of your own",
            )
        )


def _fault_of(codec: Any) -> tuple[str, str, str] | None:
    """The first thing that is wrong: a story, what must be, what is; None: all is well."""
    if isinstance(codec, type) or not isinstance(codec, Codec):
        expected = "a floating-point dtype, or an object with block, encode and decode"
        return "it lacks something", expected, repr(codec)
    block = codec.block
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        return "its block is no number of elements", "an int of at least 1", repr(block)
    if type(codec).__hash__ is None:
        return "it can't be hashed", "a frozen dataclass", type(codec).__name__
    # Four blocks, which differ, with numbers of either sign
    x = torch.linspace(-1.0, 2.0, 4 * block, dtype=torch.float32, device="cpu").view(2, -1)
    given = x.clone()
    messages, of_zeros = codec.encode(given), codec.encode(torch.zeros_like(x))
    if not torch.equal(given, x):
        return "encode has written to the numbers", "that it only reads them", "others in place"
    form = "tensors (num, m) for numbers (num, n)"
    for got in (messages, of_zeros):
        if not isinstance(got, Tensor) or got.dim() != 2 or len(got) != len(x):
            return "encode has returned another form", form, _shape(got)
    if of_zeros.shape != messages.shape:
        told = f"{_shape(messages)}, and {_shape(of_zeros)} of zeros"
        return "the length of its messages depends on the numbers", form, told
    arrived = codec.decode(messages, x.dtype)
    if _shape(arrived) != _shape(x) or arrived.dtype != x.dtype:
        return "decode has returned another form", f"{_shape(x)}, {x.dtype}", _shape(arrived)
    by_block = codec.decode(codec.encode(x.view(4, -1)), x.dtype).view(x.shape)
    if not torch.equal(arrived, by_block):
        told = f"{int((arrived != by_block).sum())} of {x.numel()} others"
        return "its blocks depend on each other, or on chance", "the same numbers again", told
    for bad in (torch.inf, torch.nan):
        spoiled = x.clone()
        spoiled[0, 0] = bad
        if bool(codec.decode(codec.encode(spoiled), x.dtype)[0].isfinite().all()):
            return f"{bad} comes back as finite numbers", "an infinity or NaN", "none"
    return None


def _shape(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
