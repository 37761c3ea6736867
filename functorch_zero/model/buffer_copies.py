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


class Kept(NamedTuple):
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


class Noted(NamedTuple):
    """The changes of buffers by calls of `apply` in a loss."""

    kept: list[Kept]
    changed: list[Changed]


# Of the loss that runs; None: nobody asks
_NOTED: ContextVar[Noted | None] = ContextVar("_NOTED", default=None)


@contextmanager
def noting_buffers() -> Iterator[Noted]:
    """Around a loss: the buffers that it keeps and changes, which are noted meanwhile."""
    noted = Noted([], [])
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def note_changed(path: str, copied: BufferCopy, after: Tensor) -> None:
    """Note a buffer that a call of `apply` counts as changed."""
    noted = _NOTED.get()
    if noted is not None and not transforms_active():
        noted.changed.append(Changed(path, copied, after))


def note_kept(
    path: str, tensor: Tensor, kept: list[Kept] | None = None, *, what: str = "a buffer"
) -> None:
    """Note a tensor that the loss leaves behind, whose values nobody reads from now on:
    `check_kept_in_backward` refuses writes to it. `kept`: the list; None: that of the loss that
    runs."""
    if kept is None:
        noted = _NOTED.get()
        kept = None if noted is None else noted.kept
    plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_inference()
    if kept is not None and plain and not transforms_active():
        kept.append(Kept(what, path, version_counter(tensor), version_of(tensor)))


def check_kept_in_backward(kept: Sequence[Kept], rank: int | None = None) -> None:
    """Raise StructureError if backward has written to one of them."""
    for what, path, counter, version in kept:
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
