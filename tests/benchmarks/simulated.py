"""One process plays a rank of many, over a wire of a given bandwidth and latency."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functorch_zero.groups.checks import check_call
from functorch_zero.groups.counting import Call, MirrorGroup
from functorch_zero.groups.forwarding import Forwarding
from functorch_zero.groups.protocol import Done, Work
from functorch_zero.groups.signature import brought

# Keeps the current stream of the current device busy for so many cycles of its clock. In public, a
# stream waits only for other work.
spin_on_device: Callable[[int], None] = torch.cuda._sleep

# 25 ms on a GPU of 2 GHz
_CYCLES_TO_MEASURE = 50_000_000
# A spin that is shorter says little about the clock, beside its launch
_SECONDS_TO_MEASURE = 2e-4


class Wire:
    """The link of a simulated rank. It carries one collective at a time, in the order in which they
    start.

    Args:
        bandwidth: bytes per second that a rank sends; None: no limit.
        latency: seconds per collective, besides its bytes.
        jitter: at most so many seconds more per collective, drawn at random.
        seed: of the jitter.

    Attributes:
        num_collectives: the collectives carried so far.
        sent_bytes: the bytes sent so far, counted as `groups.CountingGroup` counts them.
        busy_seconds: the time that these took on the wire, hidden or not.

    Raises:
        ValueError: a number is negative or not finite, or the bandwidth is 0.

    >>> wire = Wire(bandwidth=50e9, latency=20e-6)
    >>> wire.seconds_for(1e9)
    0.02002
    """

    def __init__(
        self,
        bandwidth: float | None = None,
        latency: float = 0.0,
        *,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        if bandwidth is not None and not 0 < bandwidth < math.inf:
            raise ValueError(
                f"bandwidth must be a number of bytes per second above 0, got {bandwidth}. Remedy: "
                "None for no limit"
            )
        for name, seconds in (("latency", latency), ("jitter", jitter)):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{name} must be seconds, 0 or more, got {seconds}")
        self.bandwidth, self.latency, self.jitter = bandwidth, latency, jitter
        self._random = random.Random(seed)
        self._host = _HostLane()
        self._lanes: dict[torch.device, _StreamLane] = {}
        self._clear_counts()

    def seconds_for(self, num_bytes: float) -> float:
        """The time of a collective in which a rank sends so many bytes, without jitter."""
        if self.bandwidth is None:
            return self.latency
        return self.latency + num_bytes / self.bandwidth

    @property
    def exposed_seconds(self) -> float:
        """The part of `busy_seconds` for which computing stood still, since a result was waited for
        that was still on the wire. Reading it waits for GPUs.

        Of CPU tensors it is the host that stands still, of CUDA tensors the stream that waits.
        """
        return self._host.exposed + sum(lane.exposed() for lane in self._lanes.values())

    def reset(self) -> None:
        """Count from 0 again: after the first steps, say."""
        self._clear_counts()
        self._host.exposed = 0.0
        for lane in self._lanes.values():
            lane.forget_exposed()

    def start(self, num_bytes: float, move: Callable[[], object], *tensors: Tensor) -> Work:
        """Start a collective in which a rank sends so many bytes. `move` writes its results into
        `tensors` once the wire is through."""
        seconds = self._take(num_bytes)
        if tensors and _has_streams(tensors[0]):
            return self._lane_on(tensors[0].device).start(seconds, move, tensors)
        return self._host.start(seconds, move)

    @contextmanager
    def carrying(self, num_bytes: float, device: torch.device) -> Iterator[None]:
        """Around the copies of a collective of other code: the GPU's current stream waits for the
        wire, then for as long as the bytes take, then runs the copies. Whoever waits for that
        stream is not counted in `exposed_seconds`."""
        with self._lane_on(device).carrying(self._take(num_bytes)):
            yield

    def _take(self, num_bytes: float) -> float:
        """Count a collective, and return its seconds."""
        seconds = self.seconds_for(num_bytes) + self.jitter * self._random.random()
        self.num_collectives += 1
        self.sent_bytes += num_bytes
        self.busy_seconds += seconds
        return seconds

    def _clear_counts(self) -> None:
        self.num_collectives, self.sent_bytes, self.busy_seconds = 0, 0.0, 0.0

    def _lane_on(self, device: torch.device) -> _StreamLane:
        if device not in self._lanes:
            self._lanes[device] = _StreamLane(device)
        return self._lanes[device]


class SimulatedGroup(Forwarding):
    """Rank `rank` of `size`, alone, over a simulated wire: the results are `CountingGroup`'s to the
    bit, and collectives take the time that the wire would take.

    So one process shows how much of a step's communication computing hides, at a number of ranks
    and a bandwidth that one need not have. Every other rank is taken to hold the same as this one,
    and to start each collective when this one does. So gathered params are this rank's piece N
    times: times and memory are a training step's, losses are not.

    CUDA tensors: collectives run on a stream of their own, and `Work.wait` makes the current stream
    wait, not the host, as with NCCL. Others: results are written in `Work.wait`, which sleeps until
    the wire is through. So code that reads a result too early, or writes to an input too early,
    gets other numbers than with `CountingGroup`; `Wire(jitter=...)` makes this more likely.

    Not simulated: ranks that are late, the share of a GPU's multiprocessors and memory bandwidth
    that NCCL takes, and latencies that grow with the number of ranks. The stand-in's own copies
    take time besides: on the host for CPU tensors.

    Args:
        size, rank: the number of ranks, and this one's.
        wire: by default one that takes no time. Several groups may share one; subgroups do.

    >>> wire = Wire(bandwidth=1e6, latency=1e-3)
    >>> group = SimulatedGroup(4, wire=wire)
    >>> out = torch.empty(8)
    >>> work = group.all_gather(out, torch.tensor([1.0, 2.0]))  # computing goes on meanwhile
    >>> work.wait()
    >>> out
    tensor([1., 2., 1., 2., 1., 2., 1., 2.])
    >>> wire.sent_bytes, wire.busy_seconds  # 32 bytes * 3/4
    (24.0, 0.001024)
    """

    def __init__(self, size: int, rank: int = 0, *, wire: Wire | None = None) -> None:
        super().__init__(MirrorGroup(rank, size))
        self.wire = Wire() if wire is None else wire

    def _start(self, kind: str, *arguments: Any) -> Work:
        check_call(self.size, kind, *arguments)
        own = {"all_gather": self._fill_rows, "reduce_scatter": self._multiply_slice}
        move = partial(own.get(kind, getattr(self.inner, kind)), *arguments)
        num_bytes = Call.of(self, kind, *arguments).sent_bytes
        return self._send(num_bytes, move, arguments[0], brought(arguments))

    def _meet(self, kind: str, *payload: bytes) -> Any:
        # From host to host, so it is the host that waits, wherever the tensors are
        self._send(sum(map(len, payload)) * (self.size - 1), lambda: None).wait()
        return super()._meet(kind, *payload)

    def subgroup(self, ranks: Sequence[int]) -> SimulatedGroup:
        """The group of these of its ranks, over the same wire."""
        return SimulatedGroup(len(ranks), list(ranks).index(self.rank), wire=self.wire)

    # These two do without temporary tensors, as NCCL does, so that a GPU's peaks are the step's

    @torch.no_grad()
    def _fill_rows(self, out: Tensor, piece: Tensor) -> None:
        """`out` (N * k,) becomes the piece (k,), N times. The piece may lie at its own place
        there."""
        rows = out.view(self.size, piece.numel())
        rows[: self.rank].copy_(piece)
        rows[self.rank + 1 :].copy_(piece)
        rows[self.rank].copy_(piece)

    @torch.no_grad()
    def _multiply_slice(self, out: Tensor, whole: Tensor) -> None:
        """`out` (k,) becomes N times this rank's slice of `whole` (N * k,)."""
        own = whole.view(self.size, out.numel())[self.rank]
        torch.mul(own, self.size, out=out)

    def _send(self, num_bytes: float, move: Callable[[], object], *tensors: Tensor) -> Work:
        if self.size > 1:
            return self.wire.start(num_bytes, move, *tensors)
        move()  # one rank has nobody to send to
        return Done()


def _has_streams(tensor: Tensor) -> bool:
    """Whether work on a tensor is queued on streams, which the host does not wait for."""
    return tensor.is_cuda


# ---- CPU tensors: the host's clock ----


class _HostLane:
    """The wire as the host sees it.

    Attributes:
        exposed: seconds for which the host had to wait.
    """

    def __init__(self) -> None:
        self.exposed = 0.0
        self._free_at = 0.0  # time.monotonic() when the last collective so far leaves the wire

    def start(self, seconds: float, move: Callable[[], object]) -> _OnHost:
        begins = max(time.monotonic(), self._free_at)
        self._free_at = begins + seconds
        return _OnHost(self, move, self._free_at)


class _OnHost:
    """A collective of CPU tensors, which leaves the wire at `ends`."""

    def __init__(self, lane: _HostLane, move: Callable[[], object], ends: float) -> None:
        self._lane, self._ends = lane, ends
        self._move: Callable[[], object] | None = move  # None once it is done

    def wait(self) -> None:
        if self._move is None:
            return
        self._lane.exposed += max(0.0, self._ends - time.monotonic())
        # Not before, so that who reads too early sees the old values. The copies take host time,
        # which counts as the wire's as far as that is not through.
        self._move()
        self._move = None
        time.sleep(max(0.0, self._ends - time.monotonic()))


# ---- CUDA tensors: streams ----


class _StreamLane:
    """The wire as a GPU sees it: a stream whose collectives spin for their time, then copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=-1)
        self._clock = _Clock(device)
        self._last: Any = None  # the event at which the last collective so far leaves the wire
        # Works whose tensors may still be in use: a work that nobody waits for must not free them
        self._under_way: deque[_OnStream] = deque()
        # Of each wait: events of the waiting stream, before it and behind it
        self._stalls: deque[tuple[Any, Any]] = deque()
        self._exposed = 0.0  # seconds of the stalls that are over

    def start(
        self, seconds: float, move: Callable[[], object], tensors: tuple[Tensor, ...]
    ) -> _OnStream:
        while self._under_way and self._under_way[0].is_over():
            self._under_way.popleft()
        # As NCCL does: behind all that the current stream has been given
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), self.carrying(seconds):
            move()
        work = _OnStream(self, self._last, tensors)
        self._under_way.append(work)
        return work

    @contextmanager
    def carrying(self, seconds: float) -> Iterator[None]:
        """Around the copies of a collective, on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            stream.wait_event(self._last)
        if seconds:
            self._clock.spin(seconds, stream)
        yield
        self._last = stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Let the current stream wait, and note for how long."""
        stream = torch.cuda.current_stream(self._device)
        before, behind = _timed_events()
        before.record(stream)
        stream.wait_event(event)
        behind.record(stream)
        self._stalls.append((before, behind))
        self._add_up_stalls()

    def exposed(self) -> float:
        """Seconds for which streams had to wait."""
        torch.cuda.synchronize(self._device)
        self._add_up_stalls()
        return self._exposed

    def forget_exposed(self) -> None:
        self.exposed()
        self._exposed = 0.0

    def _add_up_stalls(self) -> None:
        """Add up those that are over, so that a long run keeps few events."""
        while self._stalls and self._stalls[0][1].query():
            before, behind = self._stalls.popleft()
            self._exposed += _seconds_between(before, behind)


class _OnStream:
    """A collective of CUDA tensors, which leaves the wire at an event."""

    def __init__(self, lane: _StreamLane, done: Any, tensors: tuple[Tensor, ...]) -> None:
        self._lane, self._done = lane, done
        self._tensors = tensors  # () once a stream waits: what it frees is used again behind that

    def wait(self) -> None:
        self._lane.wait_for(self._done)
        self._tensors = ()

    def is_over(self) -> bool:
        """Whether the tensors may be freed."""
        return not self._tensors or self._done.query()


class _Clock:
    """The clock by which a GPU spins. Its rate changes with the GPU's load, so each long spin
    measures it for the next ones."""

    def __init__(self, device: torch.device) -> None:
        self._spins: deque[tuple[int, Any, Any]] = deque()  # cycles, and the events around them
        with torch.cuda.device(device):
            for _ in range(2):  # the first one wakes a GPU at rest
                self._spin(_CYCLES_TO_MEASURE, torch.cuda.current_stream(device))
            torch.cuda.synchronize(device)
        self._measure()

    def spin(self, seconds: float, stream: Any) -> None:
        """Keep the current stream busy for so long."""
        self._measure()
        cycles = int(seconds * self._cycles_per_second)
        if seconds < _SECONDS_TO_MEASURE:
            spin_on_device(cycles)
        else:
            self._spin(cycles, stream)

    def _spin(self, cycles: int, stream: Any) -> None:
        before, behind = _timed_events()
        before.record(stream)
        spin_on_device(cycles)
        behind.record(stream)
        self._spins.append((cycles, before, behind))

    def _measure(self) -> None:
        """The rate of the last spin that is over."""
        while self._spins and self._spins[0][2].query():
            cycles, before, behind = self._spins.popleft()
            self._cycles_per_second = cycles / _seconds_between(before, behind)


def _timed_events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _seconds_between(before: Any, behind: Any) -> float:
    milliseconds: float = before.elapsed_time(behind)
    return milliseconds / 1e3
