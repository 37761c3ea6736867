"""Programs that use up the state that they are given: the same numbers, less memory, and an error
where a used-up tree is needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import DonatedError, StructureError
from functorch_zero.groups import CountingGroup, run_ranks
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from tests.local import local_leaves, part
from tests.runtime.test_memory import LiveBytes
from tests.tiers import tiers

torch.manual_seed(0)
FIRST = {
    "w": torch.randn(5, 3, requires_grad=True),
    "b": torch.randn(3, requires_grad=True),
    "frozen": torch.randn(3),
}
BATCHES = [torch.randn(8, 5) for _ in range(6)]

OPTIMIZERS = {
    "adamw": optim.adamw(0.1),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.1)),
    "momentum": optim.sgd(0.1, momentum=0.9),
    "lamb": optim.lamb(0.1),
}
adamw = OPTIMIZERS["adamw"]


def loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]) * params["frozen"]).square().mean()


def simple(value: Any, x: Tensor, optimizer: Any = adamw) -> Any:
    params, state = value
    mean, grads = fz.value_and_grad(loss)(params, x)
    return optimizer.apply(grads, state, params), {"loss": mean}


def init_by(optimizer: Any) -> Any:
    return lambda params: (params, optimizer.init(params))


init = init_by(adamw)


def trained_by(step: Any, group: Any, level: int, *, donate: bool) -> tuple[Any, list[bool]]:
    """The whole value after all batches; and per step, whether it has used its state up."""
    sharded = fz.shard(step, level=level, group=group, donate=donate)
    state, used_up = sharded.init(FIRST), []
    for x in BATCHES:
        before = state
        state, _ = sharded(state, part(x, group))
        try:
            sharded.unshard(before)
            used_up.append(False)
        except DonatedError:
            used_up.append(True)
    return sharded.unshard(state).value, used_up


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_first_state_lies_in_flats(level: int) -> None:
    """The first step would copy moments that it doesn't know to lie in a flat."""
    step = fz.shard(fz.program_step(simple, init=init), level=level, group=CountingGroup(2))
    _, state = step.init(FIRST).value
    of_adam = state.as_it_lies[0]
    for moments in (of_adam.mu, of_adam.nu):
        flats = {id(moments[name]._base) for name in ("w", "b")}
        assert len(flats) == 1 and id(None) not in flats


@pytest.mark.parametrize("level", tiers([3], [0]))
@pytest.mark.parametrize("rests", tiers(["w"], ["b"]))
def test_a_state_that_stays_valid_keeps_leaves_that_the_next_one_has_too(
    rests: str, level: int
) -> None:
    """The first step donates nothing, and hands on the moments of a leaf that rests: the second
    one, which writes over its state, must copy them."""
    every_second = optim.maybe_update(optim.adam(0.1), lambda count: count % 2 == 1)
    optimizer = optim.partition(
        {"moves": optim.adam(0.1), "rests": every_second},
        lambda path, leaf: "rests" if path == rests else "moves",
    )

    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        return optimizer.apply(grads, state, params, donate=True), {"loss": mean}

    step = fz.program_step(program, init=init_by(optimizer))
    whole = step.init(FIRST).value

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group, donate=True)
        first = state = sharded.init(FIRST)
        for x in BATCHES[:3]:
            state, _ = sharded(state, part(x, group))
        # Bitwise: nobody has computed with it
        kept = optree.tree_leaves(sharded.unshard(first).value)
        for one, other in zip(kept, optree.tree_leaves(whole), strict=True):
            assert torch.equal(one, other)

    run_ranks(run, 2)


def test_a_wrong_number_of_gradients_is_told() -> None:
    step = fz.program_step(simple, init=init, num_gradients=2)
    with pytest.raises(StructureError, match=r"number of gradients.*expected num_gr.*=2, got 1"):
        step(step.init(FIRST), BATCHES[0])

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group, donate=True)
        with pytest.raises(StructureError, match="another number of gradients"):
            sharded(sharded.init(FIRST), part(BATCHES[0], group))

    run_ranks(run, 2)


# Programs whose steps give the same bits whether or not they donate


def reads_params(value: Any, x: Tensor) -> Any:
    """It holds a leaf while the tree is updated."""
    params, state = value
    old = params["w"]
    (params, state), metrics = simple(value, x)
    params = optree.tree_map_with_path(
        lambda path, p: 0.9 * p + 0.1 * old if path[-1] == "w" else p, params
    )
    return (params, state), metrics


def reads_state(value: Any, x: Tensor) -> Any:
    """It holds the state's tensors while they are updated."""
    params, state = value
    old = tree_map(lambda s: s, state)
    (params, state), metrics = simple(value, x)
    state = tree_map(lambda s, o: 0.9 * s + 0.1 * o if s.is_floating_point() else s, state, old)
    return (params, state), metrics


def averages(old: Any, new: Any) -> Any:
    """The mean of old and new params, which reads the old ones."""
    mean = tree_map(lambda a, b: (a + b) / 2, old, new)
    return tree_map(lambda m, b: m.detach().requires_grad_(b.requires_grad), mean, new)


def using(use: Callable[[Any, Any], Any]) -> Any:
    """It makes the next params of the old ones, after their update, and of the new ones."""

    def program(value: Any, x: Tensor) -> Any:
        (new, state), metrics = simple(value, x)
        return (use(value[0], new), state), metrics

    return program


def uses_state(value: Any, x: Tensor) -> Any:
    """It takes a second update from the old state."""
    (new, _), metrics = simple(value, x)
    return adamw.apply(fz.zero_updates(new), value[1], new), metrics


def keeps_old(value: Any, x: Tensor) -> Any:
    """The old params beside the new ones."""
    params, state, _ = value
    (new, state), metrics = simple((params, state), x)
    return (new, state, params), metrics


def copies_state(value: Any, x: Tensor) -> Any:
    """A copy by `tree_map` beside the state, which holds its very tensors."""
    params, state, _ = value
    new, metrics = simple((params, state), x)
    return (*new, tree_map(lambda s: s, new[1])), metrics


def follows(value: Any, x: Tensor, *, again: bool = False) -> Any:
    """A slow copy. `apply_updates` hands frozen leaves on, so that both trees have them in one
    storage. Nobody writes to them: the copy is not used up with the params, and may move
    `again`."""
    params, state, slow = value
    mean, grads = fz.value_and_grad(loss)(params, x)
    small = tree_map(lambda g: -0.01 * g, grads)
    slow = fz.apply_updates(slow, small)
    new = adamw.apply(grads, state, params)
    return (*new, fz.apply_updates(slow, small) if again else slow), {"loss": mean}


def delayed(value: Any, x: Tensor) -> Any:
    """It keeps gradients. Those of donated params know them, and so do trees of numbers made of
    them."""
    params, state, last = value
    mean, grads = fz.value_and_grad(loss)(params, x)
    halves = tree_map(lambda g: 0.5, last)
    last = tree_map(lambda g, half: half * g, last, halves)
    return (*adamw.apply(last, state, params), grads), {"loss": mean}


def gives_away(value: Any, x: Tensor, optimizer: Any = adamw, *, then: bool = False) -> Any:
    """Gradients go with params and state, and the updates are seen on their way."""
    params, state = value
    mean, grads = fz.value_and_grad(loss)(params, x)
    found: dict[str, Tensor] = fz.optim.norms(grads=grads)

    def see(updates: Any) -> None:
        found.update(fz.optim.norms(updates=updates, params=params))

    params, state = optimizer.apply(grads, state, params, see=see, donate=True)
    if then:
        found |= fz.optim.norms(grads=grads)
    return (params, state), {"loss": mean, **found}


def joint(value: Any, x: Tensor, optimizers: Any) -> Any:
    """One gradient of two trees. The first tree is used up when the second one's update asks which
    storage is free; and the states of one optimizer share their rate."""
    trees, states = value
    mean, grads = fz.value_and_grad(lambda pair, x: loss(pair[0], x) * loss(pair[1], x))(trees, x)
    rows = zip(optimizers, grads, states, trees, strict=True)
    new = [optimizer.apply(*row) for optimizer, *row in rows]
    return tuple(zip(*new, strict=True)), {"loss": mean}


def first_pair(params: Any, optimizers: Any) -> Any:
    half = tree_map(lambda p: (p / 2).detach().requires_grad_(p.requires_grad), params)
    rows = zip(optimizers, (params, half), strict=True)
    return (params, half), tuple(optimizer.init(tree) for optimizer, tree in rows)


# Which of the steps use their states up. The first one learns how many gradients there are
AFTER_FIRST = [False] + [True] * (len(BATCHES) - 1)
NEVER, ALWAYS = [False] * len(BATCHES), [True] * len(BATCHES)


class Donating(NamedTuple):
    program: Any
    used_up: list[bool] = AFTER_FIRST
    init: Any = init
    levels: tuple[int, ...] = (1, 3)
    num_gradients: int | None = None


def with_copy(params: Any) -> Any:
    return *init(params), fz.apply_updates(params, fz.zero_updates(params))


PAIRS = {
    "two trees of one optimizer": [adamw, adamw],
    "two trees": [OPTIMIZERS["lamb"], OPTIMIZERS["momentum"]],
}
PROGRAMS = {
    **{
        name: Donating(partial(simple, optimizer=of), AFTER_FIRST, init_by(of), (0, 1, 3))
        for name, of in OPTIMIZERS.items()
    },
    **{
        f"{name}, gradients, too": Donating(
            partial(gives_away, optimizer=of), ALWAYS, init_by(of), (0, 1, 3), num_gradients=1
        )
        for name, of in OPTIMIZERS.items()
    },
    **{
        name: Donating(
            partial(joint, optimizers=pair),
            init=partial(first_pair, optimizers=pair),
            levels=(1,),
        )
        for name, pair in PAIRS.items()
    },
    "reads params": Donating(reads_params, NEVER),
    "reads its state": Donating(reads_state, NEVER),
    # The first step, which doesn't donate, finds out
    "maps old params": Donating(using(averages), NEVER),
    "unshards old params": Donating(using(lambda old, new: fz.unshard(old) and new), NEVER),
    "updates old params": Donating(
        using(lambda old, new: fz.apply_updates(old, fz.zero_updates(new))), NEVER
    ),
    "applies to old params": Donating(
        using(lambda old, new: adamw.apply(fz.zero_updates(old), adamw.init(new), old)[0]), NEVER
    ),
    "uses its old state": Donating(uses_state, NEVER, levels=(3,)),
    "keeps old params": Donating(
        keeps_old, NEVER, lambda params: (*init(params), params), levels=(3,)
    ),
    "copies its state": Donating(
        copies_state, NEVER, lambda params: (*init(params), adamw.init(params)), levels=(3,)
    ),
    "a slow copy": Donating(follows, init=with_copy),
    "a slow copy, moved again": Donating(partial(follows, again=True), init=with_copy),
    "keeps gradients": Donating(
        delayed, init=lambda params: (*init(params), fz.zero_updates(params)), levels=(3,)
    ),
}


BY_LEVEL = [[(name, level) for level in case.levels] for name, case in PROGRAMS.items()]
ONE_LEVEL_EACH = [rows[i % len(rows)] for i, rows in enumerate(BY_LEVEL)]


@pytest.mark.parametrize(
    ("name", "level"),
    tiers(
        ONE_LEVEL_EACH[2::7],
        [row for rows in BY_LEVEL for row in rows if row not in ONE_LEVEL_EACH[2::7]],
        rows=True,
    ),
)
def test_donating_changes_no_bit(name: str, level: int) -> None:
    """A step whose program needs the tree, or the state, is not updated in place."""
    case = PROGRAMS[name]
    step = fz.program_step(case.program, init=case.init, num_gradients=case.num_gradients)

    def run(group: Any) -> Any:
        kept, never = trained_by(step, group, level, donate=False)
        donated, used_up = trained_by(step, group, level, donate=True)
        assert not any(never) and used_up == case.used_up
        return kept, donated

    for kept, donated in run_ranks(run, 2):
        assert_equal_values(kept, donated, grade="bitwise")


def test_ranks_may_use_old_params_alone() -> None:
    """The rank that reads them keeps them, and the others donate."""

    def run(group: Any) -> Any:
        def reports(value: Any, x: Tensor) -> Any:
            result = simple(value, x)
            if group.rank == 0:
                optree.tree_leaves(value[0])
            return result

        step = fz.program_step(reports, init=init)
        kept, _ = trained_by(step, group, 1, donate=False)
        sharded = fz.shard(step, level=1, group=group, donate=True)
        state = sharded.init(FIRST)
        for n, x in enumerate(BATCHES):
            before = state
            state, _ = sharded(state, part(x, group))
            if n > 0 and group.rank != 0:
                with pytest.raises(DonatedError):
                    sharded.check_state(before)
            else:
                sharded.check_state(before)
        return kept, sharded.unshard(state).value

    for kept, donated in run_ranks(run, 2):
        assert_equal_values(kept, donated, grade="bitwise")


def test_a_tree_that_is_needed_is_not_lost_in_silence() -> None:
    """A program that needs old params in a later step alone."""

    def program(value: Any, x: Tensor, keeps: bool) -> Any:
        (new, state), metrics = simple(value, x)
        return (averages(value[0], new) if keeps else new, state), metrics

    step = fz.program_step(program, init=init)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group, donate=True)
        state = sharded.init(FIRST)
        for x in BATCHES[:3]:
            state, _ = sharded(state, part(x, group), False)
        with pytest.raises(DonatedError, match="donate=False"):
            sharded(state, part(BATCHES[3], group), True)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3], [1]))
def test_another_structure_is_told_as_in_the_first_step(level: int) -> None:
    """Also where the structure that is expected is that of a node which is used up."""

    def changes(value: Any, x: Tensor, kind: str) -> Any:
        (params, state), metrics = simple(value, x)
        changed = {
            "none": (params, state),
            "short": (params,),
            "list": [params, state],
            "swapped": (state, params),
            "pieces": (fz.zero_updates(params), state),
            "dict": (fz.unshard(params), state),
        }
        return changed[kind], metrics

    step = fz.program_step(changes, init=init)

    def run(group: Any) -> None:
        for kind in ("short", "list", "swapped", "pieces", "dict"):
            sharded = fz.shard(step, level=level, group=group, donate=True)
            state, told = sharded.init(FIRST), []
            for x in BATCHES[:2]:
                with pytest.raises(StructureError, match="next value does not have") as caught:
                    sharded(state, part(x, group), kind)
                # The path; the numbers of leaves are of those that are compared
                told.append(str(caught.value).partition(", expected")[0])
                # The second of these steps donates
                if len(told) == 1:
                    state, _ = sharded(state, part(x, group), "none")
            assert told[0] == told[1], kind

    run_ranks(run, 2)


def test_a_failure_before_the_last_gradient_loses_nothing() -> None:
    def two_losses(value: Any, x: Tensor, fails: bool) -> Any:
        def second(params: Any, x: Tensor) -> Tensor:
            if fails:
                raise ValueError("the second one")
            return 2 * loss(params, x)

        (params, state), metrics = simple(value, x)
        _, grads = fz.value_and_grad(second)(params, x)
        return adamw.apply(grads, state, params), metrics

    step = fz.program_step(two_losses, init=init)
    expected = step.init(FIRST)
    for x in BATCHES[:3]:
        expected, _ = step(expected, x, False)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=3, group=group, donate=True)
        state, _ = sharded(sharded.init(FIRST), part(BATCHES[0], group), False)
        for x in BATCHES[1:3]:
            with pytest.raises(Exception, match="the second one"):
                sharded(state, part(x, group), group.rank == 1)
            state, _ = sharded(state, part(x, group), False)
        return sharded.unshard(state).value

    for value in run_ranks(run, 2):
        assert_equal_values(expected.value, value)


def test_a_gradient_that_is_taken_once_more_counts_once() -> None:
    """Else the first update would write over its params, and a failure in the last gradient would
    lose them."""

    def program(value: Any, x: Tensor, fails: str) -> Any:
        def first(params: Any, x: Tensor) -> Tensor:
            return loss(params, x) * (torch.nan if fails else 1)

        def last(params: Any, x: Tensor) -> Tensor:
            if fails == "twice":
                raise ValueError("the last one")
            return loss(params, x)

        (params, state), (others, of_others) = value
        try:
            _, grads = fz.value_and_grad(first, nonfinite="raise")(params, x)
        except fz.errors.NonFiniteError:
            _, grads = fz.value_and_grad(loss)(params, x)
        params, state = adamw.apply(grads, state, params)
        mean, grads = fz.value_and_grad(last)(others, x)
        others, of_others = adamw.apply(grads, of_others, others)
        return ((params, state), (others, of_others)), {"loss": mean}

    step = fz.program_step(program, init=lambda a, b: (init(a), init(b)))

    def run(group: Any) -> int:
        sharded = fz.shard(step, level=3, group=group, donate=True)
        state, _ = sharded(sharded.init(FIRST, FIRST), part(BATCHES[0], group), "")
        with pytest.raises(Exception, match="the last one"):
            sharded(state, part(BATCHES[1], group), "twice")
        state, _ = sharded(state, part(BATCHES[1], group), "")
        return int(state.step)

    assert run_ranks(run, 2) == [2, 2]


def fails_late(value: Any, x: Tensor, fails: bool) -> Any:
    made = simple(value, x)
    if fails:
        raise ValueError("after the update")
    return made


def test_a_failure_after_the_first_write_loses_the_state() -> None:
    """The error speaks of no later state: the step that wrote has made none."""

    step = fz.program_step(fails_late, init=init)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=3, group=group, donate=True)
        state, _ = sharded(sharded.init(FIRST), part(BATCHES[0], group), False)
        with pytest.raises(ValueError, match="after the update"):
            sharded(state, part(BATCHES[1], group), True)
        with pytest.raises(DonatedError, match=r"state of step 1 .*if it failed, load the newest"):
            sharded(state, part(BATCHES[1], group), False)

    run_ranks(run, 2)


@pytest.mark.parametrize("gives_away", [True, False])
def test_a_failure_before_the_params_are_written_loses_the_state(
    gives_away: bool, tmp_path: Any
) -> None:
    """The optimizer's state is written over by then, in memory or in its place: tried again, the
    step would take it as that of the step before."""

    def is_seen(value: Any, x: Tensor, fails: bool) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)

        def see(updates: Any) -> None:
            if fails:
                raise ValueError("in between")

        made = adamw.apply(grads, state, params, see=see, donate=gives_away)
        return made, {"loss": mean}

    step = fz.program_step(is_seen, init=init)

    def run(group: Any) -> None:
        place = None if gives_away else {"state": fz.places.File(tmp_path)}
        sharded = fz.shard(step, level=1, group=group, donate=True, place=place)
        state, _ = sharded(sharded.init(FIRST), part(BATCHES[0], group), False)
        with pytest.raises(ValueError, match="in between"):
            sharded(state, part(BATCHES[1], group), True)
        with pytest.raises(DonatedError, match="state of step 1"):
            sharded(state, part(BATCHES[1], group), False)

    run_ranks(run, 2)


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_loading_takes_the_storage_of_like(level: int, tmp_path: Any) -> None:
    """But for a tree that shares it, a teacher at first, for counts, and for other tensors."""
    table = torch.zeros(3)

    def program(value: Any, x: Tensor) -> Any:
        params, state, teacher, count = value
        (params, state), metrics = simple((params, state), x)
        return (params, state, teacher, count + 1), metrics

    def first(params: Any) -> Any:
        return params, adamw.init(params), params, table

    def storages_of(*nodes: Any) -> set[int]:
        return {
            x.untyped_storage().data_ptr() for x in local_leaves(nodes) if x.dim() and x.numel()
        }

    def run(group: Any) -> None:
        step = fz.shard(fz.program_step(program, init=first), level=level, group=group, donate=True)
        state = step.init(FIRST)
        for x in BATCHES[:3]:
            state, _ = step(state, part(x, group))
        checkpoint.save(tmp_path, step, state)
        expected = step.unshard(state)

        # Since the first step the params lie apart from the teacher, but for the frozen leaf
        params, of_adam, *_ = state.value
        held = storages_of(params["w"], params["b"], of_adam)
        loaded, _ = checkpoint.load(tmp_path, step, like=state)
        params_after, of_adam, *_ = loaded.value
        assert storages_of(params_after["w"], params_after["b"], of_adam) == held
        assert_equal_values(expected.value, step.unshard(loaded).value, grade="bitwise")
        with pytest.raises(DonatedError):
            step(state, part(BATCHES[3], group))
        with pytest.raises(DonatedError):
            params["w"]
        again, _ = step(loaded, part(BATCHES[3], group))

        # In a first state they are one tree, and two after loading
        loaded, _ = checkpoint.load(tmp_path, step, like=step.init(FIRST))
        assert_equal_values(expected.value, step.unshard(loaded).value, grade="bitwise")
        assert not table.any()
        other, _ = step(loaded, part(BATCHES[3], group))
        values = [step.unshard(found).value for found in (again, other)]
        assert_equal_values(*values, grade="bitwise")

    run_ranks(run, 2)


def test_the_peak_is_that_of_one_state() -> None:
    """At level 3: params, both moments and gradients in pieces, and a unit or two; without
    donating there is a second state."""
    width, depth, ranks = 256, 12, 4
    unit = width * width * 4  # bytes
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    apply, params, _ = fz.functionalize(model)

    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(lambda p, x: apply(p, {}, x)[0].mean())(params, x)
        return adamw.apply(grads, state, params), {"loss": mean}

    step = fz.program_step(program, init=init)
    peaks = {}
    for donate in (False, True):
        sharded = fz.shard(step, level=3, group=CountingGroup(ranks), donate=donate)
        x = torch.randn(2, width)
        state, _ = sharded(sharded.init(params), x)
        with LiveBytes() as live:
            before = sum(leaf.nbytes for leaf in local_leaves(state.value))
            state, _ = sharded(state, x)
        peaks[donate] = live.peak / unit
        assert before / unit == pytest.approx(3 * depth / ranks, rel=0.01)
    assert peaks[True] < peaks[False] - 1.5 * depth / ranks


@pytest.mark.parametrize("level", tiers([2], [0]))
def test_a_metric_keeps_its_value(level: int) -> None:
    """A leaf of the next value is written over by the next step, and metrics are kept."""

    def reports_leaf(value: Any, x: Tensor) -> Any:
        (params, state), metrics = simple(value, x)
        return (params, state), {**metrics, "b": params["b"]}

    step = fz.program_step(reports_leaf, init=init)
    first = FIRST | {"b": torch.tensor(0.7, requires_grad=True)}

    def run(group: Any) -> Any:
        reports = []
        for donate in (False, True):
            sharded = fz.shard(step, level=level, group=group, donate=donate)
            state, reported = sharded.init(first), []
            for x in BATCHES:
                state, metrics = sharded(state, part(x, group))
                reported.append(metrics["b"])
            reports.append(reported)
        return reports

    for kept, donated in run_ranks(run, 2):
        assert_equal_values(kept, donated, grade="bitwise")
        assert len(set(map(float, kept))) == len(BATCHES)


@pytest.mark.parametrize("level", tiers([1], [0, 3]))
def test_a_first_step_that_fails_on_one_rank_is_taken_again(level: int) -> None:
    """The other ranks have counted their gradients by then, and the one that fails hasn't."""

    step = fz.program_step(fails_late, init=init)
    expected = step.init(FIRST)
    for x in BATCHES:
        expected, _ = step(expected, x, False)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group, donate=True)
        state = sharded.init(FIRST)
        with pytest.raises(Exception, match="after the update"):
            sharded(state, part(BATCHES[0], group), group.rank == 1)
        for x in BATCHES:
            state, _ = sharded(state, part(x, group), False)
        return sharded.unshard(state).value

    for value in run_ranks(run, 2):
        assert_equal_values(expected.value, value)


@pytest.mark.parametrize("level", tiers([3], [0]))
def test_a_leaf_that_is_read_after_a_gradient_keeps_its_values(level: int) -> None:
    """In steps that are looked at, too, where the library's calls pause the watch."""

    def program(value: Any, x: Tensor) -> Any:
        params, state, average = value
        grads = fz.value_and_grad(loss)(params, x)[1]
        old = params["w"]
        params, state = adamw.apply(grads, state, params)
        moved = {"w": 0.5 * average["w"] + 0.5 * old}
        average = optree.tree_map_with_path(lambda path, a: moved.get(path[-1], a), average)
        return (params, state, average), {}

    def first(params: Any) -> Any:
        return *init(params), tree_map(lambda p: p.detach().clone(), params)

    step = fz.program_step(program, init=first)
    assert_sharded_equals_unsharded(
        step, FIRST, BATCHES, levels=[level], ranks=[2], donate=True, unused=["2.frozen"]
    )


@pytest.mark.parametrize("level", tiers([3], [1]))
def test_gradients_of_trees_that_the_program_cuts_are_counted(level: int) -> None:
    """Their engine answers where they come first. A failure in the last gradient would lose the
    state, had an update before it donated."""

    def pull(trees: Any, x: Tensor) -> Tensor:
        net, teacher = trees["net"], trees["teacher"]
        return loss(net, x) + (net["w"] - teacher["w"]).square().mean()

    def run(group: Any) -> int:
        failing: list[bool] = []

        def program(value: Any, x: Tensor) -> Any:
            params, state = value
            fixed = fz.shard_tree(FIRST, level=level, group=group)
            _, grads = fz.value_and_grad(loss)(params, x)
            params, state = adamw.apply(grads, state, params)
            trees = {"a": {"teacher": fixed}, "b": {"net": params}}  # the cut one first
            if failing:
                failing.clear()
                x = x[:, :2]
            mean, grads = fz.value_and_grad(lambda t, x: pull(t["a"] | t["b"], x))(trees, x)
            params, state = adamw.apply(grads["b"]["net"], state, params)
            return (params, state), {"loss": mean}

        sharded = fz.shard(
            fz.program_step(program, init=init), level=level, group=group, donate=True
        )
        state = sharded.init(FIRST)
        for x in BATCHES[:3]:
            state, _ = sharded(state, part(x, group))
        if group.rank == 1:
            failing.append(True)
        with pytest.raises((RuntimeError, fz.errors.PeerError)):
            sharded(state, part(BATCHES[3], group))
        state, _ = sharded(state, part(BATCHES[3], group))
        return int(state.step)

    assert run_ranks(run, 2) == [4, 4]


def test_gradients_that_were_given_away_are_not_read() -> None:
    step = fz.program_step(partial(gives_away, then=True), init=init, num_gradients=1)
    step(step.init(FIRST), BATCHES[0])

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group, donate=True)
        with pytest.raises(DonatedError, match="donated to a step"):
            sharded(sharded.init(FIRST), part(BATCHES[0], group))

    run_ranks(run, 2)


def test_leaves_of_gradients_that_were_given_away() -> None:
    """Of a state, too, which somebody has read before the step."""

    def program(value: Any, x: Tensor) -> Any:
        params, state, before = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        return (*adamw.apply(before, state, params, donate=True), grads), {"loss": mean}

    step = fz.program_step(
        program, init=lambda params: (*init(params), fz.zero_updates(params)), num_gradients=1
    )

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group, donate=True)
        state, _ = sharded(sharded.init(FIRST), part(BATCHES[0], group))
        leaf = state.value[2]["w"]
        sharded(state, part(BATCHES[1], group))
        with pytest.raises(DonatedError):
            torch.zeros_like(leaf).add(leaf)

    run_ranks(run, 2)
