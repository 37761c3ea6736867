"""The step for one process: pure, seeded, checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.groups.single import SingleRank
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.evaluate import eval_step
from functorch_zero.step.loss import Aux
from functorch_zero.step.state import State
from functorch_zero.step.train import train_step
from functorch_zero.tree import named_leaves
from tests.compare import train
from tests.models import MLP, ZOO


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def fingerprint(tree: Any) -> list[Any]:
    """Identities, versions and values of all tensors."""
    return [(id(x), x._version, x.detach().clone()) for x in optree.tree_leaves(tree)]


def unchanged(before: list[Any], tree: Any) -> bool:
    return all(
        i == id(x) and version == x._version and torch.equal(value, x)
        for (i, version, value), x in zip(before, optree.tree_leaves(tree), strict=True)
    )


@pytest.mark.parametrize("name", ["mlp", "convnet"])
def test_a_step_is_pure(name: str) -> None:
    case = ZOO[name]
    loss_fn, params, buffers = case.build()
    step = train_step(loss_fn, optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)))
    state = step.init(params, buffers)
    (batch,) = case.batches(1, 8)
    before = fingerprint(
        (params, buffers, state.params, state.buffers, state.opt_state, state.step, batch)
    )
    first, metrics = step(state, batch)
    again, _ = step(state, batch)
    assert unchanged(
        before, (params, buffers, state.params, state.buffers, state.opt_state, state.step, batch)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(optree.tree_leaves(first), optree.tree_leaves(again), strict=True)
    )
    assert not metrics["loss"].requires_grad
    assert all(
        p.is_leaf and p.requires_grad and p.grad is None for p in optree.tree_leaves(first.params)
    )


def test_init_copies() -> None:
    loss_fn, params, buffers = ZOO["convnet"].build()
    state = train_step(loss_fn, optim.sgd(0.1)).init(params, buffers)
    for mine, theirs in ((state.params, params), (state.buffers, buffers)):
        for name, leaf in mine.items():
            assert leaf.data_ptr() != theirs[name].data_ptr() and torch.equal(leaf, theirs[name])


def test_the_same_as_torch() -> None:
    """Plain torch.optim on the module itself."""
    model = MLP().double()
    apply, params, buffers = functionalize(model)
    step = train_step(
        lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1, momentum=0.9)
    )
    batches = [torch.randn(4, 7).double() for _ in range(3)]
    run = train(step, params, buffers, batches)
    theirs = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x in batches:
        theirs.zero_grad()
        model(x).square().mean().backward()
        theirs.step()
    for name, p in model.named_parameters():
        assert torch.allclose(run.states[-1].params[name], p, rtol=1e-12, atol=0)


def test_frozen_leaves_stay_and_have_no_state() -> None:
    apply, params, buffers = functionalize(MLP())
    step = train_step(
        lambda p, b, x: apply(p, b, x)[0].square().mean(),
        optim.adamw(0.1),
        trainable=lambda path, leaf: path.endswith("bias"),
    )
    state, _ = step(step.init(params, buffers), torch.randn(4, 7))
    for name, leaf in state.params.items():
        assert leaf.requires_grad == name.endswith("bias")
        assert torch.equal(leaf, params[name]) != name.endswith("bias"), name
    follow = [x for x in optree.tree_leaves(state.opt_state) if x.dim() == 1]
    assert len(follow) == 2 * 3


def test_trainable_as_a_tree() -> None:
    params = {"a": torch.ones(2), "b": [torch.ones(3)]}
    mask = {"a": False, "b": [True]}
    step = train_step(
        lambda p, b, x: p["a"].sum() + p["b"][0].sum(), optim.sgd(1.0), trainable=mask
    )
    state, _ = step(step.init(params), None)
    assert state.params["a"].tolist() == [1, 1] and state.params["b"][0].tolist() == [0, 0, 0]
    with pytest.raises(StructureError, match=r"the mask.*path b\.0"):
        train_step(lambda p, b, x: p["a"].sum(), optim.sgd(1.0), trainable={"a": False}).init(
            params
        )


def loss_of(result: Any) -> Any:
    return train_step(lambda p, b, x: result(p), optim.sgd(0.1))


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (
            lambda p: p["w"] * 2,
            StructureError,
            r"not a scalar: expected shape \(\) of a real.*, got shape \(3,\).*Remedy",
        ),
        (lambda p: p["w"].sum(0, keepdim=True), StructureError, r"got shape \(1,\)"),
        (lambda p: 1.0, StructureError, "got float"),
        (lambda p: torch.tensor(1, dtype=torch.int64), StructureError, "int64"),
        (
            lambda p: p["w"].detach().sum(),
            StructureError,
            "does not depend on any trained leaf.*Remedy",
        ),
        (lambda p: (p["w"].sum(), {"accuracy": 1}), TypeError, r"Aux\(\.\.\.\)"),
        (
            lambda p: (p["w"].sum(), Aux(buffers={"new": torch.ones(1)})),
            StructureError,
            r"Aux\.buffers.*path new",
        ),
        (
            lambda p: (p["w"].sum(), Aux(metrics={"m": torch.ones(2)})),
            StructureError,
            r"0-d tensor, got shape \(2,\)",
        ),
    ],
)
def test_what_a_loss_must_return(result: Any, error: type[Exception], message: str) -> None:
    step = loss_of(result)
    state = step.init({"w": torch.ones(3, requires_grad=True)})
    with pytest.raises(error, match=message):
        step(state, None)
    if error is StructureError and "Aux" not in message and "0-d" not in message:
        with pytest.raises(error, match=r"on rank \d\. Remedy"):
            run_ranks(
                lambda group: shard(step, level=3, group=group)(init_on(group, step), None), 2
            )


def init_on(group: Any, step: Any) -> State:
    return shard(step, level=3, group=group).init({"w": torch.ones(3, requires_grad=True)})


def test_what_params_must_be() -> None:
    step = loss_of(lambda p: p["w"].sum())
    with pytest.raises(StructureError, match=r"path w, got float"):
        step.init({"w": 1.0})
    with pytest.raises(StructureError, match=r"no leaf of params is trained.*Remedy"):
        step.init({"w": torch.ones(3)})


def test_an_optimizer_must_be_a_transform() -> None:
    for wrong in (torch.optim.SGD, lambda g: g, None):
        with pytest.raises(TypeError, match=r"optimizer must be an optim\.Transform.*Remedy"):
            train_step(lambda p, b, x: p["w"].sum(), wrong)  # type: ignore[arg-type]


def test_states_of_the_other_kind_are_refused() -> None:
    step = loss_of(lambda p: p["w"].sum())
    whole = step.init({"w": torch.ones(3, requires_grad=True)})
    with pytest.raises(StructureError, match=r"given a whole state.*Remedy.*step.shard"):
        run_ranks(lambda group: shard(step, level=1, group=group)(whole, None), 1)
    (state,) = run_ranks(lambda group: init_on(group, step), 1)
    with pytest.raises(StructureError, match=r"sharded state.*Remedy.*unshard"):
        step(state, None)
    with pytest.raises(StructureError, match="sharded state"):
        eval_step(lambda p, b, x: {})(state, None)


def dropping(p: Any, b: Any, x: Tensor) -> Tensor:
    return (F.dropout(x, 0.5) @ p["w"]).square().mean()


@pytest.mark.parametrize("seed", [0, 7])
def test_dropout_is_a_function_of_seed_and_step(seed: int) -> None:
    step = train_step(dropping, optim.sgd(0.1))
    state = step.init({"w": torch.ones(5, requires_grad=True)}, seed=seed)
    x = torch.ones(8, 5)
    torch.manual_seed(1)
    first, one = step(state, x)
    torch.manual_seed(2)
    again, two = step(state, x)
    assert torch.equal(first.params["w"], again.params["w"]) and torch.equal(
        one["loss"], two["loss"]
    )
    _, later = step(first, x)
    _, unmoved = step(first.replace(params=state.params), x)
    assert not torch.equal(unmoved["loss"], one["loss"]), "the next step draws other numbers"
    assert later["loss"] is not None
    _, other = step(state.replace(seed=torch.tensor(seed + 1)), x)
    assert not torch.equal(other["loss"], one["loss"])


def test_the_global_random_state_is_left_alone_with_a_seed_and_used_without() -> None:
    step = train_step(dropping, optim.sgd(0.1))
    params, x = {"w": torch.ones(5, requires_grad=True)}, torch.ones(8, 5)
    before = torch.get_rng_state()
    state, _ = step(step.init(params), x)
    eval_step(lambda p, b, x: {"loss": dropping(p, b, x)})(state, x)
    assert torch.equal(torch.get_rng_state(), before)
    unseeded = step.init(params, seed=None)
    _, one = step(unseeded, x)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    assert torch.equal(step(unseeded, x)[1]["loss"], one["loss"])
    assert torch.equal(one["loss"], _global(params, x, before))


def _global(params: Any, x: Tensor, state: Tensor) -> Tensor:
    torch.set_rng_state(state)
    return dropping(params, None, x).detach()


def test_eval_step() -> None:
    loss_fn, params, buffers = ZOO["convnet"].build()
    state = train_step(loss_fn, optim.sgd(0.1)).init(params, buffers)

    def fn(params: Any, buffers: Any, batch: Any) -> Any:
        assert not torch.is_grad_enabled()
        return {"size": params["head.weight"].abs().sum(), "number": 2.5}

    before = fingerprint(state)
    metrics = eval_step(fn)(state, None)
    assert unchanged(before, state)
    assert set(metrics) == {"size", "number"} and all(
        m.dim() == 0 and not m.requires_grad for m in metrics.values()
    )
    weighted = eval_step(lambda p, b, x: Aux(metrics={"a": 1}, weight=3))(state, None)
    assert float(weighted["a"]) == 1
    with pytest.raises(TypeError, match="metrics by name"):
        eval_step(lambda p, b, x: 1.0)(state, None)
    with pytest.raises(StructureError, match="0-d"):
        eval_step(lambda p, b, x: {"a": torch.ones(2)})(state, None)


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_an_evaluation_with_no_weight_for_a_mean_is_refused(weight: float) -> None:
    """On ranks, a mean by such weights would be no mean, and nothing would tell."""
    step = train_step(lambda p, b, x: (p["w"] * x).sum(), optim.sgd(0.1))
    params = {"w": torch.ones(2, requires_grad=True)}
    evaluate = eval_step(lambda p, b, x: Aux(metrics={"a": 1.0}, weight=weight))
    with pytest.raises(StructureError, match=r"expected >= 0, .*got .*Remedy"):
        evaluate(step.init(params), None)

    def run(group: Any) -> None:
        state = shard(step, level=1, group=group).init(params)
        shard(evaluate, level=1, group=group)(state, torch.ones(2))

    with pytest.raises(StructureError, match=r"expected >= 0, .*got .*Remedy"):
        run_ranks(run, 2)


def test_an_evaluation_that_writes_to_params_is_refused() -> None:
    """It sees the state's own tensors."""
    step = train_step(lambda p, b, x: (p["w"] * x).sum(), optim.sgd(0.1))
    state = step.init({"w": torch.ones(2, requires_grad=True)})
    with pytest.raises(StructureError, match=r"in place.*Remedy"):
        eval_step(lambda p, b, x: {"a": p["w"].mul_(2.0).sum()})(state, None)


def test_a_state_is_a_pytree() -> None:
    loss_fn, params, buffers = ZOO["convnet"].build()
    state = train_step(loss_fn, optim.adamw(0.1)).init(params, buffers)
    copied = tree_map(torch.clone, state)
    assert isinstance(copied, State) and copied.params.units == params.units
    assert named_leaves(copied).keys() == named_leaves(state).keys()
    assert "params.head.weight" in named_leaves(state)
    model = ZOO["convnet"].model().double()
    model.load_state_dict({**named_leaves(state.params), **state.buffers})
    assert isinstance(model, nn.Module)


def test_a_loss_that_fails_leaves_the_state_usable() -> None:
    def loss_fn(p: Any, b: Any, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ArithmeticError("bad batch")
        return (x @ p["w"]).square().mean()

    step = train_step(loss_fn, optim.sgd(0.1))
    state = step.init({"w": torch.ones(5, requires_grad=True)})
    expected, _ = step(state, torch.ones(2, 5))
    with pytest.raises(ArithmeticError):
        step(state, torch.full((2, 5), float("nan")))
    assert torch.equal(step(state, torch.ones(2, 5))[0].params["w"], expected.params["w"])

    def run(group: Any) -> Tensor:
        sharded = shard(step, level=3, group=group)
        held = sharded.init({"w": torch.ones(5, requires_grad=True)})
        with pytest.raises(ArithmeticError):
            sharded(held, torch.full((2, 5), float("nan")))
        return sharded.unshard(sharded(held, torch.ones(2, 5))[0]).params["w"]

    assert torch.equal(run(SingleRank()), expected.params["w"])


def test_what_is_no_state_weight_or_metric_is_refused() -> None:
    step, params = (
        train_step(lambda p, b, x: (p["w"] - x).sum(), optim.sgd(0.1)),
        {"w": torch.ones(3, requires_grad=True)},
    )
    with pytest.raises(TypeError, match=r"takes .state, batch., and .*got a dict"):
        step(params, step.init(params))
    for weight, text in (
        (-1, ">= 0"),
        (float("nan"), ">= 0"),
        (torch.tensor(-1.0), ">= 0"),
        ("3", "got str"),
    ):
        weighted = train_step(
            lambda p, b, x, w=weight: ((p["w"] - x).sum(), Aux(weight=w)), optim.sgd(0.1)
        )
        with pytest.raises((StructureError, TypeError), match=text):
            weighted(weighted.init(params), torch.ones(3))
    named = train_step(
        lambda p, b, x: ((p["w"] - x).sum(), Aux(metrics={"loss": 1.0})), optim.sgd(0.1)
    )
    with pytest.raises(StructureError, match='called "loss"'):
        named(named.init(params), torch.ones(3))


def test_a_loss_of_other_tensors_is_refused() -> None:
    """Of the module's own parameters, say: nothing would be trained."""
    own = torch.ones(3, requires_grad=True)
    step = train_step(lambda p, b, x: (own * x).sum(), optim.adamw(0.1))
    with pytest.raises(
        StructureError,
        match=r"does not depend on any trained leaf.*with `apply` and not the module",
    ):
        step(step.init({"w": torch.ones(3, requires_grad=True)}), torch.ones(3))


def with_scale(p: Any, b: Any, x: Tensor, scale: float) -> Tensor:
    return scale * (p["w"] * x).sum()


@functools.wraps(with_scale)
def by_names(p: Any, b: Any, x: Tensor) -> Tensor:
    return with_scale(p, b, x, 2.0)


@functools.wraps(with_scale)
def by_places(*args: Any) -> Tensor:
    return with_scale(*args, 2.0)


@pytest.mark.parametrize("loss", [by_names, by_places])
def test_a_decorator_may_give_a_loss_more_than_it_takes(loss: Callable[..., Any]) -> None:
    step = train_step(loss, optim.sgd(0.5))
    state, _ = step(step.init({"w": torch.ones(3, requires_grad=True)}), torch.ones(3))
    assert torch.equal(state.params["w"], torch.zeros(3))
