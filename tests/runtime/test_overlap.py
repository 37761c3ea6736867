"""Overlap and prefetch: the same results and the same collectives in the same order, other moments
of waiting."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from functorch_zero import optim
from functorch_zero.errors import MismatchError
from functorch_zero.groups import (
    Call,
    CountingGroup,
    LabelledGroup,
    SingleRank,
    Work,
    counted,
    run_ranks,
)
from functorch_zero.groups.mesh import axes_of
from functorch_zero.groups.signature import brought
from functorch_zero.layout.build import make_layout
from functorch_zero.model.functionalize import functionalize
from functorch_zero.planning.api import plan
from functorch_zero.runtime.prefetch import Following, Overlap, PrefetchOrder
from functorch_zero.runtime.unit import Pass
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.options import check_overlap
from functorch_zero.sharded.params import make_unit_flats
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded, models
from tests.compare import Run, train_sharded
from tests.models import GPT, Block, Shared, even, tokens
from tests.modules import Net, Unit, in_turn, seeded
from tests.runtime.test_memory import RANKS, LiveBytes
from tests.runtime.test_skipped_units import (
    half_chosen,
    skipping,
    skipping_net,
    some_rows_reach,
    with_negative_half,
)
from tests.runtime.test_unit import batches_of, build, check, next_token
from tests.tiers import thinned, tiers

OVERLAPS: list[Any] = ["memory", "time"]
FAR = Overlap(gather_at=1, settle_at=None, num_under_way=2, distance=3)


def halves(width: int) -> Unit:
    """Two linear maps: backward asks for two saved leaves, half of the unit each."""
    return Unit(
        lambda net, x: in_turn((net.a, net.b), x),
        a=nn.Linear(width, width, bias=False),
        b=nn.Linear(width, width, bias=False),
    )


def narrowing() -> Net:
    """Units 0 to 3 of different sizes, so that a collective's size tells its unit."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer, width in zip(net.layers, WIDTHS, strict=True):
            x = layer(x[:, :width])
        return x

    return Net(forward, layers=nn.ModuleList(map(halves, WIDTHS)))


WIDTHS = (32, 24, 16, 8)
ELEMENTS = {2 * width * width: number for number, width in enumerate(WIDTHS)}  # of a unit


class Noting(LabelledGroup):
    """Notes when the collectives of a label start, and when somebody waits for them."""

    def __init__(self, inner: Any, events: list[str], label: str = "") -> None:
        super().__init__(inner, label)
        self.events = events

    def at(self, label: str) -> Noting:
        return Noting(self.inner, self.events, label)

    def _start(self, kind: str, *arguments: Any) -> Work:
        what = self.label.replace("[float64]", "").replace("layers.", "")
        self.events.append("start " + what)
        work = super()._start(kind, *arguments)
        return Noted(work, brought(arguments), self.events, "wait " + what)


class Noted:
    """A collective under way that holds its input, and notes when somebody waits for it."""

    def __init__(self, work: Work, tensor: Tensor, events: list[str], text: str) -> None:
        self._work, self._events, self._text = work, events, text
        self._brought: Tensor | None = tensor

    def wait(self) -> None:
        self._events.append(self._text)
        self._work.wait()
        self._brought = None


def warm_step(
    group: Any, make: Any = narrowing, level: int = 3, **options: Any
) -> Callable[[], Any]:
    """A step whose order of units is known, to be called; two have been run."""
    apply, params, buffers = build(make, units=Unit)
    loss_fn = lambda p, b, x: apply(p, b, x)[0].square().mean()
    step = shard(train_step(loss_fn, optim.sgd(0.1)), level=level, group=group, **options)
    state, x = step.init(params, buffers), torch.ones(2, WIDTHS[0], dtype=torch.float64)
    for _ in range(2):
        state, _ = step(state, x)
    return lambda: step(state, x)


def test_nobody_waits_in_backward_where_sums_stay_in_their_flats() -> None:
    events: list[str] = []
    step = warm_step(Noting(CountingGroup(2), events), level=0, overlap="memory")
    events.clear()
    step()
    of_units = [event.removesuffix("/reduce") for event in events if event.endswith("/reduce")]
    assert of_units == [f"{moment} {n}" for moment in ("start", "wait") for n in (3, 2, 1, 0)]


def test_the_order_of_starts_and_waits_in_backward() -> None:
    """Of units 3, 2, 1, 0. "time" gathers a unit as soon as the one before it is in use, and waits
    for a reduction when the next but one is about to start."""
    found = {}
    for overlap in OVERLAPS:
        events: list[str] = []
        step = warm_step(Noting(CountingGroup(2), events), overlap=overlap)
        events.clear()
        with torch.autograd.set_multithreading_enabled(False):
            step()
        backward = events[events.index("wait 3/gather") + 1 : events.index("wait 0/reduce") + 1]
        of_units = [e for e in backward if "step" not in e and "gradient" not in e]
        found[overlap] = " | ".join(of_units)
    assert found["memory"] == (
        "start 2/gather | start 3/reduce | "
        "wait 2/gather | wait 3/reduce | start 1/gather | start 2/reduce | "
        "wait 1/gather | wait 2/reduce | start 0/gather | start 1/reduce | "
        "wait 0/gather | wait 1/reduce | start 0/reduce | wait 0/reduce"
    )
    assert found["time"] == (
        "start 2/gather | start 3/reduce | "
        "wait 2/gather | start 1/gather | start 2/reduce | "
        "wait 1/gather | start 0/gather | wait 3/reduce | start 1/reduce | "
        "wait 0/gather | wait 2/reduce | start 0/reduce | wait 1/reduce | wait 0/reduce"
    )


def equal_units() -> nn.Module:
    """Units of one size."""
    return nn.Sequential(*(halves(WIDTHS[0]) for _ in range(6)))


def peak_of(overlap: str) -> float:
    """The most that lives in a warm step beside its state, in units' sizes."""
    step = warm_step(Noting(CountingGroup(RANKS), []), equal_units, overlap=overlap)
    with torch.autograd.set_multithreading_enabled(False), LiveBytes(smallest=1024) as live:
        step()
    return live.peak / (2 * WIDTHS[0] ** 2 * 8)


def test_memory_and_time_differ_in_their_peak() -> None:
    """Beside some of the gradients' pieces, three units' flats live at most under "memory"; under
    "time" the next gather and one reduction more."""
    assert (peak_of("memory"), peak_of("time")) == (3 + 1.5 / RANKS, 5 + 3 / RANKS)


def collectives(calls: Sequence[Call]) -> list[tuple[str, int]]:
    """(kind, number of the unit), in the order of starts."""
    return [(c.kind, ELEMENTS[c.num_elements]) for c in calls if c.num_elements in ELEMENTS]


@pytest.mark.parametrize(
    ("distance", "expected"),
    tiers(
        [(2, "g0 g1 g2 g3 g2 g1 r3 g0 r2 r1 r0")],
        [
            (1, "g0 g1 g2 g3 g2 r3 g1 r2 g0 r1 r0"),
            (3, "g0 g1 g2 g3 g2 g1 g0 r3 r2 r1 r0"),
        ],
        rows=True,
    ),
)
def test_gathers_start_so_many_units_ahead(distance: int, expected: str) -> None:
    """g2 is unit 2's gather, r2 its reduction. Unit 3 stays from forward to backward."""
    group = CountingGroup(2)
    step = warm_step(group, overlap=replace(Overlap.memory, distance=distance))
    group.reset()
    step()
    short = {"all_gather": "g", "reduce_scatter": "r"}
    started = collectives(group.calls)
    assert " ".join(f"{short[kind]}{unit}" for kind, unit in started) == expected


def test_a_distance_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        replace(Overlap.memory, distance=0)


def test_an_order_is_followed_as_far_as_it_is_common() -> None:
    order, flats = PrefetchOrder(), {name: object() for name in "abc"}
    order.record(["a", "b", "gone", "c"])
    following = Following(order.units, 2, flats)  # type: ignore[arg-type]
    assert following.expected == "a" and following.ahead == [flats["a"], flats["b"]]
    following.add("a")
    assert following.expected == "b" and following.ahead == [flats["b"]]
    following.add("c")
    assert following.expected is None and following.ahead == []
    following.add("b")
    assert following.gathered == ["a", "c", "b"] and following.ahead == []


def test_an_order_ends_with_the_groups_era() -> None:
    """It begins when all ranks have come back after a failure, of which some may have heard in
    another call than the pass."""

    class Group(SingleRank):
        era = 0

    group = Group()
    order = PrefetchOrder(group)
    order.record(["a"])
    assert order.units == ("a",)
    group.era += 1
    assert order.units == ()


def trained(group: Any, level: int, remat: bool, **options: Any) -> tuple[Run, list[Call]]:
    """Two steps of a GPT, and all collectives."""
    model = seeded(lambda: GPT(depth=3).double())
    apply, params, buffers = functionalize(model, units=Block, remat=remat)
    step = train_step(next_token(apply), optim.adamw(0.01), accumulate=2)
    watched = counted(group)
    batches = batches_of(tokens, num=3)
    run = train_sharded(
        watched, step, params, buffers, batches, even(12, group.size), level=level, **options
    )
    return run, [call for call in watched.calls if call.kind != "exchange"]


@pytest.mark.parametrize("remat", tiers([False], [True]))
@pytest.mark.parametrize("level", tiers(thorough=[0, 1, 3], full=[2]))
def test_the_same_bits_and_collectives(level: int, remat: bool) -> None:
    first, *others = [
        run_ranks(lambda group, o=overlap: trained(group, level, remat, overlap=o), 2)
        for overlap in OVERLAPS
    ]
    for results in (first, *others):
        for rank, (run, calls) in enumerate(results):
            assert calls == first[0][1]
            states = zip(run.states, first[rank][0].states, strict=True)
            for state, expected in states:
                leaves = optree.tree_leaves(state), optree.tree_leaves(expected)
                assert all(map(torch.equal, *leaves))


def test_ranks_choose_alike() -> None:
    """Another choice of one rank is refused, as of any option."""

    def run(group: Any) -> None:
        trained(group, 3, False, overlap=OVERLAPS[group.rank])

    with pytest.raises(MismatchError, match="overlap"):
        run_ranks(run, 2)


@pytest.mark.parametrize("overlap", tiers(["time"], ["memory"]))
def test_a_step_is_proved_and_planned_with_it(overlap: Any) -> None:
    case = models.mlp((7, 6, 5, 3))
    step, params, buffers = case.step(optim.sgd(0.1, momentum=0.9))
    batches = case.batches(2, 6)
    assert_sharded_equals_unsharded(
        step, params, buffers, batches, levels=(2, 3), ranks=(2,), overlap=overlap
    )


def test_a_plan_knows_the_difference() -> None:
    model = equal_units()
    plans = [
        plan(model, optim.sgd(0.1), level=3, ranks=RANKS, units=Unit, overlap=overlap)
        for overlap in OVERLAPS
    ]
    assert plans[0].collectives == plans[1].collectives
    unit = 2 * WIDTHS[0] ** 2 * 4  # bytes
    assert plans[0].peak.total + unit <= plans[1].peak.total <= plans[0].peak.total + 4 * unit


@pytest.mark.parametrize(
    ("device", "chosen"), thinned([("cuda", "time"), ("cpu", "memory")], rows=True)
)
def test_the_device_chooses_where_nobody_does(device: str, chosen: str) -> None:
    """A plan of leaves without values, on a device that this machine may lack."""
    model = equal_units()
    _, params, _ = functionalize(model, units=Unit)
    with FakeTensorMode():
        there: Any = optree.tree_map(
            lambda p: torch.empty(p.shape, device=device, requires_grad=True), params
        )
    plans = {
        overlap: plan(there, optim.sgd(0.1), level=3, ranks=RANKS, overlap=overlap)
        for overlap in (None, *OVERLAPS)
    }
    assert plans["memory"].samples != plans["time"].samples
    assert plans[None].samples == plans[chosen].samples


def test_a_pass_takes_the_choice_of_its_device() -> None:
    """The meta device stands for an accelerator."""
    params = {"w": torch.ones(4, requires_grad=True)}
    layout = make_layout(params, 1, trainable=lambda path, leaf: True)
    for name in ("cpu", "meta"):
        device = torch.device(name)
        flats = [torch.ones(bucket.numel, device=device) for bucket in layout.buckets]
        units = make_unit_flats(flats, layout, axes_of(SingleRank()), [])
        made = Pass(layout, units, None, device=device)
        assert made.overlap is {"cpu": Overlap.memory, "meta": Overlap.time}[name]
        assert Pass(layout, units, None, device=device, overlap=FAR).overlap is FAR


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_pass_needs_no_garbage_collector(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the state's flats, which a donating step must be able to free."""
    passes: list[weakref.ref[Pass]] = []
    finish = Pass.finish

    def noted(self: Pass) -> None:
        passes.append(weakref.ref(self))
        finish(self)

    monkeypatch.setattr(Pass, "finish", noted)
    case = models.mlp()
    step, params, buffers = case.step(optim.sgd(0.1))
    sharded = shard(step, level=level, group=CountingGroup(2))
    state = sharded.init(params, buffers)
    gc.collect()
    gc.disable()
    try:
        sharded(state, case.batches(1, 4)[0])
        assert len(passes) == 1 and passes[0]() is None
    finally:
        gc.enable()


def test_no_other_choice() -> None:
    with pytest.raises(ValueError, match=r"overlap must be one of .*got 'speed'"):
        warm_step(CountingGroup(2), overlap="speed")


@pytest.fixture(params=tiers([("time", 3)], [("memory", 2), ("time", 1)]), ids=str)
def early(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Another overlap than the usual one, and another distance of prefetch."""
    overlap, distance = request.param
    return {"overlap": replace(check_overlap(overlap), distance=distance)}


def test_a_rank_whose_loss_passes_units_by(early: dict[str, Any]) -> None:
    """It starts the same collectives in the same order as the others."""
    check(some_rows_reach, Shared, with_negative_half, 3, 2, sizes=[6, 6], **early)


@pytest.mark.parametrize("regions", thinned(["a b?* c*", "a* b?", "a* b? c?"]))
def test_units_passed_by_next_to_recomputed_ones(early: dict[str, Any], regions: str) -> None:
    check(skipping, lambda: skipping_net(regions), half_chosen, 3, 2, **early)
