"""A group of imagined ranks that records what is called and moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..groups.counting import Call, CountedGroup
from ..groups.protocol import Done, ReduceOp, Work
from .records import Collective

Notice = Callable[[str, Tensor], None]  # (kind of memory, a tensor of that kind)


class Recorder(CountedGroup):
    """Rank `rank` of `size`: every collective is recorded with its phase and unit, and leaves its tensors as they are.

    Attributes:
        phase: of the step; set by whoever runs it.
        recorded: the collectives so far.
        notice: told which tensors hold gathered params and gradients.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(_Silent(rank, size))
        self.phase = "forward"
        self.recorded: list[Collective] = []
        self.log: list[str] = []  # what a pass says it starts: "gather blocks.0", "reduce blocks.0[float32]"
        self.notice: Notice = lambda kind, tensor: None

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        if self.phase in ("forward", "backward"):
            self.notice("gathered", out)
        work = super().all_gather(out, piece)
        return self._named(work)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        self.notice("gradients", out)
        self.notice("gradients", whole)
        self._named(super().reduce_scatter(out, whole))
        return _Holding(whole.new_empty(whole.numel()) if whole.device.type == "cpu" and self.size > 2 else None)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        if self.phase in ("forward", "backward"):
            self.notice("gradients", tensor)
        return self._named(super().all_reduce(tensor, op))

    def all_to_all(self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]) -> Work:
        return self._named(super().all_to_all(out, out_sizes, source, in_sizes))

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._named(super().broadcast(tensor, source))

    def note(self, call: Call) -> None:
        """Record a call that was counted elsewhere."""
        unit = self.log[-1].partition(" ")[2].partition("[")[0] if self.log and self._names_units else ""
        group = f"all {self.size}" if self.size > 1 else "itself"
        self.recorded.append(Collective(self.phase, call.kind, unit, *call[1:], group))

    @property
    def _names_units(self) -> bool:
        return self.phase in ("forward", "backward", "publish")

    def _named(self, work: Work) -> Work:
        self.note(self.calls[-1])
        return work


class _Holding:
    """Finished work that held room while it was under way: over gloo, what the other ranks sent."""

    def __init__(self, room: Tensor | None) -> None:
        self._room = room

    def wait(self) -> None:
        self._room = None


class _Silent:
    """A group whose collectives do nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return Done()

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        return Done()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return Done()

    def all_to_all(self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]) -> Work:
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return Done()

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size

    def barrier(self) -> None:
        return None

    def fail(self, error: BaseException) -> None:
        return None
