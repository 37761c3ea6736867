"""Processes as ranks, over gloo: collectives, and what peers are told when one rank is lost."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functorch_zero.errors import GroupError, PeerError
from functorch_zero.groups import CountingGroup, Group, ProcessGroup, as_group, launch
from functorch_zero.groups.work import TorchWork
from tests.collectives import CHECKS, check_all, several_at_once
from tests.tiers import THOROUGH, thinned, tiers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forked")

SOON = 2.0  # seconds in which every rank must hear of another's failure


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 30.0) -> list[Any]:
    return launch(fn, ranks, *args, timeout=timeout, start_method="fork")


def outcome(fn: Callable[[], object]) -> tuple[str, str, bool]:
    """The type and text of what `fn` raises, and whether it came soon."""
    start = time.monotonic()
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start < SOON
    return "", "", True


@pytest.mark.parametrize("ranks", tiers([1, 2], [3, 5]))
def test_collectives(ranks: int) -> None:
    assert (
        on_ranks(lambda: check_all(ProcessGroup()), ranks)
        == [[check.__name__ for check in CHECKS]] * ranks
    )


def test_ranks_ask_whether_all_say_the_same() -> None:
    def fn() -> list[bool]:
        group = ProcessGroup()
        time.sleep(0.1 * group.rank)  # not all are there at once
        return [group.all_say(words, 10.0) for words in ("a", "b", "a")]

    assert on_ranks(fn, 3) == [[True] * 3] * 3
    assert on_ranks(fn, 1) == [[True] * 3]


@pytest.mark.parametrize("others", thinned(["fail", "say something else", "wait elsewhere"]))
def test_ranks_that_do_not_say_the_same(others: str) -> None:
    def fn() -> str:
        group = ProcessGroup(timeout=20)
        begin = time.monotonic()
        try:
            if group.rank != 1:
                assert not group.all_say("a", 0.5)
                group.fail(ValueError("why"))
            elif others == "say something else":
                assert not group.all_say("b", 20.0)
                group.barrier()
            elif others == "wait elsewhere":
                group.barrier()
            else:
                group.fail(KeyError("mine"))
            text = ""
        except PeerError as error:
            text = str(error)
        assert time.monotonic() - begin < 5
        # Some may hear of a failure before they have failed themselves, and all come back
        if not text and group.rank == 1 and others == "say something else":
            raise AssertionError("nobody was told")
        group.rejoin()
        assert group.all_say("c", 10.0)  # counted from the beginning
        return text

    found = on_ranks(fn, 3)
    if others == "fail":
        assert found == ["rank 1 failed: KeyError: 'mine'", "", "rank 1 failed: KeyError: 'mine'"]
    else:
        assert re.fullmatch("rank [02] failed: ValueError: why", found[1])


def test_collectives_through_copies_on_the_host() -> None:
    """What gloo does for tensors on a GPU, here for tensors on the CPU."""

    class Staging(ProcessGroup):
        def _must_stage(self, tensor: torch.Tensor) -> bool:
            # The collective calls itself with the copies
            self.staged = not getattr(self, "staged", False)
            return self.staged

    on_ranks(lambda: check_all(Staging()), 2)


@THOROUGH
def test_collectives_with_none_of_gloos_shortcuts() -> None:
    """What NCCL does: the backend's own reduce-scatter and all-reduce, whatever the size. (gloo has
    both, slowly.)"""

    class Native(ProcessGroup):
        def _backend(self, tensor: torch.Tensor) -> str:
            return "native"

    on_ranks(lambda: check_all(Native()), 2)


def test_a_device_without_a_backend_is_named() -> None:
    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup()
        found = outcome(lambda: group.all_reduce(torch.ones(2, device="meta")))
        several_at_once(group)
        return found

    for name, text, _ in on_ranks(fn, 2):
        assert name == "ValueError" and "can't move tensors on meta: its backends are" in text
        assert "Remedy: initialise torch.distributed with a backend for that device" in text


def test_sums_are_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]  # float32: the order decides

    def fn() -> tuple[float, float]:
        group = ProcessGroup()
        tensor, out = torch.tensor([values[group.rank]]), torch.zeros(1)
        group.reduce_scatter(out, tensor.repeat(4)).wait()
        group.all_reduce(tensor).wait()
        return tensor.item(), out.item()

    assert on_ranks(fn, 4) == [(1.0, 1.0)] * 4


def test_two_ranks_get_the_same_bits() -> None:
    """Also where the order of two terms shows: which of two NaNs, which of two zeros."""
    # Float32: NaN, 0, 1 and NaN, -0, NaN
    bits = [
        [0x7FC00001, 0, 0x3F800000],
        [0x7FC00002, -(2**31), 0x7FC00003],
    ]

    def fn() -> list[list[int]]:
        group, got = ProcessGroup(), []
        for op in ("sum", "max"):
            tensor = torch.tensor(bits[group.rank], dtype=torch.int32).view(torch.float32)
            group.all_reduce(tensor, op).wait()
            assert tensor.isnan().tolist() == [True, False, True]
            got.append(tensor.view(torch.int32).tolist())
        return got

    first, second = on_ranks(fn, 2)
    assert first == second


def test_torchs_own_methods_are_asynchronous() -> None:
    """What `torch.distributed`'s functions are told by `async_op`. Over NCCL it decides on which
    stream they run."""
    import torch._C._distributed_c10d as c10d

    for name in ("Allgather", "Allreduce", "AllToAll", "Broadcast", "ReduceScatter"):
        assert getattr(c10d, f"{name}Options")().asyncOp, name


def test_who_waits_while_the_group_is_left_gets_an_error() -> None:
    """As another thread might, at any moment: a collective that was cut off must never look
    finished."""
    heard = []

    class Left:
        rank = 0

        def _why_left(self, era: int) -> GroupError:
            return GroupError(f"left in era {era}")

        def _lost(self, text: str) -> GroupError:
            raise AssertionError(text)

    class Watched(TorchWork):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_handle" and value is None:
                heard.append(outcome(self.wait)[:2])

    Watched(Left(), "all_reduce", object(), ()).abandon(3)
    assert heard == [("GroupError", "left in era 3")]


def test_inputs_live_until_they_are_waited_for() -> None:
    def fn() -> list[float]:
        group = ProcessGroup()
        out = torch.zeros(2)
        if group.rank == 0:
            time.sleep(0.2)  # so the other's call is still under way when its input goes
        work = group.reduce_scatter(out, torch.full((4,), 1.0 + group.rank))
        junk = [torch.zeros(4) for _ in range(100)]
        work.wait()
        return out.tolist() + junk[0].tolist()[:1]

    assert on_ranks(fn, 2) == [[3.0, 3.0, 0.0]] * 2


@THOROUGH
def test_many_at_once_finished_in_any_order() -> None:
    count = 200

    def fn() -> bool:
        group = ProcessGroup()
        outs = torch.empty(count, 2)
        works = [
            group.all_gather(outs[i], torch.tensor([100.0 * i + group.rank])) for i in range(count)
        ]
        sums = [torch.full((20_000,), float(i + group.rank)) for i in range(3)]
        works += [group.all_reduce(total) for total in sums]
        for work in reversed(works):
            work.wait()
        expected = 100.0 * torch.arange(count)[:, None] + torch.arange(2)
        return torch.equal(outs, expected) and [float(total[0]) for total in sums] == [
            1.0,
            3.0,
            5.0,
        ]

    assert on_ranks(fn, 2) == [True, True]


def test_a_tensor_is_free_once_it_was_waited_for() -> None:
    """A rank may overwrite what it sent, also while another is late with its own part."""

    def fn() -> list[float]:
        group = ProcessGroup()
        piece, out = torch.full((50_000,), float(group.rank)), torch.empty(100_000)
        time.sleep(0.1 if group.rank == 0 else 0.0)
        work = group.all_gather(out, piece)
        time.sleep(0.4 if group.rank == 1 else 0.0)
        work.wait()
        piece.fill_(-1.0)
        group.barrier()
        return sorted(set(out.tolist()))

    assert on_ranks(fn, 2) == [[0.0, 1.0]] * 2


def test_a_closed_group_leaves_nothing_open() -> None:
    def fn() -> bool:
        held = ProcessGroup()
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            group = ProcessGroup()
            group.barrier()
            group.close()
        give_up = time.monotonic() + 10  # gloo closes connections in threads of its own
        while len(os.listdir("/proc/self/fd")) > open_before and time.monotonic() < give_up:
            time.sleep(0.01)
        held.barrier()
        return len(os.listdir("/proc/self/fd")) <= open_before

    assert on_ranks(fn, 2) == [True, True]


def test_what_it_may_be_made_of() -> None:
    def fn() -> list[object]:
        rank = dist.get_rank()
        half = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        line = init_device_mesh("cpu", (4,))
        made = [ProcessGroup(), ProcessGroup(half), ProcessGroup(mesh["replicate"]), as_group(line)]
        for group in made:
            several_at_once(group)
            assert as_group(group) is group
            assert isinstance(group, Group)
        refused = outcome(lambda: ProcessGroup(mesh))
        dist.barrier()
        dist.barrier(group=half)  # the caller's groups are untouched
        return [*((group.rank, group.size) for group in made), refused]

    results = on_ranks(fn, 4)
    refused = results[0][-1]
    assert refused[0] == "NotImplementedError"
    assert "to `shard`, two" in refused[1]
    assert "replicate" in refused[1]
    for rank, result in enumerate(results):
        assert result == [(rank, 4), (rank % 2, 2), (rank // 2, 2), (rank, 4), refused]


def test_parts_that_ranks_close_at_different_moments() -> None:
    """torch would name the next ones by how many groups a rank has at the moment."""

    def fn() -> list[int]:
        everyone = ProcessGroup(timeout=5)
        sizes, rank = [], everyone.rank
        for n in range(3):
            part = everyone.subgroup([rank // 2 * 2, rank // 2 * 2 + 1])
            part.barrier()
            sizes.append(part.size)
            if rank % 2 == n % 2:
                part.close()
        return sizes

    assert on_ranks(fn, 4) == [[2, 2, 2]] * 4


def test_without_torch_distributed_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"not initialised.*Remedy.*launch"):
        ProcessGroup()
    assert isinstance(group := as_group(CountingGroup(2)), CountingGroup)
    assert as_group(group) is group


def test_what_is_no_group_is_refused() -> None:
    name, text, _ = on_ranks(lambda: outcome(lambda: as_group(3)), 1)[0]
    assert name == "TypeError"
    assert "got 3" in text


@THOROUGH
def test_warnings_are_not_shown() -> None:
    def fn() -> int:
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_all(ProcessGroup())
        return len(caught)

    assert on_ranks(fn, 2) == [0, 0]


@pytest.mark.parametrize("bad", thinned([0, 2]))
def test_fail_reaches_every_rank_with_its_text(bad: int) -> None:
    def fn() -> list[tuple[str, str, bool]]:
        group = ProcessGroup()
        group.barrier()
        if group.rank == bad:
            group.fail(ValueError("bad batch"))
            group.fail(ValueError("worse"))
        return [outcome(lambda: group.all_reduce(torch.ones(3)).wait()), outcome(group.barrier)]

    results = on_ranks(fn, 4)
    text = f"rank {bad} failed: ValueError: bad batch"
    for rank, (first, second) in enumerate(results):
        if rank == bad:
            assert first[0] == second[0] == "GroupError"
            assert text in first[1]
        else:
            assert first == second == ("PeerError", text, True)


def test_fail_with_collectives_of_its_own_under_way() -> None:
    """gloo's connections close only when nothing refers to the group, works under way and finished
    ones included."""

    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup()
        out, x = torch.zeros(6), torch.ones(2)
        finished = group.all_gather(out, x)
        group.barrier()
        if group.rank == 1:
            under_way = group.all_gather(out, x), group.all_gather(out, x)
            group.fail(ValueError("bad batch"))
            return outcome(under_way[1].wait)
        time.sleep(0.2)
        failure = outcome(lambda: [group.all_gather(out, x).wait() for _ in range(3)])
        return failure if outcome(finished.wait) == failure else outcome(finished.wait)

    text = "rank 1 failed: ValueError: bad batch"
    results = on_ranks(fn, 3)
    assert results[0] == results[2] == ("PeerError", text, True)
    assert results[1][0] == "GroupError"
    assert text in results[1][1]


def test_one_group_fails_and_others_go_on() -> None:
    def fn() -> tuple[str, list[bytes], str]:
        first, second = ProcessGroup(), ProcessGroup()
        if first.rank == 0:
            first.fail(ValueError("bad batch"))
        failure = outcome(first.barrier)
        names = second.exchange(b"still here")
        dist.barrier()
        third = ProcessGroup()  # a retry, with a group that doesn't remember the failure
        third.barrier()
        return failure[0], names, outcome(third.barrier)[0]

    assert on_ranks(fn, 2) == [
        (name, [b"still here"] * 2, "") for name in ("GroupError", "PeerError")
    ]


@THOROUGH
def test_all_ranks_rejoin_after_a_failure() -> None:
    """Twice, with works of before left over; also a part of the ranks, whose groups' names torch
    would use again."""

    def fn() -> list[object]:
        half = dist.new_group(
            [0, 1] if dist.get_rank() < 2 else [2, 3], use_local_synchronization=True
        )
        heard: list[object] = []
        for group in (ProcessGroup(), ProcessGroup(half)):
            group.rejoin()  # nothing has failed
            for bad in (1, 0):
                left = group.all_gather(torch.zeros(group.size), torch.ones(1))
                group.barrier()
                if group.rank == bad:
                    group.fail(ValueError("bad batch"))
                heard.append(outcome(group.barrier)[0])
                group.rejoin()
                several_at_once(group)
                heard += [outcome(left.wait)[0] in ("GroupError", "PeerError", "")]
        return heard

    results = on_ranks(fn, 4)
    mine = {
        rank: ["GroupError" if bad == rank else "PeerError" for bad in (1, 0)] for rank in range(4)
    }
    for rank, heard in enumerate(results):
        assert heard[::2] == mine[rank] + mine[rank % 2]
        assert all(heard[1::2])


def test_a_rank_that_does_not_come_back() -> None:
    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup(timeout=0.5)
        if group.rank == 1:
            group.fail(ValueError("bad batch"))
            time.sleep(1.5)
            return "", "", True
        outcome(group.barrier)
        first = outcome(group.rejoin)
        assert outcome(group.rejoin)[:2] == outcome(group.barrier)[:2] == first[:2]
        return first

    name, text, soon = on_ranks(fn, 2)[0]
    assert (name, soon) == ("LostPeerError", True)
    assert (
        "rank 0 waited for all ranks to come back, after this: rank 1 failed: ValueError: bad batch"
        in text
    )


def test_a_closed_group_is_not_rejoined() -> None:
    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup()
        group.close()
        return outcome(group.rejoin)

    assert {name for name, _, _ in on_ranks(fn, 2)} == {"GroupError"}


@THOROUGH
def test_a_sibling_is_another_group_of_the_same_ranks() -> None:
    def fn() -> list[object]:
        group = ProcessGroup(timeout=7)
        other = group.sibling()
        group.close()
        check_all(other)
        return [other.rank, other.size, other._timeout.total_seconds()]

    assert on_ranks(fn, 2) == [[0, 2, 7.0], [1, 2, 7.0]]


@THOROUGH
def test_a_group_without_a_backend_for_the_cpu() -> None:
    """Such as `init_process_group("nccl")` makes; here gloo stands for NCCL."""

    def fn() -> list[object]:
        group = ProcessGroup(dist.new_group(backend="cuda:gloo"))
        check_all(group)
        check_all(group.sibling())
        if group.rank == 1:
            group.fail(ValueError("bad batch"))
        heard = outcome(group.barrier)[0]
        group.rejoin()
        check_all(group)
        return [group._connections.backends, heard]

    backends = {"cpu": "gloo", "cuda": "gloo"}
    assert on_ranks(fn, 2) == [[backends, "PeerError"], [backends, "GroupError"]]


def test_a_group_that_a_rank_does_not_make() -> None:
    def fn() -> tuple[str, str, bool]:
        return (
            outcome(lambda: ProcessGroup(timeout=0.5)) if dist.get_rank() == 0 else ("", "", True)
        )

    name, text, soon = on_ranks(fn, 2)[0]
    assert (name, soon) == ("LostPeerError", True)
    assert "rank 0 could not connect to all ranks" in text


def test_a_rank_that_raises_reaches_the_others_without_fail_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`launch` publishes what a rank's function raised."""
    module = importlib.import_module("functorch_zero.groups.launch")  # the name is a function's
    monkeypatch.setattr(module, "_SECONDS_AFTER_FAILURE", 20.0)  # to write the file
    heard: list[str] = []

    def fn(folder: str) -> None:
        group = ProcessGroup()
        group.barrier()
        if group.rank == 1:
            raise ValueError("bad batch")
        result = outcome(lambda: group.all_reduce(torch.ones(3)).wait())
        with open(f"{folder}/{group.rank}", "w") as file:
            file.write(repr(result))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(ValueError, match="bad batch"):
            on_ranks(fn, 3, folder)
        for rank in (0, 2):
            with open(f"{folder}/{rank}") as file:
                heard.append(file.read())
    assert heard == [repr(("PeerError", "rank 1 failed: ValueError: bad batch", True))] * 2


@pytest.mark.parametrize("end", thinned(["killed", "returned"]))
def test_a_rank_that_goes_without_a_word(end: str) -> None:
    def fn(folder: str) -> None:
        group = ProcessGroup()
        group.barrier()
        if group.rank == 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        result = outcome(lambda: group.all_gather(torch.zeros(9), torch.ones(3)).wait())
        with open(f"{folder}/{group.rank}", "w") as file:
            file.write("\n".join(map(str, result)))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if end == "killed":
            with pytest.raises(GroupError, match="rank 1 died without a word: killed by SIGKILL"):
                on_ranks(fn, 3, folder)
        else:
            on_ranks(fn, 3, folder)
        for rank in (0, 2):
            with open(f"{folder}/{rank}") as file:
                name, text, soon = file.read().split("\n")
            assert name == "LostPeerError"
            assert f"all_gather on rank {rank} was cut off" in text
            assert soon == "True"


def test_the_time_limit_of_a_collective() -> None:
    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup(timeout=0.5)
        if group.rank == 1:
            time.sleep(1.0)
            return "", "", True
        return outcome(group.barrier)

    name, text, soon = on_ranks(fn, 2)[0]
    assert name == "LostPeerError"
    assert "barrier on rank 0 took longer than the group's time limit" in text
    assert soon


def test_a_collective_beside_the_one_whose_time_is_over() -> None:
    """gloo then ends all that is under way, in words of its own."""

    class Left:
        rank = 0

        def _lost(self, text: str) -> GroupError:
            return GroupError(text)

    class Handle:
        def wait(self) -> None:
            raise RuntimeError("Application timeout caused pair closure")

    with pytest.raises(GroupError, match="all_reduce on rank 0 took longer than the group's time"):
        TorchWork(Left(), "all_reduce", Handle(), ()).wait()


def test_a_rank_that_comes_back_too_late_is_told_at_once() -> None:
    """It would try to connect to a rank that has given up, for a multiple of the time limit."""

    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup(timeout=1.0)
        if group.rank == 0:
            group.fail(ValueError("bad batch"))
        assert outcome(group.barrier)[0] == ("GroupError" if group.rank == 0 else "PeerError")
        if group.rank == 1:
            time.sleep(3.0)
        return outcome(group.rejoin)

    for error, text, was_soon in on_ranks(fn, 2):
        assert error == "LostPeerError" and was_soon
        assert "rank 0 waited for all ranks to come back" in text and "bad batch" in text


def test_nobody_waits_for_a_rank_that_has_closed_the_group_after_a_failure() -> None:
    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup()
        if group.rank == 0:
            group.fail(ValueError("bad batch"))
        outcome(group.barrier)
        if group.rank == 1:
            group.close()
        dist.barrier()
        return outcome(group.rejoin)

    first, second = on_ranks(fn, 2)
    assert first[0] == "LostPeerError" and "rank 1 has closed this group" in first[1] and first[2]
    assert second == ("PeerError", "rank 0 failed: ValueError: bad batch", True)


def test_a_closed_group_says_so() -> None:
    def fn() -> tuple[str, str, bool]:
        group = ProcessGroup()
        group.barrier()
        group.close()
        group.close()
        dist.barrier()
        return outcome(group.barrier)

    assert {result[:2] for result in on_ranks(fn, 2)} == {
        ("GroupError", f"rank {r} has closed this group") for r in (0, 1)
    }


def test_a_forked_process_closes_nothing() -> None:
    """gloo's threads are not there, so that it would have ended the process."""

    def fn() -> int:
        group = ProcessGroup()
        child = os.fork()
        if child == 0:
            group.close()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        group.barrier()
        return status

    assert on_ranks(fn, 2) == [0, 0]


def test_the_errors_are_of_one_family() -> None:
    assert issubclass(PeerError, GroupError)
    assert DeviceMesh is not None
