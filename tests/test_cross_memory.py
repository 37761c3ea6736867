"""Ranks of one machine that read each other's memory: the same numbers as over sockets, and never a wrong one."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad

from functorch_zero.errors import GroupError, LostPeerError
from functorch_zero.groups import ProcessGroup, boards, cross_memory, launch
from functorch_zero.groups.cross_memory import CrossMemory
from tests.collectives import CHECKS, check_all

pytestmark = pytest.mark.usefixtures("readable")


def on_ranks(fn: Callable[..., Any], ranks: int, timeout: float = 40.0) -> list[Any]:
    return launch(fn, ranks, timeout=timeout, start_method="fork")


@pytest.fixture(scope="module")
def readable() -> None:
    if not all(on_ranks(lambda: ProcessGroup().reads_memory, 2)):
        pytest.skip("processes can't read each other's memory here: not Linux on x86, or the kernel does not let them")


def near(group: ProcessGroup) -> CrossMemory:
    assert group._near is not None
    return group._near


def terms(ranks: int, n: int, dtype: torch.dtype) -> Tensor:
    """A row for each rank, whose sums depend on their order."""
    rows = torch.randn(ranks, n, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(ranks)[:, None]
    return rows.to(dtype)


def in_order(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_over_sockets(ranks: int) -> None:
    """What ranks of several machines do, and those that may not read each other's memory."""

    def fn() -> list[str]:
        group = ProcessGroup(cross_memory=False)
        assert not group.reads_memory and not group.sibling().reads_memory
        return check_all(group)

    assert on_ranks(fn, ranks) == [[check.__name__ for check in CHECKS]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_large_sums_are_in_rank_order(ranks: int, dtype: torch.dtype) -> None:
    """To the bit, at any level: pieces that several reads make up, and sizes that ranks don't divide."""
    n = 2 * cross_memory._CHUNK * ranks + ranks
    rows = terms(ranks, n, dtype)

    def fn() -> tuple[bool, bool, bool]:
        group = ProcessGroup()
        near(group)
        whole, piece = rows[group.rank].clone(), torch.empty(n // ranks, dtype=dtype)
        group.reduce_scatter(piece, whole).wait()
        reduced, odd = rows[group.rank].clone(), rows[group.rank, :-1].clone()
        works = group.all_reduce(reduced), group.all_reduce(odd)
        for work in works:
            work.wait()
        expected = in_order(rows)
        mine = expected.view(ranks, -1)[group.rank]
        return torch.equal(piece, mine), torch.equal(reduced, expected), torch.equal(odd, expected[:-1])

    assert on_ranks(fn, ranks) == [(True, True, True)] * ranks


def test_more_at_once_than_a_board_holds_finished_in_any_order() -> None:
    def fn() -> bool:
        group, count = ProcessGroup(), 2 * boards.AT_ONCE + 10
        near(group)
        outs = torch.empty(count, 2)
        works = [group.all_gather(outs[i], torch.tensor([100.0 * i + group.rank])) for i in range(count)]
        sums = [torch.full((20_000,), float(i + group.rank)) for i in range(3)]
        works += [group.all_reduce(total) for total in sums]
        for work in reversed(works):
            work.wait()
        expected = 100.0 * torch.arange(count)[:, None] + torch.arange(2)
        return torch.equal(outs, expected) and [float(total[0]) for total in sums] == [1.0, 3.0, 5.0]

    assert on_ranks(fn, 2) == [True, True]


def test_what_nobody_waits_for_holds_up_nobody() -> None:
    def fn() -> list[float]:
        group, out = ProcessGroup(), torch.empty(2)
        near(group)
        if group.rank == 0:
            group.all_gather(torch.empty(2), torch.tensor([7.0]))
        else:
            group.all_gather(torch.empty(2), torch.tensor([8.0])).wait()
        group.all_gather(out, torch.tensor([float(group.rank)])).wait()
        return out.tolist()

    assert on_ranks(fn, 2) == [[0.0, 1.0]] * 2


def test_a_tensor_is_free_once_the_others_have_read_it() -> None:
    """A rank that overwrites what it sent, as soon as it may, while another is late with its own part."""

    def fn() -> list[float]:
        group = ProcessGroup()
        near(group)
        piece, out = torch.full((50_000,), float(group.rank)), torch.empty(100_000)
        if group.rank == 0:
            time.sleep(0.1)  # rank 1 has begun and found nobody: it reads in its wait, which comes later still
        work = group.all_gather(out, piece)
        if group.rank == 1:
            time.sleep(0.4)
        work.wait()
        piece.fill_(-1.0)
        group.barrier()
        return sorted(set(out.tolist()))

    assert on_ranks(fn, 2) == [[0.0, 1.0]] * 2


def test_ranks_that_call_different_things_are_told() -> None:
    """gloo would add up the wrong tensors, wait for ever, or end the process."""

    def kinds(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.all_gather(torch.empty(2), torch.ones(1)).wait()
        else:
            group.reduce_scatter(torch.empty(1), torch.ones(2)).wait()

    def sizes(group: ProcessGroup) -> None:
        n = 10 + group.rank
        group.all_gather(torch.empty(2 * n), torch.ones(n)).wait()

    def operations(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(6), "max" if group.rank else "sum").wait()

    def sources(group: ProcessGroup) -> None:
        if group.rank:
            group.all_gather(torch.empty(2), torch.ones(1)).wait()
        else:
            group.broadcast(torch.ones(1), 0).wait()

    def dtypes(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(8, dtype=torch.int32 if group.rank else torch.float32)).wait()

    def sums(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(100_000 + 2 * group.rank)).wait()

    def fn(wrong: Callable[[ProcessGroup], None]) -> str:
        group = ProcessGroup(timeout=5)
        near(group)
        with pytest.raises(GroupError, match=r"called different collectives.*Remedy") as error:
            wrong(group)
        time.sleep(0.2)  # the other sees it, too
        assert not isinstance(error.value, LostPeerError)
        return str(error.value)

    for wrong, rank_0 in [
        (kinds, "rank 0 all_gather, rank 1 reduce_scatter"),
        (sizes, "rank 0 all_gather of 40 bytes, rank 1 one of 44 bytes"),
        (sums, "rank 0 all_reduce of 200,000 bytes, rank 1 one of 200,004 bytes"),
        (operations, "rank 0 all_reduce, rank 1 all_reduce (max)"),
        (dtypes, "rank 0 all_reduce of torch.float32, rank 1 one of torch.int32"),
        (sources, "rank 0 broadcast, rank 1 all_gather"),
    ]:
        first, second = on_ranks(lambda wrong=wrong: fn(wrong), 2)
        assert rank_0 in first and "rank 0" in second and "rank 1" in second


def test_who_is_late_is_named_by_all() -> None:
    def fn() -> str:
        group = ProcessGroup(timeout=1.0)
        near(group)
        if group.rank == 1:
            time.sleep(2.0)
            return ""
        with pytest.raises(LostPeerError) as error:
            group.all_reduce(torch.ones(1)).wait()
        return str(error.value)

    first, _, third = on_ranks(fn, 3)
    for text in (first, third):
        assert "time limit" in text and "timed out after 1 s: rank 1 did not come" in text


def test_a_rank_whose_memory_cannot_be_read_makes_all_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = boards._copy_from

    def refused(pid: int, *runs: boards.Run) -> None:
        if pid != os.getpid() and torch.distributed.get_rank() == 1:
            raise PermissionError("not permitted")
        copy(pid, *runs)

    def fn() -> tuple[bool, bool]:
        monkeypatch.setattr(boards, "_copy_from", refused)
        group, other = ProcessGroup(), ProcessGroup(cross_memory=torch.distributed.get_rank() == 0)
        check_all(group)
        check_all(other)
        return group.reads_memory, other.reads_memory

    assert on_ranks(fn, 2) == [(False, False)] * 2


def test_memory_that_cannot_be_read_any_more_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int, *runs: boards.Run) -> None:
        raise ProcessLookupError("no such process")

    def fn() -> str:
        group = ProcessGroup(timeout=5)
        near(group)
        if group.rank == 0:
            monkeypatch.setattr(boards, "_copy_from", gone)
        with pytest.raises(LostPeerError) as error:
            group.all_gather(torch.empty(2), torch.ones(1)).wait()
        return str(error.value)

    first, second = on_ranks(fn, 2)
    assert "rank 1's memory can't be read" in first and "rank 0 has left" in second


def interrupt(group: ProcessGroup, tensor: Tensor) -> None:
    with pytest.raises(KeyboardInterrupt):
        group.all_reduce(tensor).wait()


def refusal(group: ProcessGroup, tensor: Tensor) -> str:
    """What a later collective raises."""
    with pytest.raises(GroupError) as error:
        group.all_reduce(tensor).wait()
    return str(error.value)


def test_a_sum_that_was_cut_off_is_not_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the midst of adding: what is in place already must not be added twice."""
    add, calls = torch.add, []

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return add(*args, **kwargs)

    def fn() -> str:
        group, tensor = ProcessGroup(timeout=5), torch.ones(4 * cross_memory._CHUNK)
        near(group)
        if group.rank == 0:
            monkeypatch.setattr(torch, "add", interrupted)
            interrupt(group, tensor)
        return refusal(group, tensor)

    assert all("has left" in text for text in on_ranks(fn, 2))


def test_what_was_read_is_not_read_again_after_an_interrupt() -> None:
    class Interrupted(deque[cross_memory.Transfer]):
        def popleft(self) -> cross_memory.Transfer:
            raise KeyboardInterrupt

    def fn() -> str:
        group, tensor = ProcessGroup(timeout=5), torch.ones(100_000)
        if group.rank == 0:
            near(group)._unread = Interrupted()
            interrupt(group, tensor)
        return refusal(group, tensor)

    assert all("has left" in text for text in on_ranks(fn, 2))


def test_a_collective_in_the_midst_of_another_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal's handler may call one; what is under way would be read, and added, twice."""
    add = torch.add

    def fn() -> str:
        group = ProcessGroup(timeout=5)
        near(group)

        def interrupted(*args: Any, **kwargs: Any) -> Tensor:
            monkeypatch.setattr(torch, "add", add)
            group.barrier()
            return add(*args, **kwargs)

        if group.rank == 0:
            monkeypatch.setattr(torch, "add", interrupted)
        with pytest.raises(GroupError) as error:
            group.all_reduce(torch.ones(100_000)).wait()
        return str(error.value)

    first, second = on_ranks(fn, 2)
    assert "within another, from a signal's handler" in first and "rank 0 has left" in second


def test_a_process_that_has_taken_an_ended_ones_number_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fn() -> None:
        group = ProcessGroup(timeout=5)
        near(group)
        time.sleep(0.2 * group.rank)
        work = group.all_gather(torch.empty(2), torch.ones(1))
        if group.rank == 1:
            os._exit(0)  # it has read rank 0's
        time.sleep(0.4)
        monkeypatch.setattr(boards, "_copy_from", lambda *args: None)  # as if it could be read
        with pytest.raises(LostPeerError) as error:
            work.wait()
        (tmp_path / "error").write_text(str(error.value))

    with pytest.raises(GroupError, match="died without a word"):
        on_ranks(fn, 2)
    assert "rank 1's process has ended" in (tmp_path / "error").read_text()


def test_a_rank_that_leaves_spoils_only_what_it_has_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = boards._copy_from

    def slowly(pid: int, shown: boards.Run, wanted: boards.Run) -> None:
        time.sleep(0.3 if wanted[1] > 100 else 0.0)
        copy(pid, shown, wanted)

    def fn() -> list[float]:
        group, out = ProcessGroup(timeout=5), torch.empty(2)
        memory = near(group)
        if group.rank == 0:
            time.sleep(0.2)  # so that rank 1 reads both in the wait for the first
        else:
            monkeypatch.setattr(boards, "_copy_from", slowly)
        work = group.all_gather(out, torch.tensor([float(group.rank)]))
        group.all_gather(torch.empty(2000), torch.empty(1000))
        work.wait()
        while group.rank == 1 and not memory._who_left():
            time.sleep(0.01)
        group.close()
        return out.tolist()

    assert on_ranks(fn, 2) == [[0.0, 1.0]] * 2


def test_a_rank_without_room_for_a_board_makes_all_use_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str) -> int:
        raise OSError("too many open files")

    def fn() -> bool:
        if torch.distributed.get_rank() == 1:
            monkeypatch.setattr(os, "memfd_create", full)
        group = ProcessGroup()
        group.barrier()
        return group._near is None

    assert on_ranks(fn, 2) == [True, True]


def test_sums_of_what_lies_on_another_device_are_for_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn() -> list[str]:
        group, kinds = ProcessGroup(), []
        near(group)
        group._backends["meta"] = "nccl"
        monkeypatch.setattr(group, "_launch", lambda kind, *args: kinds.append(kind))
        for dtype in (torch.float32, torch.int16):
            group.reduce_scatter(*(torch.empty(n, dtype=dtype, device="meta") for n in (3, 6)))
        return kinds

    assert on_ranks(fn, 2) == [["reduce_scatter"] * 2] * 2


def test_ranks_that_have_called_different_things_can_come_back() -> None:
    def fn() -> None:
        group = ProcessGroup(timeout=10)
        near(group)
        with pytest.raises(GroupError, match="different collectives"):
            group.all_gather(torch.empty(2 * (2 + group.rank)), torch.ones(2 + group.rank)).wait()
        group.rejoin()
        check_all(group)
        near(group)

    on_ranks(fn, 2)


def test_after_a_failure_that_all_have_caught_memory_is_read_again() -> None:
    def fn() -> bool:
        group = ProcessGroup(timeout=10)
        near(group)
        if group.rank == 0:
            group.fail(ValueError("bad batch"))
        with pytest.raises(GroupError, match="bad batch"):
            group.barrier()
        assert group._near is None
        group.rejoin()
        check_all(group)
        return group._near is not None

    assert on_ranks(fn, 2) == [True, True]


def test_nothing_is_left_open_and_a_forked_child_says_nothing() -> None:
    def fn() -> tuple[int, bool]:
        groups = [ProcessGroup(), ProcessGroup()]
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            group = ProcessGroup()
            near(group)
            group.barrier()
            leave = group._near.leave
            group.close()
            assert not leave.alive
        left = len(os.listdir("/proc/self/fd")) - open_before
        child = os.fork()
        if not child:
            near(groups[0]).leave()
            with pytest.raises(cross_memory.Cut, match="forked"):
                near(groups[1]).all_gather(torch.empty(2), torch.ones(1))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for group in groups:
            check_all(group)
        return left, True

    for left, _ in on_ranks(fn, 2):
        assert left <= 2  # gloo closes connections in threads of its own


def test_what_was_under_way_is_let_go_when_a_rank_leaves() -> None:
    def fn() -> tuple[bool, int]:
        group, alone = ProcessGroup(), ProcessGroup()
        near(group)
        gc.collect()
        gc.disable()
        open_before = len(os.listdir("/proc/self/fd"))
        other = group.sibling()
        near(other)
        held = [torch.ones(100_000), torch.ones(3)]
        works = [other.all_reduce(tensor) for tensor in held] if group.rank == 0 else []
        refs = [weakref.ref(tensor) for tensor in held]
        other.close()
        works.clear()
        held.clear()
        left = len(os.listdir("/proc/self/fd")) - open_before
        alone.barrier()
        return any(ref() is not None for ref in refs), left

    for is_held, left in on_ranks(fn, 2):
        assert not is_held and left <= 2  # gloo closes connections in threads of its own


def test_a_collective_inside_a_transform_raises() -> None:
    def fn() -> str:
        group = ProcessGroup()
        near(group)

        def loss(x: Tensor) -> Tensor:
            group.all_reduce(torch.ones(2)).wait()
            return x.sum()

        with pytest.raises(RuntimeError, match=r"inside a torch.func transform.*Remedy") as error:
            grad(loss)(torch.ones(3))
        return str(error.value)

    assert all("all_reduce" in text for text in on_ranks(fn, 2))
