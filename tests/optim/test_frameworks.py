"""Optimizers and states from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.optim.claims.check import check_claims
from functorch_zero.optim.local import Local
from functorch_zero.tree import paths
from tests.parity.cases import assert_close, gradients, hostile_tree, run, stacked
from tests.tiers import thinned


class Pair(NamedTuple):
    """As optax.GradientTransformation."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def optax_momentum(decay: float) -> Pair:
    def init(params: Any) -> Any:
        return tree_map(torch.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = tree_map(lambda t, u: decay * t + u, state, updates)
        return tree_map(torch.clone, new), new

    return Pair(init, update)


def torchopt_momentum(decay: float) -> Pair:
    inner = optax_momentum(decay)

    def update(
        updates: Any, state: Any, *, params: Any = None, inplace: bool = True
    ) -> tuple[Any, Any]:
        assert not inplace and params is not None
        return inner.update(updates, state)

    return Pair(inner.init, update)


@pytest.mark.parametrize(
    "needs", [needs for needs in optim.Needs if needs != optim.Needs.STATISTICS]
)
def test_pairs_of_functions(needs: optim.Needs) -> None:
    params = hostile_tree()
    grads = gradients(params, 3)
    expected, _, _ = run(optim.trace(0.9), params, grads)
    pair = optax_momentum(0.9)
    for made in (
        optim.from_optax(pair, needs=needs),
        optim.from_optax((pair.init, pair.update), needs=needs),
        optim.from_torchopt(torchopt_momentum(0.9), needs=needs),
    ):
        assert made.needs == needs
        got, _, _ = run(made, params, grads)
        assert_close(stacked(got), stacked(expected))
    check_claims(optim.from_optax(pair, needs=needs), params)


def test_pairs_that_claim_too_little() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return tree_map(lambda u: u / u.norm(), updates), state

    pair = Pair(lambda params: (), update)
    with pytest.raises(TransformError, match="norm"):
        check_claims(optim.from_optax(pair, needs=optim.Needs.POINTWISE), hostile_tree())
    with pytest.raises(ValueError, match="with_statistics"):
        optim.from_optax(pair, needs=optim.Needs.STATISTICS)


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1)),
    "Adam": (torch.optim.Adam, dict(lr=0.1, amsgrad=True)),
    "Adamax": (torch.optim.Adamax, dict(lr=0.1, weight_decay=0.1)),
    "NAdam": (torch.optim.NAdam, dict(lr=0.1)),
    "RAdam": (torch.optim.RAdam, dict(lr=0.1)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=0.1, initial_accumulator_value=0.5)),
    "Adadelta": (torch.optim.Adadelta, dict(lr=1.0)),
    "RMSprop": (torch.optim.RMSprop, dict(lr=0.1, momentum=0.9, centered=True)),
    "Rprop": (torch.optim.Rprop, dict(lr=0.1)),
    "ASGD": (torch.optim.ASGD, dict(lr=0.1, t0=2.0)),
}


def torch_params(params: Any) -> list[Tensor]:
    return [p.clone().requires_grad_() for p in optree.tree_leaves(params)]


def torch_steps(optimizer: torch.optim.Optimizer, own: list[Tensor], grads: list[Any]) -> None:
    for grad in grads:
        for p, g in zip(own, optree.tree_leaves(grad), strict=True):
            p.grad = g.clone()
        optimizer.step()


@pytest.mark.parametrize("name", thinned(CLASSES))
def test_torchs_classes(name: str) -> None:
    """Params move as the class itself moves them, and the class is seen to be pointwise."""
    made, options = CLASSES[name]
    params = hostile_tree()
    grads = gradients(params, 4)
    own = torch_params(params)
    torch_steps(made(own, **options), own, grads)
    transform = optim.from_torch(made, **options)
    _, got, _ = run(transform, params, grads)
    for a, b, p in zip(optree.tree_leaves(got), own, optree.tree_leaves(params), strict=True):
        if p.numel():
            assert (a != p).any() and torch.allclose(a, b.detach(), rtol=1e-14, atol=1e-14)
    check_claims(transform, params)


def test_classes_that_are_not_pointwise() -> None:
    with pytest.raises(TransformError):
        check_claims(optim.from_torch(Normalised, lr=0.1), hostile_tree())
    with pytest.raises(NotImplementedError, match=r"Factored.*pointwise.*path its state 'row'"):
        optim.from_torch(Factored)


class Normalised(torch.optim.Optimizer):
    """A class that looks at a whole tensor."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / (p.grad.norm() + 1), alpha=self.param_groups[0]["lr"])


class Factored(Normalised):
    """A class whose state isn't like its params."""

    def __init__(self, params: Any):
        super().__init__(params, 0.1)

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = p.new_zeros(7)


SHARED: dict[
    str, tuple[Callable[[], optim.Transform], Callable[[list[Tensor]], torch.optim.Optimizer]]
] = {
    "SGD": (
        lambda: optim.sgd(0.1, 0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.3),
    ),
    "Adam": (lambda: optim.adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
    "AdamW": (lambda: optim.adamw(0.1), lambda p: torch.optim.AdamW(p, 0.1)),
    "AMSGrad": (lambda: optim.amsgrad(0.1), lambda p: torch.optim.Adam(p, 0.1, amsgrad=True)),
    "Adamax": (lambda: optim.adamax(0.1), lambda p: torch.optim.Adamax(p, 0.1)),
    "NAdam": (lambda: optim.nadam(0.1), lambda p: torch.optim.NAdam(p, 0.1)),
    "RAdam": (lambda: optim.radam(0.1, b2=0.6), lambda p: torch.optim.RAdam(p, 0.1, (0.9, 0.6))),
    "Adagrad": (
        lambda: optim.adagrad(0.1, lr_decay=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, 0.1),
    ),
    "Adadelta": (lambda: optim.adadelta(1.0), lambda p: torch.optim.Adadelta(p, 1.0)),
    "RMSprop": (
        lambda: optim.rmsprop(0.1, momentum=0.9, centered=True),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    ),
    "RMSprop plain": (lambda: optim.rmsprop(0.1), lambda p: torch.optim.RMSprop(p, 0.1)),
    "Rprop": (lambda: optim.contrib.rprop(0.1), lambda p: torch.optim.Rprop(p, 0.1)),
    "partition": (
        lambda: optim.partition(
            {"a": optim.adam(0.1), "b": optim.adam(0.1)}, lambda path, _: "ab"[path == "scale"]
        ),
        lambda p: torch.optim.Adam(p, 0.1),
    ),
    "from_torch": (
        lambda: optim.from_torch(torch.optim.ASGD, lr=0.1),
        lambda p: torch.optim.ASGD(p, 0.1),
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_run_goes_on_here_and_back_there(name: str) -> None:
    """3 steps there, 2 here, 2 there again: the params of 7 steps there."""
    ours, theirs = SHARED[name]
    params = hostile_tree()
    grads = gradients(params, 7)
    names = paths(params)
    treedef = optree.tree_structure(params)

    alone = torch_params(params)
    torch_steps(theirs(alone), alone, grads)

    own = torch_params(params)
    optimizer = theirs(own)
    torch_steps(optimizer, own, grads[:3])
    transform, here = ours(), treedef.unflatten([p.detach().clone() for p in own])
    state = optim.import_torch_state(
        transform.init(here, Local(here)), optimizer.state_dict(), names=names, step=3
    )
    for grad in grads[3:5]:
        updates, state = transform.update(grad, state, here, Local(here))
        here = tree_map(torch.add, here, updates)

    back = torch_params(here)
    optimizer = theirs(back)
    optimizer.load_state_dict(optim.export_torch_state(state, optimizer, names=names))
    torch_steps(optimizer, back, grads[5:])
    for a, b in zip(back, alone, strict=True):
        # Torch keeps NAdam's product of momenta in float32
        rtol = 1e-5 if name == "NAdam" else 1e-12
        assert torch.allclose(a, b, rtol=rtol, atol=rtol)


def test_names_from_the_state_dict() -> None:
    params = {"b": torch.ones(2), "a": torch.zeros(3)}  # optree sorts dicts: a, b
    own = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.AdamW(list(own.items()))
    for p in own.values():
        p.grad = torch.full_like(p, float(p.numel()))
    optimizer.step()
    transform = optim.adamw(1e-3)
    state = optim.import_torch_state(transform.init(params, Local(params)), optimizer.state_dict())
    assert torch.equal(state[0].mu["a"], torch.full((3,), 0.3)) and torch.equal(
        state[0].mu["b"], torch.full((2,), 0.2)
    )
    assert [s.count.item() for s in state] == [1, 1, 1]


def test_mistakes_in_state_dicts() -> None:
    params = {"a": torch.zeros(3), "b": torch.ones(2)}
    own = torch_params(params)
    optimizer = torch.optim.Adam(own)
    torch_steps(optimizer, own, [params])
    state_dict = optimizer.state_dict()
    state = optim.adam(0.1).init(params, Local(params))
    with pytest.raises(ValueError, match="pass names"):
        optim.import_torch_state(state, state_dict)
    with pytest.raises(ValueError, match="2 params, got 1 names"):
        optim.import_torch_state(state, state_dict, names=["a"])
    with pytest.raises(
        StructureError, match="another shape: path a, expected \\(3,\\), got \\(2,\\)"
    ):
        optim.import_torch_state(state, state_dict, names=["b", "a"])
    with pytest.raises(StructureError, match="lacks a part: path a, expected max_exp_avg_sq"):
        optim.import_torch_state(
            optim.amsgrad(0.1).init(params, Local(params)), state_dict, names=["a", "b"]
        )
    # Nothing that torch keeps is dropped without a word: by another transform, or a state dict
    for other in (optim.lion(0.1).init(params, Local(params)), {"state": {}}):
        with pytest.raises(StructureError, match=r"no place for: path a, expected .* exp_avg"):
            optim.import_torch_state(other, state_dict, names=["a", "b"])
    state_dict["state"][1]["step"] += 1
    with pytest.raises(StructureError, match="different steps: path a, expected 2, got 1"):
        optim.import_torch_state(state, state_dict, names=["a", "b"])
