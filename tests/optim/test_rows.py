"""Optimizers of rows: torch's of sparse gradients, in one process; the same numbers on pieces;
state that is cut with the rows; and authors who mix rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import TransformError
from functorch_zero.groups import counted, run_ranks
from functorch_zero.optim import rows
from functorch_zero.params import as_local
from functorch_zero.testing import (
    assert_equal_values,
    assert_sharded_equals_unsharded,
    check_transform,
)
from tests.modules import Net, seeded
from tests.reference import (
    HOSTILE,
    assert_same,
    assert_sharded,
    falling,
    gradients_for,
    run,
    tensors,
    trajectory,
)
from tests.reference import whole as oracles
from tests.tiers import THOROUGH, crossed, tiers

D = torch.float64
SHAPES = HOSTILE | {"empty": (0, 3), "without columns": (4, 0)}
PARAMS = tensors(SHAPES, 0)
EVERY = {name: getattr(rows, name) for name in rows.__all__}


def some_rows(seed: int = 0) -> list[dict[str, Tensor]]:
    """Gradients that touch about half of the rows, others in each step."""
    g = torch.Generator().manual_seed(seed)

    def thinned_out(x: Tensor) -> Tensor:
        kept = torch.rand(x.shape[:1], generator=g) < 0.5
        return x * kept.view(-1, *[1] * (x.dim() - 1)) if x.dim() else x * kept

    return [tree_map(thinned_out, step) for step in gradients_for(SHAPES)]


# In one process: the oracle


def table(num_rows: int = 30, columns: int = 4) -> nn.Embedding:
    return seeded(lambda: nn.Embedding(num_rows, columns, sparse=True, dtype=D))


def batches_of(num: int = 5, size: int = 8, num_rows: int = 30, columns: int = 4) -> list[Any]:
    """Ids that repeat, and no row of zeros among the gradients."""
    g = torch.Generator().manual_seed(1)
    return [
        {
            "ids": torch.randint(0, num_rows, (size,), generator=g),
            "w": torch.rand(size, columns, generator=g, dtype=D) + 0.1,
        }
        for _ in range(num)
    ]


def loss_of(apply: Any) -> Callable[..., Tensor]:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        out: Tensor = apply(params, buffers, batch["ids"])[0]
        return ((out + 1).square() * batch["w"]).sum(1).mean()

    return loss_fn


TORCH: dict[str, tuple[optim.Transform, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (rows.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "adagrad": (
        rows.adagrad(0.1, 0.3, 1e-5),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3, eps=1e-5),
    ),
    "adagrad, by default": (rows.adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    "lazy_adam": (rows.lazy_adam(0.1), lambda p: torch.optim.SparseAdam(p, 0.1)),
    "lazy_adam, other decays": (
        rows.lazy_adam(0.1, 0.5, 0.8, 1e-3),
        lambda p: torch.optim.SparseAdam(p, 0.1, (0.5, 0.8), 1e-3),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", TORCH)
def test_torch_on_sparse_gradients(name: str) -> None:
    """Step by step: the updates, at 1e-12 of the largest."""
    ours, make_theirs = TORCH[name]
    model = table()
    apply, params, buffers = fz.functionalize(model)
    step = fz.train_step(loss_of(apply), ours)
    state, theirs = step.init(params, buffers), make_theirs([*model.parameters()])
    for batch in batches_of():
        old, old_theirs = state.params["weight"].detach(), model.weight.detach().clone()
        state, _ = step(state, batch)
        out = model(batch["ids"])
        ((out + 1).square() * batch["w"]).sum(1).mean().backward()
        assert model.weight.grad is not None and model.weight.grad.is_sparse
        theirs.step()
        theirs.zero_grad()
        update = model.weight.detach() - old_theirs
        got = state.params["weight"].detach() - old
        assert update.any() and (got - update).abs().max() <= 1e-12 * update.abs().max()


def test_adagrad_by_row_is_the_paper() -> None:
    made = run(rows.adagrad_by_row(falling, 0.1), PARAMS, some_rows())
    oracle = oracles.AdagradByRow(falling, 0.1)
    assert_same(made, trajectory(oracle, PARAMS, some_rows()))


@pytest.mark.parametrize("name", ["adagrad", "adagrad_by_row", "lazy_adam"])
def test_rows_of_zeros_rest(name: str) -> None:
    """Updates of the others are those of a table without them, also after a rest; a row with a NaN
    is touched."""
    optimizer, g = EVERY[name](0.1), torch.Generator().manual_seed(2)
    params = {"all": torch.randn(6, 3, generator=g, dtype=D)}
    alone = {"all": params["all"][[1, 4]]}
    grads, grads_alone = [], []
    for k in range(4):
        grad = torch.zeros(6, 3, dtype=D)
        grad[[1, 4]] = torch.randn(2, 3, generator=g, dtype=D) * (k != 1)
        grads.append({"all": grad})
        grads_alone.append({"all": grad[[1, 4]]})
    grads[3]["all"][0, 1] = torch.nan
    made, expected = run(optimizer, params, grads), run(optimizer, alone, grads_alone)
    for k in range(4):
        assert torch.equal(made[k]["all"][[1, 4]], expected[k]["all"])
        assert not made[k]["all"][[2, 3, 5]].any()
    assert made[0]["all"].any() and not made[1]["all"].any()
    assert made[3]["all"][0].isnan().any()


def test_sizes_of_the_state() -> None:
    params = {"emb": torch.zeros(50, 8, dtype=D, requires_grad=True)}
    sizes = {}
    for name, make in EVERY.items():
        state = make(0.1).init(params)
        sizes[name] = sum(x.numel() for x in tree_leaves(state) if x.dim())
    assert sizes == {"sgd": 0, "adagrad": 400, "adagrad_by_row": 50, "lazy_adam": 800}


# On pieces


@pytest.mark.parametrize(("name", "ranks"), crossed(EVERY, [(1, 3), (2, 5)]))
def test_pieces_give_the_same(name: str, ranks: tuple[int, ...]) -> None:
    assert_sharded(EVERY[name](falling), PARAMS, some_rows(), ranks=ranks)


def two_embeddings(sparse: bool) -> Net:
    """Two embeddings, of which one is cut between rows at all levels, and a net."""
    return Net(
        lambda self, ids: self.net(torch.cat([self.even(ids), self.odd(ids % 13)], 1)),
        # Rows of 256 bytes, at whose multiples pieces begin
        even=nn.Embedding(48, 32, sparse=sparse),
        odd=nn.Embedding(13, 7, sparse=sparse),
        net=nn.Linear(39, 4),
    )


def both(*, sparse: bool = False) -> tuple[Any, Any, Any]:
    """`sparse`: at levels 1 to 3 both embeddings are tables."""
    return seeded(lambda: fz.functionalize(two_embeddings(sparse).to(D), units=nn.Embedding))


def of_tables(path: str, leaf: Tensor) -> str:
    return "net" if path.startswith("net") else "tables"


def usual(make: Callable[[Any], optim.Transform]) -> optim.Transform:
    """Tables by rows, AdamW for the rest, clipped together."""
    apart = optim.partition({"tables": make(0.1), "net": optim.adamw(1e-2)}, of_tables)
    return optim.chain(optim.clip_by_global_norm(0.05), apart)


@THOROUGH
@pytest.mark.parametrize(("name", "level"), crossed(EVERY, [3, 1, 0, 2]))
def test_beside_other_optimizers(name: str, level: int) -> None:
    """With the norm of all, donated and not, in micro-batches."""
    apply, params, buffers = both()
    step = fz.train_step(loss_of(apply), usual(EVERY[name]), accumulate=2)
    batches = batches_of(3, 12, 48)
    for donate in (True, False):
        assert_sharded_equals_unsharded(
            step, params, buffers, batches, levels=(level,), ranks=(1, 3), donate=donate
        )


def trained(
    level: int,
    group: Any,
    batches: list[Any],
    state: Any = None,
    *,
    sparse: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    apply, params, buffers = both(sparse=sparse)
    step = fz.train_step(loss_of(apply), usual(rows.adagrad_by_row))
    sharded: Any = step if level < 0 else fz.shard(step, level=level, group=group, **options)
    state = sharded.init(params, buffers) if state is None else state(sharded, params, buffers)
    for batch in batches:
        size = 1 if level < 0 else group.size
        own = {name: x.chunk(size)[0 if level < 0 else group.rank] for name, x in batch.items()}
        state, _ = sharded(state, own)
    return sharded, state


def test_state_lies_with_its_rows_and_nothing_is_sent() -> None:
    """A number per row, of the rows that a rank holds. Of the other embedding one rank has all."""

    def on_rank(group: Any) -> tuple[dict[str, Any], int, str]:
        watched = counted(group)
        apply, params, buffers = both()
        step = fz.train_step(loss_of(apply), rows.adagrad_by_row(0.1))
        sharded = fz.shard(step, level=3, group=watched)
        state = sharded.init(params, buffers)
        first, _ = as_local(state.opt_state)
        shapes = {path: (*first[path].state.sum_of_squares.shape,) for path in params}
        watched.calls.clear()
        state, _ = sharded(state, {name: x[:4] for name, x in batches_of(1)[0].items()})
        sent = [call.num_elements for call in watched.calls if call.kind == "all_to_all"]
        return shapes, sum(sent), str(fz.describe(sharded, state))

    for shapes, sent, text in run_ranks(on_rank, 2):
        assert shapes["even.weight"] == (24,)
        assert shapes["odd.weight"] in ((13,), (0,))
        assert sent < 48 * 32  # the other leaves' alone
        assert "at owners" in text


@pytest.mark.parametrize("name", tiers(["adagrad_by_row"], ["lazy_adam"]))
@pytest.mark.parametrize("level", tiers([3], [1, 2]))
def test_tables(name: str, level: int) -> None:
    """`sparse=True`: of any number of rows, and nothing at owners."""
    apply, params, buffers = both(sparse=True)
    step = fz.train_step(loss_of(apply), usual(EVERY[name]), accumulate=2)
    batches = batches_of(3, 12, 48)
    assert_sharded_equals_unsharded(
        step, params, buffers, batches, levels=(level,), ranks=(1, 2, 3)
    )

    def on_rank(group: Any) -> tuple[list[int], str]:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        of_odd = as_local(state.opt_state)[1]["tables"][0]["odd.weight"].state
        return [len(x) for x in of_odd if x.dim()], str(fz.describe(sharded, state))

    found = run_ranks(on_rank, 3)
    assert [{*lengths} for lengths, _ in found] == [{5}, {5}, {3}]
    assert not any("at owners" in text for _, text in found)


@THOROUGH
@pytest.mark.parametrize(
    ("before", "after"),
    tiers([((3, 2), (1, 3))], [((-1, 1), (3, 3)), ((3, 3), (-1, 1))], rows=True),
)
@pytest.mark.parametrize("sparse", tiers([True], [False]))
def test_checkpoints(
    before: tuple[int, int], after: tuple[int, int], sparse: bool, tmp_path: Path
) -> None:
    """From levels and numbers of ranks to others, and from tables to other leaves; -1 is the
    unsharded step."""
    batches = batches_of(4, 12, 48)

    def save(group: Any) -> Any:
        step, state = trained(before[0], group, batches[:2], sparse=sparse)
        checkpoint.save(tmp_path / "at 2", step, state)

    def resume(group: Any) -> Any:
        def load(step: Any, params: Any, buffers: Any) -> Any:
            like = step.init(params, buffers)
            return checkpoint.load(tmp_path / "at 2", step, like=like).state

        step, state = trained(after[0], group, batches[2:], load)
        return step.unshard(state) if after[0] >= 0 else state

    run_ranks(save, before[1])
    found = run_ranks(resume, after[1])[0]
    _, expected = trained(-1, None, batches)
    assert_equal_values(expected.opt_state, found.opt_state, grade="reordered")
    assert_equal_values(expected.params, found.params, grade="reordered")


@pytest.mark.parametrize("levels", tiers([(3, 1)], [(0, 3), (2, 0)]))
def test_whole_and_cut_again(levels: tuple[int, int]) -> None:
    batches = batches_of(4, 12, 48)

    def on_rank(group: Any) -> Any:
        before, state = trained(levels[0], group, batches[:2])
        whole = before.unshard(state)
        step, state = trained(levels[1], group, batches[2:], lambda s, p, b: s.shard(whole))
        return step.unshard(state)

    found = run_ranks(on_rank, 3)[0]
    _, expected = trained(-1, None, batches)
    assert_equal_values(expected.opt_state, found.opt_state, grade="reordered")


def test_donated_state_is_written_over() -> None:
    """At the same address; where nothing is donated the old state stays as it was."""

    def on_rank(group: Any) -> None:
        for donate in (True, False):
            step, state = trained(3, group, batches_of(1, 12, 48), donate=donate)
            sums = as_local(state.opt_state)[1]["tables"][0]["even.weight"].state.sum_of_squares
            before, at = sums.clone(), sums.data_ptr()
            own = {k: x.chunk(2)[group.rank] for k, x in batches_of(2, 12, 48)[1].items()}
            new, _ = step(state, own)
            after = as_local(new.opt_state)[1]["tables"][0]["even.weight"].state.sum_of_squares
            assert (after.data_ptr() == at) == donate
            assert not torch.equal(after, before)
            assert donate or torch.equal(sums, before)

    run_ranks(on_rank, 2)


def test_a_state_that_is_one_tensor_twice() -> None:
    """It isn't written over twice."""

    def init(param: Tensor) -> tuple[Tensor, Tensor]:
        zeros = param.new_zeros(len(param))
        return zeros, zeros

    def update(g: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        a, b = state
        return g * (1 + a - b)[:, None], (a + 1, b + 2)

    apply, params, buffers = both()
    own = optim.chain(optim.with_whole_rows(init, update), optim.scale(-0.1))
    step = fz.train_step(loss_of(apply), own)
    assert_sharded_equals_unsharded(
        step, params, buffers, batches_of(3, 12, 48), levels=(0, 3), ranks=(2,)
    )


# Authors


def norm_of_all(g: Tensor, state: Any) -> tuple[Tensor, Any]:
    return g / (g.norm() + 1e-9), state


def by_position(g: Tensor, state: Any) -> tuple[Tensor, Any]:
    return g * torch.arange(len(g), dtype=g.dtype)[:, None], state


def by_their_number(g: Tensor, state: Any) -> tuple[Tensor, Any]:
    return g / max(len(g), 1), state


def turned_round(g: Tensor, state: Any) -> tuple[Tensor, Any]:
    return g.flip(0), state


def of_params(g: Tensor, state: Any, param: Tensor) -> tuple[Tensor, Any]:
    return g * param.sum(), state


def counting_rows(g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return g, state + len(g)


def counting_steps_with_rows(g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return g, state + (len(g) > 0)


def at_random(g: Tensor, state: Any) -> tuple[Tensor, Any]:
    return torch.rand_like(g), state


LIES = [
    *(norm_of_all, by_position, by_their_number, turned_round, of_params),
    *(counting_rows, counting_steps_with_rows),
]


@pytest.mark.parametrize("update", [*LIES, at_random])
def test_who_mixes_rows_is_refused(update: Any) -> None:
    transform = optim.with_whole_rows(lambda param: param.new_zeros(()), update)
    match = "is not a function" if update is at_random else r"of some rows are not .*whole_leaves"
    with pytest.raises(TransformError, match=f"{update.__name__}.*{match}"):
        check_transform(transform, ranks=())
    params = {"emb": torch.ones(4, 3, requires_grad=True)}
    step = fz.train_step(lambda params, buffers, batch: params["emb"].sum(), transform)
    with pytest.raises(TransformError, match=update.__name__):
        fz.shard(step, level=1, group=fz.groups.SingleRank()).init(params)


def test_who_needs_a_row_is_refused() -> None:
    """A rank may have none that is touched."""

    def divides_by_its_columns(g: Tensor, state: Any) -> tuple[Tensor, Any]:
        return g / (1 + g.reshape(len(g), -1).abs()), state

    params = {"emb": torch.ones(4, 3, requires_grad=True)}
    transform = optim.with_whole_rows(lambda param: (), divides_by_its_columns)
    step = fz.train_step(lambda params, buffers, batch: params["emb"].sum(), transform)
    with pytest.raises(TransformError, match="divides_by_its_columns fails on some rows"):
        fz.shard(step, level=1, group=fz.groups.SingleRank()).init(params)


def test_what_rows_are() -> None:
    """Of all shapes, and what an author is given."""
    seen = []

    def init(param: Tensor) -> Tensor:
        seen.append((*param.shape,))
        return param.new_zeros(len(param), 2)

    shapes = {"kernel": (4, 3, 2), "matrix": (5, 2), "scalar": (), "vector": (6,)}
    params = {k: torch.ones(shape, requires_grad=True) for k, shape in shapes.items()}
    optim.with_whole_rows(init, lambda g, state: (g, state)).init(params)
    assert seen == [(4, 6), (5, 2), (1, 1), (6, 1)]


def test_other_shapes_are_refused() -> None:
    params = {"emb": torch.ones(4, 3, requires_grad=True)}

    def three(param: Tensor) -> Tensor:
        return param.new_zeros(3)

    def one_sum(g: Tensor, state: Any) -> tuple[Tensor, Any]:
        return g.sum(1), state

    with pytest.raises(TransformError, match=r"three .*expected tensors with 4 rows.*\(3,\)"):
        optim.with_whole_rows(three, one_sum).init(params)
    transform = optim.with_whole_rows(lambda param: (), one_sum)
    with pytest.raises(TransformError, match=r"one_sum must make .*\(4, 3\).*got \[\(4,\)\]"):
        transform.update(params, transform.init(params), params)


def test_complex_rows_are_refused() -> None:
    params = {"emb": torch.ones(4, 3, dtype=torch.complex128, requires_grad=True)}
    with pytest.raises(TransformError, match="emb"):
        rows.lazy_adam(0.1).init(params)
