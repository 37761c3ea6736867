"""Places for tests: one that counts, and one whose tensors must be brought; and a unit for them."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from functorch_zero._torch_private import storage_id
from functorch_zero.places import Arriving, File, Here, Host, Leaving
from tests.modules import Unit


def layer(width: int) -> Unit:
    """A unit of one matrix."""
    return Unit(lambda net, x: torch.tanh(net.linear(x)), linear=nn.Linear(width, width))


@dataclass(frozen=True)
class Counted(File):
    """Files, and how often each method was called."""

    calls: Counter[str] = field(default_factory=Counter, repr=False, compare=False)

    def empty(self, like: Tensor) -> Tensor:
        self.calls["empty"] += 1
        return super().empty(like)

    def bring(self, stored: Tensor) -> Arriving:
        assert self.holds(stored)
        self.calls["bring"] += 1
        return super().bring(stored)

    def leave(self, tensor: Tensor, into: Tensor) -> Leaving:
        assert self.holds(into)
        self.calls["leave"] += 1
        return super().leave(tensor, into)


class Away:
    """Keeps other values than it is given, so that what isn't brought gives others: as where the
    params are on a GPU."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.held: list[Tensor] = []

    def empty(self, like: Tensor) -> Tensor:
        self.calls["empty"] += 1
        self.held.append(torch.full(like.shape, torch.nan).to(like.dtype))
        return self.held[-1]

    def holds(self, tensor: Tensor) -> bool:
        return any(tensor is held for held in self.held)

    def bring(self, stored: Tensor) -> Any:
        assert self.holds(stored)
        self.calls["bring"] += 1
        return Here(-stored)

    def leave(self, tensor: Tensor, into: Tensor) -> Any:
        assert self.holds(into) and not self.holds(tensor)
        self.calls["leave"] += 1
        return Here(into.copy_(-tensor))


class PlayedStream:
    """A `DeviceStream` of a GPU that tensors of the CPU stand for. It is late: a copy is made when
    somebody waits for it, or for a later one. Until then there are no numbers, and what others may
    write over or free gives wrong ones, or an error.

    Attributes:
        host_waits: how often the host has waited.
        most_here: bytes of brought tensors that were alive at a time.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.host_waits = self.most_here = 0
        self._num_done = 0
        self._lock = threading.RLock()  # ranks are threads
        self._late: deque[tuple[Tensor, Callable[[], Tensor | None]]] = deque()
        self._pinned: dict[int, Tensor] = {}  # by storage; kept, so that no other one has its id
        self._here: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def pinned(self, like: Tensor) -> Tensor:
        self.calls["pinned"] += 1
        made = _without_numbers(like)
        self._pinned[storage_id(made)] = made.data
        return made

    def is_pinned(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._pinned

    def holds(self, tensor: Tensor) -> bool:
        return not self.is_pinned(tensor)

    def copied(self, source: Tensor) -> Tensor:
        assert self.is_pinned(source) or not source.numel()
        self.calls["brought"] += 1
        made, kept = _without_numbers(source), source.data
        with self._lock:
            self._here.add(made)
            self.most_here = max(self.most_here, sum(x.nbytes for x in self._here))
            self._late.append((made.data, lambda: kept))
        return made

    def copy(self, source: Tensor, into: Tensor) -> None:
        assert not source.numel() or (self.is_pinned(into) and not self.is_pinned(source))
        self.calls["left"] += 1
        with self._lock:
            # Memory of the stream's own is given to its later copies alone
            is_own = any(source is x for x in self._here)
            kept = source.data if is_own else None
            self._late.append((into.data, (lambda: kept) if is_own else weakref.ref(source)))

    def end(self) -> int:
        with self._lock:
            return self._num_done + len(self._late)

    @torch.no_grad()
    def hold_caller(self, event: int) -> None:
        with self._lock:
            while self._num_done < event:
                into, source = self._late.popleft()
                found = source()
                assert found is not None, "memory was given away before it was copied"
                into.copy_(found)
                self._num_done += 1

    def synchronize(self) -> None:
        self.host_waits += 1
        self.hold_caller(self.end())


def _without_numbers(like: Tensor) -> Tensor:
    made = torch.full(like.shape, torch.nan, dtype=torch.float32)
    return made.to(like.dtype).contiguous()


def played_host(ahead: int = 1) -> tuple[Host, PlayedStream]:
    """A `Host` that believes to be beside a GPU, and its stream."""
    place, stream = Host(ahead), PlayedStream()
    place._streams[stream.device] = stream  # type: ignore[assignment]
    return place, stream
