"""Places for what a plan imagines to lie elsewhere than on the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..places import ByUnit, Here, ahead_of, brings_copies
from ..sharded.options import Options
from ..sharded.placed import Stored
from .watch import MemoryWatch


class Elsewhere:
    """A place for tensors without values, which no device takes.

    Args:
        kind: of what lies here.
        ahead: as of a place.
        brings_copies: else a step works in it, as in a `File`.

    Attributes:
        read, written: bytes that were brought and left since it began.
    """

    def __init__(self, kind: str, watch: MemoryWatch, *, ahead: int, brings_copies: bool):
        self._kind, self._watch, self._live = kind, watch, watch.live
        self.ahead, self.brings_copies = ahead, brings_copies
        # Bytes that lie here: now, the most since it began, and when it began
        self._now = self._most = self._held = self.read = self.written = 0

    def begin(self) -> None:
        """Forget what was, but for the tensors that lie here."""
        self._most = self._held = self._now
        self.read = self.written = 0

    def stored(self) -> Stored:
        """The bytes since it began."""
        kind = self._kind
        # Nobody brings what is worked on where it lies: params that a step begins with, and sums
        # of gradients, which the update reads
        read = {"params": self._held, "gradients": self.written}.get(kind, self.read)
        return Stored(kind, self._most, read, self.written)

    def empty(self, like: Tensor) -> Tensor:
        with self._live.paused():
            made = torch.empty_like(like, memory_format=torch.contiguous_format)
        self._live.adopt([made], self)
        return made

    def count(self, change: int) -> None:
        self._now += change
        self._most = max(self._most, self._now)

    def holds(self, tensor: Tensor) -> bool:
        return self._live.kind_of(tensor) is self

    def bring(self, stored: Tensor) -> Here:
        self.read += stored.nbytes
        if not self.brings_copies:
            return Here(stored)
        with self._live.paused():
            made = torch.empty_like(stored)
        self._watch.adopt("state" if self._kind == "state" else "activations", made)
        return Here(made)

    def leave(self, tensor: Tensor, into: Tensor) -> Here:
        # Params and states are counted by the engine, where they are worked on in their place, too
        if self._kind in ("gradients", "saved"):
            self.written += into.nbytes
        return Here(into)


def with_imagined_places(
    options: Options, watch: MemoryWatch, device: torch.device
) -> tuple[Options, dict[str, Elsewhere]]:
    """The options with stand-ins for the user's places, which would be asked for real memory; and
    these, one per kind. `device`: of the params."""
    made, by_unit = {}, {}
    for kind, places in options.places.given.items():
        ahead = max(map(ahead_of, places.distinct))
        brings = any(brings_copies(place, device) for place in places.distinct)
        made[kind] = own = Elsewhere(kind, watch, ahead=ahead, brings_copies=brings)
        rule = {p: None if place is None else own for p, place in places.rule.items()}
        by_unit[kind] = ByUnit(rule)
    return replace(options, places=replace(options.places, **by_unit)), made
