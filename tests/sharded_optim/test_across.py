"""`Sharded` answers on pieces what `Local` answers on whole leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import strategies as st
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import TransformError
from functorch_zero.groups import CountingGroup, counted, run_ranks
from functorch_zero.groups.single import SingleRank
from functorch_zero.layout.build import make_layout
from functorch_zero.layout.layout import Layout
from functorch_zero.optim.across import Across
from functorch_zero.optim.claims.pretended import PretendedRank
from functorch_zero.optim.local import Local
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.sharded_optim.state_plan import Planner
from functorch_zero.testing.slicing import slice_tree
from tests.local import all_gather_tree
from tests.tiers import drawn

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
trees = st.lists(shapes, min_size=1, max_size=6).filter(
    lambda found: any(torch.Size(s).numel() for s in found)
)


def make(spec: list[tuple[int, ...]], ranks: int, seed: int = 0) -> tuple[Any, Layout]:
    g = torch.Generator().manual_seed(seed)
    tree = {
        f"leaf{i}": torch.randn(shape, generator=g, dtype=torch.float64)
        for i, shape in enumerate(spec)
    }
    return tree, make_layout(tree, ranks, trainable=lambda path, leaf: True)


def close(a: Any, b: Any) -> None:
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-14, equal_nan=True), (x, y)


def last_dims(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return tuple(range(1, len(shape))) if len(shape) > 1 else None


QUESTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": lambda across, a, b: across.sum(a, b),
    "mean": lambda across, a, b: across.mean(a, b),
    "norm": lambda across, a, b: across.norm(a, b),
    "max": lambda across, a, b: across.max(a),
    "total": lambda across, a, b: across.total(a, b),
    "dot": lambda across, a, b: across.dot(a, b),
    "dots": lambda across, a, b: across.dots((a, b), (a, a)),
    "sum_dim": lambda across, a, b: across.sum_dim(
        a, lambda shape: len(shape) - 1 if shape else None
    ),
    "sum_dims": lambda across, a, b: across.sum_dims(
        (a, last_dims), (b, lambda shape: tuple(range(len(shape))))
    ),
    "max_dim": lambda across, a, b: across.max_dim(a, lambda shape: 0 if shape else None),
    "max_dims": lambda across, a, b: across.max_dims((a, last_dims)),
}


@pytest.mark.parametrize("question", QUESTIONS)
@drawn(spec=trees, ranks=st.integers(1, 5))
def test_answers_are_those_about_whole_tensors(question: str, spec: Any, ranks: int) -> None:
    ask = QUESTIONS[question]
    a, _ = make(spec, ranks)
    b, _ = make(spec, ranks, seed=1)
    expected = ask(Local(a), a, b)

    def run(group: Any) -> Any:
        _, layout = make(spec, ranks)
        watched = counted(group)
        answer = ask(
            Sharded(layout, watched), *(slice_tree(tree, layout, group.rank) for tree in (a, b))
        )
        assert watched.num_calls() <= 1, "one collective for all leaves together"
        return answer

    for answer in run_ranks(run, ranks):
        close(answer, expected)


@pytest.mark.parametrize("value", [1e25, 1e-25])
@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_norms_whose_squares_are_out_of_range(shape: tuple[int, ...], value: float) -> None:
    """Of single elements too, of which torch takes the norm without a square."""
    tree = {"w": torch.full(shape, value)}
    layout = make_layout(tree, 2, trainable=lambda path, leaf: True)
    expected = Local(tree).norm(tree)["w"]

    def run(group: Any) -> Tensor:
        norm: Tensor = Sharded(layout, group).norm(slice_tree(tree, layout, group.rank))["w"]
        return norm

    for norm in run_ranks(run, 2):
        assert torch.equal(norm, expected)


@pytest.mark.parametrize("implementation", [Local, Sharded, Planner, PretendedRank])
def test_questions_are_written_once(implementation: type[Across]) -> None:
    """In the base class, over primitives."""
    assert [
        question
        for question in QUESTIONS
        if getattr(implementation, question) is not getattr(Across, question)
    ] == []


def test_a_product_is_summed_in_its_own_dtype() -> None:
    tree, layout = make([(7, 3), (5,)], 2)
    singles = tree_map(torch.Tensor.float, tree)

    def run(group: Any) -> Tensor:
        pieces = slice_tree(tree, layout, group.rank)
        return Sharded(layout, group).dot(tree_map(torch.Tensor.float, pieces), pieces)

    for answer in run_ranks(run, 2):
        assert answer.dtype == torch.float64
        close(answer, Local(tree).dot(singles, tree))


def test_integers_beside_floating_point_are_not_rounded() -> None:
    tree, layout = make([(6,)], 2)
    large = 2**53 + 1  # in no float32 or float64

    def run(group: Any) -> tuple[Any, ...]:
        across = Sharded(layout, group)
        counts = {"leaf0": torch.tensor([large if group.rank else -2])}
        pieces = slice_tree(tree, layout, group.rank)
        return *across.sum(counts, pieces), *across.reduce([counts, pieces], "max")

    for summed, floats, largest, _ in run_ranks(run, 2):
        assert summed["leaf0"].dtype == torch.int64 and int(summed["leaf0"]) == large - 2
        assert int(largest["leaf0"]) == large
        close(floats, Local(tree).sum(tree))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("question", ["sum", "mean", "total", "dot", "dots", "sum_dim", "sum_dims"])
def test_sums_of_integers_and_bools_count(question: str, dtype: torch.dtype) -> None:
    """As torch's own sums: a bool adds 1 wherever it lies, and narrow integers don't wrap."""
    spec: list[tuple[int, ...]] = [(7, 3), (300,), (), (0, 3), (2, 2, 2)]
    ask = QUESTIONS[question]
    large = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    narrow = tree_map(lambda x: ((x > 0) * large).to(dtype), make(spec, 1)[0])
    wide = tree_map(torch.Tensor.long, narrow)
    expected = ask(Local(wide), wide, wide)
    close(ask(Local(narrow), narrow, narrow), expected)

    def run(group: Any) -> Any:
        _, layout = make(spec, group.size)
        pieces = slice_tree(narrow, layout, group.rank)
        return ask(Sharded(layout, group), pieces, pieces)

    for answer in run_ranks(run, 3):
        close(answer, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("question", [name for name in QUESTIONS if name.startswith("max")])
def test_maxima_of_integers(question: str, dtype: torch.dtype) -> None:
    """Also where a rank has no element of a leaf, and where nobody has one: -inf is no integer."""
    spec: list[tuple[int, ...]] = [(7, 3), (1,), (), (0, 3), (2, 2, 2)]
    ask = QUESTIONS[question]
    # Mostly below zero, so that a zero in the place of nothing would show
    whole = tree_map(lambda x: (3 * x - 9).to(dtype), make(spec, 1)[0])
    expected = ask(Local(whole), whole, whole)

    def run(group: Any) -> Any:
        _, layout = make(spec, group.size)
        pieces = slice_tree(whole, layout, group.rank)
        return ask(Sharded(layout, group), pieces, pieces)

    for ranks in (1, 2, 5):
        for answer in run_ranks(run, ranks):
            found = zip(optree.tree_leaves(answer), optree.tree_leaves(expected), strict=True)
            for got, wanted in found:
                assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_each_gathered_tree_is_held_to_the_limit() -> None:
    wide, layout = make([(6, 2)], 2)  # 96 bytes
    narrow = tree_map(torch.Tensor.float, wide)

    def gather(across: Across, trees: list[Any]) -> None:
        with pytest.raises(TransformError, match="of 96 bytes, above its limit of 50"):
            across.gather(trees, 50)

    def run(group: Any) -> None:
        pieces = [slice_tree(tree, layout, group.rank) for tree in (narrow, wide)]
        gather(Sharded(layout, group), pieces)

    gather(Local(wide), [narrow, wide])
    run_ranks(run, 2)


@drawn(spec=trees, ranks=st.integers(1, 5))
def test_spread_is_the_inverse_direction(spec: Any, ranks: int) -> None:
    tree, _ = make(spec, ranks)
    dim = lambda shape: len(shape) - 1 if shape else None

    def run(group: Any) -> Any:
        _, layout = make(spec, ranks)
        across = Sharded(layout, group)
        pieces = slice_tree(tree, layout, group.rank)
        spread = across.spread(across.sum_dim(pieces, dim), dim)
        made = tree_map(
            lambda p, s: p if s is None else p / s.expand_as(p), pieces, spread, none_is_leaf=True
        )
        return all_gather_tree(made, layout, group)

    expected = tree_map(lambda x: x / x.sum(-1, keepdim=True) if x.dim() else x, tree)
    for got in run_ranks(run, ranks):
        close(got, expected)


@drawn(spec=trees, ranks=st.integers(1, 4), keep=st.lists(st.booleans(), min_size=6, max_size=6))
def test_select_narrows(spec: Any, ranks: int, keep: list[bool]) -> None:
    tree, layout = make(spec, ranks)
    mask = layout.treedef.unflatten(keep[: len(spec)])
    chosen = tree_map(lambda x, k: x if k else None, tree, mask)

    def run(group: Any) -> Any:
        _, own = make(spec, ranks)
        pieces = slice_tree(tree, own, group.rank)
        narrowed = Sharded(own, group).select(mask)
        return narrowed.norm(tree_map(lambda x, k: x if k else None, pieces, mask))

    for answer in run_ranks(run, ranks):
        close(answer, Local(chosen).norm(chosen))


def whole_leaf(batched: bool) -> optim.Transform:
    """Sees its leaf's shape and transposes: wrong on pieces."""

    def update(u: Tensor, s: Any, p: Tensor) -> tuple[Tensor, Any]:
        new = {"seen": s["seen"] + u}
        return (new["seen"].flip(-1) if u.dim() > batched else u) + p.sum() * 0 + p, new

    return optim.with_whole_leaves(lambda p: {"seen": torch.zeros_like(p)}, update, batched=batched)


@pytest.mark.parametrize("batched", [False, True])
@drawn(spec=trees, ranks=st.integers(1, 4))
def test_whole_leaves_at_their_owners(batched: bool, spec: Any, ranks: int) -> None:
    tree, _ = make(spec, ranks)
    grads, _ = make(spec, ranks, seed=1)
    transform, local = whole_leaf(batched), Local(tree)
    state = transform.init(tree, local)
    first, state = transform.update(grads, state, tree, local)
    second, _ = transform.update(grads, state, tree, local)

    def run(group: Any) -> Any:
        _, layout = make(spec, ranks)
        across = Sharded(layout, group)
        u, p = slice_tree(grads, layout, group.rank), slice_tree(tree, layout, group.rank)
        held = transform.init(p, across)
        one, held = transform.update(u, held, p, across)
        two, held = transform.update(u, held, p, across)
        kept = sum(x.numel() for x in optree.tree_leaves(held))
        return all_gather_tree(one, layout, group), all_gather_tree(two, layout, group), kept

    results = run_ranks(run, ranks)
    for one, two, _ in results:
        close((one, two), (first, second))
    assert sum(kept for _, _, kept in results) == sum(x.numel() for x in tree.values()), (
        "state at the owners only"
    )


@drawn(spec=trees, ranks=st.integers(1, 4))
def test_the_whole_tree(spec: Any, ranks: int) -> None:
    def update(u: Any, s: Any, p: Any) -> Any:
        total = sum(x.sum() for x in optree.tree_leaves(u))
        return tree_map(lambda x, y: x.flip(0) * total + y if x.dim() else x * total + y, u, p), s

    transform = optim.with_whole_tree(lambda p: (), update)
    tree, _ = make(spec, ranks)
    grads, _ = make(spec, ranks, seed=1)
    expected, _ = transform.update(grads, (), tree, Local(tree))

    def run(group: Any) -> Any:
        _, layout = make(spec, ranks)
        pieces = (slice_tree(x, layout, group.rank) for x in (grads, tree))
        u, p = pieces
        made, _ = transform.update(u, (), p, Sharded(layout, group))
        return all_gather_tree(made, layout, group)

    for got in run_ranks(run, ranks):
        close(got, expected)


@pytest.mark.parametrize("wants_params", [False, True])
def test_a_whole_tree_is_gathered_bit_by_bit(wants_params: bool) -> None:
    """Each rank sends its piece to the others, once for each dtype and tree; zeros keep their
    sign."""
    tree = {
        "a": -torch.zeros(7, 3),
        "b": torch.randn(11, dtype=torch.float64),
        "c": torch.tensor([2.0, torch.nan]),
    }
    seen: list[Any] = []

    def with_params(u: Any, s: Any, p: Any) -> Any:
        seen.append((u, p))
        return u, s

    def without(u: Any, s: Any) -> Any:
        seen.append((u,))
        return u, s

    transform = optim.with_whole_tree(lambda p: (), with_params if wants_params else without)

    def run(group: Any) -> tuple[int, float, int]:
        layout, own = make_layout(tree, 3, trainable=lambda path, leaf: True), counted(group)
        pieces = slice_tree(tree, layout, group.rank)
        transform.update(pieces, (), pieces, Sharded(layout, own))
        return own.num_calls("all_to_all"), own.sent_bytes(), sum(x.nbytes for x in pieces.values())

    results = run_ranks(run, 3)
    trees = 1 + wants_params
    assert [(calls, sent) for calls, sent, _ in results] == [
        (2, 2 * trees * held) for _, _, held in results
    ]
    assert sum(held for _, _, held in results) == sum(x.nbytes for x in tree.values())
    for whole in (one for trees in seen for one in trees):
        for name, x in whole.items():
            assert x.dtype == tree[name].dtype and x.shape == tree[name].shape
            assert torch.equal(x.signbit(), tree[name].signbit()) and torch.equal(
                x.nan_to_num(), tree[name].nan_to_num()
            )


def test_a_whole_tree_above_its_limit_is_refused() -> None:
    transform = optim.with_whole_tree(lambda p: (), lambda u, s, p: (u, s), limit=100)
    tree, layout = make([(4, 4)], 1)
    across = Sharded(layout, SingleRank())
    with pytest.raises(TransformError, match=r"128 bytes, above its limit of 100.*Remedy"):
        transform.update(tree_map(torch.flatten, tree), (), tree_map(torch.flatten, tree), across)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_products_of_half_precision_neither_overflow_nor_are_rounded(
    dtype: torch.dtype, ranks: int
) -> None:
    """300 * 300 is above float16's largest number, and 1.0078125**2 between two of bfloat16's."""
    tree = {
        "w": torch.full((6,), 300.0, dtype=dtype),
        "b": torch.full((3,), 1 + 2**-7, dtype=dtype),
    }
    layout = make_layout(tree, ranks, trainable=lambda path, leaf: True)
    want = sum(x.double().square().sum() for x in tree.values())

    def run(group: Any) -> None:
        across, pieces = Sharded(layout, group), slice_tree(tree, layout, group.rank)
        for answer in (across.dot(pieces, pieces), *across.dots((pieces, pieces))):
            assert answer.dtype == torch.float32
            torch.testing.assert_close(answer.double(), want, rtol=1e-7, atol=0)

    run_ranks(run, ranks)
    torch.testing.assert_close(Local(tree).dot(tree, tree).double(), want, rtol=1e-7, atol=0)
    torch.testing.assert_close(fz.dot(tree, tree).double(), want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", ["shampoo", "soap", "muon", "full_matrix_adagrad"])
def test_owners_and_others_have_states_on_the_same_devices(name: str) -> None:
    """A collective takes them to all ranks, and each device has its own backend. Counts are on the
    CPU at their owner. The meta device stands for a GPU."""
    factory = getattr(optim, name, None) or getattr(optim.contrib, name)
    tree = {f"leaf{i}": torch.empty(4 + i, 3, device="meta") for i in range(3)}
    devices = []  # per rank, of each leaf of the state
    for rank in range(2):
        layout = make_layout(tree, 2, trainable=lambda path, leaf: True)
        extents = layout.extents(rank)
        pieces = tree_map(lambda e: torch.empty(e.num_here, device="meta"), extents)
        across = Sharded(layout, CountingGroup(2, rank))
        state = factory(1e-3).init(pieces, across)
        leaves = [x for x in optree.tree_leaves(state) if isinstance(x, Tensor)]
        assert all(x.device.type == "cpu" for x in leaves if x.dtype == torch.int64)
        devices.append([x.device for x in leaves])
    assert devices[0] == devices[1]
