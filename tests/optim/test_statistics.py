"""The transforms with statistics against oracles from the papers, torch.optim, optax, and
themselves on pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map, tree_structure

from functorch_zero import optim
from functorch_zero.groups.counting import counted
from functorch_zero.groups.threads import ThreadGroup, run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.optim.local import Local
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.sharded_optim.state_plan import plan_state
from functorch_zero.testing.slicing import slice_tree
from tests.reference import (
    HOSTILE,
    assert_same,
    assert_sharded,
    decay,
    falling,
    gradients_for,
    run,
    tensors,
    trajectory,
)
from tests.reference import statistics as oracles
from tests.tiers import crossed, thinned, tiers

PARAMS = tensors(HOSTILE, 0)
GRADIENTS = gradients_for(HOSTILE)


def clipping(transform: optim.Transform) -> optim.Transform:
    """A transform of updates as an optimizer."""
    return optim.chain(transform, optim.scale(-0.1))


def clipped(clip: Any) -> Any:
    """Its oracle."""
    return lambda t, g, p: {k: -0.1 * x for k, x in clip(g, p).items()}


def directed(directions: Any) -> Any:
    """The oracle of a transform that looks at gradients."""
    return lambda t, g, p: {k: -0.1 * x for k, x in directions(t, g).items()}


TABLE: dict[str, tuple[optim.Transform, Any]] = {
    "clip_by_global_norm": (
        clipping(optim.clip_by_global_norm(4.0)),
        lambda: clipped(lambda g, p: oracles.clip_by_global_norm(g, 4.0)),
    ),
    "clip_by_block_rms": (
        clipping(optim.contrib.clip_by_block_rms(0.3)),
        lambda: clipped(lambda g, p: oracles.clip_by_block_rms(g, 0.3)),
    ),
    "adaptive_grad_clip": (
        clipping(optim.adaptive_grad_clip(0.3)),
        lambda: clipped(lambda g, p: oracles.adaptive_grad_clip(g, p, 0.3)),
    ),
    "scale_by_factored_rms": (
        clipping(optim.scale_by_factored_rms(min_dim_size_to_factor=3)),
        lambda: directed(oracles.FactoredRms(3)),
    ),
    "lamb": (optim.lamb(falling, weight_decay=decay), lambda: oracles.Lamb(falling, decay)),
    "lars": (
        optim.lars(falling, decay, trust_coefficient=0.1),
        lambda: oracles.Lars(falling, decay, trust=0.1),
    ),
    "lars, nesterov": (
        optim.lars(falling, decay, nesterov=True),
        lambda: oracles.Lars(falling, decay, nesterov=True),
    ),
    "fromage": (optim.contrib.fromage(falling), lambda: oracles.Fromage(falling)),
    "novograd": (
        optim.contrib.novograd(falling, weight_decay=decay),
        lambda: oracles.Novograd(falling, decay),
    ),
    "adafactor": (
        optim.adafactor(falling, weight_decay_rate=decay),
        lambda: oracles.Adafactor(falling, decay),
    ),
    "adafactor, momentum": (
        optim.adafactor(falling, weight_decay_rate=decay, momentum=0.9, clipping_threshold=0.5),
        lambda: oracles.Adafactor(falling, decay, momentum=0.9, clip=0.5),
    ),
    "sm3": (optim.contrib.sm3(falling), lambda: oracles.Sm3(falling)),
    "prodigy": (
        optim.prodigy(falling, weight_decay=0.1, estim_lr0=1e-2),
        lambda: oracles.Prodigy(falling, 0.1, 1e-2),
    ),
    "lbfgs": (optim.lbfgs(falling, 3), lambda: oracles.Lbfgs(falling, 3)),
    "lbfgs, not scaled": (
        optim.lbfgs(falling, 2, False),
        lambda: oracles.Lbfgs(falling, 2, scaled=False),
    ),
}


SLOW = ("lbfgs", "lbfgs, not scaled")


@pytest.mark.parametrize("name", tiers([name for name in TABLE if name not in SLOW], SLOW))
def test_the_oracle(name: str) -> None:
    transform, oracle = TABLE[name]
    assert_same(run(transform, PARAMS, GRADIENTS), trajectory(oracle(), PARAMS, GRADIENTS))


@pytest.mark.parametrize("clip", [1.0, 3.0])
def test_adafactor_is_torch(clip: float) -> None:
    ours = run(
        optim.adafactor(0.01, weight_decay_rate=0.1, clipping_threshold=clip), PARAMS, GRADIENTS
    )
    leaves = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    theirs = torch.optim.Adafactor(leaves.values(), lr=0.01, weight_decay=0.1, d=clip)
    expected, now = [], PARAMS
    for g in GRADIENTS:
        for k, leaf in leaves.items():
            leaf.grad = g[k].clone()
        theirs.step()
        expected.append({k: leaf.detach() - now[k] for k, leaf in leaves.items()})
        now = {k: leaf.detach().clone() for k, leaf in leaves.items()}
    for step, other in zip(ours, expected, strict=True):
        for k in step:  # a difference of params has the rounding of params
            torch.testing.assert_close(step[k], other[k], rtol=1e-12, atol=1e-14)


OPTAX: dict[str, tuple[optim.Transform, str]] = {
    "clip_by_global_norm": (optim.clip_by_global_norm(4.0), "optax.clip_by_global_norm(4.0)"),
    "clip_by_block_rms": (optim.contrib.clip_by_block_rms(0.3), "optax.clip_by_block_rms(0.3)"),
    "adaptive_grad_clip": (
        optim.adaptive_grad_clip(0.3, axis=0),
        "optax.adaptive_grad_clip(0.3, axis=0)",
    ),
    "scale_by_trust_ratio": (
        optim.scale_by_trust_ratio(0.2, 0.5, 0.1),
        "optax.scale_by_trust_ratio(0.2, 0.5, 0.1)",
    ),
    "scale_by_param_block_norm": (
        optim.contrib.scale_by_param_block_norm(1.5),
        "optax.scale_by_param_block_norm(1.5)",
    ),
    "scale_by_param_block_rms": (
        optim.contrib.scale_by_param_block_rms(0.9),
        "optax.scale_by_param_block_rms(0.9)",
    ),
    "scale_by_factored_rms": (
        optim.scale_by_factored_rms(min_dim_size_to_factor=3),
        "optax.scale_by_factored_rms(min_dim_size_to_factor=3)",
    ),
    "scale_by_factored_rms, everything": (
        optim.scale_by_factored_rms(min_dim_size_to_factor=0),
        "optax.scale_by_factored_rms(min_dim_size_to_factor=0)",
    ),
    "scale_by_factored_rms, not factored": (
        optim.scale_by_factored_rms(False, 0.7, -3, epsilon=1e-4),
        "optax.scale_by_factored_rms(False, 0.7, -3, epsilon=1e-4)",
    ),
    "lamb": (optim.lamb(0.05, weight_decay=0.1), "optax.lamb(0.05, weight_decay=0.1)"),
    "lars": (optim.lars(0.05, 0.1, nesterov=True), "optax.lars(0.05, 0.1, nesterov=True)"),
    "fromage": (optim.contrib.fromage(0.05), "optax.fromage(0.05)"),
    "novograd": (
        optim.contrib.novograd(0.05, weight_decay=0.1),
        "optax.novograd(0.05, weight_decay=0.1)",
    ),
    "sm3": (optim.contrib.sm3(0.05), "optax.sm3(0.05)"),
    "prodigy": (
        optim.prodigy(estim_lr0=1e-2, weight_decay=0.1, safeguard_warmup=True),
        "optax.contrib.prodigy(estim_lr0=1e-2, weight_decay=0.1, safeguard_warmup=True)",
    ),
    "scale_by_lbfgs": (
        optim.chain(optim.scale_by_lbfgs(3), optim.scale(-0.05)),
        "optax.chain(optax.scale_by_lbfgs(3), optax.scale(-0.05))",
    ),
    "adafactor": (
        optim.chain(
            optim.scale_by_factored_rms(min_dim_size_to_factor=3),
            optim.contrib.clip_by_block_rms(1.0),
            optim.scale_by_learning_rate(0.05),
            optim.contrib.scale_by_param_block_rms(),
        ),
        "optax.adafactor(0.05, min_dim_size_to_factor=3)",
    ),
}


@pytest.mark.parametrize("name", tiers(thorough=OPTAX))
def test_optax_agrees(name: str) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time
    transform, made = OPTAX[name]
    # Optax refuses 0-d
    left_out = {"tall", "one"} | ({"scalar"} if "grad_clip" in name or name == "sm3" else set())
    shapes = {k: s for k, s in HOSTILE.items() if k not in left_out}
    params, gradients = tensors(shapes, 0), gradients_for(shapes)
    with jax.enable_x64(True):
        theirs = eval(made, {"optax": optax})
        update = jax.jit(theirs.update)
        now = {k: jax.numpy.asarray(p.numpy()) for k, p in params.items()}
        state, expected = theirs.init(now), []
        for g in gradients:
            updates, state = update(
                {k: jax.numpy.asarray(x.numpy()) for k, x in g.items()}, state, now
            )
            expected.append(updates)
            now = {k: now[k] + updates[k] for k in now}
    single = "factored" in name or name == "adafactor"  # optax takes decay ** t in float32
    assert_same(run(transform, params, gradients), expected, 1e-6 if single else 1e-12)


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


def test_injected_hyperparams_change_nothing() -> None:
    made = {
        optim.lamb: {"learning_rate": falling, "weight_decay": decay},
        optim.lars: {"learning_rate": falling, "weight_decay": decay},
        optim.contrib.fromage: {"learning_rate": 0.05},
        optim.contrib.novograd: {"learning_rate": falling, "weight_decay": 0.1},
        optim.adafactor: {
            "learning_rate": falling,
            "weight_decay_rate": 0.1,
            "eps": 1e-9,
            "momentum": 0.9,
        },
        optim.scale_by_factored_rms: {"min_dim_size_to_factor": 3},
        optim.contrib.sm3: {"learning_rate": falling},
        optim.prodigy: {"weight_decay": 0.1, "estim_lr0": 1e-2},
        optim.lbfgs: {"learning_rate": 0.05},
        optim.clip_by_global_norm: {"max_norm": 4.0},
        optim.contrib.clip_by_block_rms: {"threshold": 0.3},
        optim.adaptive_grad_clip: {"clipping": 0.3},
        optim.scale_by_trust_ratio: {"min_norm": 0.3, "eps": 0.1},
        optim.contrib.scale_by_param_block_norm: {},
    }
    for factory, given in made.items():
        ours = run(optim.inject_hyperparams(factory)(**given), PARAMS, GRADIENTS)
        assert_same(ours, run(factory(**given), PARAMS, GRADIENTS))


def halves(tree: Any) -> Any:
    """A tree of three dtypes."""
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    return {f"{k}.{i}": x.to(dtype) for k, x in tree.items() for i, dtype in enumerate(dtypes)}


@pytest.mark.parametrize("name", thinned(TABLE))
def test_dtypes_stay(name: str) -> None:
    """Also of 0-d leaves in a tree with wider ones, and of the state."""
    transform, params = TABLE[name][0], halves(PARAMS)
    steps = run(transform, params, [halves(g) for g in GRADIENTS])
    assert all(
        step[k].dtype == p.dtype and step[k].isfinite().all()
        for step in steps
        for k, p in params.items()
    )
    across = Local(params)
    state = transform.init(params, across)
    _, later = transform.update(halves(GRADIENTS[0]), state, params, across)
    assert [x.dtype for x in tree_leaves(later)] == [x.dtype for x in tree_leaves(state)]


@pytest.mark.parametrize("name", thinned(TABLE))
def test_zero_gradients(name: str) -> None:
    """They give finite updates and states, at first and later."""
    zeros = tree_map(torch.zeros_like, PARAMS)
    steps = run(TABLE[name][0], PARAMS, [zeros, zeros, *GRADIENTS[:2], zeros])
    assert all(x.isfinite().all() for step in steps for x in step.values())
    empty = {"empty": torch.zeros(0, 4), "nothing": None}
    assert run(TABLE[name][0], empty, [empty])[0]["empty"].shape == (0, 4)
    across = Local(empty)
    state = TABLE[name][0].init(empty, across)
    _, state = TABLE[name][0].update(empty, state, empty, across)
    assert all(x.isfinite().all() for x in tree_leaves(state) if x.is_floating_point())


COLLECTIVES = {"adafactor": 2, "adafactor, momentum": 2}  # what is not here takes one all-reduce


@pytest.mark.parametrize("name", TABLE)
def test_collectives_of_a_step(name: str) -> None:
    layout = make_layout(PARAMS, 3, trainable=lambda path, leaf: True)

    def one(group: ThreadGroup) -> tuple[int, list[Any]]:
        counted_group = counted(group)
        across = Sharded(layout, counted_group)
        params = slice_tree(PARAMS, layout, group.rank)
        state = TABLE[name][0].init(params, across)
        assert not counted_group.calls
        TABLE[name][0].update(slice_tree(GRADIENTS[0], layout, group.rank), state, params, across)
        return counted_group.num_calls(), counted_group.calls

    for number, calls in run_ranks(one, 3):
        assert number == COLLECTIVES.get(name, 1), calls


@pytest.mark.parametrize("name", thinned(TABLE))
def test_the_state_can_be_planned(name: str) -> None:
    """`init` runs on placeholders, and what it makes has the structure of the real state."""
    layout = make_layout(PARAMS, 2, trainable=lambda path, leaf: True)
    plan = plan_state(TABLE[name][0].init, layout, layout.trainable, 2)
    assert plan.treedef == tree_structure(TABLE[name][0].init(PARAMS, Local(PARAMS)))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_size"):
        optim.scale_by_lbfgs(0)


def test_not_a_number_in_one_leaf() -> None:
    """The global norm carries it everywhere, a leaf's own norm to that leaf alone."""
    bad = GRADIENTS[0] | {
        "vector": GRADIENTS[0]["vector"].clone().index_fill(0, torch.tensor(2), torch.nan)
    }
    for transform, everywhere in ((optim.clip_by_global_norm(1.0), True), (optim.lamb(0.1), False)):
        updates = run(transform, PARAMS, [bad])[0]
        assert updates["vector"].isnan().all()
        assert updates["matrix"].isnan().all() == everywhere
