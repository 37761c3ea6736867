"""Random numbers of leaves: the same however leaves are cut, and random."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor

from functorch_zero import optim
from functorch_zero.errors import StructureError, TransformError
from functorch_zero.layout.extent import Extent
from functorch_zero.optim import Transform
from functorch_zero.optim.claims.check import check_claims
from functorch_zero.optim.local import Local
from functorch_zero.optim.random_numbers import BLOCK, Kind, draw_leaf, key_of
from functorch_zero.testing import check_transform
from tests.tiers import THOROUGH, drawn

KINDS: tuple[Kind, ...] = ("normal", "uniform", "rademacher")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def bits(x: Tensor) -> list[int]:
    seen: list[int] = x.reshape(-1).view(torch.uint8).tolist() if x.numel() else []
    return seen


# ---- However leaves are cut ----

SHAPES = st.one_of(
    st.sampled_from([(), (0,), (3, 0), (1,), (15,), (16,), (17,)]),
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    # Two blocks, and the edges between them
    st.sampled_from([(BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (2 * BLOCK,), (2, BLOCK + 5)]),
)


@drawn(st.data())
def test_pieces_are_those_of_the_whole_leaf(data: Any) -> None:
    shape, kind = data.draw(SHAPES), data.draw(st.sampled_from(KINDS))
    dtype, seed = data.draw(st.sampled_from(DTYPES + COMPLEX)), data.draw(st.integers(0, 2**63 - 1))
    numel = math.prod(shape)
    near = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, numel - 1]).filter(
        lambda n: 0 <= n <= numel
    )
    cuts = sorted(data.draw(st.lists(near | st.integers(0, numel), max_size=4)))
    whole = draw_leaf(kind, seed, "a", torch.empty(shape, dtype=dtype))
    assert (whole.shape, whole.dtype) == (shape, dtype)
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, numel], strict=True):
        piece = torch.empty(stop - start, dtype=dtype)
        pieces.append(draw_leaf(kind, seed, "a", piece, Extent(shape, start, stop)))
    assert bits(torch.cat(pieces)) == bits(whole)


def test_torchs_own_numbers_neither_matter_nor_move() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw_leaf("normal", 3, "a", torch.empty(9))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(draw_leaf("normal", 3, "a", torch.empty(9)), first)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_half_precision_is_float32_rounded(dtype: torch.dtype) -> None:
    wide = draw_leaf("normal", 3, "a", torch.empty(70_000))
    assert torch.equal(
        draw_leaf("normal", 3, "a", torch.empty(70_000, dtype=dtype)), wide.to(dtype)
    )


@pytest.mark.parametrize("leaf", [torch.zeros(3, dtype=torch.int64), torch.zeros(3) > 0, 3.0, None])
def test_other_leaves_are_refused(leaf: Any) -> None:
    with pytest.raises(TransformError, match=r"path w, got [\s\S]*Remedy"):
        draw_leaf("normal", 3, "w", leaf)


# ---- Random ----

NUM = 100_000  # numbers: more than a block


def numbers(kind: Kind = "normal", seed: int = 0, step: int = 0, path: str = "w") -> Tensor:
    """(NUM,) float64"""
    return draw_leaf(kind, key_of(seed, step), path, torch.empty(NUM)).double()


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """In standard deviations from its mean."""
    degrees = counts.numel() - 1
    found = ((counts - expected).square() / expected).sum()
    return float((found - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("seed", range(3))
def test_uniform_numbers_fill_the_range_evenly(seed: int) -> None:
    found = numbers("uniform", seed)
    assert found.min() >= 0 and found.max() < 1
    counts = torch.histc(found, 100, 0, 1)
    assert abs(chi_square(counts, torch.full((100,), NUM / 100))) < 4


@pytest.mark.parametrize("seed", range(3))
def test_normal_numbers_have_the_distributions_shape(seed: int) -> None:
    # By the distribution function they would be uniform
    found = torch.special.ndtr(numbers("normal", seed))
    counts = torch.histc(found, 100, 0, 1)
    assert abs(chi_square(counts, torch.full((100,), NUM / 100))) < 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_doesnt_reach_one(dtype: torch.dtype) -> None:
    found = draw_leaf("uniform", 0, "w", torch.empty(2 * NUM, dtype=dtype))
    assert found.max() < 1
    assert found.double().max() > 0.995


def test_signs_are_fair() -> None:
    found = numbers("rademacher")
    assert set(found.tolist()) == {-1.0, 1.0}
    assert abs(found.sum()) < 4 * math.sqrt(NUM)


def correlated(a: Tensor, b: Tensor) -> bool:
    """By more than four standard deviations."""
    return abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) > 4 / math.sqrt(a.numel())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [1, 2, 16, 624, BLOCK])
def test_elements_are_independent(kind: Kind, lag: int) -> None:
    found = numbers(kind)
    assert not correlated(found[:-lag], found[lag:])


# A base, and what is changed of it: neighbours, bits that cancel, exchanged numbers
STREAMS: dict[str, Callable[[], Tensor]] = {
    "base": lambda: numbers(seed=0, step=1),
    "another seed": lambda: numbers(seed=1, step=1),
    "another step": lambda: numbers(seed=0, step=2),
    "exchanged": lambda: numbers(seed=1, step=0),
    "a high bit": lambda: numbers(seed=2**40, step=1),
    "a negative seed": lambda: numbers(seed=-1, step=1),
    "another leaf": lambda: numbers(step=1, path="v"),
    "another kind": lambda: numbers("uniform", step=1),
    "signs": lambda: numbers("rademacher", step=1),
}


def test_streams_are_independent() -> None:
    made = {name: stream() for name, stream in STREAMS.items()}
    for one, other in combinations(made, 2):
        assert not correlated(made[one], made[other]), (one, other)


def test_correlations_are_found() -> None:
    found = numbers()
    assert correlated(found, found + 50 * numbers(seed=1))
    assert abs(chi_square(torch.histc(found, 100, 0, 1), torch.full((100,), NUM / 100))) > 4


# ---- Asked of `across` ----

PARAMS: Any = {
    "b": torch.zeros(4),
    "frozen": None,
    "w": {"x": torch.zeros(2, 3), "y": torch.ones(())},
}


def test_a_tree_of_numbers() -> None:
    across = Local(PARAMS)
    count, seed = torch.tensor(7), torch.tensor(3)
    made = across.normal(PARAMS, seed=seed, step=count)
    assert made["frozen"] is None
    for got, want in zip(tree_leaves(made), tree_leaves(PARAMS), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    again = across.normal(PARAMS, seed=3, step=7)
    assert tree_map(Tensor.tolist, again) == tree_map(Tensor.tolist, made)
    later = across.normal(PARAMS, seed=3, step=8)
    assert not torch.equal(later["w"]["x"], made["w"]["x"])


def test_masked_leaves_draw_what_they_draw_in_the_whole_tree() -> None:
    across = Local(PARAMS)
    mask = {"b": False, "frozen": None, "w": {"x": True, "y": True}}
    part = {"b": None, "frozen": None, "w": PARAMS["w"]}
    for kind in KINDS:
        of_part = getattr(across.select(mask), kind)(part, seed=1, step=2)
        of_all = getattr(across, kind)(PARAMS, seed=1, step=2)
        assert of_part["b"] is None
        assert torch.equal(of_part["w"]["x"], of_all["w"]["x"])


def test_another_tree_is_refused() -> None:
    across = Local(PARAMS)
    with pytest.raises(StructureError, match=r"across\.normal[\s\S]*path frozen"):
        across.normal({**PARAMS, "frozen": torch.zeros(2)}, seed=0, step=0)
    with pytest.raises(TransformError, match=r"path b, expected 4 elements, got 5"):
        across.uniform({**PARAMS, "b": torch.zeros(5)}, seed=0, step=0)
    with pytest.raises(TypeError, match="integer"):
        across.uniform(PARAMS, seed=torch.tensor(0.5), step=0)


WIDE = {"w": torch.zeros(4, 6)}


def noisy(seed_of: Callable[[Any], Any] = lambda updates: 0) -> Transform:
    """A transform that adds numbers of each kind."""

    def update(updates: Any, count: Tensor, params: Any, across: Any) -> tuple[Any, Tensor]:
        for kind in KINDS:
            made = getattr(across, kind)(updates, seed=seed_of(updates), step=count)
            updates = tree_map(torch.add, updates, made)
        return updates, count + 1

    return optim.with_statistics(lambda params: optim.step_count(), update)


@THOROUGH
def test_a_transform_that_draws_passes_the_check() -> None:
    check_claims(noisy(), WIDE)
    check_transform(noisy())


def test_a_seed_made_of_values_of_leaves_is_refused() -> None:
    with pytest.raises(TransformError, match="reads values of leaves on the host"):
        check_claims(noisy(lambda updates: updates["w"].long().reshape(-1)[0]), WIDE)


# ---- Noise ----


def test_the_variance_of_added_noise() -> None:
    """Neelakantan et al.: eta / (1 + t)**gamma, t from 0."""
    params = {"w": torch.zeros(NUM, dtype=torch.float64)}
    eta, gamma = 0.3, 0.55
    transform, across = optim.add_noise(eta, gamma, seed=5), Local(params)
    state, seen = transform.init(params, across), []
    for t in range(4):
        updates, state = transform.update(params, state, params, across)
        # The estimate's standard deviation is sqrt(2 / NUM) of it
        expected = eta / (1 + t) ** gamma
        assert abs(updates["w"].var() / expected - 1) < 4 * math.sqrt(2 / NUM)
        seen.append(updates["w"])
    assert not any(correlated(a, b) for a, b in combinations(seen, 2))
    assert (int(state.count), int(state.seed)) == (4, 5)


def test_noise_is_added_to_the_updates() -> None:
    params = {"w": torch.zeros(5, dtype=torch.bfloat16), "frozen": None}
    transform, across = optim.add_noise(0.0, 1.0), Local(params)
    updates = {"w": torch.arange(5.0).bfloat16(), "frozen": None}
    got, _ = transform.update(updates, transform.init(params, across), params, across)
    assert got["w"].dtype == torch.bfloat16
    assert torch.equal(got["w"], updates["w"])
