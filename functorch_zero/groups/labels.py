"""Saying where in a step a collective belongs: in errors and, when asked, to the other ranks before
it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import GroupError, LostPeerError, PeerError
from .checks import by_rank
from .forwarding import AllSay, Forwarding, ranks_of, ring_of, subgroup
from .last_collectives import Entry
from .protocol import Group, Work
from .signature import Signature, brought


class LabelledGroup(Forwarding):
    """Forwards to `inner`; `labelled` makes it.

    The errors of its collectives begin with `label`, a unit and a phase ("blocks.1/gather"). Its
    rank's ring remembers the collectives.
    """

    def __init__(self, inner: Group, label: str = "") -> None:
        self.inner, self.label = inner, label

    def at(self, label: str) -> LabelledGroup:
        """This group, for collectives of another label."""
        # `type(self)`: a checked group stays checked under another label
        return type(self)(self.inner, label)

    def _start(self, kind: str, *arguments: Any) -> Work:
        tensor = brought(arguments)
        # Remembered before the call: a collective that never starts on other ranks hangs inside it
        entry = self._remember(Signature(kind, tensor.dtype, tensor.numel()))
        return _LabelledWork(self._forward(kind, *arguments), entry, self)

    def _meet(self, kind: str, *payload: bytes) -> Any:
        call = Signature(kind, torch.uint8, len(payload[0])) if payload else Signature(kind)
        entry = self._remember(call)
        entry.state = "waiting"
        result = self._forward(kind, *payload)
        # Not reached when it raises: the entry then stays one that has not ended
        entry.state = "ended"
        return result

    def _remember(self, call: Signature) -> Entry:
        """Put the collective into this rank's ring, unless a labelled group around this one has."""
        if not self.label:  # the entry is for nobody
            return Entry(0, "", call, ())
        return ring_of(self.inner).start(self.label, call, ranks_of(self.inner))

    def _forward(self, kind: str, *arguments: Any) -> Any:
        """Call `inner`'s collective of this kind; its errors say where in the step it belongs."""
        try:
            return getattr(self.inner, kind)(*arguments)
        except GroupError as error:
            _tell_where(error, self)
            raise


class CheckedGroup(LabelledGroup):
    """A debug mode: before each collective, ranks compare the calls that they are about to make.

    Where ranks make different calls, or the same for different units or phases, all raise
    `GroupError` with every rank's label. Without the check gloo would add up the wrong tensors.
    Each collective costs one `exchange` more, and waits for all ranks.

    >>> from functorch_zero.groups import run_ranks
    >>> def meet(group):
    ...     CheckedGroup(group).at(f"block {group.rank}/reduce").barrier()
    >>> try:
    ...     run_ranks(meet, 2)
    ... except GroupError as error:
    ...     print(error)
    the ranks called different collectives: rank 0: block 0/reduce: barrier; rank 1: block 1/reduce:
        barrier. ...
    """

    def subgroup(self, ranks: Sequence[int]) -> CheckedGroup:
        """The checked group of these of its ranks, where its kind can be divided (for a
        `HybridGroup`)."""
        return CheckedGroup(subgroup(self.inner, ranks), self.label)

    @property
    def all_say(self) -> AllSay | None:
        """None: every collective is compared already, and an error names both."""
        return None

    def _forward(self, kind: str, *arguments: Any) -> Any:
        own = f"{self.label or 'a call'}: {Signature.of(kind, *arguments)}"
        # Over bytes, whose sizes may differ: the ranks may disagree about all else
        payloads = super()._forward("exchange", own.encode())
        calls = [payload.decode() for payload in payloads]
        # All raise or none does: every rank has the same list
        if len(set(calls)) > 1:
            raise GroupError(
                f"the ranks called different collectives: {by_rank(calls)}. Remedy: make "
                "every rank's loss use the same units in the same order, and its loop make the "
                "same calls"
            )
        return super()._forward(kind, *arguments)


def labelled(group: Group, label: str) -> Group:
    """The group, for collectives that belong to `label`: a unit and a phase, as
    "blocks.1/gather"."""
    if group.size == 1:  # alone: no error can come from another rank
        return group
    if isinstance(group, LabelledGroup):  # its own kind stays: checked, or recorded
        return group.at(label)
    return LabelledGroup(group, label)


class _LabelledWork:
    """A collective under way that knows where it belongs."""

    def __init__(self, work: Work, entry: Entry, group: LabelledGroup) -> None:
        self._work, self._entry, self._group = work, entry, group

    def wait(self) -> None:
        # A work may be waited for again; an ended one stays so
        if self._entry.state == "started":
            self._entry.state = "waiting"
        try:
            self._work.wait()
        except GroupError as error:
            _tell_where(error, self._group, self._entry)
            raise
        self._entry.state = "ended"


def _tell_where(error: GroupError, group: LabelledGroup, entry: Entry | None = None) -> None:
    """Put the label before an error's text, and the last collectives after that of a lost rank.

    Another rank's own words stay as they are.
    """
    label = group.label
    if not label or isinstance(error, PeerError):
        return
    if isinstance(error, LostPeerError):
        # None: the error came at the start, so the newest entries tell most
        number = math.inf if entry is None else entry.number
        last = ring_of(group).near(number)
        error.args = (f"lost peer in {label}: {error}\n{last}",)
    else:
        error.args = (f"{label}: {error}",)
