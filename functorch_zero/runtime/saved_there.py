"""Tensors that autograd saves for backward, on their way to a place and back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from ..places import Arriving, Leaving, Place, ahead_of


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class PlacedTensor:
    """A tensor that autograd has saved, in its place."""

    number: int  # in the order of saving, in one pass
    place: Place
    stored: Tensor  # 1-D: its elements as they lie in memory, and what lies between them
    size: torch.Size
    stride: tuple[int, ...]

    def seen_in(self, brought: Tensor) -> Tensor:
        """The tensor as it was saved, of what was brought."""
        return brought.as_strided(self.size, self.stride)


class SavedThere:
    """The tensors that one pass has saved in places.

    In forward, the memory of one that leaves is free once the work after the next ones waits for
    it: as many are on their way as the place brings ahead. Backward asks for them about in reverse
    order, so the ones before the one that it asks for are brought, too. But an operator asks for
    its own, up to three, in the order of saving. So what is on its way stays that while backward
    has gone past it by no more, and what was asked for isn't brought again.
    """

    def __init__(self) -> None:
        self._saved: list[ref[PlacedTensor]] = []  # weak: they go with autograd's graph
        self._leaving: deque[tuple[Leaving, Tensor]] = deque()  # and what must stay until then
        self._arriving: dict[int, Arriving] = {}  # by number
        self._recalled: set[int] = set()  # numbers

    def leave(self, place: Place, tensor: Tensor) -> PlacedTensor:
        """Start to copy a tensor to its place."""
        size, stride = tensor.size(), tensor.stride()
        # With its strides: a kernel may sum another layout's elements in another order
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        source = tensor.detach().as_strided((span,), (1,))
        saved = PlacedTensor(len(self._saved), place, place.empty(source), size, stride)
        self._saved.append(ref(saved))
        self._leaving.append((place.leave(source, saved.stored), source))
        self._wait_for_all_but(ahead_of(place))
        return saved

    def recall(self, saved: PlacedTensor) -> Tensor:
        """The tensor beside the params, for backward."""
        self._wait_for_all_but(0)
        number, ahead = saved.number, ahead_of(saved.place)
        if number in self._recalled:  # the graph was kept, and backward runs once more
            self._recalled.clear()
        self._recalled.add(number)
        arriving = self._arriving.pop(number, None) or saved.place.bring(saved.stored)
        # What backward has gone past without asking for it is dropped
        self._arriving = {n: on_way for n, on_way in self._arriving.items() if n < number + 3}
        for n in range(number - 1, -1, -1):
            if len(self._arriving) >= ahead:
                break
            other = self._saved[n]()
            if other is None or n in self._recalled or n in self._arriving:
                continue
            self._arriving[n] = other.place.bring(other.stored)
        return saved.seen_in(arriving.wait())

    def _wait_for_all_but(self, num: int) -> None:
        while len(self._leaving) > num:
            leaving, _ = self._leaving.popleft()
            leaving.wait()
