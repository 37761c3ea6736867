"""Complex params: every row of the conformance table trains them alike on ranks, or refuses them by
path. `tests/parity` compares with torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.groups import run_ranks
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.conformance.table import TABLE
from tests.tiers import thinned, tiers

# Rows whose transform is of real leaves only
REFUSED = {
    "adafactor",
    "adafactor, absolute step",
    "adafactor, momentum",
    "adafactor, not factored",
    "adaptive_grad_clip",
    "chain",
    "full_matrix_adagrad",
    "full_matrix_adagrad, whole tree",
    "inject_hyperparams, whole leaf",
    "apply_if_finite, whole leaf",
    "apply_if_nonzero, by label, whole leaf",
    "lbfgs",
    "lookahead",
    "muon",
    "rows.adagrad",
    "rows.adagrad_by_row",
    "rows.lazy_adam",
    "muon, match_rms_adamw",
    "orthogonalize",
    "partition",
    "partition, of every kind",
    "prodigy",
    "scale_by_adafactor",
    "scale_by_factored_rms",
    "scale_by_full_matrix_adagrad",
    "scale_by_full_matrix_adagrad_tree",
    "scale_by_lbfgs",
    "scale_by_shampoo",
    "scale_by_sm3",
    "scale_by_soap",
    "shampoo",
    "shampoo, blocks",
    "sm3",
    "soap",
}
# A test's own transforms, which torch refuses: signs, maxima and medians of complex numbers
OWN = {"pointwise", "with_statistics, every question", "with_whole_tree"}


def started() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    c128, f64 = torch.complex128, torch.float64
    drawn = {
        "matrix": torch.randn(4, 3, dtype=c128, generator=generator),
        "vector": torch.randn(5, dtype=c128, generator=generator),
        "real": torch.randn(3, 2, dtype=f64, generator=generator),
        "scalar": torch.randn((), dtype=c128, generator=generator),
    }
    return {name: leaf.requires_grad_() for name, leaf in drawn.items()}


def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
    total = x.mean() * 0
    for leaf in tree_leaves(fz.unshard(params)):
        other = leaf.real * leaf.imag + leaf.imag if leaf.is_complex() else leaf
        total = total + (leaf.abs() ** 2 * ((1 + x) ** 2).mean() + other * x.mean()).sum()
    return total


BATCHES = [*torch.linspace(-1, 2, 24, dtype=torch.float64).view(3, 8)]
TRAINED = [*(TABLE.keys() - REFUSED - OWN)]


# Each at one level, in turn: some are quick, the others thorough. The full tier has all levels
AT_A_LEVEL = [(name, i % 4) for i, name in enumerate(sorted(TRAINED))]
AT_OTHERS = [(name, level) for name, one in AT_A_LEVEL for level in range(4) if level != one]
QUICK = AT_A_LEVEL[::25]
NOT_QUICK = [row for row in AT_A_LEVEL if row not in QUICK]


@pytest.mark.parametrize(
    ("name", "level"),
    tiers(QUICK, NOT_QUICK, AT_A_LEVEL + AT_OTHERS, rows=True),
)
def test_ranks_train_complex_params_as_one_process_does(name: str, level: int) -> None:
    step = fz.train_step(loss_fn, TABLE[name].make())
    unused = () if name not in ("set_to_zero", "freeze") else ("*",)
    assert_sharded_equals_unsharded(
        step,
        started(),
        {},
        BATCHES,
        levels=(level,),
        ranks=(2,),
        unused=unused,
        allow_round_off=True,  # scale_by_stddev divides by the root of a variance of about 0
    )


def test_the_levels_of_each_tier_are_all() -> None:
    for rows in (QUICK, NOT_QUICK):
        assert {level for _, level in rows} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", thinned(sorted(REFUSED), 18))
def test_complex_params_are_refused_by_path(name: str) -> None:
    """In one process, and on every rank."""
    step = fz.train_step(loss_fn, TABLE[name].make())
    message = r"real leaves only: path \w+.*got torch\.complex128.*Remedy"
    with pytest.raises(TransformError, match=message):
        step.init(started())

    def run(group: fz.Group) -> None:
        with pytest.raises(TransformError, match=message):
            fz.shard(step, level=1, group=group).init(started())

    run_ranks(run, 2)


def test_the_state_is_complex_where_it_follows_a_complex_param() -> None:
    state = fz.train_step(loss_fn, optim.chain(optim.contrib.rprop(0.1))).init(started()).opt_state
    sizes = [x for x in tree_leaves(state) if x.is_complex() and x.shape == (5,)]
    assert any(torch.equal(x, torch.full_like(x, 0.1 + 0.1j)) for x in sizes)


def test_an_authors_update_sees_complex_leaves_unless_it_asks() -> None:
    seen: list[torch.dtype] = []

    def update(updates: Any, state: Any, params: Any) -> Any:
        seen.extend(x.dtype for x in tree_leaves(updates))
        return updates, state

    for in_parts in (False, True):
        transform = optim.pointwise(lambda params: (), update, in_parts=in_parts)
        params = {"w": torch.ones(3, dtype=torch.complex64, requires_grad=True)}
        transform.update(params, transform.init(params), params)
    assert seen == [torch.complex64, torch.float32]


@pytest.mark.parametrize("level", [None, *tiers([0, 1, 3], [2])])
def test_a_step_refuses_a_complex_update_of_a_real_leaf(level: int | None) -> None:
    """The sum would lose its imaginary part."""
    turned = optim.pointwise(lambda params: (), lambda u, s, p: (tree_map(lambda x: 1j * x, u), s))
    step = fz.train_step(lambda params, buffers, batch: (params["b"] * batch).sum(), turned)
    params = {"b": torch.ones(4, requires_grad=True)}

    def run(group: Any) -> None:
        own = step if level is None else fz.shard(step, level=level, group=group)
        with pytest.raises(StructureError, match=r"(?s)complex.*path b.*float32.*complex64"):
            own(own.init(params), torch.ones(4))

    run_ranks(run, 1 if level is None else 2)


def test_the_largest_element_of_a_complex_leaf_is_refused() -> None:
    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        largest = across.max(updates)
        return tree_map(torch.div, updates, largest), state

    by_largest = optim.with_statistics(optim.base.init_empty, update)
    params = {"w": torch.ones(3, dtype=torch.complex128, requires_grad=True)}
    with pytest.raises(TransformError, match=r"across\.max.*complex leaf.*Remedy.*torch\.abs"):
        by_largest.update(tree_map(torch.ones_like, params), by_largest.init(params), params)
