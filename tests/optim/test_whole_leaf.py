"""The transforms with whole leaves and whole trees against oracles, torch.optim.Muon, and
themselves on pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map, tree_structure

from functorch_zero import optim
from functorch_zero.errors import PeerError, TransformError
from functorch_zero.groups.counting import counted
from functorch_zero.groups.threads import ThreadGroup, run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.optim import with_whole_leaves
from functorch_zero.optim.local import Local
from functorch_zero.optim.transforms import matrix_roots
from functorch_zero.sharded.api import shard
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.sharded_optim.state_plan import plan_state
from functorch_zero.step.train import train_step
from functorch_zero.testing.slicing import slice_tree
from tests.reference import (
    HOSTILE,
    assert_same,
    assert_sharded,
    decay,
    falling,
    gradients_for,
    run,
    run_on,
    tensors,
    trajectory,
)
from tests.reference import whole as oracles
from tests.tiers import crossed, thinned

SHAPES = HOSTILE | {"wide": (3, 8), "same": (6, 5)}
PARAMS = tensors(SHAPES, 0)
GRADIENTS = gradients_for(SHAPES)

TABLE: dict[str, tuple[optim.Transform, Any]] = {
    "muon": (optim.muon(falling, weight_decay=decay), lambda: oracles.Muon(falling, decay)),
    "muon, match_rms_adamw": (
        optim.muon(falling, weight_decay=decay, scaling="match_rms_adamw", nesterov=False),
        lambda: oracles.Muon(falling, decay, nesterov=False, match_rms=True),
    ),
    "shampoo": (
        optim.shampoo(falling, weight_decay=decay),
        lambda: oracles.Shampoo(falling, decay),
    ),
    "shampoo, blocks": (
        optim.shampoo(
            falling,
            b2=0.9,
            eps=1e-2,
            weight_decay=decay,
            block_size=4,
            precondition_frequency=2,
            graft="rmsprop",
        ),
        lambda: oracles.Shampoo(
            falling, decay, block=4, b2=0.9, eps=1e-2, every=2, graft="rmsprop"
        ),
    ),
    "shampoo, not grafted": (
        optim.shampoo(falling, weight_decay=decay, graft=None),
        lambda: oracles.Shampoo(falling, decay, graft=None),
    ),
    "shampoo, sgd": (
        optim.shampoo(falling, weight_decay=decay, block_size=3, graft="sgd"),
        lambda: oracles.Shampoo(falling, decay, block=3, graft="sgd"),
    ),
    "soap": (
        optim.soap(falling, weight_decay=decay, precondition_frequency=2),
        lambda: oracles.Soap(falling, decay, every=2),
    ),
    "soap, one side": (
        optim.soap(falling, weight_decay=decay, precondition_frequency=1, max_precond_dim=6),
        lambda: oracles.Soap(falling, decay, every=1, most=6),
    ),
    "full_matrix_adagrad": (
        optim.contrib.full_matrix_adagrad(falling, weight_decay=decay),
        lambda: oracles.FullMatrixAdagrad(falling, decay),
    ),
    "full_matrix_adagrad, whole tree": (
        optim.contrib.full_matrix_adagrad(falling, weight_decay=decay, whole_tree=True),
        lambda: oracles.FullMatrixAdagrad(falling, decay, whole_tree=True),
    ),
}


@pytest.mark.parametrize("name", thinned(TABLE, 3))
def test_the_oracle(name: str) -> None:
    transform, oracle = TABLE[name]
    assert_same(run(transform, PARAMS, GRADIENTS), trajectory(oracle(), PARAMS, GRADIENTS))


@pytest.mark.parametrize(("name", "ranks"), crossed(TABLE, [(1, 3), (2, 5)], n=5))
def test_pieces_give_the_same(name: str, ranks: tuple[int, ...]) -> None:
    empty = torch.zeros(0, 3, dtype=torch.float64)
    params = PARAMS | {"empty": empty, "nothing": None}
    assert_sharded(
        TABLE[name][0],
        params,
        [g | {"empty": empty.clone(), "nothing": None} for g in GRADIENTS],
        ranks=ranks,
    )


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
def test_muon_is_torch(scaling: Any) -> None:
    """In bfloat16, where torch takes it; the leaves are float32, so that updates are seen."""
    shapes = {"matrix": (6, 5), "thin": (1, 7), "tall": (40, 8)}
    params = tree_map(torch.Tensor.float, tensors(shapes, 0))
    gradients = [tree_map(torch.Tensor.float, g) for g in gradients_for(shapes)]
    ours = run(optim.muon(0.02, scaling=scaling, ns_dtype=torch.bfloat16), params, gradients)
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    theirs = torch.optim.Muon(leaves.values(), lr=0.02, adjust_lr_fn=scaling)
    for step, g in zip(ours, gradients, strict=True):
        before = {k: leaf.detach().clone() for k, leaf in leaves.items()}
        for k, leaf in leaves.items():
            leaf.grad = g[k].clone()
        theirs.step()
        for k, leaf in leaves.items():
            torch.testing.assert_close(step[k], leaf.detach() - before[k], rtol=1e-3, atol=1e-4)


def test_what_orthogonalize_runs_in() -> None:
    x = tensors({"x": (7, 4)}, 3)
    whole, half = (
        run(optim.orthogonalize(ns_dtype=dtype), x, [x])[0]["x"] for dtype in (None, torch.bfloat16)
    )
    assert half.dtype == torch.float64
    assert 1e-4 < (whole - half).norm() / whole.norm() < 3e-2
    singular = torch.linalg.svdvals(whole) / (7 / 4) ** 0.5
    assert singular.min() > 0.6 and singular.max() < 1.3


def test_matrices_of_ones_own() -> None:
    """A 1-D convolution's kernel is one matrix, if one says so."""

    def as_matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
        return (1, shape[0], shape[1] * shape[2])

    kernel, flat = tensors({"k": (4, 3, 2)}, 1), tensors({"k": (4, 6)}, 1)
    ours = run(optim.orthogonalize(as_matrices=as_matrices), kernel, [kernel])[0]["k"]
    torch.testing.assert_close(ours.reshape(4, 6), run(optim.orthogonalize(), flat, [flat])[0]["k"])


def test_labels_of_ones_own() -> None:
    adam = run(optim.adamw(0.1, weight_decay=0.0), PARAMS, GRADIENTS)
    labels = {
        k: "adam" if k == "matrix" else "muon" if PARAMS[k].ndim > 1 else "adam" for k in PARAMS
    }
    ours = run(optim.muon(0.1, param_labels=labels), PARAMS, GRADIENTS)
    for step, other in zip(ours, adam, strict=True):
        assert torch.equal(step["matrix"], other["matrix"]) and not torch.equal(
            step["same"], other["same"]
        )


@pytest.mark.parametrize("name", thinned(TABLE, len(TABLE)))
def test_fewer_leaves_than_ranks(name: str) -> None:
    params, gradients = tensors({"thin": (1, 9)}, 0), gradients_for({"thin": (1, 9)})
    assert_sharded(TABLE[name][0], params, gradients)


@pytest.mark.parametrize("name", thinned(TABLE))
def test_zero_gradients(name: str) -> None:
    zeros = tree_map(torch.zeros_like, PARAMS)
    steps = run(TABLE[name][0], PARAMS, [zeros, zeros, *GRADIENTS[:2], zeros])
    assert all(x.isfinite().all() for step in steps for x in step.values())
    empty = {"empty": torch.zeros(0, 4), "nothing": None}
    assert run(TABLE[name][0], empty, [empty])[0]["empty"].shape == (0, 4)


@pytest.mark.parametrize(("name", "value"), crossed(TABLE, [torch.nan, torch.inf], quick=1))
def test_not_a_number(name: str, value: float) -> None:
    """A leaf whose gradient is not finite gets an update that isn't, the same on every rank; the
    others get theirs."""
    transform = TABLE[name][0]
    bad = [
        GRADIENTS[0],
        GRADIENTS[1] | {"matrix": GRADIENTS[1]["matrix"].index_fill(0, torch.tensor(2), value)},
    ]
    updates, good = run(transform, PARAMS, bad)[1], run(transform, PARAMS, GRADIENTS[:2])[1]
    assert not updates["matrix"].isfinite().all()
    if "whole tree" not in name:
        assert all(torch.equal(updates[k], good[k]) for k in PARAMS if k != "matrix")
    pieces = run_on(3, transform, PARAMS, bad)[1]
    for k in PARAMS:
        torch.testing.assert_close(pieces[k], updates[k], rtol=1e-11, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "make", [optim.scale_by_shampoo, optim.contrib.scale_by_full_matrix_adagrad]
)
def test_statistics_survive_a_bad_gradient(make: Any) -> None:
    bad = tree_map(lambda g: g * torch.nan, GRADIENTS[1])
    for transform in (make(graft=None) if make is optim.scale_by_shampoo else make(),):
        across, state = Local(PARAMS), transform.init(PARAMS, Local(PARAMS))
        _, state = transform.update(GRADIENTS[0], state, PARAMS, across)
        _, after = transform.update(bad, state, PARAMS, across)
        updates, _ = transform.update(GRADIENTS[2], after, PARAMS, across)
        expected, _ = transform.update(GRADIENTS[2], state, PARAMS, across)
        assert all(torch.equal(updates[k], expected[k]) for k in PARAMS)


def test_eigenvectors_that_do_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.tensor([[[2.0, 1.0], [1.0, 3.0]]])
    calls = []

    def fail(x: torch.Tensor) -> Any:
        calls.append(x.dtype)
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    values, vectors = matrix_roots.eigh(a)
    assert calls == [torch.float32, torch.float64]
    assert values.tolist() == [[2.0, 3.0]] and vectors.tolist() == [[[1.0, 0.0], [0.0, 1.0]]]


def test_a_first_step_of_soap_is_zero() -> None:
    updates = run(optim.scale_by_soap(), PARAMS, GRADIENTS[:1])[0]
    assert all((x == 0).all() for x in updates.values())


def test_soap_does_not_feel_last_bits() -> None:
    """Though the gradients' ranks are less than the matrices' dims, whose statistics have null
    spaces."""
    params, gradients = tensors({"w": (12, 3)}, 0), gradients_for({"w": (12, 3)})
    nudged = [tree_map(lambda x: x * (1 + 2e-16 * torch.randn_like(x)), g) for g in gradients]
    soap = optim.soap(falling, precondition_frequency=1)
    assert_same(run(soap, params, nudged), run(soap, params, gradients), 1e-11)


@pytest.mark.parametrize(("whole_tree", "size"), [(False, 60**2 * 8), (True, 215**2 * 8)])
def test_a_matrix_too_large(whole_tree: bool, size: int) -> None:
    sizes = [p.numel() for p in PARAMS.values()]
    assert size == (sum(sizes) if whole_tree else max(sizes)) ** 2 * 8
    optim.contrib.full_matrix_adagrad(0.1, whole_tree=whole_tree, limit=size).init(
        PARAMS, Local(PARAMS)
    )
    with pytest.raises(TransformError, match=f"would need {size} bytes"):
        optim.contrib.full_matrix_adagrad(0.1, whole_tree=whole_tree, limit=size - 1).init(
            PARAMS, Local(PARAMS)
        )


def test_a_matrix_too_large_on_every_rank() -> None:
    layout = make_layout(PARAMS, 3, trainable=lambda path, leaf: True)

    def one(group: ThreadGroup) -> str:
        with pytest.raises(TransformError) as error:
            transform = optim.contrib.full_matrix_adagrad(0.1, limit=1000)
            transform.init(slice_tree(PARAMS, layout, group.rank), Sharded(layout, group))
        return str(error.value)

    assert len(set(run_ranks(one, 3))) == 1


def test_collectives_of_a_step() -> None:
    """One all-to-all in, one out."""
    layout = make_layout(PARAMS, 3, trainable=lambda path, leaf: True)
    params = [slice_tree(PARAMS, layout, rank) for rank in range(3)]

    def one(group: ThreadGroup) -> list[str]:
        kinds = []
        for name in TABLE:
            if "whole tree" not in name:
                watched = counted(group)
                across, transform = Sharded(layout, watched), TABLE[name][0]
                state = transform.init(params[group.rank], across)
                watched.reset()
                transform.update(
                    slice_tree(GRADIENTS[0], layout, group.rank), state, params[group.rank], across
                )
                kinds.append(",".join(call.kind for call in watched.calls))
        return kinds

    for kinds in run_ranks(one, 3):
        assert set(kinds) == {"all_to_all,all_to_all"}


@pytest.mark.parametrize("name", thinned(TABLE))
def test_the_state_can_be_planned(name: str) -> None:
    layout = make_layout(PARAMS, 2, trainable=lambda path, leaf: True)
    plan = plan_state(TABLE[name][0].init, layout, layout.trainable, 2)
    assert plan.treedef == tree_structure(TABLE[name][0].init(PARAMS, Local(PARAMS)))


@pytest.mark.parametrize("name", thinned(TABLE))
def test_dtypes_stay(name: str) -> None:
    transform = TABLE[name][0]
    params = {
        k: p.to(torch.bfloat16 if k in ("matrix", "scalar") else torch.float32)
        for k, p in PARAMS.items()
    }
    gradient = {k: g.to(params[k].dtype) for k, g in GRADIENTS[0].items()}
    state = transform.init(params, Local(params))
    updates, later = transform.update(gradient, state, params, Local(params))
    assert all(
        updates[k].dtype == p.dtype and updates[k].isfinite().all() for k, p in params.items()
    )
    assert [(x.dtype, x.shape) for x in tree_leaves(later)] == [
        (x.dtype, x.shape) for x in tree_leaves(state)
    ]


def test_injected_hyperparams_change_nothing() -> None:
    made = {
        optim.muon: {"learning_rate": falling, "weight_decay": 0.1},
        optim.shampoo: {
            "learning_rate": falling,
            "weight_decay": decay,
            "b2": 0.9,
            "graft": "rmsprop",
        },
        optim.soap: {"learning_rate": 0.05},
        optim.contrib.full_matrix_adagrad: {"learning_rate": 0.05, "weight_decay": decay},
    }
    for factory, given in made.items():
        ours = run(optim.inject_hyperparams(factory)(**given), PARAMS, GRADIENTS)
        assert_same(ours, run(factory(**given), PARAMS, GRADIENTS), 1e-11)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="scaling"):
        optim.muon(0.1, scaling="adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="graft"):
        optim.shampoo(0.1, graft="adam")  # type: ignore[arg-type]


def test_soap_does_not_feel_last_bits_along_a_direction_without_gradients() -> None:
    """As in the head of a classifier: the gradients of its rows add up to zero."""
    params = tensors({"w": (4, 6)}, 0)
    gradients = [tree_map(lambda x: x - x.mean(0), g) for g in gradients_for({"w": (4, 6)})]
    nudged = [tree_map(lambda x: x * (1 + 2e-16 * torch.randn_like(x)), g) for g in gradients]
    soap = optim.soap(falling, precondition_frequency=2)
    assert_same(run(soap, params, nudged), run(soap, params, gradients), 1e-11)


@pytest.mark.parametrize(
    "update",
    [lambda u, s: (u.mT, s), lambda u, s: (u, s.flatten()[:2]), lambda u, s: (u.flatten(), s)],
    ids=["transposed", "another state", "flat"],
)
def test_results_of_other_shapes_are_refused(update: Any) -> None:
    """Sharded, the pieces of a transposed update would be other elements' pieces."""
    transform = with_whole_leaves(torch.zeros_like, update)
    params = {"w": torch.randn(4, 6, requires_grad=True)}
    step = train_step(lambda p, b, x: (p["w"] * x).sum(), transform)
    story = r"lambda> must make an update and a state of the shapes it was given: expected \[\(4, 6"
    with pytest.raises(TransformError, match=story) as error:
        step(step.init(params), torch.randn(4, 6))
    assert error.value.__notes__ == ["Raised by the update of w."]

    def on_a_rank(group: Any) -> None:
        sharded = shard(step, level=3, group=group)
        if group.rank == 0:  # the owner
            with pytest.raises(TransformError, match=story) as error:
                sharded(sharded.init(params), torch.randn(4, 6))
            assert "Raised by the update of w." in error.value.__notes__
        else:
            with pytest.raises(PeerError, match=story):
                sharded(sharded.init(params), torch.randn(4, 6))

    run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("of_state", [True, False])
def test_a_batch_keeps_its_first_dim(of_state: bool) -> None:
    def update(batch: torch.Tensor, state: torch.Tensor) -> Any:
        twice = torch.cat([state, state]) if of_state else torch.cat([batch, batch])
        return (batch, twice) if of_state else (twice, state)

    transform = optim.with_whole_leaves(torch.zeros_like, update, batched=True)
    params = {"w": torch.ones(2, 3, requires_grad=True)}
    state = transform.init(params)
    with pytest.raises(TransformError, match=r"must make .*expected \[\(1, .*\(2, .*Remedy"):
        transform.update(tree_map(torch.ones_like, params), state, params)
