"""Plans of programs are what a run does: bytes, collectives and peaks."""

from __future__ import annotations

import gc
import json
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim, plan
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup, HybridGroup, run_ranks
from functorch_zero.groups.counting import counted
from functorch_zero.layout.sharded_tree import is_held
from functorch_zero.params import is_on_engine
from functorch_zero.places import File
from tests.local import part
from tests.planning.test_plan import allocations, calls_of, held
from tests.programs.case import Case, applied, net
from tests.programs.cases import BY_RANK, CASES, gan
from tests.tiers import THOROUGH, tiers


def run(case: Case, ranks: int, **options: Any) -> list[tuple[Any, ...]]:
    """Each rank's first value, and the collectives of its last step."""

    def on_rank(group: Any) -> tuple[Any, ...]:
        group = counted(group)
        if "shard_size" in options:
            mesh: Any = HybridGroup(group, shard_size=options["shard_size"])
        else:
            mesh = group
        own = {name: x for name, x in options.items() if name != "shard_size"}
        step = fz.shard(case.step, group=mesh, **own)
        state = first = step.init(*case.trees())
        # From the second on, the order of units is known. Nobody looks closely at the seventh, step
        # 6, which is like step 0 for programs that do something every two or three steps
        for batch in (case.batches() * 3)[:7]:
            group.reset()
            state, _ = step(state, part(batch, group))
        return first.value, list(group.calls)

    return run_ranks(on_rank, ranks)


def check(case: Case, ranks: int, **options: Any) -> None:
    """On the last rank, which has the padding."""
    rank, trees = ranks - 1, case.trees()
    sample = tree_map(lambda x: x[: len(x) // ranks], case.batches()[0])
    value, calls = run(case, ranks, **options)[rank]
    made = plan(tuple(trees), case.step, ranks=ranks, rank=rank, batch=sample, **options)
    assert calls_of(made) == calls
    nodes = optree.tree_leaves(value, is_leaf=is_on_engine)
    assert made.params == held([node for node in nodes if is_held(node)])
    assert made.state == held([node for node in nodes if not is_held(node)])
    assert made.num_params == sum(leaf.numel() for leaf in optree.tree_leaves(trees))


PLANNED = CASES | BY_RANK
FEW = [("byol", 2), ("sam", 1)]
OTHERS = [(name, level) for name in PLANNED for level in range(4) if (name, level) not in FEW]


@pytest.mark.parametrize(
    ("name", "level"), tiers(FEW[:1], FEW[1:] + OTHERS[::3], OTHERS, rows=True)
)
def test_collectives_and_bytes_are_those_of_a_run(name: str, level: int) -> None:
    check(PLANNED[name](), 2 + level % 2, level=level)


OPTIONS: dict[str, dict[str, Any]] = {
    "by name": {"level": {"gen": 3, "disc": 1}},
    "kept": {"level": 3, "reshard_after_forward": False},
    "mesh": {"level": 3, "shard_size": 2},
    "both axes": {"level": 1, "shard_size": 2, "state_axes": "both"},
    "time": {"level": 3, "overlap": "time"},
    "donate": {"level": 1, "donate": True},
}


@pytest.mark.parametrize("name", tiers(thorough=OPTIONS))
def test_options(name: str) -> None:
    check(gan(), 4 if "shard_size" in OPTIONS[name] else 2, **OPTIONS[name])


# Peaks


WIDTH = 256
big = net(1, WIDTH, WIDTH, WIDTH, WIDTH, dtype=torch.float32)
forward = applied(big)
adam, sgd = optim.adam(1e-3), optim.sgd(1e-3)


def first_value(one: Any, two: Any) -> Any:
    return one, two, adam.init(one), sgd.init(two)


def distance(one: Any, two: Any, x: Tensor) -> Tensor:
    return (forward(one, x) - forward(two, x)).square().mean()


def both(value: Any, x: Tensor) -> Any:
    one, two, of_one, of_two = value
    loss, grads = fz.value_and_grad(distance)(one, two, x)
    one, of_one = adam.apply(grads, of_one, one)
    _, grads = fz.value_and_grad(distance)(two, one, x)
    two, of_two = sgd.apply(grads, of_two, two)
    return (one, two, of_one, of_two), {"loss": loss}


BOTH = fz.program_step(both, init=first_value)


def trees() -> tuple[Any, Any]:
    made = fz.functionalize(big, units=nn.Linear)[1]
    return made, tree_map(lambda p: (2 * p).detach().requires_grad_(), made)


class Numpy(File):
    """As mapped files, in numpy's memory, which torch's allocator doesn't count."""

    def _mapped(self, like: Tensor) -> Tensor:
        return torch.from_numpy(np.empty(like.nbytes, dtype=np.uint8)).view(like.dtype)

    def holds(self, tensor: Tensor) -> bool:
        return not tensor.untyped_storage().resizable()  # as no foreign memory is


def measured_peaks(levels: list[int], donate: bool, place: Any = None) -> list[int]:
    """On a real rank over gloo: the most bytes of tensors in a step, by torch's own allocator."""
    torch.set_num_threads(1)
    return [measured_peak(level, donate, place) for level in levels]


def measured_peak(level: int, donate: bool, place: Any, group: Any = None, times: int = 6) -> int:
    step = fz.shard(BOTH, level=level, group=group, donate=donate, place=place)
    state = step.init(*trees())
    batch = torch.randn(64, WIDTH)
    for _ in range(2):
        state, _ = step(state, batch)
    before, peaks = held(state.value), []
    if place is not None:
        before -= sum(stored.nbytes for stored in fz.describe(step, state).stored)
    for _ in range(times):  # gloo's threads may hold tensors a little longer than the step does
        gc.collect()
        events: list[int] = []
        with allocations(events):
            state, _ = step(state, batch)
        peaks.append(before + max(accumulate(events)))
    return min(peaks)


PEAKS = tiers(thorough=[([0, 1, 2, 3], False), ([0, 1, 2, 3], True)], rows=True)


@pytest.mark.parametrize(("levels", "donate"), PEAKS, ids=str)
def test_the_peak_is_that_of_a_run_on_real_ranks(levels: list[int], donate: bool) -> None:
    found = fz.launch(measured_peaks, 2, levels, donate, timeout=100, start_method="fork")[0]
    batch = torch.empty(64, WIDTH)
    for level, most in zip(levels, found, strict=True):
        made = plan(trees(), BOTH, level=level, ranks=2, batch=batch, donate=donate)
        # At level 2 a step that donates saves 5%
        assert made.peak.total == pytest.approx(most, rel=0.02), level


ELSEWHERE: dict[str, Any] = {  # the last one by unit
    "state": {"state": Numpy("nowhere")},
    "all": dict.fromkeys(("state", "params", "gradients"), Numpy("nowhere")),
    "some": {"state": {"one.0": Numpy("nowhere")}, "params": {"two": Numpy("nowhere")}},
}
PLACED = tiers(
    thorough=[
        ([3, 1, 0], True, "all"),
        ([1, 3], True, "state"),
        ([1, 3], False, "all"),
        ([1, 3], True, "some"),
    ],
    rows=True,
)


@THOROUGH
def test_the_peak_falls_by_what_lies_elsewhere() -> None:
    """In the plan as on a rank, in whose group copies of halves take some room, too."""
    planned, measured = [], []
    for place in (None, ELSEWHERE["all"]):
        measured.append(measured_peak(3, True, place, CountingGroup(2), times=1))
        options: dict[str, Any] = {"batch": torch.empty(64, WIDTH), "donate": True, "place": place}
        planned.append(plan(trees(), BOTH, level=3, ranks=2, **options).peak.total)
    assert planned[0] - planned[1] == pytest.approx(measured[0] - measured[1], rel=0.02)
    assert planned[1] < 0.3 * planned[0]


@pytest.mark.parametrize(("levels", "donate", "name"), PLACED)
def test_the_peak_with_kinds_elsewhere_on_real_ranks(
    levels: list[int], donate: bool, name: str
) -> None:
    options = {"donate": donate, "place": ELSEWHERE[name]}
    arguments = levels, *options.values()
    found = fz.launch(measured_peaks, 2, *arguments, timeout=100, start_method="fork")[0]
    batch = torch.empty(64, WIDTH)
    for level, most in zip(levels, found, strict=True):
        made = plan(trees(), BOTH, level=level, ranks=2, batch=batch, **options)
        assert made.peak.total == pytest.approx(most, rel=0.02), level


@pytest.mark.parametrize("name", tiers(["all"], ["state", "some"]))
def test_what_lies_elsewhere_is_told_apart(name: str, tmp_path: Path) -> None:
    """To the byte, as on a rank, and without a call of the user's place."""
    options: dict[str, Any] = {"level": 1, "donate": True}
    plan_options = options | {"ranks": 2, "batch": torch.empty(64, WIDTH)}
    plain = plan(trees(), BOTH, **plan_options)
    made = plan(trees(), BOTH, **plan_options, place=ELSEWHERE[name])
    group = CountingGroup(2)
    sharded = fz.shard(BOTH, **options, group=group, place=in_files(ELSEWHERE[name], tmp_path))
    described = fz.describe(sharded, sharded.init(*trees()))
    # The program takes another gradient after the first update, which can't be in place
    held = [stored._replace(nbytes=stored.read) for stored in made.stored]
    assert [*described.stored] == [stored for stored in held if stored.kind != "gradients"]
    assert [stored.kind for stored in made.stored] == [*ELSEWHERE[name]]
    assert all(min(stored[1:]) > 0 for stored in made.stored)
    by_kind = {stored.kind: stored.nbytes for stored in described.stored}
    assert plain.stored == () and "elsewhere" not in str(plain)
    assert made.state == plain.state and made.collectives == plain.collectives
    one, other = plain.samples[0], made.samples[0]
    assert one.state - other.state == by_kind["state"]
    assert one.params - other.params == by_kind.get("params", 0)
    assert made.peak.total < plain.peak.total
    assert "elsewhere" in str(made) and "elsewhere: " in str(described)
    assert json.loads(made.to_json())["stored"] == [s._asdict() for s in made.stored]


def in_files(place: Any, folder: Path) -> Any:
    """The same places as files that are there."""
    if isinstance(place, dict):
        return {key: in_files(inner, folder) for key, inner in place.items()}
    return File(folder)


# What a program may ask


def test_meta_and_many_ranks() -> None:
    with torch.device("meta"):
        one, two = [tree_map(lambda p: torch.empty_like(p, device="meta"), t) for t in trees()]
    one, two = [tree_map(Tensor.requires_grad_, tree) for tree in (one, two)]
    batch = torch.empty(4, WIDTH, device="meta")
    made = plan((one, two), BOTH, level={"one": 3, "two": 1}, ranks=1000, batch=batch)
    assert json.loads(made.to_json())["num_ranks"] == 1000
    assert made.gathered > 0 and made.gradients > 0 and made.activations > 0
    phases = {call.phase for call in made.collectives}
    assert phases == {"forward", "backward", "metrics", "publish"}
    assert "program" in {sample.moment for sample in made.samples}
    assert "levels 1 and 3, 1000 ranks" in str(made)
    assert not is_on_engine(one)


def test_random_numbers_and_questions() -> None:
    """A step with `fz.random`, torch's own numbers, a yes-no question and several arguments."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return forward(params, torch.dropout(x, 0.1, train=True)).square().mean()

    def program(value: Any, x: Tensor, scale: float) -> Any:
        found, grads = fz.value_and_grad(loss)(value, x)
        noise = fz.random.normal(grads)
        if fz.dot(grads, grads).isfinite():
            noise = tree_map(lambda g, n: -scale * (g + n * torch.rand(())), grads, noise)
        return fz.apply_updates(value, noise), {"loss": found}

    step = fz.program_step(program, init=lambda params: params)
    one, _ = trees()
    made = plan(one, step, level=2, ranks=3, batch=(torch.empty(2, WIDTH), 0.1))
    assert made.assumed == 1
    before = torch.get_rng_state()
    plan(one, step, level=2, ranks=3, batch=(torch.empty(2, WIDTH), 0.1))
    assert torch.equal(before, torch.get_rng_state())


def test_a_tree_that_the_program_cuts_itself() -> None:
    def loss(params: Any, anchor: Any, x: Tensor) -> Tensor:
        return forward(params, x).square().mean() - forward(anchor, x).mean()

    def program(value: Any, x: Tensor) -> Any:
        zeros = tree_map(lambda p: torch.zeros(p.shape, dtype=p.dtype), whole)
        anchor = fz.shard_tree(zeros, layout_like=value)
        found, grads = fz.value_and_grad(loss)(value, anchor, x)
        return fz.apply_updates(value, grads), {"loss": found}

    whole, _ = trees()
    step = fz.program_step(program, init=lambda params: params)
    plan(whole, step, level=3, ranks=2, batch=torch.empty(2, WIDTH))


class Distilled(NamedTuple):
    net: Any
    teacher: Any
    opt: Any


@pytest.mark.parametrize("level", tiers([3], [1]))
def test_units_have_the_names_that_describe_gives_them(level: int) -> None:
    """A tree's unit is called by the tree's path in the value. A teacher that follows its student
    by `tree_map` is gathered at most."""

    def program(value: Distilled, x: Tensor) -> Any:
        loss, grads = fz.value_and_grad(distance)(value.net, value.teacher, x)
        net, opt = adam.apply(grads, value.opt, value.net)
        teacher = tree_map(lambda t, p: (t + p).detach() / 2, value.teacher, net)
        return Distilled(net, teacher, opt), {"loss": loss}

    def start(params: Any) -> Distilled:
        return Distilled(params, tree_map(lambda p: p * 1, params), adam.init(params))

    step = fz.program_step(program, init=start)
    params = trees()[0]
    sharded = fz.shard(step, level=level, group=CountingGroup(2))
    rows = fz.describe(sharded, sharded.init(params)).rows
    messages = {row.unit: [message for message, _ in row.wire] for row in rows if row.leaves}
    made = plan(params, step, level=level, ranks=2, batch=torch.empty(2, WIDTH))
    sent = {call.unit for call in made.collectives if call.unit}
    assert sent == {unit for unit, words in messages.items() if words}
    moments = {sample.moment.partition(" of ")[2] for sample in made.samples} - {""}
    assert moments == {*messages}
    of_teacher = [words for unit, words in messages.items() if unit.startswith("teacher.")]
    assert of_teacher and all(words == ["gather"] * (level == 3) for words in of_teacher)
    assert all("reduce" in words for unit, words in messages.items() if unit.startswith("net."))


def test_a_tensor_that_the_value_has_twice_counts_once() -> None:
    table = torch.zeros(1000)

    def program(value: Any, x: Tensor) -> Any:
        _, grads = fz.value_and_grad(lambda params, x: forward(params, x).mean())(value[0], x)
        return (fz.apply_updates(value[0], grads), *value[1:]), {}

    step = fz.program_step(program, init=lambda params: (params, table, table[:10]))
    made = plan(trees()[0], step, level=1, ranks=2, batch=torch.empty(2, WIDTH))
    assert made.state == table.nbytes


def test_errors_say_what_to_do() -> None:
    one, _ = trees()
    batch = torch.empty(2, WIDTH)

    def reads(value: Any, x: Tensor) -> Any:
        found, grads = fz.value_and_grad(lambda params, x: forward(params, x).mean())(value, x)
        rate = 0.1 / float(found)
        return fz.apply_updates(value, tree_map(lambda g: -rate * g, grads)), {}

    def reads_in_a_loss(value: Any, x: Tensor) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            return forward(params, x).mean() * float(x.mean())

        fz.value_and_grad(loss)(value, x)
        return value, {}

    def first(params: Any) -> Any:
        return params

    for program, story in (
        (reads, r"the program reads values.*Remedy"),
        (reads_in_a_loss, r"the loss reads values.*Remedy"),
    ):
        step = fz.program_step(program, init=first)
        with pytest.raises(StructureError, match=story):
            plan(one, step, level=1, ranks=2, batch=batch)
    with pytest.raises(StructureError, match=r"needs a batch.*Remedy"):
        plan(trees(), BOTH, level=1, ranks=2)
    with pytest.raises(StructureError, match=r"units is of a training step.*Remedy"):
        plan(trees(), BOTH, level=1, ranks=2, batch=batch, units=nn.Linear)
    with pytest.raises(TypeError, match=r"both\(\) takes 2 .* but 3 were given"):
        plan(trees(), BOTH, level=1, ranks=2, batch=(batch, batch))
    two = fz.program_step(lambda value, x, y: (value, {}), init=first)
    for given, made, story in (
        (one, two, "missing .*'y'"),
        (trees(), BOTH, "list"),
        (big, optim.sgd(0.1), "list"),
    ):
        with pytest.raises(TypeError, match=story) as caught:
            plan(given, made, level=1, ranks=2, batch=[batch])
        assert "batch=[...] is one argument. Remedy: batch=(x, y)" in "".join(
            caught.value.__notes__
        )
    with pytest.raises(TypeError, match="missing a required argument: 'two'"):
        plan(one, BOTH, level=1, ranks=2, batch=batch)


def test_an_option_that_a_program_has_no_place_for_is_refused_as_by_shard() -> None:
    case, options = CASES["gan"](), {"sync_buffers": "local"}
    with pytest.raises(ValueError, match="Remedy") as by_shard:
        fz.shard(case.step, level=1, group=CountingGroup(2), **options)
    with pytest.raises(ValueError, match="Remedy") as by_plan:
        plan(tuple(case.trees()), case.step, level=1, ranks=2, batch=case.batches()[0], **options)
    assert str(by_plan.value) == str(by_shard.value)
