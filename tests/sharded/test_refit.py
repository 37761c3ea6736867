"""States that go on with other trained leaves or more leaves: on ranks as in one process."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import MismatchError, StructureError
from functorch_zero.groups import counted, run_ranks
from functorch_zero.runtime.reduce import Summed
from functorch_zero.testing.equality import assert_equal_values
from functorch_zero.tree import named_leaves
from tests.local import local_leaves
from tests.models import MLP
from tests.tiers import crossed, thinned, tiers

LEVELS = [0, 1, 2, 3, {"": 3, "layers.1": 1}]
OPTIMIZERS = {
    "adamw": lambda: optim.adamw(0.01),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9)),
    "muon": lambda: optim.muon(0.02),
    "by rows": lambda: optim.rows.adagrad_by_row(0.1),
    "adafactor": lambda: optim.adafactor(0.01),
    "lookahead": lambda: optim.lookahead(optim.adam(0.01), 2, 0.5),
}
torch.manual_seed(0)
APPLY, PARAMS, _ = fz.functionalize(MLP((7, 6, 5, 3)).double(), units=torch.nn.Linear)
X = torch.randn(4, 12, 7, dtype=torch.float64)


def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
    return APPLY(params, {}, x)[0].square().mean()


def ends(path: str, leaf: Tensor) -> bool:
    return path.startswith(("layers.0", "layers.2.weight"))


def middle(path: str, leaf: Tensor) -> bool:
    return path.startswith(("layers.1", "layers.2", "norm"))


def steps_of(optimizer: str) -> list[Any]:
    make = OPTIMIZERS[optimizer]
    return [fz.train_step(loss, make(), trainable=rule) for rule in (ends, middle)]


def part(x: Tensor, group: Any) -> Tensor:
    return x.tensor_split(group.size)[group.rank] if group.size > 1 else x


@pytest.mark.parametrize(("optimizer", "level"), crossed(OPTIMIZERS, LEVELS, n=3, quick=1))
def test_trains_other_leaves(optimizer: str, level: Any) -> None:
    first, second = steps_of(optimizer)

    def run(group: Any) -> Any:
        # The oracle of the refit itself is that of the whole state, to the bit
        before, after = (fz.shard(step, level=level, group=group) for step in (first, second))
        state = before.init(PARAMS)
        for x in X[:2]:
            state, _ = before(state, part(x, group))
        old = before.unshard(state)
        made = after.refit(state)
        whole = after.unshard(made)
        assert_equal_values(second.refit(old), whole, grade="bitwise")
        assert_equal_values(old, before.unshard(state), grade="bitwise")  # still good
        made, _ = after(made, part(X[2], group))
        return old, after.unshard(made)

    oracle = first.init(PARAMS)
    for x in X[:2]:
        oracle, _ = first(oracle, x)
    refitted = second.refit(oracle)
    expected, _ = second(refitted, X[2])
    assert int(expected.step) == 3
    for old, whole in run_ranks(run, 3 if optimizer == "adamw" else 2):
        assert_equal_values(oracle, old)
        assert_equal_values(expected.params, whole.params)
        assert_equal_values(expected, whole)
    # What was frozen in the second step stays, and the rest moves
    for path, leaf in named_leaves(expected.params).items():
        assert torch.equal(leaf, refitted.params[path]) != middle(path, leaf)


def test_moments_of_kept_leaves_and_of_new_ones() -> None:
    first, second = steps_of("adamw")
    state = first.init(PARAMS)
    for x in X[:2]:
        state, _ = first(state, x)
    made = second.refit(state)
    old, new = named_leaves(state), named_leaves(made)
    moments = {path: leaf for path, leaf in new.items() if ".mu." in path or ".nu." in path}
    assert len(moments) == 2 * sum(middle(path, leaf) for path, leaf in PARAMS.items())
    for path, leaf in moments.items():
        if path in old:
            assert torch.equal(leaf, old[path]) and leaf.any()
            assert path.endswith("layers.2.weight")
        else:
            assert not leaf.any()
    counts = [leaf for path, leaf in new.items() if path.endswith("count")]
    assert counts and all(int(count) == 2 for count in counts)
    for path, leaf in new.items():  # copies
        assert path not in old or path in ("step", "seed") or leaf is not old[path]


def grown() -> Any:
    """The params with a leaf in front, one in a new unit, and one frozen."""
    leaves = {"scale": torch.full((5,), 1.5), "head.weight": torch.ones(3, 3), "pad": torch.ones(2)}
    new = {path: leaf.double() for path, leaf in leaves.items()}
    made = {"scale": new["scale"].requires_grad_(), **PARAMS, "pad": new["pad"]}
    made["head.weight"] = new["head.weight"].requires_grad_()
    return made


def loss_of_grown(params: Any, buffers: Any, x: Tensor) -> Tensor:
    old = fz.Params({path: params[path] for path in PARAMS}, PARAMS.units)
    output = APPLY(old, {}, x)[0] @ params["head.weight"]
    return output.square().mean() + params["scale"].square().sum() + params["pad"].sum()


@pytest.mark.parametrize(("optimizer", "level"), crossed(OPTIMIZERS, [3, 0, 1, 2], n=4, quick=1))
def test_more_leaves(optimizer: str, level: Any) -> None:
    if level == 3 and optimizer == "muon":
        level = {"": 3, "scale": 1}
    make = OPTIMIZERS[optimizer]
    first, second = fz.train_step(loss, make()), fz.train_step(loss_of_grown, make())
    start = {**PARAMS}

    def run(group: Any) -> Any:
        before = fz.shard(first, level=3 if isinstance(level, dict) else level, group=group)
        after = fz.shard(second, level=level, group=group)
        if isinstance(level, dict):
            before = fz.shard(first, level={"": 3, "layers.0.bias": 1}, group=group)
        state, _ = before(before.init(start), part(X[0], group))
        made = after.refit(state, grown())
        expected = second.refit(before.unshard(state), grown())
        assert_equal_values(expected, after.unshard(made), grade="bitwise")
        made, _ = after(made, part(X[1], group))
        return after.unshard(made)

    oracle, _ = first(first.init(start), X[0])
    expected, _ = second(second.refit(oracle, grown()), X[1])
    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


@pytest.mark.parametrize("level", thinned([3, 1]))
def test_a_model_with_one_more_layer(level: int) -> None:
    apply, params, _ = fz.functionalize(MLP((7, 6, 5, 3, 2)).double(), units=torch.nn.Linear)
    deeper = fz.train_step(
        lambda params, buffers, x: apply(params, {}, x)[0].square().mean(), optim.adamw(0.01)
    )
    first = fz.train_step(loss, optim.adamw(0.01))

    def run(group: Any) -> Any:
        before, after = (fz.shard(step, level=level, group=group) for step in (first, deeper))
        state, _ = before(before.init(PARAMS), part(X[0], group))
        state, _ = after(after.refit(state, params), part(X[1], group))
        return after.unshard(state)

    state, _ = first(first.init(PARAMS), X[0])
    expected, _ = deeper(deeper.refit(state, params), X[1])
    for whole in run_ranks(run, 3):
        assert_equal_values(expected, whole)


def test_kept_leaves_may_be_on_the_meta_device() -> None:
    first, second = (
        fz.train_step(loss, optim.adam(0.1)),
        fz.train_step(loss_of_grown, optim.adam(0.1)),
    )
    metas = {
        path: leaf.detach().to("meta").requires_grad_(leaf.requires_grad)
        if path in PARAMS
        else leaf
        for path, leaf in grown().items()
    }
    empty = {**metas, "pad": metas["pad"].to("meta")}

    def run(group: Any) -> Any:
        before, after = (fz.shard(step, level=3, group=group) for step in (first, second))
        state = before.init({**PARAMS})
        with pytest.raises(StructureError, match=r"no values.*pad"):
            after.refit(state, empty)
        return after.unshard(after.refit(state, metas))

    expected = second.refit(first.init({**PARAMS}), grown())
    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole, grade="bitwise")
    with pytest.raises(StructureError, match=r"no values.*pad"):
        second.refit(first.init({**PARAMS}), empty)


@pytest.mark.parametrize("axes", thinned(["both", "shard"]))
@pytest.mark.parametrize("level", thinned([3, 1]))
def test_replicas(level: int, axes: Any) -> None:
    first, second = steps_of("adamw")

    def run(group: Any) -> Any:
        mesh = fz.HybridGroup(group, shard_size=2)
        before, after = (
            fz.shard(step, level=level, group=mesh, state_axes=axes) for step in (first, second)
        )
        state, _ = before(before.init(PARAMS), part(X[0], group))
        made = after.refit(state)
        expected = second.refit(before.unshard(state))
        assert_equal_values(expected, after.unshard(made), grade="bitwise")

    run_ranks(run, 4)


@pytest.mark.parametrize(
    ("ranks", "every"), tiers(thorough=[(2, 1), (3, 1)], full=[(2, 3)], rows=True)
)
def test_processes(ranks: int, every: int) -> None:
    chosen = [*OPTIMIZERS][::every]

    def run() -> Any:
        group, found = fz.ProcessGroup(), []
        for optimizer in chosen:
            before, after = (fz.shard(step, level=3, group=group) for step in steps_of(optimizer))
            state, _ = before(before.init(PARAMS), part(X[0], group))
            state, _ = after(after.refit(state), part(X[1], group))
            found.append(after.unshard(state))
        return found

    results = fz.launch(run, ranks, start_method="fork", timeout=200)
    for i, optimizer in enumerate(chosen):
        first, second = steps_of(optimizer)
        state, _ = first(first.init(PARAMS), X[0])
        expected, _ = second(second.refit(state), X[1])
        for found in results:
            assert_equal_values(expected, found[i])


def test_only_elements_whose_rank_changes_are_sent() -> None:
    first, second = steps_of("adamw")

    def run(group: Any) -> Any:
        recorded = counted(group)
        before, same, after = (
            fz.shard(step, level=3, group=recorded) for step in (first, first, second)
        )
        state = before.init(PARAMS)
        recorded.reset()
        same.refit(state)
        nothing = recorded.num_calls("all_to_all")
        recorded.reset()
        made = after.refit(state)
        # By hand: a rank's new ranges of params and of kept moments, less those it had
        missing = 0
        for old, new, factor in (
            (state.params, made.params, 1),
            (state.params.pieces(), made.params.pieces(), 2),
        ):
            had = kept_extents(old)
            for path, extent in kept_extents(new).items():
                if path in had:
                    both = min(extent.stop, had[path].stop) - max(extent.start, had[path].start)
                    missing += factor * (extent.num_here - max(both, 0))
        return nothing, recorded.sent_bytes("all_to_all"), 8 * missing

    results = run_ranks(run, 3)
    assert all(nothing == 0 for nothing, _, _ in results)
    assert sum(sent for _, sent, _ in results) == sum(missing for _, _, missing in results) > 0


def kept_extents(tree: Any) -> dict[str, Any]:
    rows = zip(tree.sharding.layout.leaves, tree.holding.parts, strict=True)
    is_held = tree.holding.form == "held"
    return {leaf.path: part.extent for leaf, part in rows if is_held or leaf.trainable}


def test_checkpoints_across_the_change(tmp_path: Any) -> None:
    first, second = steps_of("adamw")
    oracle, _ = first(first.init(PARAMS), X[0])
    expected, _ = second(second.refit(oracle), X[1])

    def save(group: Any) -> None:
        before = fz.shard(first, level=3, group=group)
        state, _ = before(before.init(PARAMS), part(X[0], group))
        fz.checkpoint.save(tmp_path / "before", before, state)
        after = fz.shard(second, level=3, group=group)
        fz.checkpoint.save(tmp_path / "after", after, after.refit(state))

    def go_on(group: Any) -> Any:
        found = []
        before, after = (fz.shard(step, level=2, group=group) for step in (first, second))
        like = before.init(PARAMS)
        state = fz.checkpoint.load(tmp_path / "before", before, like=like).state
        made, _ = after(after.refit(state), part(X[1], group))
        found.append(after.unshard(made))
        like = after.init(PARAMS)
        state = fz.checkpoint.load(tmp_path / "after", after, like=like).state
        made, _ = after(state, part(X[1], group))
        return [*found, after.unshard(made)]

    run_ranks(save, 2)
    for found in run_ranks(go_on, 3):
        for whole in found:
            assert_equal_values(expected, whole)


def test_buffers_and_loss_scale_go_on() -> None:
    def make(trainable: Any) -> Any:
        return fz.train_step(
            lambda params, buffers, x: loss(params, buffers, x) + buffers["mean"].sum(),
            optim.adam(0.1),
            trainable=trainable,
            loss_scale=fz.LossScale(interval=1),
        )

    first, second = make(ends), make(middle)
    buffers = {"mean": torch.ones(2, dtype=torch.float64)}
    more = {"mean": torch.zeros(2, dtype=torch.float64), "more": torch.full((1,), 5.0)}
    oracle, _ = first(first.init(PARAMS, buffers, seed=4), X[0])
    expected = second.refit(oracle, buffers=more)
    assert expected.buffers["mean"].sum() == 2 and expected.buffers["more"] == 5
    assert int(expected.seed) == 4 and float(expected.finite.scale) == float(oracle.finite.scale)

    def run(group: Any) -> Any:
        before, after = (fz.shard(step, level=3, group=group) for step in (first, second))
        state, _ = before(before.init(PARAMS, buffers, seed=4), part(X[0], group))
        own = tree_map(torch.clone, more)
        made = after.refit(state, buffers=own)
        own["more"].zero_()  # the caller's own, as in init
        return after.unshard(made)

    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


class Clones(TorchDispatchMode):
    """The shapes of tensors that are cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **kwargs or {})


def test_buffers_are_copied_once() -> None:
    step = fz.train_step(lambda params, buffers, x: loss(params, buffers, x), optim.sgd(0.1))
    sharded = fz.shard(step, level=2, group=fz.groups.SingleRank())
    state = sharded.init(PARAMS, {"kept": torch.ones(131)})
    given = {"kept": torch.zeros(131), "new": torch.zeros(137)}
    with Clones() as clones:
        made = sharded.refit(state, buffers=given)
    assert [clones.shapes.count((n,)) for n in (131, 137)] == [1, 1]
    for own in (state.buffers["kept"], *given.values()):
        own.fill_(7)
    assert made.buffers["kept"].eq(1).all() and made.buffers["new"].eq(0).all()


def test_ranks_that_give_other_buffers_are_told() -> None:
    step = fz.train_step(lambda params, buffers, x: loss(params, buffers, x), optim.sgd(0.1))

    def run(group: Any) -> str:
        sharded = fz.shard(step, level=2, group=group)
        state = sharded.init(PARAMS, {"mean": torch.ones(2)})
        with pytest.raises(MismatchError, match="buffers"):
            sharded.refit(state, buffers=None if group.rank == 0 else {})
        return "told"

    assert run_ranks(run, 2) == ["told", "told"]


class Value(NamedTuple):
    params: Any
    opt: Any
    mean: Any
    num: Tensor


@pytest.mark.parametrize("level", thinned([3, 0, 1]))
def test_programs(level: int) -> None:
    adam = optim.adam(0.1)

    def init(params: Any) -> Value:
        zeros = fz.zero_updates(params)
        return Value(params, adam.init(params), zeros, torch.zeros((), dtype=torch.int64))

    def program(value: Value, x: Tensor) -> Any:
        found, grads = fz.value_and_grad(lambda p, x: APPLY(p, {}, x)[0].square().mean())(
            value.params, x
        )
        params, opt = adam.apply(grads, value.opt, value.params)
        mean = tree_map(lambda m, g: 0.9 * m + g, value.mean, grads)
        return Value(params, opt, mean, value.num + 1), {"loss": found}

    step = fz.program_step(program, init=init)
    one, two = (
        tree_map(lambda p, on: p.detach().requires_grad_(on), PARAMS, mask)
        for mask in (
            fz.Params({path: rule(path, leaf) for path, leaf in PARAMS.items()}, PARAMS.units)
            for rule in (ends, middle)
        )
    )
    oracle, _ = step(step.init(one), X[0])
    refitted = step.refit(oracle, two)
    assert int(refitted.value.num) == 1 and refitted.value.mean["layers.2.weight"].any()
    assert not refitted.value.mean["norm.weight"].any()
    expected, _ = step(refitted, X[1])

    def run(group: Any) -> Any:
        before, after = (fz.shard(step, level=level, group=group) for _ in range(2))
        state, _ = before(before.init(one), part(X[0], group))
        made = after.refit(state, two)
        again = step.refit(before.unshard(state), two)
        assert_equal_values(again, after.unshard(made), grade="bitwise")
        made, _ = after(made, part(X[1], group))
        return after.unshard(made)

    for whole in run_ranks(run, 2):
        assert_equal_values(expected, whole)


def test_wrong_input_is_refused() -> None:
    first, second = steps_of("adamw")
    other = fz.train_step(loss, optim.sgd(0.1, momentum=0.9), trainable=middle)
    wide = fz.Params({**PARAMS, "norm.bias": torch.ones(9).double()}, PARAMS.units)

    def run(group: Any) -> None:
        before, after = (fz.shard(step, level=3, group=group) for step in (first, second))
        state = before.init(PARAMS)
        with pytest.raises(StructureError, match=r"state.opt_state"):
            fz.shard(other, level=3, group=group).refit(state)
        with pytest.raises(StructureError, match=r"norm.bias.*another path"):
            after.refit(state, wide)
        with pytest.raises(StructureError, match=r"whole state"):
            after.refit(before.unshard(state))
        with pytest.raises(MismatchError, match=r"extra"):
            more = {**PARAMS, "extra": torch.full((2,), float(group.rank))}
            after.refit(state, more)
        after(after.refit(state), part(X[0], group))  # the state is still good

    run_ranks(run, 2)
    state = first.init(PARAMS)
    with pytest.raises(StructureError, match=r"optimizer|opt_state"):
        other.refit(state)
    with pytest.raises(StructureError, match=r"norm.bias.*another path"):
        second.refit(state, wide)


class Remembering(Summed):
    """A reduction that keeps a tensor between steps."""

    keeps: ClassVar[Any] = {"seen": "same"}

    def init(self, bucket: Any, device: torch.device) -> Any:
        return {"seen": torch.zeros(1, device=device)}


def test_a_reduction_that_keeps_tensors_goes_by_whole_states() -> None:
    first, second = steps_of("adamw")

    def run(group: Any) -> Any:
        before, after = (
            fz.shard(step, level=2, group=group, reduction=Remembering())
            for step in (first, second)
        )
        state = before.init(PARAMS)
        with pytest.raises(NotImplementedError, match=r"keeps between steps.*path parts"):
            after.refit(state)
        with pytest.raises(StructureError, match=r"replace\(parts=None\)"):
            second.refit(before.unshard(state))
        whole = before.unshard(state).replace(parts=None)
        return after.unshard(after.shard(after.unsharded.refit(whole))).replace(parts=None)

    for found in run_ranks(run, 2):
        assert_equal_values(second.refit(first.init(PARAMS)), found, grade="bitwise")


def test_a_reduction_that_keeps_tensors_begins_with_the_refit() -> None:
    first, second = steps_of("adamw")

    def run(group: Any) -> Any:
        before = fz.shard(first, level=2, group=group)
        after = fz.shard(second, level=2, group=group, reduction=Remembering())
        made, _ = after(after.refit(before.init(PARAMS)), part(X[0], group))
        return after.unshard(made).params

    expected, _ = second(second.refit(first.init(PARAMS)), X[0])
    for params in run_ranks(run, 2):
        assert_equal_values(expected.params, params)


def test_state_that_lies_elsewhere(tmp_path: Any) -> None:
    first, second = steps_of("adamw")

    def run(group: Any) -> None:
        folder = tmp_path / str(group.rank)
        folder.mkdir()
        place = {"state": fz.places.File(folder)}
        before, after = (
            fz.shard(step, level=2, group=group, place=place) for step in (first, second)
        )
        state, _ = before(before.init(PARAMS), part(X[0], group))
        made = after.refit(state)
        expected = second.refit(before.unshard(state))
        assert_equal_values(expected, after.unshard(made), grade="bitwise")
        after(made, part(X[1], group))

    run_ranks(run, 2)


def test_a_donated_state_is_refused() -> None:
    first, second = steps_of("adamw")

    def run(group: Any) -> None:
        before, after = (fz.shard(step, level=3, group=group) for step in (first, second))
        state = before.init(PARAMS)
        later, _ = before(state, part(X[0], group))
        with pytest.raises(fz.errors.DonatedError):
            after.refit(state)
        # Neither does the refitted state lie in the old one's storage
        made = after.refit(later)
        kept = [leaf.clone() for leaf in local_leaves(made)]
        before(later, part(X[1], group))
        for one, two in zip(kept, local_leaves(made), strict=True):
            assert torch.equal(one, two)

    run_ranks(run, 2)


def test_init_and_refit_of_a_program_leave_its_other_states_valid() -> None:
    trained = {name: torch.ones(3, requires_grad=True) for name in ("weight", "bias")}
    other_shape = trained | {"weight": torch.ones(7, requires_grad=True)}
    frozen = trained | {"bias": trained["bias"].detach()}
    step = fz.program_step(
        lambda value: (value, {}), init=lambda params, number: (params, torch.tensor(number))
    )

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group)
        state = sharded.init(trained, 0)
        with pytest.raises(StructureError, match="another shape"):
            sharded.refit(state, other_shape, 0)
        # It fails when ranks compare the values that their init has made
        with pytest.raises(MismatchError):
            sharded.init(frozen, group.rank)
        state, _ = sharded(state)
        sharded.shard(sharded.unshard(state))
        other = sharded.refit(state, frozen, 0)
        for valid in (state, other):
            sharded.unshard(sharded(valid)[0])
        sharded.refit(state, frozen, 0)

    run_ranks(run, 2)


def squared(params: Any, buffers: Any, x: Tensor) -> Tensor:
    return sum((leaf - 1).square().sum() for leaf in optree.tree_leaves(params)) * x.mean()


def refits(params: Any, optimizer: Any, old: str, new: str, then: Any = None) -> list[Any]:
    """Both steps' states of one process and on two ranks, where the second one is a refit."""
    first, second = (
        fz.train_step(squared, optimizer, trainable=lambda path, leaf, own=own: path in own)
        for own in (old.split(), new.split())
    )
    x = torch.ones(2)
    state, _ = first(first.init(params), x)
    found = [(state, second.refit(state, then))]

    def run(group: Any) -> Any:
        before, after = (fz.shard(step, level=1, group=group) for step in (first, second))
        state, _ = before(before.init(params), part(x, group))
        return before.unshard(state), after.unshard(after.refit(state, then))

    return [*found, *run_ranks(run, 2)]


@pytest.mark.parametrize("name", ["full_matrix_adagrad", "lbfgs"])
@pytest.mark.parametrize(("old", "new"), thinned([("0 1", "1"), ("1", "0"), ("0", "1")], rows=True))
def test_names_of_leaves_hide_no_tensor_of_all_leaves(name: str, old: str, new: str) -> None:
    optimizer = {
        "full_matrix_adagrad": optim.contrib.full_matrix_adagrad(0.1, whole_tree=True),
        "lbfgs": optim.chain(optim.lbfgs(0.1, memory_size=2)),
    }[name]
    params = [torch.zeros(4), torch.zeros(4)]
    with pytest.raises(StructureError, match="all leaves together"):
        refits(params, optimizer, old, new)
    refits(params, optimizer, old, old)  # the same leaves are trained


def test_a_leaf_of_the_name_of_a_state_s_field() -> None:
    optimizer = optim.contrib.full_matrix_adagrad(0.1, whole_tree=True)
    params = {"outer": torch.zeros(4), "b": torch.zeros(4)}
    with pytest.raises(StructureError, match="all leaves together"):
        refits(params, optimizer, "outer", "b")
    # Names of fields of Adam's state, whose moments are each leaf's own
    params = {"mu": torch.zeros(4), "nu": torch.zeros(4), "0": torch.zeros(4)}
    for old, new in refits(params, optim.adam(0.1), "mu nu", "nu 0"):
        known, made = named_leaves(old.opt_state), named_leaves(new.opt_state)
        assert torch.equal(made["0.mu.nu"], known["0.mu.nu"]) and made["0.mu.nu"].any()
        assert not made["0.mu.0"].any() and "0.mu.mu" not in made


def test_the_same_leaves_in_another_order() -> None:
    params = fz.Params({"a": torch.zeros(4), "b": torch.full((4,), 2.0)})
    turned = fz.Params(reversed(params.items()))
    optimizer = optim.contrib.full_matrix_adagrad(0.1, whole_tree=True)
    with pytest.raises(StructureError, match="another order"):
        refits(params, optimizer, "a b", "a b", turned)
    for old, new in refits(params, optim.adam(0.1), "a b", "a b", turned):
        assert_equal_values(named_leaves(old.opt_state), named_leaves(new.opt_state))


def test_a_single_tensor_becomes_a_tree() -> None:
    first = fz.train_step(squared, optim.adam(0.1))
    one, tree = (torch.zeros(4, requires_grad=True) for _ in range(2))
    state, _ = first(first.init(one), torch.ones(1))
    made = first.refit(state, {"w": tree})
    assert not named_leaves(made.opt_state)["0.mu.w"].any() and int(made.step) == 1


def test_an_init_that_asks_for_values_can_tell_nothing() -> None:
    optimizer = optim.with_statistics(
        lambda params: tree_map(lambda p: p + float(p.sum()), params),
        lambda updates, state, params, across: (updates, state),
    )
    first, second = (
        fz.train_step(squared, optimizer, trainable=lambda path, leaf, own=own: path in own)
        for own in ("a", "ab")
    )
    state = first.init({"a": torch.zeros(4), "b": torch.zeros(4)})
    with pytest.raises(StructureError, match=r"init fails on the meta device.*begin anew"):
        second.refit(state)


@pytest.mark.parametrize("level", [0, 3])
def test_a_tree_by_a_ranks_own_number_is_refused(level: int) -> None:
    """Elements of both ranks would be mixed, and nobody would see it afterwards."""
    step = fz.train_step(lambda params, buffers, x: params["w"].sum() * x, optim.adam(0.1))

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init({"w": torch.ones(4, requires_grad=True)})
        own = tree_map(lambda p: p * (1.0 + group.rank), state.params)
        with pytest.raises(MismatchError, match=r"the value's tree 'params'"):
            sharded.refit(state.replace(params=own))

    run_ranks(run, 2)
