"""Copies of buffers for code that may write to its own, and the buffers that it has changed.

Note [changed buffers]: a version counter says whether a buffer was written to. It misses torch's
batch_norm, which writes its running statistics without counting, and writes through `.data` or
numpy. So buffers are compared, on the CPU. Elsewhere comparing would wait for the device:
floating-point buffers count as changed there, and the others by their counter. Before ranks send
large ones, the device is asked, once for all, between forward and backward: the answers come while
backward is queued behind them. Small ones are sent sooner than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch_private import transforms_active, version_counter, version_of
from ..errors import StructureError
from ..tree import has_values


class BufferCopy(NamedTuple):
    """A buffer, and the copy that a call is given in its place."""

    old: Tensor
    tensor: Tensor  # the copy
    version: int | None  # of the copy before the call; None: tensors of inference mode don't count

    def is_changed(self, after: Tensor) -> bool:
        """Whether the tensor in the buffer's place after the call is another one than the copy, or
        the copy was written to; see Note [changed buffers]."""
        changed = self.is_surely_changed(after)
        if changed or _is_comparable(after):
            return changed
        dense_float = after.is_floating_point() and after.layout == torch.strided
        return dense_float or after.is_inference()

    def is_surely_changed(self, after: Tensor) -> bool:
        """Whether it was replaced or written to by values that differ, and doesn't only count as
        changed."""
        if self._is_written(after):
            return True
        return _is_comparable(after) and not _equal(after, self.old)

    def _is_written(self, after: Tensor) -> bool:
        if after is not self.tensor or after.dtype != self.old.dtype:
            return True
        return _version(after) != self.version


def _is_comparable(buffer: Tensor) -> bool:
    """Whether values can be compared, without a wait for a device."""
    plain = type(buffer) is Tensor and buffer.layout == torch.strided and not transforms_active()
    # Torch can't compare the last one
    return plain and buffer.is_cpu and buffer.dtype != torch.complex32


_SMALL = 2**18  # bytes


def changed_between(before: Tensor, after: Tensor) -> bool | Tensor:
    """Whether a step's loss has changed a buffer. Where only its device knows, a small one counts
    as changed, and for a large one the answer is a 0-d bool tensor."""
    # A buffer that is known to have stayed is the same object
    if before is after or _is_comparable(after):
        return before is not after
    alike = (before.shape, before.dtype, before.layout) == (after.shape, after.dtype, after.layout)
    if not alike or after.layout != torch.strided or not has_values(after):
        return True
    # Writes in backward to one of inference mode would not be seen
    if after.nbytes <= _SMALL or after.is_inference():
        return True
    # A NaN counts as changed
    return (after != before).any()


def copy_of(buffer: Tensor) -> BufferCopy:
    """A copy of the buffer, to be written to."""
    copied = buffer.clone()
    return BufferCopy(buffer, copied, _version(copied))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype have the same values."""
    # Torch compares masks ten times as fast as words
    if a.dtype == torch.bool and a.shape == b.shape and _has_words(a) and _has_words(b):
        a, b = (x.view(-1).view(torch.int64) for x in (a, b))
    if torch.equal(a, b):
        return True
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())  # a NaN that stays is no change


def _has_words(mask: Tensor) -> bool:
    """Whether a mask, of one byte per element, lies in its storage in whole words of 8 bytes."""
    in_words = mask.numel() % 8 == 0 and mask.storage_offset() % 8 == 0
    return in_words and mask.numel() > 0 and mask.is_contiguous()


def _version(tensor: Tensor) -> int | None:
    """How often it has been written to; tensors of inference mode don't count."""
    return None if tensor.is_inference() else version_of(tensor)


class Left(NamedTuple):
    """A tensor that nobody reads when the loss has returned: the copy of a buffer that it has not
    changed, or a metric, whose value is taken then."""

    what: str
    path: str
    counter: Tensor  # without the copy's values, which may go
    version: int  # when the loss had returned


class Changed(NamedTuple):
    """A buffer that a call of `apply` counts as changed."""

    path: str  # in the model
    copied: BufferCopy  # of the buffer that it was given
    after: Tensor

    def is_sure(self) -> bool:
        """Whether it is known to have changed, as far as the host sees without a wait."""
        return self.copied.is_surely_changed(self.after)


class OfLoss(NamedTuple):
    """The changes of buffers by calls of `apply` in a loss."""

    left: list[Left]
    changed: list[Changed]


# Of the loss that runs; None: nobody asks
_OF_LOSS: ContextVar[OfLoss | None] = ContextVar("_OF_LOSS", default=None)


@contextmanager
def noting_buffers() -> Iterator[OfLoss]:
    """Around a loss: the buffers that it keeps and changes, which are listed meanwhile."""
    own = OfLoss([], [])
    token = _OF_LOSS.set(own)
    try:
        yield own
    finally:
        _OF_LOSS.reset(token)


def note_changed(path: str, copied: BufferCopy, after: Tensor) -> None:
    """Note a buffer that a call of `apply` counts as changed."""
    own = _OF_LOSS.get()
    if own is not None and not transforms_active():
        own.changed.append(Changed(path, copied, after))


def note_left(
    path: str, tensor: Tensor, left: list[Left] | None = None, *, what: str = "a buffer"
) -> None:
    """Note a tensor that the loss leaves behind, whose values nobody reads from now on:
    `check_left_in_backward` refuses writes to it. `left`: the list; None: that of the loss that
    runs."""
    if left is None:
        own = _OF_LOSS.get()
        left = None if own is None else own.left
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_inference()
    if left is not None and plain and not transforms_active():
        left.append(Left(what, path, version_counter(tensor), version_of(tensor)))


def check_left_in_backward(left: Sequence[Left], rank: int | None = None) -> None:
    """Raise StructureError if backward has written to one of them."""
    for what, path, counter, version in left:
        if version_of(counter) != version:
            raise written_in_backward(what, path, rank)


def written_in_backward(what: str, path: str, rank: int | None) -> StructureError:
    """The error for a write that nobody would see."""
    return StructureError(
        f"{what} was written to in backward, when the loss had returned it",
        path=path,
        expected="writes by forward",
        got="one by a hook, or by the backward of a custom autograd.Function",
        rank=rank,
        remedy="write it in forward. Numbers about gradients belong in the optimizer's "
        "state: optim.chain(your_transform, ...). A checkpoint of your own in a module "
        "with backward hooks: functionalize(remat=...). A buffer as a metric: a clone",
    )
