"""Collectives under way over torch.distributed, and the small change of `ProcessGroup`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .protocol import Done, Work
from .signature import brought

if TYPE_CHECKING:
    from .membership import Membership


class TorchWork:
    """torch's Work, whose errors become ours.

    Args:
        arguments: torch's, whose tensors must live until the backend is through with them.
    """

    # A work is under way (a handle), done (none), or was cut off (none, and an era): see Note
    # [eras] in `membership`
    _era: int | None = None  # of the group, when it left with this under way

    def __init__(
        self, group: Membership, kind: str, handle: Any, arguments: tuple[Any, ...]
    ) -> None:
        self._group, self._kind, self._handle, self._arguments = group, kind, handle, arguments

    def wait(self) -> None:
        # Done, or the group has left: then the error of that era, however late one waits
        if self._handle is None:
            if self._era is not None:
                raise self._group._why_left(self._era)
            return
        try:
            self._handle.wait()
        except RuntimeError as error:
            # Its frames hold the torch group, whose connections must close
            cause = error.with_traceback(None)
            raise self._group._lost(self._failure_text(cause)) from cause
        self._handle, self._arguments = None, ()  # the backend is through with the tensors

    def _failure_text(self, cause: RuntimeError) -> str:
        where = f"{self._kind} on rank {self._group.rank}"
        # Backends have no type of error for it; gloo and NCCL word it differently
        if re.search("timed out|timeout", str(cause), re.IGNORECASE):
            return (
                f"{where} took longer than the group's time limit: another rank is stuck, slow "
                f"or lost: {cause}"
            )
        return f"{where} was cut off: another rank has ended or can't be reached: {cause}"

    def abandon(self, era: int) -> None:
        """Let go of the connections. The tensors stay: the backend may still write to them."""
        if self._handle is not None:
            self._era, self._handle = era, None  # in this order: another thread may wait meanwhile


class Then:
    """A collective under way, and a function to call on this rank once it has ended.

    It is a `Work`: `wait` waits for the collective, and calls the function the first time.
    """

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        # None once called: later waits do nothing
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        # An error leaves `finish` uncalled: outputs stay as they were
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)  # shares memory


def copy_alone(out: Tensor, source: Tensor) -> Work:
    """A collective of one rank."""
    # A piece may be its own place in `out`
    if out is not source and out.data_ptr() != source.data_ptr():
        out.copy_(source)
    return Done()


def through_host(collective: Callable[..., Work], arguments: Sequence[Any]) -> Work:
    """`collective(*arguments)` on copies on the CPU; where output and input are one tensor, it
    works in place on one copy."""
    out, source = arguments[0], brought(arguments)
    # The copy to the CPU waits for the device's work on `source`
    host_source = source.cpu()
    in_place = out is source
    host_out = host_source if in_place else torch.empty(out.shape, dtype=out.dtype, device="cpu")
    hosts = {id(out): host_out, id(source): host_source}
    work = collective(*(hosts.get(id(argument), argument) for argument in arguments))
    return Then(work, lambda: out.copy_(host_out))


def nan_apart(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """A tensor to reduce to a maximum in place of `tensor`, and a function that then brings the
    maximum into `tensor`, with NaN kept.

    Backends compare, and every comparison with NaN is false: chance would say which rank's NaN
    survives. So a mask of NaN goes along.
    """
    if not tensor.is_floating_point():
        return tensor, lambda: None  # integers have no NaN
    is_nan = tensor.isnan()
    # (2 * k,): the numbers, then 1.0 for each NaN
    # -inf loses against every number; 1.0 in the mask wins against 0.0
    doubled = torch.cat([tensor.masked_fill(is_nan, -torch.inf), is_nan.to(tensor.dtype)])
    values, mask = doubled.chunk(2)  # views (k,) of it
    return doubled, lambda: tensor.copy_(values.masked_fill_(mask > 0, torch.nan))
