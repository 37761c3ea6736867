"""What every optimizer of the conformance table keeps on a rank, and what it sends: counted through
`shard`.

The group is a `CountingGroup`: one process plays one rank, and the other ranks are imagined. The
numbers that a step makes there mean nothing; sizes and collectives are a real run's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import CountingGroup
from functorch_zero.groups.counting import Call
from functorch_zero.optim import Needs, Transform
from functorch_zero.optim.across import WholeLeaf
from functorch_zero.optim.local import Local
from functorch_zero.sharded_optim.state_plan import StatePlan, plan_state
from tests.conformance.gpt import gpt_tree
from tests.conformance.table import TABLE
from tests.local import local_leaves
from tests.tiers import THOROUGH, tiers

RANKS = 3
# But for those of rows, of which `test_rows.py` has what a rank holds and sends
NAMES = [name for name in TABLE if TABLE[name].make().needs != Needs.WHOLE_ROWS]
QUICK = NAMES[::60]
NOT_QUICK = [name for name in NAMES if name not in QUICK]
# Rows of each kind of needs
DEEP = [
    "scale_by_radam",
    "adafactor, momentum",
    "lbfgs",
    "shampoo, blocks",
    "muon, match_rms_adamw",
    "scale_by_full_matrix_adagrad_tree",
]
NUM_STEPS = 2  # some optimizers rest in one of them


def loss_fn(params: Any, buffers: Any, batch: Tensor) -> Tensor:
    leaves = optree.tree_leaves(fz.unshard(params))
    return sum(((p - batch.mean()) ** 2).mean() for p in leaves)


def level_of(name: str) -> int:
    """1, 2 or 3, in turn."""
    return 1 + list(TABLE).index(name) % 3


class Size(NamedTuple):
    """A tree's: small where the square of the number of params is kept."""

    small: bool
    layers: int


def tree(size: Size) -> Any:
    """Params."""
    return gpt_tree(5, 2, size.layers, 3) if size.small else gpt_tree(30, 8, size.layers, 6)


def nbytes(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def held(state: Any) -> int:
    """Bytes of the storages behind a state: a view of something large counts as all of it."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors(state) if x.numel()
    }
    return sum(storage.nbytes() for storage in storages.values())


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in local_leaves(tree) if isinstance(x, Tensor)]


def run_rank(
    optimizer: Transform, level: int, rank: int, num_steps: int, size: Size
) -> tuple[fz.State, list[list[Call]]]:
    """One imagined rank: its last state, and the collectives of each step."""
    group = CountingGroup(RANKS, rank)
    step = fz.shard(fz.train_step(loss_fn, optimizer), level=level, group=group)
    state, calls = step.init(tree(size)), []
    for _ in range(num_steps):
        group.reset()
        state, _ = step(state, torch.randn(3))
        calls.append(list(group.calls))
    return state, calls


@pytest.fixture(scope="module")
def base() -> Callable[[int, Size], list[Call]]:
    """The collectives of a level's step itself, on a tree of that size."""
    return cache(lambda level, size: run_rank(optim.sgd(0.1), level, 0, 1, size)[1][0])


def plan_for(optimizer: Transform, state: fz.State) -> StatePlan:
    assert state.sharding is not None
    layout = state.sharding.layout
    return plan_state(optimizer.init, layout, layout.trainable, RANKS)


@pytest.mark.parametrize(
    ("name", "layers"),
    tiers(
        [(n, 1) for n in QUICK],
        [(n, 1) for n in NOT_QUICK] + [(n, 2) for n in DEEP],
        [(n, 2) for n in NAMES if n not in DEEP],
        rows=True,
    ),
)
def test_state_and_traffic(name: str, layers: int, base: Callable[[int, Size], list[Call]]) -> None:
    optimizer, level = TABLE[name].make(), level_of(name)
    size = Size(optimizer.needs == Needs.WHOLE_TREE, layers)
    first, steps = run_rank(optimizer, level, 0, NUM_STEPS, size)
    others = [run_rank(optimizer, level, rank, 0, size)[0] for rank in range(1, RANKS)]
    check_state(name, optimizer, [first, *others], size)
    for calls in steps:
        check_traffic(optimizer, beyond(calls, base(level, size)), size)


def check_state(name: str, optimizer: Transform, ranks: list[fz.State], size: Size) -> None:
    """A rank holds 1/N of what follows params, within padding; the whole states of the leaves it
    owns; and vectors."""
    whole_tree = optimizer.needs == Needs.WHOLE_TREE
    whole = optree.tree_leaves(fz.train_step(loss_fn, optimizer).init(tree(size)).opt_state)
    plan = plan_for(optimizer, ranks[0])
    sizes = {kind: 0 for kind in ("follows", "owned", "replicated")}
    by_leaf: dict[int, int] = {}
    for leaf, x in zip(plan.leaves, whole, strict=True):
        sizes[leaf.kind] += nbytes(x)
        if leaf.kind == "owned":
            by_leaf[leaf.leaf] = by_leaf.get(leaf.leaf, 0) + nbytes(x)
        if leaf.kind == "replicated" and not whole_tree:
            assert nbytes(x) <= 8 * 32, (
                "what every rank holds is a vector of a matrix's dim at most"
            )
    shares = [held(state.opt_state) for state in ranks]
    listed = ", ".join(f"{share:,}" for share in shares)
    print(
        f"{name}: {sum(sizes.values()):,} bytes whole ({sizes['replicated']:,} on every rank); "
        f"ranks hold {listed}"
    )
    padding = 64 * (RANKS + 1) * sum(leaf.kind == "follows" for leaf in plan.leaves)
    indivisible = max(by_leaf.values(), default=0)  # a leaf's state is at one owner
    # Answers of `across` may lie in one packed tensor
    slack = 1.1 * sizes["replicated"] + 8 * len(plan.leaves)
    assert (
        max(shares) <= (sizes["follows"] + sizes["owned"]) / RANKS + padding + indivisible + slack
    )


def check_traffic(optimizer: Transform, own: list[Call], size: Size) -> None:
    """Beyond the level's own: nothing; or a few small all-reduces; or two all-to-alls of 2S/N."""
    leaves = tensors(tree(size))
    if optimizer.needs == Needs.POINTWISE:
        assert not own, f"a pointwise optimizer sent {own}"
    elif optimizer.needs == Needs.WHOLE_TREE:
        check_gathering(own, leaves, optimizer)
    else:
        check_statistics([call for call in own if call.kind == "all_reduce"], leaves)
        check_exchange([call for call in own if call.kind == "all_to_all"], leaves, optimizer)
        assert {call.kind for call in own} <= {"all_reduce", "all_to_all"}


def beyond(calls: list[Call], base: list[Call]) -> list[Call]:
    """The calls that `base` has not."""
    rest = list(calls)
    for call in base:
        rest.remove(call)
    return rest


def check_statistics(calls: list[Call], leaves: list[Tensor]) -> None:
    """One collective for a kind of question, whatever the number of leaves, of scalars or vectors a
    leaf."""
    assert len(calls) <= 8, calls  # as many as there are questions
    vectors = sum(1 + sum(x.numel() // max(size, 1) for size in x.shape) for x in leaves)
    for call in calls:
        assert call.num_elements <= 2 * vectors, (
            f"{call}: more than two vectors for each dim of a leaf"
        )


def check_exchange(calls: list[Call], leaves: list[Tensor], optimizer: Transform) -> None:
    """Two all-to-alls, not two a matrix: what is mine goes out, what I own comes in, and back."""
    if optimizer.needs < Needs.WHOLE_LEAF:
        assert not calls
        return
    assert len(calls) in (0, 2), calls  # none in a step that rests
    size, largest = sum(nbytes(x) for x in leaves), max(nbytes(x) for x in leaves)
    padding = 64 * (RANKS + len(leaves))
    wanted = 3 if any(takes_params(part) for part in parts_of(optimizer)) else 2
    assert sum(call.sent_bytes for call in calls) <= wanted * (size / RANKS + padding) + largest


def check_gathering(calls: list[Call], leaves: list[Tensor], optimizer: Transform) -> None:
    """One all-to-all, in which this rank sends what it has to each of the others: S (N-1)/N, as an
    all-gather would."""
    trees = 2 if any(takes_params(part) for part in parts_of(optimizer)) else 1
    assert [call.kind for call in calls] == ["all_to_all"], calls
    size, padding = sum(nbytes(x) for x in leaves), 64 * (RANKS + len(leaves))
    assert (
        0 < sum(call.sent_bytes for call in calls) <= trees * (size / RANKS + padding) * (RANKS - 1)
    )


def parts_of(transform: Transform) -> list[Transform]:
    return [transform, *(inner for part in transform.parts for inner in parts_of(part))]


class Asked(Local):
    """An `across` that notes whether an update is sent the params as well, and runs nothing."""

    takes_params = False

    def run_whole(self, part: WholeLeaf, updates: Any, state: Any, params: Any) -> Any:
        self.takes_params = part.wants_param
        return updates, state

    def run_whole_tree(self, update: Any, trees: list[Any], state: Any, limit: int) -> Any:
        self.takes_params = len(trees) > 1
        return trees[0], state


def takes_params(transform: Transform) -> bool:
    """Whether a whole-leaf or whole-tree update asks for the params as well."""
    if transform.needs < Needs.WHOLE_LEAF or transform.parts:
        return False
    params = {"w": torch.zeros(2, 2)}
    asked = Asked(params)
    transform.update(params, (), params, asked)
    return asked.takes_params


def test_the_deep_rows_are_of_each_kind() -> None:
    assert {TABLE[name].make().needs for name in DEEP} == {*Needs} - {Needs.WHOLE_ROWS}


@THOROUGH
def test_more_leaves_are_not_more_collectives() -> None:
    for make in (lambda: optim.lamb(0.1), lambda: optim.adafactor(), lambda: optim.muon(0.1)):
        counts = []
        for layers in (1, 4):
            group = CountingGroup(RANKS)
            params = gpt_tree(30, 8, layers, 6)
            calls = {}
            for optimizer in (make(), optim.sgd(0.1)):
                step = fz.shard(fz.train_step(loss_fn, optimizer), level=1, group=group)
                state = step.init(params)
                group.reset()
                step(state, torch.randn(3))
                calls[optimizer.needs] = group.num_calls()
            counts.append(max(calls.values()) - calls[Needs.POINTWISE])
        assert counts[0] == counts[1] > 0
