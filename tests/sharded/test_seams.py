"""Seams, each proved by a double that is given through a constructor: a reduction that keeps its
rounding error, and state elsewhere than its params; and how a mesh is shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import HybridGroup, Then, counted, run_ranks
from functorch_zero.runtime.reduce import Carried, Kept
from functorch_zero.testing import Equality, assert_equal_values, assert_sharded_equals_unsharded
from tests.sharded.test_processes import on_processes
from tests.tiers import crossed, thinned, tiers

EXACT = Equality("bitwise")
LR = 0.5
SHAPES = {"w": (7, 5), "b": (5,), "one": ()}


def linear_loss(params: Any, buffers: Any, x: Tensor) -> Any:
    """Its gradients do not depend on the params, so those of several steps add up."""
    weights = fz.unshard(params)
    y = x @ weights["w"] + weights["b"] * x[:, :5].square()
    return (y * x[:, 2:]).mean() + weights["one"] * x.mean()


def make_params(requires_grad: bool = True) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_(requires_grad)
        for name, shape in SHAPES.items()
    }


def make_batches(num: int = 3, rows: int = 12) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [*torch.randn(num, rows, 7, generator=g, dtype=torch.float64)]


def make_step(**options: Any) -> fz.TrainStep:
    return fz.train_step(linear_loss, optim.sgd(LR), **options)


def sums_of_grads(batches: list[Tensor]) -> dict[str, Tensor]:
    """Over the steps, of the whole batches' gradients."""
    params = make_params()
    total = tree_map(torch.zeros_like, params)
    for x in batches:
        grads = torch.autograd.grad(linear_loss(params, {}, x), [*params.values()])
        total = {name: t + g for (name, t), g in zip(total.items(), grads, strict=True)}
    return total


# A reduction that keeps an error between steps


@dataclass(frozen=True)
class Rounded:
    """Sends gradients rounded, and adds what that has cost to the next ones (error feedback)."""

    dtype: torch.dtype
    keeps = {"error": "sum"}  # noqa: RUF012

    def init(self, bucket: Any, device: torch.device) -> Kept:
        return {"error": torch.zeros(bucket.numel, dtype=bucket.reduce, device=device)}

    def start(self, flat: Tensor, kept: Kept, group: Any, *, cut: bool) -> Any:
        meant = flat + kept["error"]
        sent = meant.to(self.dtype)  # (numel,)
        new = {"error": meant - sent.to(flat.dtype)}
        if not cut:
            whole = sent.to(flat.dtype)
            return whole, group.all_reduce(whole), new
        size = sent.numel() // group.size
        arrived, sizes = torch.empty_like(sent), [size] * group.size
        work = group.all_to_all(arrived, sizes, sent, sizes)
        result = flat.new_empty(size)

        def add_up() -> None:
            torch.sum(arrived.view(-1, size).to(flat.dtype), 0, out=result)

        return result, Then(work, add_up), new


ROUNDED = Rounded(torch.bfloat16)


def train(step: Any, state: Any, batches: list[Tensor], group: Any) -> Any:
    for x in batches:
        state, _ = step(state, x.tensor_split(group.size)[group.rank])
    return state


def expected_params(batches: list[Tensor], error: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of SGD on all gradients but what is still to be sent."""
    grads, params = sums_of_grads(batches), make_params(requires_grad=False)
    return {name: p - LR * (grads[name] - error[name][0]) for name, p in params.items()}


def check_conserved(step: Any, state: Any, batches: list[Tensor], *, plain: bool = False) -> None:
    """Gradients were sent, or are kept. What is kept is not nothing, unless sums are plain."""
    whole = step.unshard(state)
    error = whole.parts["reduction"]["error"]
    assert all((e.abs().max() > 1e-6) != plain for e in error.values())
    expected = expected_params(batches, error)
    for name, p in whole.params.items():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("ranks", tiers([2], [1]))
def test_a_reduction_keeps_its_error(level: int, ranks: int) -> None:
    batches = make_batches()

    def run(group: Any) -> None:
        for options in ({}, {"donate": False}):
            step = fz.shard(make_step(), level=level, group=group, reduction=ROUNDED, **options)
            check_conserved(step, train(step, step.init(make_params()), batches, group), batches)

    run_ranks(run, ranks)


def test_leaves_whose_names_differ_by_a_dot_keep_errors_of_their_own() -> None:
    params = {name: torch.ones(3, requires_grad=True) for name in ("w", ".w", "w.")}
    loss = lambda p, b, x: sum((x * w).square().mean() for w in p.values())
    step = fz.train_step(loss, optim.sgd(LR))
    sharded = fz.shard(step, level=3, group=fz.groups.SingleRank(), reduction=ROUNDED)
    state = sharded.init(params, {})
    assert {*state.parts["reduction"]["error"]} == {*params}


class InPlace(Rounded):
    """Adds to what it keeps, which the state before still holds."""

    def start(self, flat: Tensor, kept: Kept, group: Any, *, cut: bool) -> Any:
        result, work, new = super().start(flat, kept, group, cut=cut)
        return result, work, {"error": kept["error"].copy_(new["error"])}


def test_a_reduction_only_reads_what_it_keeps() -> None:
    def run(group: Any) -> None:
        step = fz.shard(make_step(), level=3, group=group, reduction=InPlace(torch.bfloat16))
        with pytest.raises(StructureError, match=r"InPlace.start has written to kept\['error'\]"):
            train(step, step.init(make_params()), make_batches(), group)

    run_ranks(run, 2)


def test_the_error_is_carried_to_other_ranks(tmp_path: Path) -> None:
    """Two ranks, three, two, one process: nothing of the sum is lost, and training goes on."""
    batches = make_batches(5)
    wholes: list[Any] = []

    def run(group: Any, done: int, until: int) -> Any:
        step = fz.shard(make_step(), level=3, group=group, reduction=ROUNDED)
        state = step.init(make_params())
        if done:
            state = checkpoint.load(tmp_path, step, like=state).state
            if group.rank == 0:
                assert_equal_values(wholes[-1], step.unshard(state), grade="reordered")
            else:
                step.unshard(state)
        state = train(step, state, batches[done:until], group)
        checkpoint.save(tmp_path, step, state)
        check_conserved(step, state, batches[:until])
        again = checkpoint.load(tmp_path, step, like=step.init(make_params())).state
        assert_equal_values(state.parts, again.parts, grade=EXACT)
        return step.unshard(state)

    for ranks, done, until in [(2, 0, 3), (3, 3, 4), (2, 4, 5)]:
        wholes.append(run_ranks(lambda g, a=done, b=until: run(g, a, b), ranks)[0])

    def back(group: Any) -> None:
        step = fz.shard(make_step(), level=1, group=group, reduction=ROUNDED)
        assert_equal_values(wholes[-1], step.unshard(step.shard(wholes[-1])), grade=EXACT)

    run_ranks(back, 3)
    kept, _ = make_step()(wholes[-1], batches[0])
    assert_equal_values(wholes[-1].parts, kept.parts, grade=EXACT)
    checkpoint.save(tmp_path / "whole", make_step(), wholes[-1])

    def from_whole(group: Any) -> None:
        step = fz.shard(make_step(), level=3, group=group, reduction=ROUNDED)
        state = checkpoint.load(tmp_path / "whole", step, like=step.init(make_params())).state
        assert_equal_values(wholes[-1], step.unshard(state), grade=EXACT)

    run_ranks(from_whole, 2)


@pytest.mark.parametrize("same_data", thinned(["replicate", "shard", None]))
def test_on_a_mesh_rows_are_those_of_the_data(same_data: Any, tmp_path: Path) -> None:
    batches = make_batches()

    def run(group: Any) -> Any:
        mesh = HybridGroup(group, shard_size=2, same_data=same_data)
        step = fz.shard(make_step(), level=3, group=mesh, reduction=ROUNDED)
        state = train(step, step.init(make_params()), batches, mesh.data)
        check_conserved(step, state, batches, plain=same_data == "shard")
        checkpoint.save(tmp_path, step, state)
        return step.unshard(state)

    whole = run_ranks(run, 4)[0]

    def load(group: Any) -> None:
        step = fz.shard(make_step(), level=3, group=group, reduction=ROUNDED)
        state = checkpoint.load(tmp_path, step, like=step.init(make_params())).state
        assert_equal_values(whole, step.unshard(state), grade="reordered")

    run_ranks(load, 3)


def test_accumulated_gradients_are_sent_or_kept() -> None:
    batches = make_batches()

    def run(group: Any) -> None:
        for rule in (None, "once"):
            step = fz.shard(
                make_step(accumulate=3),
                level=3,
                group=group,
                reduction=ROUNDED,
                reduce_gradients=rule,
            )
            check_conserved(step, train(step, step.init(make_params()), batches, group), batches)

    run_ranks(run, 2)


@pytest.mark.parametrize(
    ("mesh", "level"), crossed([None, {}, {"same_data": "replicate"}], [0, 1, 3])
)
def test_weighted_gradients_are_sent_or_kept(level: int, mesh: Any) -> None:
    """What is kept is of means: a step's weights are no others'."""
    batches = make_batches()

    def weighted(params: Any, buffers: Any, batch: tuple[Tensor, Tensor]) -> Any:
        x, weight = batch
        return linear_loss(params, buffers, x), fz.Aux(weight=weight)

    def run(group: Any) -> None:
        step = fz.train_step(weighted, optim.sgd(LR))
        ranks = group if mesh is None else HybridGroup(group, shard_size=2, **mesh)
        data = group if mesh is None else ranks.data
        sharded = fz.shard(step, level=level, group=ranks, reduction=ROUNDED)
        state = sharded.init(make_params())
        for x, weight in zip(batches, (1000.0, 1.0, 30.0), strict=True):
            own = x.tensor_split(data.size)[data.rank]
            state, _ = sharded(state, (own, torch.tensor(weight)))
        check_conserved(sharded, state, batches)

    run_ranks(run, 2 if mesh is None else 4)


def test_a_state_that_is_not_donated_stays_valid() -> None:
    x = make_batches()[0]

    def run(group: Any) -> None:
        step = fz.shard(make_step(), level=3, group=group, reduction=ROUNDED, donate=False)
        state = train(step, step.init(make_params()), make_batches(), group)
        before = tree_map(torch.clone, state)
        first, second = train(step, state, [x], group), train(step, state, [x], group)
        assert_equal_values(before, state, grade=EXACT)
        assert_equal_values(first, second, grade=EXACT)
        copied = train(step, tree_map(torch.clone, state), [x], group)
        assert_equal_values(first, copied, grade=EXACT)

    run_ranks(run, 2)


def test_a_skipped_step_keeps_the_error() -> None:
    def run(group: Any) -> None:
        step = fz.shard(make_step(nonfinite="skip"), level=3, group=group, reduction=ROUNDED)
        state = train(step, step.init(make_params()), make_batches(), group)
        before = tree_map(torch.clone, state.parts)
        state = train(step, state, [make_batches()[0] * float("inf")], group)
        assert int(state.finite.skipped) == 1
        assert_equal_values(before, state.parts, grade=EXACT)

    run_ranks(run, 2)


def test_describe_and_plan_see_what_is_kept_and_sent() -> None:
    x = make_batches()[0]

    def run(group: Any) -> tuple[Any, ...]:
        watched = counted(group)
        step = fz.shard(make_step(), level=3, group=watched, reduction=ROUNDED)
        state = train(step, step.init(make_params()), [x], group)
        watched.reset()
        train(step, state, [x], group)
        return fz.describe(step, step.init(make_params())), watched.sent_bytes("all_to_all")

    def planned(reduction: Any) -> Any:
        return fz.plan(make_params(), make_step(), level=3, ranks=2, reduction=reduction)

    plain, rounded = planned(None), planned(ROUNDED)
    (row, sent), _ = run_ranks(run, 2)
    text = str(row)
    row = next(row for row in row.rows if row.unit == "(reduction: error)")
    numel = sum(c.num_elements for c in plain.collectives if c.kind == "reduce_scatter")
    assert row.nbytes == rounded.parts == numel * 8 > 0 and plain.parts == 0
    assert row.where == "a share of the sum" and row.storage == (torch.float64,)
    assert "reduction=Rounded(dtype=torch.bfloat16)" in text and "(reduction: error)" in text
    calls = [c for c in rounded.collectives if c.kind == "all_to_all"]
    assert sent == sum(c.sent_bytes for c in calls) == numel * 2 / 2
    assert {c.dtype for c in calls} == {torch.bfloat16} and {c.phase for c in calls} == {"backward"}
    assert not [c for c in rounded.collectives if c.kind == "reduce_scatter"]
    assert "parts" in str(rounded) and json.loads(rounded.to_json())["parts"] == rounded.parts


def test_a_plan_with_a_batch_sees_the_same() -> None:
    common: dict[str, Any] = {"level": 3, "ranks": 2, "reduction": ROUNDED}
    without = fz.plan(make_params(), make_step(), **common)
    traced = fz.plan(make_params(), make_step(), **common, batch=make_batches()[0])
    assert traced.parts == without.parts
    wanted = [[c for c in p.collectives if c.kind == "all_to_all"] for p in (traced, without)]
    assert wanted[0] == wanted[1] != []


# What is kept in pieces, and what all ranks have


class Finished:
    """A reduction whose result becomes part of a mean when it is here."""

    def __init__(self, work: Any, finish: Callable[[], None]):
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()


class Averaged:
    """Sums as they are; and keeps their mean over the steps."""

    keeps: Mapping[str, Carried] = {"mean": "pieces", "count": "same"}

    def init(self, bucket: Any, device: torch.device) -> Kept:
        mean = torch.zeros(bucket.piece, dtype=bucket.dtype, device=device)
        return {"mean": mean, "count": torch.zeros(1, dtype=torch.int64, device=device)}

    def start(self, flat: Tensor, kept: Kept, group: Any, *, cut: bool) -> Any:
        result = flat.new_empty(flat.numel() // group.size) if cut else flat
        work = group.reduce_scatter(result, flat) if cut else group.all_reduce(flat)
        count, mean = kept["count"] + 1, torch.empty_like(kept["mean"])

        def finish() -> None:
            torch.lerp(kept["mean"], result, 1 / count.to(result.dtype), out=mean)

        return result, Finished(work, finish), {"mean": mean, "count": count}


@pytest.mark.parametrize("level", thinned([3, 0]))
def test_pieces_and_what_is_the_same_are_carried(level: int, tmp_path: Path) -> None:
    batches = make_batches(4)

    def first(group: Any) -> Any:
        step = fz.shard(make_step(), level=level, group=group, reduction=Averaged())
        state = train(step, step.init(make_params()), batches[:3], group)
        checkpoint.save(tmp_path, step, state)
        assert "(reduction: mean)" in str(fz.describe(step, state))
        return step.unshard(state)

    def then(group: Any) -> Any:
        step = fz.shard(make_step(), level=level, group=group, reduction=Averaged())
        state = checkpoint.load(tmp_path, step, like=step.init(make_params())).state
        assert_equal_values(whole, step.unshard(state), grade=EXACT)
        assert_equal_values(step.shard(whole).parts, state.parts, grade=EXACT)
        return step.unshard(train(step, state, batches[3:], group))

    whole = run_ranks(first, 2)[0]
    last = run_ranks(then, 3)[0].parts["reduction"]
    for name, total in sums_of_grads(batches).items():
        torch.testing.assert_close(last["mean"][name], total / 4, rtol=1e-12, atol=1e-14)
    assert [int(count) for count in last["count"].values()] == [4] * len(last["count"])


def test_pieces_of_replicas_are_refused() -> None:
    def run(group: Any) -> None:
        mesh = HybridGroup(group, shard_size=1)
        with pytest.raises(NotImplementedError, match=r"Averaged keeps pieces.*Remedy"):
            fz.shard(make_step(), level=3, group=mesh, reduction=Averaged()).init(make_params())

    run_ranks(run, 2)


def adamw_step(**options: Any) -> fz.TrainStep:
    return fz.train_step(linear_loss, optim.adamw(0.1), **options)


def test_the_proof_takes_seams(tmp_path: Path) -> None:
    """A step with state elsewhere equals the unsharded one; one that rounds gradients doesn't."""
    args = adamw_step(), make_params(), {}, make_batches()
    place = {"state": fz.places.File(tmp_path)}
    assert_sharded_equals_unsharded(*args, place=place, ranks=(1,))
    with pytest.raises(AssertionError):
        assert_sharded_equals_unsharded(*args, reduction=ROUNDED, ranks=(2,), levels=(3,))


# How a mesh is shown

MESHES: dict[str, dict[str, Any]] = {
    "replicate 2 x shard 1": {"shard_size": 1},
    "replicate 2 x shard 1; same data along replicate": {
        "shard_size": 1,
        "same_data": "replicate",
    },
    "replicate 1 x shard 2; same data along shard": {"shard_size": 2, "same_data": "shard"},
}


@pytest.mark.parametrize("line", thinned(MESHES))
def test_a_mesh_is_shown(line: str) -> None:
    def run(group: Any) -> str:
        step = fz.shard(adamw_step(), level=3, group=HybridGroup(group, **MESHES[line]))
        return str(fz.describe(step, step.init(make_params())))

    assert f"mesh: {line}" in run_ranks(run, 2)[0].splitlines()
    for batch in (None, make_batches()[0]):
        planned = fz.plan(
            make_params(), adamw_step(), level=3, batch=batch, ranks=2, **MESHES[line]
        )
        assert f"mesh         {line}" in str(planned)
        assert json.loads(planned.to_json())["mesh"] == line


@pytest.mark.parametrize("shard_size", [2, None])
def test_one_axis_or_a_mesh_of_one_replica_has_no_line(shard_size: int | None) -> None:
    planned = fz.plan(make_params(), adamw_step(), level=3, ranks=2, shard_size=shard_size)
    assert "mesh" not in str(planned)


@pytest.mark.thorough
def test_processes_give_what_threads_give(tmp_path: Path) -> None:
    batches = make_batches()

    def run(group: Any) -> Any:
        place = {"state": fz.places.File(tmp_path)}
        step = fz.shard(adamw_step(), level=3, group=group, reduction=ROUNDED, place=place)
        return step.unshard(train(step, step.init(make_params()), batches, group))

    expected = run_ranks(run, 2)[0]
    for found in on_processes(run, 2):
        assert_equal_values(expected, found, grade=EXACT)


# What is refused


def test_states_of_another_reduction_are_refused() -> None:
    plain = fz.shard(make_step(), level=3, group=fz.groups.SingleRank())
    keeping = fz.shard(make_step(), level=3, group=fz.groups.SingleRank(), reduction=ROUNDED)
    other = fz.shard(make_step(), level=3, group=fz.groups.SingleRank(), reduction=Averaged())
    x = make_batches()[0]
    with pytest.raises(StructureError, match=r"no parts.*Rounded.*error.*rank 0.*Remedy"):
        keeping(plain.init(make_params()), x)
    with pytest.raises(StructureError, match=r"has parts.*error\.b.*Summed keeps nothing.*Remedy"):
        plain(keeping.init(make_params()), x)
    with pytest.raises(StructureError, match=r"state\.parts.*path reduction"):
        other(keeping.init(make_params()), x)
    with pytest.raises(StructureError, match=r"no parts, and reduction=Rounded"):
        keeping.unshard(plain.init(make_params()))
    with pytest.raises(StructureError, match=r"has parts.*replace\(parts=None\)"):
        plain.unshard(keeping.init(make_params()))
    whole = keeping.unshard(keeping.init(make_params()))
    with pytest.raises(StructureError, match=r"has parts.*Remedy"):
        plain.shard(whole)
    state, _ = plain(plain.shard(whole.replace(parts=None)), x)
    assert state.parts is None
    first = keeping.shard(plain.unshard(state)).parts["reduction"]["error"]
    assert all(not e.any() for e in first.values()), "a state without parts is given first ones"


def test_checkpoints_of_another_reduction_are_refused(tmp_path: Path) -> None:
    plain = fz.shard(make_step(), level=3, group=fz.groups.SingleRank())
    keeping = fz.shard(make_step(), level=3, group=fz.groups.SingleRank(), reduction=ROUNDED)
    checkpoint.save(tmp_path / "plain", plain, plain.init(make_params()))
    checkpoint.save(tmp_path / "kept", keeping, keeping.init(make_params()))
    with pytest.raises(StructureError, match=r"lacks parts\.reduction\.error\.b"):
        checkpoint.load(tmp_path / "plain", keeping, like=keeping.init(make_params()))
    with pytest.raises(StructureError, match=r"has parts\.reduction\.error\.b.*lacks"):
        checkpoint.load(tmp_path / "kept", plain, like=plain.init(make_params()))
    options = {"allow_missing": True}
    checkpoint.load(tmp_path / "plain", keeping, like=keeping.init(make_params()), **options)


def test_an_import_of_weights_leaves_the_parts_as_they_are() -> None:
    step = fz.shard(make_step(), level=3, group=fz.groups.SingleRank(), reduction=ROUNDED)
    like = train(step, step.init(make_params()), make_batches(), fz.groups.SingleRank())
    before = {name: x.clone() for name, x in like.parts["reduction"]["error"].items()}
    assert all(x.any() for x in before.values())
    state = checkpoint.import_weights(make_params(), step, like=like)
    assert_equal_values(before, state.parts["reduction"]["error"], grade=EXACT)


@dataclass(frozen=True)
class Wrong(Rounded):
    """Returns something else than `init` has promised."""

    how: str = ""

    def start(self, flat: Tensor, kept: Kept, group: Any, *, cut: bool) -> Any:
        result, work, new = super().start(flat, kept, group, cut=cut)
        error = new["error"]
        return {
            "another name": (result, work, {"eror": error}),
            "another shape": (result, work, {"error": error[:1]}),
            "another dtype": (result, work, {"error": error.bfloat16()}),
            "a number": (result, work, {"error": 0.0}),
            "nothing kept": (result, work, None),
            "no work": (result, None, new),
            "no sum": (None, work, new),
            "a longer sum": (torch.cat([result, result]), work, new),
            "two results": (result, work),
        }[self.how]


WRONG = {
    "another name": r"the tensors to keep .*expected a dict with \['error'\], got \['eror'\]",
    "another shape": r"kept\['error'\] .*expected a tensor of shape \(\d\d+,\).*got .*\(1,\)",
    "another dtype": r"kept\['error'\] .*float64.*got .*bfloat16",
    "a number": r"kept\['error'\] .*got float",
    "nothing kept": "the tensors to keep .*got NoneType",
    "no work": r"the work .*expected an object with wait\(\).*got NoneType",
    "no sum": "the sum .*got NoneType",
    "a longer sum": "the sum .*expected a tensor of shape",
    "two results": r"its results .*Started\(result, work, kept\), got tuple",
}


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("level", thinned([0, 3, 1]))
def test_a_reduction_that_returns_other_things_is_named(how: str, level: int) -> None:
    def run(group: Any) -> None:
        reduction = Wrong(torch.bfloat16, how)
        step = fz.shard(make_step(), level=level, group=group, reduction=reduction)
        state, before = step.init(make_params()), make_params()
        with pytest.raises(fz.errors.FunctorchZeroError, match=r"Wrong\.start .*Remedy") as error:
            step(state, make_batches()[0])
        assert re.search(WRONG[how], str(error.value))
        assert_equal_values(before, step.unshard(state).params, grade=EXACT)

    run_ranks(run, 2)


class Misshapen(Rounded):
    def init(self, bucket: Any, device: torch.device) -> Kept:
        return {"error": torch.zeros(bucket.numel + 1)}


class Misnamed(Rounded):
    def init(self, bucket: Any, device: torch.device) -> Kept:
        return {"eror": torch.zeros(bucket.numel)}


def test_wrong_reductions_are_refused() -> None:
    group = fz.groups.SingleRank()
    for wrong in (Rounded, "bf16", torch.bfloat16):
        with pytest.raises(TypeError, match=r"reduction must be an object.*Remedy"):
            fz.shard(make_step(), level=3, group=group, reduction=wrong)
    step = make_step(loss_scale=fz.LossScale())
    with pytest.raises(NotImplementedError, match=r"Rounded keeps gradients.*loss_scale"):
        fz.shard(step, level=3, group=group, reduction=ROUNDED)
    for made in (Misshapen, Misnamed):
        step = fz.shard(make_step(), level=3, group=group, reduction=made(torch.bfloat16))
        with pytest.raises(StructureError, match=rf"{made.__name__}\.init.*expected.*got"):
            step.init(make_params())
