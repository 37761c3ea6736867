"""A simulated rank: CountingGroup's results, the wire's times, and streams that are played."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from functorch_zero import optim
from functorch_zero.groups import CountingGroup, Done, Group, HybridGroup, counted
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.benchmarks.simulated import SimulatedGroup, Wire, spin_on_device
from tests.collectives import bad_arguments
from tests.groups.test_counting import call_each
from tests.local import local_leaves
from tests.models import ZOO, split
from tests.tiers import crossed

SLOW = 0.05  # seconds of a collective that a busy machine can't hide


# ---- Results ----


def trained(group: Group, level: int, name: str, **options: Any) -> list[Tensor]:
    """This rank's state after three steps."""
    case = ZOO[name]
    loss_fn, params, buffers = case.build()
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.muon(1e-2))
    step = shard(train_step(loss_fn, optimizer), level=level, group=group, **options)
    state = step.init(params, buffers)
    for batch in case.batches(3, 4):
        state, _ = step(state, split(batch, [2, 2])[0])
    return [x.detach().clone() for x in local_leaves(state)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("level", "name", "overlap"),
    crossed((0, 1, 2, 3), ("gpt", "convnet"), ("memory", "time"), n=4),
)
def test_a_step_has_the_numbers_of_a_counting_group(level: int, name: str, overlap: Any) -> None:
    wire = Wire(latency=1e-4, jitter=5e-4)
    expected = trained(CountingGroup(4, 1), level, name, overlap=overlap)
    found = trained(SimulatedGroup(4, 1, wire=wire), level, name, overlap=overlap)
    assert same(expected, found)
    assert wire.busy_seconds > wire.num_collectives * 1e-4 > 0


def test_replicas_of_shards_share_the_wire() -> None:
    wire = Wire()
    expected = trained(HybridGroup(CountingGroup(4, 1), shard_size=2), 3, "gpt")
    found = trained(HybridGroup(SimulatedGroup(4, 1, wire=wire), shard_size=2), 3, "gpt")
    assert same(expected, found) and wire.num_collectives > 0


def test_bytes_are_a_counting_groups() -> None:
    wire, counting = Wire(), CountingGroup(3, 1)
    group = counted(SimulatedGroup(3, 1, wire=wire))
    call_each(group)
    call_each(counting)
    assert group.calls == counting.calls
    assert wire.num_collectives == len(counting.calls)
    assert wire.sent_bytes == pytest.approx(counting.sent_bytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_collectives_are_a_counting_groups_to_the_bit(dtype: torch.dtype) -> None:
    def results(group: Group) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        whole = torch.randint(-99, 99, (12,), generator=generator).to(dtype) / 8
        whole = whole.to(dtype)
        in_place, out, piece = whole.clone(), torch.empty(12, dtype=dtype), whole[:4].clone()
        gathered, nothing = torch.empty(12, dtype=dtype), torch.empty(0, dtype=dtype)
        for work in (
            group.all_gather(gathered, piece),
            group.all_gather(in_place, in_place[4:8]),
            group.all_gather(nothing, nothing.clone()),
            group.all_to_all(out, [1, 2, 9], whole.clone(), [4, 5, 3]),
        ):
            work.wait()
        reduced = torch.empty(4, dtype=dtype)
        group.reduce_scatter(reduced, whole.clone()).wait()
        summed = whole.clone()
        group.all_reduce(summed).wait()
        group.broadcast(summed, 2).wait()
        return [gathered, in_place, out, reduced, summed]

    assert same(results(CountingGroup(3, 1)), results(SimulatedGroup(3, 1)))


def test_wrong_arguments_are_refused_at_the_call() -> None:
    bad_arguments(SimulatedGroup(2))


def test_results_come_in_wait() -> None:
    group = SimulatedGroup(2)
    out, piece = torch.zeros(4), torch.ones(2)
    work = group.all_gather(out, piece)
    assert out.tolist() == [0] * 4  # who reads now reads too early
    work.wait()
    assert out.tolist() == [1] * 4
    out.zero_()
    work.wait()  # as often as one likes
    assert out.tolist() == [0] * 4


def test_one_rank_takes_no_time() -> None:
    wire = Wire(latency=100.0)
    group, x = SimulatedGroup(1, wire=wire), torch.ones(2)
    assert isinstance(group.all_reduce(x), Done)
    assert group.exchange(b"a") == [b"a"]
    assert x.tolist() == [1, 1] and wire.busy_seconds == wire.num_collectives == 0


# ---- The host's time ----


def test_a_wait_takes_what_computing_has_not_hidden() -> None:
    wire = Wire(bandwidth=1e6, latency=SLOW)
    group, x = SimulatedGroup(2, wire=wire), torch.zeros(12500)  # 50 kB, all of them sent: 50 ms
    start = time.monotonic()
    work = group.all_reduce(x)
    time.sleep(SLOW)  # computing
    work.wait()
    assert time.monotonic() - start >= 2 * SLOW
    assert wire.busy_seconds == pytest.approx(2 * SLOW)
    assert 0 < wire.exposed_seconds <= SLOW


def test_a_collective_that_computing_hides_is_not_exposed() -> None:
    wire = Wire(latency=0.01)
    work = SimulatedGroup(2, wire=wire).all_reduce(torch.zeros(2))
    time.sleep(0.02)
    work.wait()
    assert wire.exposed_seconds == 0 and wire.busy_seconds == 0.01


def test_a_wire_carries_one_collective_at_a_time() -> None:
    wire = Wire(latency=SLOW)
    group = SimulatedGroup(2, wire=wire)
    start = time.monotonic()
    works = [group.all_reduce(torch.zeros(2)) for _ in range(3)]
    started = time.monotonic() - start
    works[2].wait()  # the last one first: it leaves the wire behind the others
    assert time.monotonic() - start >= 3 * SLOW > started
    before = wire.exposed_seconds
    works[0].wait()
    assert wire.exposed_seconds == before


@pytest.mark.parametrize("call", [lambda g: g.exchange(b"abc"), lambda g: g.barrier()])
def test_the_host_waits_for_words(call: Callable[[Any], object]) -> None:
    wire = Wire(latency=SLOW)
    start = time.monotonic()
    call(SimulatedGroup(2, wire=wire))
    assert time.monotonic() - start >= SLOW


def test_counts_begin_again() -> None:
    wire = Wire(latency=1e-3, jitter=1e-3, seed=1)
    SimulatedGroup(2, wire=wire).all_reduce(torch.zeros(2)).wait()
    assert 1e-3 < wire.busy_seconds < 2e-3 and wire.exposed_seconds > 0
    wire.reset()
    assert wire.num_collectives == wire.sent_bytes == 0
    assert wire.busy_seconds == wire.exposed_seconds == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bandwidth": 0}, "bandwidth.*above 0, got 0.*Remedy: None"),
        ({"bandwidth": float("nan")}, "bandwidth"),
        ({"bandwidth": float("inf")}, "bandwidth"),
        ({"latency": -1.0}, "latency must be seconds, 0 or more, got -1.0"),
        ({"jitter": float("nan")}, "jitter"),
    ],
)
def test_wires_that_there_are_not(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Wire(**options)  # type: ignore[arg-type]


# ---- Streams, played ----


class Stream:
    """A stream on which all is done as soon as it is told, at the time of its own clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.now = 0.0  # seconds

    def wait_stream(self, other: Stream) -> None:
        self.now = max(self.now, other.now)

    def wait_event(self, event: Event) -> None:
        self.now = max(self.now, event.at)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.at = (stream or Device.current).now

    def query(self) -> bool:
        return Device.is_through

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)  # milliseconds


class Device:
    """Of the streams: the current one, and whether the device is through with them."""

    current = Stream()
    is_through = True
    rate = 2e9  # cycles per second

    @staticmethod
    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        outer, Device.current = Device.current, stream
        yield
        Device.current = outer

    @staticmethod
    def spin(cycles: int) -> None:
        Device.current.now += cycles / Device.rate


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Streams for the tensors of a CPU; the one that computes."""
    Device.current, Device.is_through, Device.rate = Stream(), True, 2e9
    # Its module, of which pytest may have imported another copy for the doctests
    names_of_module = Wire.start.__globals__
    monkeypatch.setitem(names_of_module, "_has_streams", lambda tensor: True)
    monkeypatch.setitem(names_of_module, "spin_on_device", Device.spin)
    names = {
        "Stream": Stream,
        "Event": Event,
        "stream": Device.use,
        "current_stream": lambda device=None: Device.current,
        "synchronize": lambda device=None: None,
        "device": lambda device: Device.use(Device.current),
    }
    for name, played in names.items():
        monkeypatch.setattr(torch.cuda, name, played)
    return Device.current


def test_streams_wait_and_the_host_does_not(played: Stream) -> None:
    wire = Wire(latency=3.0)
    group, out = SimulatedGroup(2, wire=wire), torch.zeros(4)
    start = time.monotonic()
    work = group.all_gather(out, torch.ones(2))
    before = played.now  # the first collective has measured the clock
    played.now += 1.0  # computing, on the current stream
    work.wait()
    assert played.now == pytest.approx(before + 3.0)
    assert wire.exposed_seconds == pytest.approx(2.0)
    assert time.monotonic() - start < 2.0 and out.tolist() == [1] * 4


def test_collectives_begin_behind_what_computes_and_follow_each_other(played: Stream) -> None:
    wire = Wire(latency=1.0)
    group = SimulatedGroup(2, wire=wire)
    group.all_reduce(torch.zeros(2)).wait()
    wire.reset()
    at = played.now
    played.now += 5.0
    first, second = group.all_reduce(torch.zeros(2)), group.all_reduce(torch.zeros(2))
    first.wait()
    assert played.now == pytest.approx(at + 6.0)
    second.wait()
    assert played.now == pytest.approx(at + 7.0)
    assert wire.exposed_seconds == pytest.approx(2.0)


def test_tensors_live_until_the_wire_is_through(played: Stream) -> None:
    group = SimulatedGroup(2)
    Device.is_through = False
    group.all_reduce(torch.zeros(2))  # nobody waits for it
    group.all_reduce(torch.zeros(2)).wait()
    (lane,) = group.wire._lanes.values()
    assert len(lane._under_way) == 2  # the first one is not over
    Device.is_through = True
    group.all_reduce(torch.zeros(2))
    assert len(lane._under_way) == 1


def test_a_clock_that_slows_down_is_measured_again(played: Stream) -> None:
    group = SimulatedGroup(2, wire=Wire(latency=1.0))
    took = []
    for rate in (2e9, 1e9, 1e9):
        Device.rate, before = rate, played.now
        group.all_reduce(torch.zeros(2)).wait()
        took.append(played.now - before)
    # The first one begins with the clock's own measure; the second is the last that is too long
    assert took[1:] == pytest.approx([2.0, 1.0])


def test_copies_of_other_code_take_their_turn(played: Stream) -> None:
    wire = Wire(bandwidth=2.0)
    SimulatedGroup(2, wire=wire).all_reduce(torch.zeros(2)).wait()
    other = Stream()
    other.now = at = played.now
    with Device.use(other), wire.carrying(6.0, torch.device("cpu")):
        assert other.now == pytest.approx(at + 3.0)
    work = SimulatedGroup(2, wire=wire).all_reduce(torch.zeros(2))  # 8 bytes
    work.wait()
    assert played.now == pytest.approx(at + 3.0 + 4.0)


def test_a_step_on_played_streams(played: Stream) -> None:
    wire = Wire(latency=1.0)
    expected = trained(CountingGroup(4, 1), 3, "gpt")
    assert same(expected, trained(SimulatedGroup(4, 1, wire=wire), 3, "gpt"))
    assert 0 < wire.exposed_seconds <= wire.busy_seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_spin_on_device() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    spin_on_device(100_000_000)
    end.record()
    assert not end.query()  # the host goes on
    end.synchronize()
    assert start.elapsed_time(end) > 30  # milliseconds, of clocks up to 3 GHz
