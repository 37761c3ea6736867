"""Threads as ranks: collectives, determinism, and errors on every rank instead of a hang."""

from __future__ import annotations

import contextvars
import os
import random
import re
import sys
import threading
import time
from typing import Any

import pytest
import torch

from functorch_zero.errors import GroupError, PeerError
from functorch_zero.groups import Group, ThreadGroup, run_ranks
from tests.collectives import CHECKS
from tests.tiers import THOROUGH, thinned


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collective(check: Any, ranks: int) -> None:
    assert run_ranks(check, ranks) == [None] * ranks


def test_a_group_and_its_results_in_rank_order() -> None:
    def fn(group: ThreadGroup) -> tuple[int, int]:
        assert isinstance(group, Group)
        return group.rank, group.size

    assert run_ranks(fn, 3) == [(0, 3), (1, 3), (2, 3)]


def test_sums_are_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]  # float32: the order decides

    def fn(group: ThreadGroup) -> tuple[float, float]:
        tensor, out = torch.tensor([values[group.rank]]), torch.zeros(1)
        group.reduce_scatter(out, tensor.repeat(4)).wait()
        group.all_reduce(tensor).wait()
        return tensor.item(), out.item()

    assert run_ranks(fn, 4) == [(1.0, 1.0)] * 4


def test_outputs_are_no_ranks_alias() -> None:
    def fn(group: ThreadGroup) -> float:
        piece, out, tensor = torch.ones(1), torch.zeros(2), torch.ones(1)
        group.all_gather(out, piece).wait()
        group.broadcast(tensor, 0).wait()
        for changed in (piece, out, tensor):
            changed += group.rank + 1
        group.barrier()
        return out.sum().item() + tensor.item()

    assert run_ranks(fn, 2) == [6.0, 9.0]


def test_an_output_is_written_by_wait_and_not_before() -> None:
    def fn(group: ThreadGroup) -> None:
        out = torch.zeros(2)
        work = group.all_gather(out, torch.ones(1))
        group.barrier()
        assert out.tolist() == [0, 0]
        work.wait()
        assert out.tolist() == [1, 1]

    run_ranks(fn, 2)


def test_each_rank_has_its_own_random_stream() -> None:
    def draws(group: ThreadGroup) -> list[float]:
        drawn = []
        for i in range(3):
            drawn += torch.rand(1 + group.rank * i).tolist()[:1]
            group.barrier()
        return drawn

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = run_ranks(draws, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == run_ranks(draws, 3)  # repeatable
    alone = []
    for rank in range(3):
        torch.manual_seed(3)
        alone.append([torch.rand(1 + rank * i)[0].item() for i in range(3)])
    assert first == alone


def test_runs_are_repeatable() -> None:
    def record(group: ThreadGroup) -> None:
        for _ in range(3):
            trace.append((group.rank, random.random()))
            group.barrier()

    traces = []
    for _ in range(3):
        trace: list[tuple[int, float]] = []
        random.seed(0)
        run_ranks(record, 4)
        traces.append(trace)
    assert traces[0] == traces[1] == traces[2]


@THOROUGH
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its threads")
def test_no_rank_is_still_ending_afterwards() -> None:
    """A process forked beside a thread that ends may wait for MKL's lock for good."""
    x = torch.ones(64, 64, dtype=torch.float64)

    def multiply(group: ThreadGroup) -> int:
        group.all_reduce((x @ x).view(-1)).wait()
        return threading.get_native_id()

    for _ in range(50):
        ended = run_ranks(multiply, 3)
        assert not {str(thread) for thread in ended} & {*os.listdir("/proc/self/task")}


def test_what_torch_keeps_per_thread_is_the_callers() -> None:
    variable = contextvars.ContextVar("variable", default=0)

    def fn(group: ThreadGroup) -> tuple[bool, bool, int, str]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            variable.get(),
            torch.empty(0).device.type,
        )

    assert run_ranks(fn, 2) == [(True, False, 0, "cpu")] * 2
    variable.set(1)
    with torch.no_grad(), torch.device("meta"):
        assert run_ranks(fn, 2) == [(False, False, 1, "meta")] * 2
    with torch.inference_mode():
        assert run_ranks(fn, 2)[0][:2] == (False, True)


def test_backward_runs_in_the_ranks_own_thread() -> None:
    def fn(group: ThreadGroup) -> float:
        threads = set()

        def hook(grad: torch.Tensor) -> torch.Tensor:
            threads.add(threading.get_ident())
            group.all_reduce(total := grad.clone().view(1)).wait()
            return total.view(())

        x = torch.tensor(float(group.rank + 1), requires_grad=True)
        y = x * 1
        y.register_hook(hook)
        (y * y).backward()
        assert threads == {threading.get_ident()}
        return x.grad.item()

    assert run_ranks(fn, 3) == [12.0] * 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_failure_breaks_the_others_and_is_raised(bad: int) -> None:
    heard = {}

    def fn(group: ThreadGroup) -> None:
        group.barrier()
        if group.rank == bad:
            raise ValueError("bad batch")
        try:
            group.all_reduce(torch.ones(1)).wait()
        except PeerError as error:
            heard[group.rank] = str(error)
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as caught:
        run_ranks(fn, 3)
    assert time.monotonic() - start < 1
    assert caught.value.__notes__ == [f"Raised on rank {bad} of 3."]
    assert heard == {
        rank: f"rank {bad} failed: ValueError: bad batch" for rank in range(3) if rank != bad
    }


def test_fail_tells_the_others_at_once() -> None:
    def fn(group: ThreadGroup) -> str:
        if group.rank == 1:
            group.fail(ValueError("bad batch"))
            group.fail(ValueError("worse"))
            return "failed"
        with pytest.raises(PeerError) as caught:
            group.barrier()
        return str(caught.value)

    text = "rank 1 failed: ValueError: bad batch"
    assert run_ranks(fn, 3) == [text, "failed", text]


def mismatches() -> dict[str, tuple[Any, Any, list[str]]]:
    """What rank 1 calls, what the others call, and what the error must name."""

    def gather(k: int, dtype: torch.dtype = torch.float32) -> Any:
        return lambda g: g.all_gather(
            torch.zeros(k * g.size, dtype=dtype), torch.zeros(k, dtype=dtype)
        ).wait()

    def reduce(op: Any) -> Any:
        return lambda g: g.all_reduce(torch.ones(2), op).wait()

    def send(k: int) -> Any:
        return lambda g: g.all_to_all(torch.ones(3), [1] * 3, torch.ones(3 * k), [k] * 3).wait()

    return {
        "kind": (
            lambda g: g.barrier(),
            gather(2),
            ["rank 0: all_gather of 2 float32", "rank 1: barrier"],
        ),
        "size": (
            gather(3),
            gather(2),
            ["rank 0: all_gather of 2 float32", "rank 1: all_gather of 3 float32"],
        ),
        "dtype": (
            gather(2, torch.int64),
            gather(2),
            ["all_gather of 2 float32", "all_gather of 2 int64"],
        ),
        "op": (
            reduce("max"),
            reduce("sum"),
            ["rank 0: all_reduce(sum)", "rank 1: all_reduce(max)"],
        ),
        "source": (
            lambda g: g.broadcast(torch.ones(1), 1),
            lambda g: g.broadcast(torch.ones(1), 0),
            ["broadcast(source=1)", "broadcast(source=0)"],
        ),
        "runs": (send(2), send(1), ["rank 1 sends 2 elements to rank 0", "expects 1"]),
    }


@pytest.mark.parametrize("case", mismatches())
def test_different_calls_are_an_error_on_all_ranks(case: str) -> None:
    odd, usual, parts = mismatches()[case]
    texts = []

    def fn(group: ThreadGroup) -> None:
        try:
            (odd if group.rank == 1 else usual)(group)
            group.barrier()
        except GroupError as error:
            assert not isinstance(error, PeerError)
            texts.append(str(error))
            raise

    with pytest.raises(GroupError):
        run_ranks(fn, 3)
    assert len(texts) == 3
    assert len(set(texts)) == 1
    assert all(part in texts[0] for part in parts), texts[0]


def test_ranks_ask_whether_all_say_the_same() -> None:
    def fn(group: ThreadGroup) -> list[bool]:
        group.all_reduce(torch.ones(2))  # under way, and nobody waits
        return [group.all_say(words, 1.0) for words in ("a", "b", "a")]

    assert run_ranks(fn, 3) == [[True] * 3] * 3


@pytest.mark.parametrize("others", ["say something else", "wait elsewhere", "have ended"])
def test_ranks_that_do_not_say_the_same(others: str) -> None:
    """Those who ask have an answer, and not an error, so that they can tell the others why."""

    def fn(group: ThreadGroup) -> str:
        try:
            if group.rank != 1:
                assert not group.all_say("a", 1.0)
                group.fail(ValueError("why"))
                return "asked"
            if others == "have ended":
                return "ended"
            if others == "say something else":
                assert not group.all_say("b", 1.0)
            group.barrier()
        except PeerError as error:
            return str(error)
        finally:
            if others != "have ended":
                group.rejoin()
                assert group.all_say("c", 1.0)
        return "not told"

    _, other, _ = run_ranks(fn, 3)
    assert (
        other == "ended" if others == "have ended" else re.match("rank [02] failed: .*why", other)
    )


def test_a_rank_that_returns_early_is_no_hang() -> None:
    def fn(group: ThreadGroup) -> None:
        if group.rank != 1:
            group.all_reduce(torch.ones(2)).wait()

    with pytest.raises(
        GroupError,
        match=r"no rank can go on: rank 1 returned; rank 0 waits in all_reduce.* rank 2 waits",
    ):
        run_ranks(fn, 3)


def test_a_collective_that_some_never_call_is_an_error_at_the_end() -> None:
    def fn(group: ThreadGroup) -> None:
        if group.rank != 1:
            group.all_reduce(torch.ones(2))  # not waited for

    with pytest.raises(
        GroupError, match="rank 1 never called what others called: rank 0: all_reduce"
    ):
        run_ranks(fn, 3)


def test_ranks_that_wait_for_each_others_calls() -> None:
    def fn(group: ThreadGroup) -> None:
        work = group.all_reduce(torch.ones(1)) if group.rank == 0 else None
        group.barrier()
        if work is not None:
            work.wait()

    with pytest.raises(GroupError, match="different collectives"):
        run_ranks(fn, 2)


@pytest.mark.skipif(
    sys.gettrace() is not None, reason="coverage may be interrupted while it holds its lock"
)
@pytest.mark.parametrize("stuck", thinned(["waits", "loops"]))
def test_the_time_limit_ends_every_thread(stuck: str) -> None:
    def fn(group: ThreadGroup) -> None:
        while group.rank == 1 and stuck == "loops":
            pass
        while stuck == "waits":
            group.barrier()
        group.barrier()

    before = threading.active_count()
    with pytest.raises(TimeoutError, match=r"longer than 0\.2 s: rank 0.*timeout=0\.4\)"):
        run_ranks(fn, 3, timeout=0.2)
    assert threading.active_count() == before


def test_ranks_behind_finish_their_step_after_a_failure() -> None:
    """The failing rank is in its second step when the others of its group of all ranks have yet to
    call the last collective of their axis."""

    def fn(group: ThreadGroup) -> list[str]:
        behind = group.rank < 2
        axis = group.subgroup((0, 1) if behind else (2, 3))
        work = group.all_reduce(torch.ones(1))
        done = []
        # Rank 0 hands on first, and comes back when the others wait or have failed
        work.wait()
        try:
            if not behind:
                raise ValueError("ahead")
            for _ in range(3):
                out = torch.ones(1)
                axis.all_reduce(out).wait()
                done.append(f"axis {float(out)}")
            group.all_reduce(torch.ones(1)).wait()
        except (ValueError, PeerError) as error:
            done.append(type(error).__name__)
            group.fail(error)
        group.rejoin()
        group.all_reduce(torch.ones(1)).wait()
        return done

    first, second, third, fourth = run_ranks(fn, 4)
    assert first == second == ["axis 2.0"] * 3 + ["PeerError"]
    assert third == fourth == ["ValueError"]


def test_a_rank_that_waits_in_rejoin_is_said_to() -> None:
    def fn(group: ThreadGroup) -> None:
        if group.rank == 0:
            group.fail(MemoryError())
            group.rejoin()
        while True:
            pass

    expected = r"rank 0 waits in rejoin for ranks 1, 2; rank 1 runs; rank 2 is ready to go on"
    with pytest.raises(TimeoutError, match=expected):
        run_ranks(fn, 3, timeout=0.2)


def test_exceptions_that_are_no_exception() -> None:
    def fn(group: ThreadGroup) -> None:
        if group.rank:
            pytest.skip("of another family")
        group.barrier()

    with pytest.raises(pytest.skip.Exception):
        run_ranks(fn, 2)


def test_a_group_is_for_its_own_thread() -> None:
    groups: list[ThreadGroup] = []
    run_ranks(groups.append, 2)
    with pytest.raises(GroupError, match="outside its rank's thread"):
        groups[0].barrier()


def test_runs_nest() -> None:
    def inner(group: ThreadGroup) -> float:
        group.all_reduce(tensor := torch.ones(1)).wait()
        return tensor.item()

    def outer(group: ThreadGroup) -> float:
        total = torch.tensor([sum(run_ranks(inner, 3))])
        group.all_reduce(total).wait()
        return total.item()

    assert run_ranks(outer, 2) == [18.0, 18.0]


def test_the_number_of_ranks_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(lambda group: None, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.func.jvp's own
def test_waiting_inside_forward_mode_is_refused_since_its_level_is_one_for_all_threads():
    def on_a_rank(group):
        def f(x):
            group.all_reduce(torch.ones(1)).wait()
            return x * 2

        return torch.func.jvp(f, (torch.ones(1),), (torch.ones(1),))

    with pytest.raises(NotImplementedError, match=r"torch\.func\.jvp"):
        run_ranks(on_a_rank, 2)
