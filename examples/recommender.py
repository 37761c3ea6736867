"""Train two towers, of users and of items, on ratings that the example makes: tables whose rows lie
on several ranks, and negatives from the whole batch. Losses are the same on any number of ranks.

    $ python examples/recommender.py                  # tables of a million rows, 2 ranks
    $ python examples/recommender.py --size tiny --ranks 3

Users and items are drawn by a power law. Each has a hidden group, and users rate items of their
own. Recall is measured on each step's batch before the step has learned from it: how often the item
of a rating is among the ten that its user likes best, out of all items of the batch.
"""

import argparse
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim, testing

DIM, TOP, TEMPERATURE = 16, 10, 0.1


class Size(NamedTuple):
    num_rows: int  # of each of the two tables
    num_groups: int
    num_ratings: int  # of a step, over all ranks
    num_steps: int


SIZES = {"tiny": Size(3_000, 8, 64, 6), "million": Size(1_000_000, 64, 2048, 60)}


class Tower(nn.Module):
    def __init__(self, num_rows: int):
        super().__init__()
        self.table = nn.Embedding(num_rows, DIM, sparse=True)  # a table at levels 1 to 3
        self.net = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.net(self.table(ids)), dim=1)


class TwoTowers(nn.Module):
    def __init__(self, num_rows: int):
        super().__init__()
        self.users, self.items = Tower(num_rows), Tower(num_rows)

    def forward(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        return self.users(users), self.items(items)


def ratings(number: int, size: Size) -> tuple[Tensor, Tensor]:
    """The batch of a step: ids of users and of the items that they like, (num_ratings,) each."""
    own = torch.Generator().manual_seed(number)
    drawn = torch.rand(2, size.num_ratings, generator=own, dtype=torch.float64)
    users, items = (size.num_rows**drawn).long() - 1  # the r-th is drawn about as often as 1 / r
    items += users % size.num_groups - items % size.num_groups
    # Ids that aren't sorted by how frequent they are: ranks are asked for equally many rows.
    shuffled = (torch.stack([users, items]) * 7919) % size.num_rows
    return shuffled[0], shuffled[1]


def kind(path: str, leaf: object) -> str:
    return "tables" if path.endswith("table.weight") else "towers"


def loss_and_recall(
    users: Tensor, own: slice, all_items: Tensor, all_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Of this rank's ratings, whose users (n, DIM) are compared with the items of the whole batch,
    (num_ratings, DIM) and their ids; `own` are those that go with the users."""
    labels = torch.arange(len(all_ids))[own]
    same = all_ids[own, None] == all_ids  # an item that others rated, too, is no negative
    same[torch.arange(len(labels)), labels] = False
    scores = (users @ all_items.T / TEMPERATURE).masked_fill(same, -torch.inf)
    is_found = (scores.topk(TOP).indices == labels[:, None]).any(dim=1)
    return F.cross_entropy(scores, labels), is_found.double().mean()


def make_step(apply, of_tables: optim.Transform):
    def loss_fn(params, buffers, batch):
        users, items = apply(params, buffers, *batch)[0]
        own = fz.batch.own_rows(users)
        all_items, all_ids = fz.batch.all_rows(items), fz.batch.all_rows(batch[1])
        loss, recall = loss_and_recall(users, own, all_items, all_ids)
        return loss, fz.Aux(metrics={"recall": recall}, weight=len(users))

    by_kind = {"tables": of_tables, "towers": optim.adamw(3e-3)}
    return fz.train_step(loss_fn, optim.partition(by_kind, kind))


def train(
    group: fz.Group, step, params: fz.Params, buffers: dict[str, Tensor], size: Size, level: int
) -> tuple[list[tuple[float, float]], float]:
    """What one rank does: the losses and recalls of all steps, and the part of the tables that it
    holds."""
    sharded = fz.shard(step, level=level, group=group)
    state, seen = sharded.init(params, buffers), []
    for number in range(size.num_steps):
        batch = fz.data.share(ratings(number, size), group)
        state, metrics = sharded(state, batch)
        seen.append((metrics["loss"].item(), metrics["recall"].item()))
    tables = [leaf for path, leaf in state.params.items() if kind(path, leaf) == "tables"]
    held = sum(leaf.local.numel() for leaf in tables)
    return seen, held / (2 * size.num_rows * DIM)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="threads of this process")
    parser.add_argument("--level", type=int, default=3, choices=range(4))
    parser.add_argument("--size", default="million", choices=SIZES)
    parser.add_argument("--steps", type=int, help="instead of the size's")
    args = parser.parse_args()
    size = SIZES[args.size]
    if args.steps is not None:
        size = size._replace(num_steps=args.steps)
    if size.num_steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {size.num_steps}")
    torch.manual_seed(0)
    apply, params, buffers = fz.functionalize(TwoTowers(size.num_rows).double(), units=Tower)
    step = make_step(apply, optim.rows.adagrad_by_row(0.3))
    start = time.perf_counter()
    ranks = testing.run_ranks(
        lambda group: train(group, step, params, buffers, size, args.level), args.ranks
    )
    seconds = time.perf_counter() - start
    (first, *_), last = ranks[0][0], ranks[0][0][-1]
    print(f"loss {first[0]:.10f} -> {last[0]:.10f}")
    print(f"recall@{TOP} {first[1]:.4f} -> {last[1]:.4f}")
    for rank, (_, held) in enumerate(ranks):
        print(f"rank {rank} holds {held:.2f} of the tables")
    print(f"{seconds / size.num_steps:.3f} s per step")


if __name__ == "__main__":
    main()
