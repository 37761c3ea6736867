"""Units that some ranks' losses leave out, use twice, or enter in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError
from functorch_zero.groups import run_ranks
from functorch_zero.planning.api import plan
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from tests.compare import train_sharded
from tests.models import Shared, even, rows, uneven
from tests.modules import Net, in_turn
from tests.runtime.test_unit import Loss, batches_of, build, check
from tests.tiers import crossed, tiers


def some_rows_reach(apply: Any) -> Loss:
    """Rows with a negative target don't reach most units; a rank may have no others."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Aux]:
        output = apply(params, buffers, batch["x"])[0]
        first = (batch["x"] @ params["block.weight"]).square().mean(1)
        chosen = batch["y"][:, 0] > 0
        per_row = torch.where(chosen, output.square().sum(1), first)
        return per_row.mean() if chosen.any() else first.mean(), Aux(weight=len(per_row))

    return loss_fn


def with_negative_half(n: int) -> Any:
    """The first half of the rows are such rows."""
    made = rows(5, 2)(n)
    made["y"][: n // 2] = -1
    return made


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_a_rank_whose_loss_does_not_reach_a_unit(level: int) -> None:
    """The unit is entered on every rank, and backward passes it by on one."""
    check(some_rows_reach, Shared, with_negative_half, level, 2, sizes=[6, 6])
    check(some_rows_reach, Shared, with_negative_half, level, 3, sizes=uneven(12, 3))


def skipping_net(row: str) -> Net:
    """A row of regions such as "ab?*": units a and b, left out by rows that are not chosen, run
    again in backward."""
    regions = row.split()

    def forward(net: Any, x: Tensor, chosen: Tensor) -> Any:
        for region in regions:
            units = [net.units[name] for name in region.rstrip("?*")]
            run = lambda x, units=units: in_turn(units, x)
            y = checkpoint(run, x, use_reentrant=False) if "*" in region else run(x)
            if "?" in region:
                y = torch.where(chosen[:, None], y, x) if chosen.any() else x
            x = y
        return net.head(x)

    head, names = nn.Linear(7, 3), sorted({*row} - {*" ?*"})
    return Net(forward, head=head, units=nn.ModuleDict({name: nn.Linear(7, 7) for name in names}))


def skipping(apply: Any, inner: bool = False) -> Loss:
    """The rows that have no negative target are chosen. `inner`: with a backward inside the
    loss."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Aux]:
        x = batch["x"].clone().requires_grad_()
        output = apply(params, buffers, x, batch["y"][:, 0] > 0)[0]
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0] if inner else x[:0]
        return (output - batch["y"]).square().mean() + slope.square().sum() / len(x), Aux(
            weight=len(x)
        )

    return loss_fn


def half_chosen(n: int) -> Any:
    """The first half of the rows are not chosen."""
    made = rows(7, 3)(n)
    made["y"] = made["y"].abs()
    made["y"][: n // 2] *= -1
    return made


SKIPPED = ["a* b?", "a b?* c*", "a* b? c?", "a?* a* a?*", "a* bb?*", "a* bc?*", "a* ab?* ab* c?"]


@pytest.mark.parametrize(("regions", "level"), crossed(SKIPPED[:5], (2, 3), n=5))
def test_a_unit_that_one_ranks_loss_leaves_out_next_to_one_that_runs_again(
    regions: str, level: int
) -> None:
    check(skipping, lambda: skipping_net(regions), half_chosen, level, 2)
    check(skipping, lambda: skipping_net(regions), half_chosen, level, 3, sizes=uneven(12, 3))


@pytest.mark.parametrize("inner", tiers(thorough=[True, False]))
def test_units_left_out_with_params_that_stay(inner: bool) -> None:
    """Nothing is gathered in backward, so ranks may differ in what it reaches, also inside the
    loss."""
    for regions in SKIPPED:
        loss = lambda apply: skipping(apply, inner)
        check(
            loss, lambda r=regions: skipping_net(r), half_chosen, 3, 2, reshard_after_forward=False
        )


@pytest.mark.parametrize(("regions", "inner"), [("a* bc?*", False), ("a b? c", True)])
def test_units_left_out_that_others_gather_in_an_order_nobody_can_know(
    regions: str, inner: bool
) -> None:
    with pytest.raises(GroupError, match=r"the same|different collectives"):
        check(
            lambda apply: skipping(apply, inner), lambda: skipping_net(regions), half_chosen, 3, 2
        )


def around_net() -> Net:
    """A unit around others, whose leaf is used before them and after them, as a tied embedding."""

    def forward(net: Any, x: Tensor, chosen: Tensor) -> Any:
        x = torch.tanh(x @ net.tied)
        for block in net.blocks:
            y = torch.tanh(block(x))
            x = torch.where(chosen[:, None], y, x) if chosen.any() else x
        return (x @ net.tied.T)[:, :3]

    tied = nn.Parameter(torch.empty(7, 7))
    return Net(forward, tied=tied, blocks=nn.ModuleList(nn.Linear(7, 7) for _ in range(3)))


def around(apply: Any) -> Loss:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Aux]:
        output = apply(params, buffers, batch["x"], batch["y"][:, 0] > 0)[0]
        return (output - batch["y"]).square().mean(), Aux(weight=len(output))

    return loss_fn


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_a_unit_around_others_is_used_before_and_after_them(level: int) -> None:
    """Its leaf is the first that backward asks for, and the others' backward is still to come."""
    check(around, around_net, rows(7, 3), level, 2)
    check(around, around_net, half_chosen, level, 2)  # one rank's backward passes them by
    check(around, around_net, half_chosen, level, 3, sizes=uneven(12, 3))


class Scaled(nn.Module):
    """A unit around another, with a leaf that is used after it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(7, 7), nn.Parameter(torch.empty(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.inner(x))


NESTED = (nn.Linear, Scaled)


def scaled_net(forward: Any) -> Net:
    blocks = nn.ModuleList(Scaled() for _ in range(2))
    return Net(forward, first=nn.Linear(7, 7), blocks=blocks, head=nn.Linear(7, 3))


@pytest.mark.parametrize("level", tiers([3], [2], [0, 1]))
def test_a_unit_is_passed_by_whose_leaf_is_used_after_one_within(level: int) -> None:
    """Other ranks gather it before the one within, and reduce it after that."""

    def forward(net: Any, x: Tensor, chosen: Tensor) -> Tensor:
        x = net.first(x)
        y = net.head(in_turn(net.blocks, x))
        # All ranks use the units, and the backward of some doesn't come to them
        return torch.where(chosen[:, None], y, x[:, :3]) if chosen.any() else x[:, :3]

    check(around, lambda: scaled_net(forward), half_chosen, level, 2, units=NESTED)
    check(
        around,
        lambda: scaled_net(forward),
        half_chosen,
        level,
        3,
        sizes=uneven(12, 3),
        units=NESTED,
    )


@pytest.mark.parametrize(("sizes", "level"), crossed([[0, 12], [12, 0]], (3, 2), n=2))
def test_a_part_of_no_weight_whose_backward_comes_to_exchanges_alone(
    sizes: list[int], level: int
) -> None:
    """The other ranks' backward comes to a leaf that is used after a unit within its own."""

    def forward(net: Any, x: Tensor, chosen: Tensor) -> Tensor:
        x = net.first(x)
        return net.head(in_turn(net.blocks, x + fz.batch.mean(x)))

    def weighted(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> tuple[Tensor, Aux]:
            output, size = apply(params, buffers, batch["x"], None)[0], len(batch["x"])
            return (output - batch["y"]).square().sum() / max(1, size), Aux(weight=size)

        return loss_fn

    check(
        weighted,
        lambda: scaled_net(forward),
        rows(7, 3),
        level,
        2,
        sizes=sizes,
        units=NESTED,
    )


def test_a_unit_around_others_costs_the_others_nothing() -> None:
    """Each is gathered twice and reduced once, as without it."""
    apply, params, _ = build(around_net)
    step = train_step(
        lambda p, b, x: apply(p, b, x, torch.ones(6) > 0)[0].square().mean(), optim.sgd(0.1)
    )
    collectives = plan(
        params, step, level=3, ranks=2, batch=rows(7, 3)(6)["x"].to("meta")
    ).collectives
    units = ["blocks.2", "blocks.1", "blocks.0", "root"]
    assert [c.unit for c in collectives if c.kind == "reduce_scatter"] == units
    assert len([c for c in collectives if c.kind == "all_gather"]) <= 2 * len(units)


def ordered() -> Net:
    """Two units of one size, in either order."""

    def forward(net: Any, x: Tensor, swapped: bool) -> Any:
        first, last = (net.b, net.a) if swapped else (net.a, net.b)
        return last(torch.tanh(first(x)))

    return Net(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 7))


@pytest.mark.parametrize("level", (2, 3))
def test_ranks_that_enter_units_in_another_order(level: int) -> None:
    """Their gradients would be mixed up."""

    def run(group: Any) -> None:
        apply, params, buffers = build(ordered)
        step = train_step(
            lambda p, b, batch: apply(p, b, batch["x"], group.rank == 1)[0].square().mean(),
            optim.sgd(0.1),
        )
        train_sharded(
            group, step, params, buffers, batches_of(rows(7, 7)), even(12, 2), level=level
        )

    with pytest.raises(GroupError, match="same"):
        run_ranks(run, 2)
