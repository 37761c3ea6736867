"""Each unit's tensors in the place of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import Equality, assert_equal_values
from tests.local import local_leaves
from tests.modules import Unit
from tests.places import Away, Counted, layer
from tests.tiers import thinned, tiers

EXACT = Equality("bitwise")
KINDS = ("state", "params", "gradients", "saved")
WIDTH = 24


def model() -> Any:
    """The params of two layers and a head, and their `apply`."""
    torch.manual_seed(0)
    net = nn.Sequential(layer(WIDTH), layer(WIDTH), nn.Linear(WIDTH, 3)).double()
    apply, params, _ = fz.functionalize(net, units=Unit)
    return (lambda p, x: apply(p, {}, x)[0]), params


def batches(group: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 48, WIDTH, generator=g, dtype=torch.float64)
    return [x.tensor_split(group.size)[group.rank] for x in rows]


def train(step: Any, state: Any, group: Any, num: int = 3) -> Any:
    for x in batches(group)[:num]:
        state, _ = step(state, x)
    return state


def check(place: Any, unit: str, state: Any) -> None:
    """Params and optimizer state of a unit lie in a place, and nothing else does."""
    rows = zip(fz.named_leaves(state), local_leaves(state), strict=True)
    found = {path: place.holds(x) for path, x in rows if x.dim() and x.numel()}
    assert any(found.values())
    assert found == {path: f"{unit}.linear." in path for path in found}


OPTIMIZERS = {
    "adamw": optim.adamw(0.1),
    "muon": optim.chain(optim.muon(0.1), optim.scale(0.5)),
    "lamb": optim.lamb(0.1),
}


@pytest.mark.parametrize("donate", thinned([False, True]))
@pytest.mark.parametrize("level", tiers([3], [1, 0, 2]))
@pytest.mark.parametrize("name", thinned([*OPTIMIZERS]))
def test_every_kind_by_unit(name: str, level: int, donate: bool, tmp_path: Path) -> None:
    """One layer's in one place, the other's in another, and the head's in memory."""
    forward, params = model()
    loss = lambda p, b, x: forward(p, x).square().mean()
    step = fz.train_step(loss, OPTIMIZERS[name], accumulate=2)
    for n in (0, 1):
        (tmp_path / f"{n}").mkdir()

    def run(group: Any) -> None:
        one, two = Counted(tmp_path / "0"), Counted(tmp_path / "1")
        places = {key: {"": None, "*": two, "0": one, "2": None} for key in KINDS}
        options: dict[str, Any] = {"level": level, "group": group, "donate": donate}
        plain = fz.shard(step, **options)
        sharded = fz.shard(step, **options, place=places)
        state = sharded.init(params)
        check(one, "0", state), check(two, "1", state)
        later = train(sharded, state, group)
        check(one, "0", later), check(two, "1", later)
        expected = plain.unshard(train(plain, plain.init(params), group))
        assert_equal_values(expected, sharded.unshard(later), grade=EXACT)

    run_ranks(run, 2)


@pytest.mark.parametrize("kind", thinned(KINDS))
def test_only_what_is_named(kind: str, tmp_path: Path) -> None:
    """Places are asked for tensors of their unit alone, the saved ones, too."""
    forward, params = model()
    step = fz.train_step(lambda p, b, x: forward(p, x).square().mean(), optim.adamw(0.1))

    def run(group: Any) -> None:
        nums = []
        for units in (["0"], ["1"], ["0", "1"], ["**"]):
            place = Counted(tmp_path)
            sharded = fz.shard(
                step, level=3, group=group, place={kind: dict.fromkeys(units, place)}
            )
            train(sharded, sharded.init(params), group)
            nums.append(place.calls["empty"] - 2)  # beside those that try it
        one, two, both, everything = nums
        assert one > 0 and two > 0 and both == one + two and everything >= both
        assert everything > both or kind == "saved"  # the head saves its input, which lies there

    run_ranks(run, 2)


def test_states_that_are_brought(tmp_path: Path) -> None:
    """Evaluation, checkpoints and refit bring each unit's from its place."""
    forward, params = model()
    loss = lambda p, b, x: forward(p, x).square().mean()
    step = fz.train_step(loss, optim.schedule_free_adamw(0.1))
    check = fz.eval_step(
        lambda p, b, x: {"loss": loss(p, b, x)}, params=optim.schedule_free_eval_params
    )

    def run(group: Any) -> None:
        found = []
        for place in (None, {"state": {"0": Away(), "1": Away()}}):
            options: dict[str, Any] = {"level": 1, "group": group, "place": place}
            sharded = fz.shard(step, **options)
            state = train(sharded, sharded.init(params), group, 1)
            numbers = fz.shard(check, **options)(state, batches(group)[0])
            folder = tmp_path / f"{place is None}"
            checkpoint.save(folder, sharded, state)
            loaded = checkpoint.load(folder, sharded, like=sharded.init(params)).state
            again = sharded.refit(loaded, params)
            wholes = [sharded.unshard(train(sharded, x, group, 1)) for x in (again, loaded)]
            found.append((*wholes, numbers))
        assert_equal_values(*found, grade=EXACT)

    run_ranks(run, 2)


def two_nets() -> Any:
    """A program that trains one net, which another one follows."""
    forward, params = model()
    adam = optim.adamw(0.1)

    def program(value: Any, x: Tensor) -> Any:
        def loss(student: Any, teacher: Any, x: Tensor) -> Tensor:
            return (forward(student, x) - forward(teacher, x + 1)).square().mean()

        mean, grads = fz.value_and_grad(loss)(value["net"], value["teacher"], x)
        net, state = adam.apply(grads, value["state"], value["net"])
        teacher = tree_map(lambda t, n: (0.9 * t + 0.1 * n).detach(), value["teacher"], net)
        # Another name than that of the argument
        return {"net": net, "teacher": teacher, "state": state}, {"loss": mean}

    def init(student: Any, other: Any) -> Any:
        frozen = tree_map(lambda p: p.detach().clone(), other)
        return {"net": student, "teacher": frozen, "state": adam.init(student)}

    return fz.program_step(program, init=init), (params, params)


@pytest.mark.parametrize("donate", thinned([True, False]))
@pytest.mark.parametrize("level", thinned([3, 1, 0]))
def test_a_program_names_trees_by_the_arguments_of_init(
    level: int, donate: bool, tmp_path: Path
) -> None:
    step, nets = two_nets()

    def run(group: Any) -> None:
        disk = Counted(tmp_path)
        rule = {"student.0": disk, "other": disk}
        options: dict[str, Any] = {"level": level, "group": group, "donate": donate}
        wholes = []
        for place in (None, dict.fromkeys(KINDS, rule)):
            sharded = fz.shard(step, **options, place=place)
            state = train(sharded, sharded.init(*nets), group)
            wholes.append(sharded.unshard(state))
        value = state.value
        assert [disk.holds(f) for f in value["net"].flats()].count(True) == 1
        assert all(map(disk.holds, value["teacher"].flats()))
        held = [x for x in optree.tree_leaves(value["state"].as_it_lies) if x.dim()]
        assert 0 < sum(map(disk.holds, held)) < len(held)
        assert_equal_values(*wholes, grade=EXACT)

    run_ranks(run, 2)


def test_patterns_that_name_nothing() -> None:
    forward, params = model()
    step = fz.train_step(lambda p, b, x: forward(p, x).square().mean(), optim.adamw(0.1))
    program, nets = two_nets()
    group = fz.groups.SingleRank()
    words = r"`place\['saved'\]` names no unit: path head.*such as 0, 1.*units=.*`\*\*`"
    wrong = {"saved": {"": None, "head": Away()}}
    with pytest.raises(StructureError, match=words):
        fz.shard(step, level=3, group=group, place=wrong).init(params)
    with pytest.raises(StructureError, match=words):
        fz.plan(params, step, level=3, ranks=2, place=wrong)
    # A leaf is none: those of a unit lie together
    leaf = {"params": {"0.linear.weight": Away()}}
    with pytest.raises(StructureError, match=r"names no unit: path 0\.linear\.weight"):
        fz.shard(step, level=3, group=group, place=leaf).init(params)
    words = r"names no unit: path net.*init's arguments \(student, other\).*student.0"
    with pytest.raises(StructureError, match=words):
        fz.shard(program, level=3, group=group, place={"state": {"net": Away()}}).init(*nets)
    for given in ({"0": "cpu"}, {0: Away()}, {"0": Away}):
        with pytest.raises(TypeError, match=r"place\['state'\] must be .*patterns.*Remedy"):
            fz.shard(step, level=3, group=group, place={"state": given})
