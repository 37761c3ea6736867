"""Counting collectives and their bytes."""

from __future__ import annotations

import pytest
import torch

from functorch_zero.groups import Call, CountingGroup, Group, ThreadGroup, counted, run_ranks
from tests.collectives import bad_arguments, check_all


def call_each(group: Group) -> None:
    n = group.size
    group.all_gather(torch.zeros(4 * n), torch.zeros(4)).wait()
    group.reduce_scatter(torch.zeros(4), torch.zeros(4 * n)).wait()
    group.all_reduce(torch.zeros(6, dtype=torch.float64), "max").wait()
    group.all_to_all(torch.zeros(n), [1] * n, torch.zeros(n), [1] * n).wait()
    group.broadcast(torch.zeros(5), 0).wait()
    group.exchange(b"abc")
    group.barrier()


EXPECTED = [
    Call("all_gather", torch.float32, 12, 4 * 12 * 2 / 3),
    Call("reduce_scatter", torch.float32, 12, 4 * 12 * 2 / 3),
    Call("all_reduce", torch.float64, 6, 2 * 8 * 6 * 2 / 3),
    Call("all_to_all", torch.float32, 3, 4 * 2),
    Call("broadcast", torch.float32, 5, 4 * 5),
    Call("exchange", torch.uint8, 3, 3 * 2),
    Call("barrier", torch.uint8, 0, 0),
]


def test_calls_are_recorded_with_their_ideal_bytes() -> None:
    group = CountingGroup(3, rank=1)
    assert (group.rank, group.size) == (1, 3)
    call_each(group)
    assert group.calls == EXPECTED
    assert group.num_calls() == 7
    assert group.num_calls("all_gather") == 1
    assert group.sent_bytes("all_gather") == 32
    assert group.sent_bytes() == sum(call.sent_bytes for call in EXPECTED)
    group.reset()
    assert group.num_calls() == group.sent_bytes() == 0


def test_one_rank_sends_nothing() -> None:
    group = CountingGroup(1)
    call_each(group)
    assert group.num_calls() == 7
    assert group.sent_bytes() == 0


def test_a_wrapped_group_records_the_same_and_works() -> None:
    def fn(group: ThreadGroup) -> list[Call]:
        wrapped = counted(group)
        assert isinstance(wrapped, Group)
        assert (wrapped.rank, wrapped.size) == (group.rank, group.size)
        call_each(wrapped)
        calls = list(wrapped.calls)
        check_all(wrapped)
        return calls

    assert run_ranks(fn, 3) == [EXPECTED] * 3


def test_a_refused_call_is_not_recorded() -> None:
    group = CountingGroup(2)
    bad_arguments(group)
    assert [call.kind for call in group.calls] == ["barrier"]


def test_fail_is_forwarded() -> None:
    def fn(group: ThreadGroup) -> None:
        if group.rank == 0:
            counted(group).fail(ValueError("bad"))
        else:
            group.barrier()

    with pytest.raises(RuntimeError, match="rank 0 failed: ValueError: bad"):
        run_ranks(fn, 2)


def test_results_are_as_if_every_rank_had_this_ranks_data() -> None:
    group = CountingGroup(3, rank=1)
    out = torch.zeros(6)
    group.all_gather(out, torch.tensor([1.0, 2.0])).wait()
    assert out.tolist() == [1, 2, 1, 2, 1, 2]
    piece = torch.zeros(2)
    group.reduce_scatter(piece, torch.arange(6.0)).wait()
    assert piece.tolist() == [6, 9]
    summed, largest = torch.arange(2.0), torch.arange(2.0)
    group.all_reduce(summed).wait()
    group.all_reduce(largest, "max").wait()
    assert (summed.tolist(), largest.tolist()) == ([0, 3], [0, 1])
    group.broadcast(summed, 2).wait()
    assert summed.tolist() == [0, 3]
    assert group.exchange(b"a") == [b"a"] * 3
    received = torch.full((6,), -1.0)
    group.all_to_all(received, [1, 2, 3], torch.arange(4.0), [1, 2, 1]).wait()
    assert received.tolist() == [1, 1, 2, 1, 2, 1]
    group.all_to_all(received, [1, 2, 3], torch.arange(4.0), [2, 0, 2]).wait()
    assert received.tolist() == [0] * 6


def test_the_same_as_threads_that_hold_the_same() -> None:
    def fn(group: Group) -> list[list[float]]:
        n = group.size
        out, piece, tensor, received = (
            torch.zeros(2 * n),
            torch.zeros(2),
            torch.arange(3.0),
            torch.zeros(2 * n),
        )
        group.all_gather(out, torch.arange(2.0)).wait()
        group.reduce_scatter(piece, torch.arange(2.0 * n)).wait()
        group.all_reduce(tensor).wait()
        group.all_to_all(received, [2] * n, torch.arange(2.0 * n), [2] * n).wait()
        return [t.tolist() for t in (out, piece, tensor, received)]

    assert [fn(CountingGroup(4, rank)) for rank in range(4)] == run_ranks(fn, 4)


def test_meta_tensors_and_worlds_that_no_machine_has() -> None:
    group = CountingGroup(4096)
    piece = torch.empty(2**20, device="meta")
    out = torch.empty(2**32, device="meta")
    group.all_gather(out, piece).wait()
    group.reduce_scatter(piece, out).wait()
    group.all_reduce(piece).wait()
    assert group.sent_bytes("all_gather") == 4 * (2**32 - 2**20)


def test_the_rank_is_checked() -> None:
    with pytest.raises(ValueError, match="rank must be from 0 to the number of ranks - 1"):
        CountingGroup(2, rank=2)
