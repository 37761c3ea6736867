"""What happens to some ranks ends in an error on all of them, and soon; a retry gives the same
numbers.

The letters are those of the table in docs/maintain/faults.md.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.errors import GroupError, PeerError, StructureError
from functorch_zero.groups import (
    CheckedGroup,
    LabelledGroup,
    ProcessGroup,
    Work,
    labelled,
    launch,
    run_ranks,
)
from functorch_zero.groups.mesh import HybridGroup
from functorch_zero.groups.protocol import Collectives
from functorch_zero.groups.single import SingleRank
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.failures import propagate_failures
from functorch_zero.step.train import train_step
from tests.collectives import several_at_once
from tests.compare import train
from tests.faults import SOON, Trigger, outcome, survivors
from tests.local import local_leaves
from tests.models import ZOO, even, rows, split
from tests.runtime.test_skipped_units import ordered
from tests.runtime.test_unit import build
from tests.tiers import thinned, tiers

LEVELS = (0, 1, 2, 3)
RANKS = 2


class Raises(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("bad batch")


NOW = threading.local()  # where this rank is to fail; no part of the optimizer, which ranks compare


def fail_now(where: str) -> None:
    if NOW.fails == where:
        while not NOW.waits():
            time.sleep(0.001)
        raise ArithmeticError("bad batch")


class Rank:
    """A rank that trains, and fails where and when it is told to."""

    def __init__(self, group: Any, level: int, *, donate: bool = False):
        NOW.fails, NOW.waits = "", lambda: True
        loss_fn, params, buffers = ZOO["mlp"].build()

        def loss(p: Any, b: Any, batch: Any) -> Any:
            value, aux = loss_fn(p, b, batch)
            if NOW.fails == "loss":
                raise ArithmeticError("bad batch")
            return (Raises.apply(value) if NOW.fails == "backward" else value), aux

        def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
            fail_now("optimizer")
            across.norm(updates)
            fail_now("end")  # after the step's last collective, at levels 0 and 3
            return updates, state

        picky = optim.with_statistics(lambda params: (), update)
        self.step = shard(
            train_step(loss, optim.chain(optim.adamw(0.01), picky)),
            level=level,
            group=group,
            donate=donate,
        )
        self.state = self.step.init(params, buffers)
        self.batches = [
            split(b, even(12, group.size))[group.rank] for b in ZOO["mlp"].batches(3, 12)
        ]

    def take(self, i: int) -> None:
        self.state, _ = self.step(self.state, self.batches[i])

    def values(self) -> list[Tensor]:
        return [leaf.detach().clone() for leaf in local_leaves(self.state)]

    def whole(self) -> list[Tensor]:
        return [leaf.detach().clone() for leaf in optree.tree_leaves(self.step.unshard(self.state))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def undisturbed(group: Any, level: int) -> list[Tensor]:
    rank = Rank(group, level)
    for i in range(3):
        rank.take(i)
    return rank.whole()


def fail_and_retry(
    group: Any,
    level: int,
    where: str,
    guilty: tuple[int, ...],
    donate: bool,
    expected: list[Tensor],
) -> list[Any]:
    """Three steps, of which the second fails once; what was raised, and whether all is as if
    nothing had been."""
    rank = Rank(group, level, donate=donate)
    rank.take(0)
    group.barrier()  # on threads a failure breaks what ranks of other axes still have to do, too
    before = rank.values()
    NOW.fails = where if group.rank in guilty else ""
    ended = outcome(lambda: rank.take(1))
    intact = same(before, rank.values())
    NOW.fails = ""
    rank.take(1)
    rank.take(2)
    return [ended.error, ended.text, ended.seconds < SOON, intact, same(rank.whole(), expected)]


def check_retried(results: list[list[Any]], guilty: tuple[int, ...]) -> None:
    failed = {r for r, (error, *_) in enumerate(results) if error == "ArithmeticError"}
    # Of two that fail, one may hear of the other first
    assert failed and failed <= {*guilty}
    for r, (error, text, soon, intact, equal) in enumerate(results):
        assert error == ("ArithmeticError" if r in failed else "PeerError") and "bad batch" in text
        assert r in failed or re.search(r"rank [01] failed: ArithmeticError", text)
        assert soon and intact and equal, (r, soon, intact, equal)


CASES = [
    (level, where, guilty, donate)
    for level in LEVELS
    for where in ("loss", "backward", "optimizer")
    for guilty in ((1,), (0, 1))
    for donate in (False, True)
    if where != "optimizer" or (not donate and level > 0)  # see below
]


@pytest.mark.parametrize("cases", tiers(thorough=[CASES[::3]], full=[CASES]), ids=len)
def test_a_failed_step_is_tried_again_on_processes(cases: list[Any]) -> None:
    """S1, S2. One after the other in the same processes, so each starts from a group that has
    failed before."""

    def run() -> list[list[Any]]:
        group = ProcessGroup(timeout=20)
        levels = sorted({case[0] for case in cases})
        expected = {level: undisturbed(group, level) for level in levels}
        return [fail_and_retry(group, *case, expected[case[0]]) for case in cases]

    results = launch(run, RANKS, start_method="fork", timeout=100)
    for i, (_, _, guilty, _) in enumerate(cases):
        check_retried([result[i] for result in results], guilty)


@pytest.mark.parametrize("case", thinned(CASES[:: len(CASES) // 4][::-1]), ids=str)
def test_a_failed_step_is_tried_again_on_threads(case: Any) -> None:
    def run(group: Any) -> list[Any]:
        return fail_and_retry(group, *case, undisturbed(group, case[0]))

    check_retried(run_ranks(run, 3), case[2])


def test_prefetches_after_a_failure_outside_of_the_pass() -> None:
    """S2. A batch that is refused, an optimizer that raises, data that can't be read: ranks that
    had come to other places start the same gathers when they try again."""

    class Lost(Exception):
        pass

    def wait_for_failure(step: Any, state: Any, batch: Any) -> None:
        with pytest.raises((Lost, StructureError, PeerError)):
            while True:  # until the failure is heard of
                state, _ = step(state, batch)

    def run(group: Any) -> list[Any]:
        guilty = group.rank == 1
        raises = [False]

        def update(updates: Any, state: Any, params: Any) -> Any:
            if raises[0]:
                raise Lost
            return tree_map(lambda u: -0.1 * u, updates), state

        loss_fn, params = deep_loss()
        optimizer = optim.pointwise(lambda params: (), update)
        step = shard(train_step(loss_fn, optimizer), level=3, group=group, donate=False)
        state, batch = step.init(params), torch.ones(2, 4, dtype=torch.float64)
        state, _ = step(state, batch)
        expected, _ = step(state, batch)

        wait_for_failure(step, state, batch.to("meta") if guilty else batch)
        after_batch, _ = step(state, batch)

        raises[0] = guilty
        wait_for_failure(step, state, batch)
        raises[0] = False
        after_optimizer, _ = step(state, batch)

        with pytest.raises((Lost, PeerError)), propagate_failures(step):
            if guilty:
                raise Lost
            step(state, batch)
        after_data, _ = step(state, batch)

        states = [expected, after_batch, after_optimizer, after_data]
        return [step.unshard(state).params for state in states]

    for expected, *others in run_ranks(run, 2):
        for other in others:
            assert all(torch.equal(expected[path], other[path]) for path in expected)


class OwnGroup(Collectives):
    """A user's own group, as the protocol wants it: ranks can't ask, and eras aren't counted."""

    def __init__(self, inner: Any) -> None:
        self.rank, self.size, self._inner = inner.rank, inner.size, inner

    def _start(self, kind: str, *arguments: Any) -> Any:
        return getattr(self._inner, kind)(*arguments)

    def _meet(self, kind: str, *payload: bytes) -> Any:
        return getattr(self._inner, kind)(*payload)

    def fail(self, error: BaseException) -> None:
        self._inner.fail(error)


def test_prefetches_after_passes_in_different_orders() -> None:
    """The ranks find out together, so none is told, and no era begins: yet each has an order."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})
    uses = threading.local()  # of this rank

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            for name in uses.names:
                x = self.layers[name](x)
            return x

    apply, params, buffers = functionalize(Model(), units="layers.*")

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Tensor:
        output, _ = apply(params, buffers, batch)
        return output.square().mean()

    def run(group: Any) -> None:
        step = shard(
            train_step(loss_fn, optim.sgd(0.1)), level=3, group=OwnGroup(group), donate=False
        )
        state, batch = step.init(params, buffers), torch.ones(2, 4)
        uses.names = "abd" if group.rank == 0 else "acd"
        with pytest.raises(GroupError, match="have not started the same collectives"):
            step(state, batch)
        uses.names = "abd"
        step(state, batch)

    run_ranks(run, 2)


def deep_loss() -> tuple[Any, Any]:
    """Three units, so that prefetches have an order."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    apply, params, _ = functionalize(nn.Sequential(*layers).double(), units=nn.Linear)

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Tensor:
        output, _ = apply(params, {}, batch)
        return output.square().mean()

    return loss_fn, params


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [True, False])
def test_a_failed_step_over_two_axes(threads: bool) -> None:
    """S1. A rank shares each axis with some of the others only; those without one with it hear of
    it all the same."""

    def run(group: Any) -> list[Any]:
        mesh = HybridGroup(group, shard_size=2)
        results = []
        for level in (1, 3):
            mesh.barrier()
            expected = undisturbed(mesh, level)
            results.append(fail_and_retry(mesh, level, "loss", (3,), False, expected))
        return results

    if threads:
        results = run_ranks(run, 4)
    else:
        results = launch(lambda: run(ProcessGroup(timeout=20)), 4, start_method="fork", timeout=60)
    for i in range(2):
        for rank, (error, text, soon, intact, equal) in enumerate(result[i] for result in results):
            assert (
                error == ("ArithmeticError" if rank == 3 else "PeerError") and "bad batch" in text
            )
            assert soon and intact and equal, (rank, soon, intact, equal)


@pytest.mark.thorough
def test_data_that_one_rank_cannot_read() -> None:
    """S1. Outside of any step; and that rank lives on."""

    def run(group: ProcessGroup) -> None:
        rank = Rank(group, 3)
        with propagate_failures(rank.step):
            rank.take(0)
            if group.rank == 1:
                raise ArithmeticError("bad file")
            rank.take(1)

    ended = survivors(run, 3)
    assert ended[1].error == "ArithmeticError"
    for r in (0, 2):
        assert (
            ended[r].error == "PeerError"
            and "rank 1 failed: ArithmeticError: bad file" in ended[r].text
        )
        assert ended[r].seconds < 2 * SOON  # two steps and the start included


def test_a_retry_that_only_some_ranks_make() -> None:
    def run(group: Any) -> str:
        rank = Rank(group, 3)
        NOW.fails = "loss" if group.rank == 1 else ""
        with pytest.raises((ArithmeticError, PeerError)):
            rank.take(0)
        if group.rank == 1:
            return ""
        with pytest.raises(PeerError, match="rank 1 failed: ArithmeticError: bad batch") as caught:
            rank.take(0)
        return str(caught.value)

    assert run_ranks(run, 3)[0]


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_rank_that_steps_from_an_older_state(level: int) -> None:
    """D1. Or one that missed that the others have finished their step: its numbers would be of
    another step."""

    def run(group: Any) -> str:
        rank = Rank(group, level)
        old = rank.state
        rank.take(0)
        before = rank.values()
        if group.rank == 1:
            rank.state = old
        with pytest.raises(GroupError, match=r"different steps: \[1, 0\]"):
            rank.take(1)
        return str(group.rank == 1 or same(before, rank.values()))

    assert run_ranks(run, 2) == ["True"] * 2


def in_a_loop(rank: Rank, i: int) -> None:
    with propagate_failures(rank.step):
        rank.take(i)


GOES_ON: dict[str, Callable[[Rank], Any]] = {  # the others, after a step that one rank has failed
    "step": lambda rank: in_a_loop(rank, 1),
    "unshard": Rank.whole,
}


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    ("level", "goes_on"),
    tiers(thorough=[(3, "unshard"), (0, "step")], full=[(3, "step")], rows=True),
)
def test_a_rank_that_fails_when_the_others_have_finished_the_step(
    level: int, goes_on: str, threads: bool, tmp_path: Path
) -> None:
    """S1. The ranks come back to different calls. They hear of it before the first collective, in
    which gloo would end a process; and from the same state they go on. (At levels 1 and 2 the
    others wait for that rank's new params, and so are at its step.)"""
    finished = tmp_path / "finished"

    def run(group: Any) -> list[Any]:
        rank = Rank(group, level)
        first, guilty = rank.state, group.rank == 1
        if guilty:
            NOW.fails, NOW.waits = "end", finished.exists if not threads else lambda: True
            with pytest.raises(ArithmeticError):
                rank.take(0)
            NOW.fails = ""
            again = lambda: in_a_loop(rank, 0)
        else:
            rank.take(0)
            finished.touch()
            again = lambda: GOES_ON[goes_on](rank)
            with pytest.raises(PeerError, match="rank 1 failed: ArithmeticError: bad batch"):
                again()
        before = rank.values()
        texts = []
        for _ in range(2):
            with pytest.raises(GroupError) as caught:
                again()
            texts.append(str(caught.value))
        intact = same(before, rank.values())
        rank.state = first
        for i in range(3):
            rank.take(i)
        return [intact, texts, same(rank.whole(), undisturbed(group, level))]

    if threads:
        results = run_ranks(run, RANKS)
    else:
        in_process = lambda: run(ProcessGroup(timeout=20))
        results = launch(in_process, RANKS, start_method="fork", timeout=60)
    for intact, texts, equal in results:
        assert intact and equal
        for text in texts:
            assert "came back to different calls" in text and "Remedy" in text
            assert f"rank 0: {goes_on} at step 1; rank 1: step at step 0" in text


def exit_without_a_word() -> None:
    os._exit(0)


FAULTS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exits": exit_without_a_word,
    "sys.exit": lambda: sys.exit(0),
}


PHASES: dict[
    str, tuple[int, str]
] = {  # a level at which the others then wait for nothing else, and what they say
    "/gather": (3, r"lost peer in layers.\d/gather"),
    "/reduce": (2, r"lost peer in layers.\d\[float64\]/reduce"),
    "optimizer/update": (3, "lost peer in optimizer/update"),
    "gradient/metrics": (3, "lost peer in gradient/metrics"),
}
# Values set out before backward, where the others wait for a gather or a reduction; then come words
SPARED = {"gradient/metrics": 1}


LOST = [*itertools.product(FAULTS, PHASES)]
EACH_ONCE = [*zip(FAULTS, PHASES, strict=True)]


@pytest.mark.parametrize(
    ("fault", "phase"),
    tiers(EACH_ONCE[:1], EACH_ONCE[1:], sorted({*LOST} - {*EACH_ONCE}), rows=True),
)
def test_a_rank_is_lost_in_a_phase(fault: str, phase: str) -> None:
    """S3. The others say in which unit and phase, within the group's time limit."""
    level, label = PHASES[phase]
    timeout = 2.0 if fault == "stopped" else 20.0
    expected, label = {
        "stopped": ("LostPeerError", label + ": .*longer than the group's time limit"),
        "sys.exit": ("PeerError", "rank 1 failed: SystemExit: 0"),
    }.get(fault, ("LostPeerError", label))

    def run(group: ProcessGroup) -> Any:
        trigger = Trigger(phase, FAULTS[fault], spared=SPARED.get(phase, 0))
        rank = Rank(trigger.on(group) if group.rank == 1 else group, level)
        rank.take(0)
        trigger.armed = group.rank == 1
        return outcome(lambda: rank.take(1))

    ended = survivors(run, 3, timeout=timeout)
    assert set(ended) == {0, 2}
    for rank in (0, 2):
        error, text, seconds = ended[rank].result[1:]
        assert error == expected and re.search(label, text), ended[rank]
        assert seconds < timeout + 5
        if (
            error == "LostPeerError"
        ):  # and its own last collectives, of which that one has not ended
            where = PHASES[phase][1].removeprefix("lost peer in ")
            assert f"\nThe last collectives of rank {rank}, oldest first" in text
            assert re.search(rf"\n> \d+ {where}: \w+ of \d+ \w+64 on ranks 0, 1, 2 \(", text), text


@pytest.mark.thorough
@pytest.mark.parametrize("level", [3, 0, 1, 2])
def test_a_loop_that_is_a_step_short(level: int) -> None:
    """S3. That rank ends; the others say where they wait for it: in the step's first collective."""

    def run(group: ProcessGroup) -> Any:
        rank = Rank(group, level)
        rank.take(0)
        return outcome(lambda: rank.take(1)) if group.rank != 1 else None

    ended = survivors(run, 3)
    assert not ended[1].error
    for rank in (0, 2):
        error, text, seconds = ended[rank].result[1:]
        assert error == "LostPeerError" and seconds < 20, ended[rank]
        assert re.search(
            r"lost peer in [\w.]+" + ("/gather" if level == 3 else r"\[float64\]/reduce"), text
        ), text


@pytest.mark.parametrize("level", tiers([3], [2]))
def test_checked_collectives_name_both_labels(level: int) -> None:
    """S4. The units are of equal size: gloo itself would add up the wrong tensors and say
    nothing."""

    def run(group: Any) -> list[str]:
        group = CheckedGroup(group)
        apply, params, buffers = build(ordered)
        step = train_step(
            lambda p, b, batch: apply(p, b, batch["x"], group.rank == 1)[0].square().mean(),
            optim.sgd(0.1),
        )
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        with pytest.raises(GroupError) as caught:
            sharded(state, rows(7, 7)(6))
        return [str(caught.value)]

    for texts in (
        run_ranks(run, 2),
        launch(lambda: run(ProcessGroup()), 2, start_method="fork", timeout=40),
    ):
        assert texts[0] == texts[1]
        text = texts[0][0]
        phase = "gather" if level == 3 else "reduce"
        assert (
            text.startswith("the ranks called different collectives: rank 0: ")
            and "; rank 1: " in text
        )
        assert text.count(f"/{phase}: ") == 2 and "float64" in text and "Remedy" in text
        first, second = text.split("; rank 1: ")
        assert first.split("rank 0: ")[1].split("/")[0] != second.split("/")[0]


def test_checked_ranks_that_call_different_things_are_told() -> None:
    """S4. gloo would add up the wrong tensors, wait for ever, or end the process. The group is as
    good as before."""

    def kinds(group: Any) -> Work:
        if group.rank == 0:
            return group.all_gather(torch.empty(2), torch.ones(1))
        return group.reduce_scatter(torch.empty(1), torch.ones(2))

    def sizes(group: Any) -> Work:
        n = 10 + group.rank
        return group.all_gather(torch.empty(2 * n), torch.ones(n))

    def operations(group: Any) -> Work:
        return group.all_reduce(torch.ones(6), "max" if group.rank else "sum")

    def dtypes(group: Any) -> Work:
        return group.all_reduce(torch.ones(8, dtype=torch.int32 if group.rank else torch.float32))

    def sources(group: Any) -> Work:
        return group.broadcast(torch.ones(1), group.rank)

    differing = [  # and each rank's words
        (kinds, "all_gather of 1 float32", "reduce_scatter of 2 float32"),
        (sizes, "all_gather of 10 float32", "all_gather of 11 float32"),
        (operations, "all_reduce(sum) of 6 float32", "all_reduce(max) of 6 float32"),
        (dtypes, "all_reduce(sum) of 8 float32", "all_reduce(sum) of 8 int32"),
        (sources, "broadcast(source=0) of 1 float32", "broadcast(source=1) of 1 float32"),
    ]

    def run(group: Any) -> list[str]:
        checked, texts = CheckedGroup(group), []
        for wrong, _, _ in differing:
            with pytest.raises(GroupError, match=r"called different collectives.*Remedy") as error:
                wrong(checked)
            texts.append(str(error.value))
        several_at_once(checked)
        return texts

    first, second = launch(lambda: run(ProcessGroup()), 2, start_method="fork", timeout=40)
    assert first == second
    for text, (_, own, other) in zip(first, differing, strict=True):
        assert f"rank 0: a call: {own}; rank 1: a call: {other}. " in text


@pytest.mark.thorough
def test_a_short_loop_that_goes_on_to_something_else() -> None:
    """S3, S4. To `gather`, while the others are in a step. Unchecked, gloo may end a process
    there."""

    def run(group: Any) -> str:
        rank = Rank(CheckedGroup(group), 3)
        with pytest.raises(GroupError) as caught:
            rank.whole() if group.rank == 1 else rank.take(0)
        return str(caught.value)

    for texts in (
        run_ranks(run, 2),
        launch(lambda: run(ProcessGroup()), 2, start_method="fork", timeout=40),
    ):
        for text in texts:
            assert (
                "the ranks called different collectives" in text
                and "rank 1: unshard: all_gather" in text
            ), text


def test_checked_training_is_training() -> None:
    loss_fn, params, buffers = ZOO["mlp"].build()
    step, batches = train_step(loss_fn, optim.adamw(0.01)), ZOO["mlp"].batches(2, 12)

    def run(group: Any) -> list[Tensor]:
        sharded = shard(step, level=3, group=group)
        state = sharded.init(params, buffers)
        for batch in batches:
            state, _ = sharded(state, split(batch, even(12, 2))[group.rank])
        return [x.detach() for x in optree.tree_leaves(sharded.unshard(state))]

    plain, checked = run_ranks(run, 2), run_ranks(lambda group: run(CheckedGroup(group)), 2)
    assert same(plain[0], checked[0])
    assert len(train(step, params, buffers, batches).states) == 3


def test_labels() -> None:
    assert labelled(SingleRank(), "a") is not None and not isinstance(
        labelled(SingleRank(), "a"), LabelledGroup
    )

    def run(group: Any) -> None:
        one = labelled(group, "a/b")
        assert (
            isinstance(one, LabelledGroup)
            and one.label == "a/b"
            and (one.rank, one.size) == (group.rank, 2)
        )
        two = labelled(one, "c/d")
        assert isinstance(two, LabelledGroup) and two.label == "c/d" and two.inner is group
        checked = labelled(CheckedGroup(group), "e/f")
        assert isinstance(checked, CheckedGroup) and checked.label == "e/f"
        if group.rank == 1:
            with pytest.raises(GroupError, match=r"^e/f: the ranks called different"):
                labelled(group, "e/f").barrier()
        else:
            with pytest.raises(GroupError, match=r"^g/h: the ranks called different"):
                labelled(group, "g/h").exchange(b"")

    run_ranks(run, 2)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_an_empty_batch_without_a_weight(level: int) -> None:
    """B1. Its mean is NaN, which would reach every rank."""

    def run(group: Any) -> str:
        rank = Rank(group, level)
        before = rank.values()
        if group.rank == 1:
            rank.batches[0] = {name: x[:0] for name, x in rank.batches[0].items()}
        try:
            rank.take(0)
        except (StructureError, PeerError) as error:
            return f"{same(before, rank.values())} {error}"
        return "nothing"

    for text in run_ranks(run, 2):
        assert (
            "path x" in text
            and "on rank 1" in text
            and "weight" in text
            and text.startswith("True")
        )


@pytest.mark.parametrize("batch", thinned(["columns", "float32", "rows"]))
def test_a_wrong_batch_on_one_rank(batch: str) -> None:
    """B1. torch's own error there, and the others hear of it."""

    def run(group: Any) -> tuple[str, str]:
        rank = Rank(group, 3)
        if group.rank == 1:
            x = rank.batches[0]["x"]
            rank.batches[0]["x"] = {"float32": x.float(), "rows": x[:5], "columns": x[:, :5]}[batch]
        ended = outcome(lambda: rank.take(0))
        return ended.error, ended.text

    results = run_ranks(run, 2)
    assert results[1][0] not in ("", "PeerError")
    assert results[0][0] == "PeerError" and f"rank 1 failed: {results[1][0]}" in results[0][1]
