"""`fz.data`: the order of batches is of the run, and a rank's share of the batch."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import functorch_zero as fz
from functorch_zero.errors import MismatchError, StructureError
from functorch_zero.groups import HybridGroup, SingleRank, run_ranks
from functorch_zero.sharded.data import GlobalOrder, share

NUM_ROWS, BATCH = 26, 6  # 4 batches an epoch, 2 rows left


def order_of(group: Any, **options: Any) -> GlobalOrder:
    return GlobalOrder(NUM_ROWS, BATCH, group, seed=3, **options)


def batches_of(ranks: int, **options: Any) -> list[list[int]]:
    """The batches of two epochs, each put together from all ranks' shares."""

    def run(group: Any) -> list[list[int]]:
        order, found = order_of(group, **options), []
        while order.epoch < 2:
            for rows in order:
                found.append(rows)
                order.advance()
        return found

    by_rank = run_ranks(run, ranks)
    return [[*chain(*shares)] for shares in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(
    "ranks, options", [(3, {}), (2, {}), (3, {"shuffle": False}), (2, {"drop_last": False})]
)
def test_the_sequence_of_batches_knows_no_ranks(ranks: int, options: Any) -> None:
    alone = batches_of(1, **options)
    assert batches_of(ranks, **options) == alone
    epochs = alone[: len(alone) // 2], alone[len(alone) // 2 :]
    taken = NUM_ROWS if "drop_last" in options else NUM_ROWS - 2
    assert all(len({*chain(*epoch)}) == taken for epoch in epochs)
    assert (epochs[0] == epochs[1]) is ("shuffle" in options)


def test_another_seed_is_another_order_in_each_epoch() -> None:
    seeds = [GlobalOrder(NUM_ROWS, BATCH, SingleRank(), seed=seed) for seed in (0, 1)]
    first = [order.rows(epoch, 0).tolist() for order in seeds for epoch in (0, 1)]
    assert len({*map(tuple, first)}) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_goes_on_after_a_kill_on_other_ranks_as_if_nothing_had_been(workers: int) -> None:
    alone = batches_of(1)
    rows = TensorDataset(torch.arange(NUM_ROWS))

    def load(group: Any, saved: Any, count: int) -> Any:
        """So many batches of a run that goes on from what was saved."""
        order, found = order_of(group), []
        order.load_state_dict(saved)
        loader = DataLoader(rows, batch_sampler=order, num_workers=workers)
        while len(found) < count:
            for (batch,) in loader:  # a worker has asked for more by now
                found.append(batch.tolist())
                order.advance()
                if len(found) == count:
                    break
        return found, order.state_dict()

    if workers:  # which threads would fork
        first, saved = load(SingleRank(), {"epoch": 0, "step": 0}, 3)
        then, _ = load(SingleRank(), saved, 5)
        assert [*first, *then] == alone
        return
    killed = run_ranks(lambda group: load(group, {"epoch": 0, "step": 0}, 3), 2)
    saved = killed[0][1]
    assert saved == {"epoch": 0, "step": 3}
    resumed = run_ranks(lambda group: load(group, saved, 5), 3)
    found = [
        [[*chain(*x)] for x in zip(*(r[0] for r in run), strict=True)] for run in (killed, resumed)
    ]
    assert [*found[0], *found[1]] == alone


def test_a_step_on_shares_is_the_step_on_the_batch() -> None:
    data = torch.randn(NUM_ROWS, 3, dtype=torch.float64)

    def loss_fn(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        return (x @ params["w"] - 1).square().mean(), fz.Aux(weight=len(x))

    step = fz.train_step(loss_fn, fz.optim.adamw(0.1))
    params = {"w": torch.ones(3, dtype=torch.float64, requires_grad=True)}

    def train(group: Any) -> Any:
        order, sharded = order_of(group, drop_last=False), fz.shard(step, level=3, group=group)
        state = sharded.init(params)
        for rows in order:
            state, _ = sharded(state, data[rows])
        return sharded.unshard(state).params["w"] - params["w"]

    alone, two = train(SingleRank()), run_ranks(train, 2)[0]
    assert alone.abs().min() > 0
    torch.testing.assert_close(two, alone, rtol=0, atol=1e-12)


def test_ranks_of_the_same_data_get_the_same_share() -> None:
    def run(group: Any) -> Any:
        mesh = HybridGroup(group, shard_size=2, same_data="replicate")
        order = GlobalOrder(8, 4, mesh, shuffle=False)
        return share(torch.arange(4), mesh).tolist(), next(iter(order))

    assert run_ranks(run, 4) == [([0, 1], [0, 1]), ([2, 3], [2, 3])] * 2


def test_shares_of_a_tree_and_of_what_has_no_rows() -> None:
    batch = {
        "x": torch.arange(7),
        "names": [*"abcdefg"],
        "temperature": 0.5,
        "all": torch.tensor(1),
    }
    shares = run_ranks(lambda group: share(batch, group), 3)
    assert [x["x"].tolist() for x in shares] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [x["names"] for x in shares] == [[*"abc"], [*"de"], [*"fg"]]
    assert all(x["temperature"] == 0.5 and x["all"] == 1 for x in shares)
    assert shares[0]["x"].data_ptr() == batch["x"].data_ptr()  # a view
    with pytest.raises(StructureError, match=r"unequal rows.*y"):
        share({"x": torch.ones(4), "y": torch.ones(3)}, SingleRank())


def test_ranks_of_other_seeds_or_sizes_are_told() -> None:
    with pytest.raises(MismatchError, match=r"seed is 0 on rank 0 and 1 on rank 1"):
        run_ranks(lambda group: GlobalOrder(8, 4, group, seed=group.rank), 2)
    with pytest.raises(MismatchError, match=r"num_rows is 8 on rank 0 and 9"):
        run_ranks(lambda group: GlobalOrder(8 + group.rank, 4, group), 2)


@pytest.mark.parametrize(
    "rows, batch, options, text",
    [
        (8, 2, {}, "a batch of 2 rows has none for some of 3 ranks"),
        (3, 4, {}, "3 rows don't fill a batch of 4"),
        (8, 6, {"drop_last": False}, "the last batch of an epoch has 2 of 8 rows"),
        (0, 4, {"drop_last": False}, "an epoch has none"),
    ],
)
def test_an_order_without_rows_for_a_rank_is_refused(
    rows: int, batch: int, options: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        run_ranks(lambda group: GlobalOrder(rows, batch, group, **options), 3)


@pytest.mark.parametrize("saved", [{"epoch": 0, "step": 4}, {"epoch": -1, "step": 0}])
def test_a_place_that_no_run_has_is_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"none of 4 steps"):
        order_of(SingleRank()).load_state_dict(saved)
