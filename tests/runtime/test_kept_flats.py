"""Level 3 with `reshard_after_forward=False`: what is gathered stays over the micro-batches."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup, counted, run_ranks
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.modules import Net, seeded
from tests.tiers import THOROUGH, crossed

UNITS = 4


def made(accumulate: int = 4, precision: Any = None, loss: Any = None) -> tuple[Any, Any]:
    """A step of several units, and their params."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(UNITS))))
    model = model if precision else model.double()
    apply, params, _ = fz.functionalize(model, units=nn.Linear, precision=precision)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        if loss is not None:
            loss(params, x)
        return apply(params, buffers, x)[0].square().mean()

    return fz.train_step(loss_fn, optim.adamw(0.1), accumulate=accumulate), params


def run(group: Any, step: Any, params: Any, x: Tensor, steps: int = 2, **options: Any) -> Any:
    options = {"reshard_after_forward": False, **options}
    sharded = fz.shard(step, level=3, group=group, **options)
    state = sharded.init(params)
    for _ in range(steps):
        group.reset()
        state, _ = sharded(state, x)
    return state


def test_units_are_gathered_once_per_step() -> None:
    """Four micro-batches send 4.5 S in bfloat16: half of S for gathers, and S for each sum."""
    group = CountingGroup(2)
    precision = fz.Precision(compute=torch.bfloat16, reduce=torch.float32)
    run(group, *made(precision=precision), torch.ones(8, 16))
    assert (group.num_calls("all_gather"), group.num_calls("reduce_scatter")) == (UNITS, 4 * UNITS)
    whole = group.sent_bytes("reduce_scatter") / 4
    assert group.sent_bytes() - group.sent_bytes("all_reduce") == 4.5 * whole

    run(group, *made(precision=precision), torch.ones(8, 16), reshard_after_forward=True)
    assert group.num_calls("all_gather") > 4 * UNITS


@pytest.mark.parametrize(("accumulate", "ranks"), crossed((3, 2), (3, 1, 2)))
def test_as_the_unsharded_step(accumulate: int, ranks: int) -> None:
    step, params = made(accumulate)
    x = torch.randn(3, 36, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for level in (3, {"": 3, "1": 2}):
        assert_sharded_equals_unsharded(
            step,
            params,
            {},
            [*x],
            levels=(level,),
            ranks=(ranks,),
            reshard_after_forward=False,
        )


def test_the_next_step_gathers_ahead() -> None:
    """In the order of all micro-batches: the second one uses a unit that the first one doesn't."""
    parts = seeded(lambda: nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"}).double())
    apply, params, _ = fz.functionalize(parts_of(parts), units=nn.Linear)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x)[0].square().mean()

    step = fz.train_step(loss_fn, optim.sgd(0.1), accumulate=2)
    x = torch.cat([torch.ones(2, 4), -torch.ones(2, 4)]).double()

    def one_rank(group: Any) -> list[str]:
        group = counted(group)
        sharded = fz.shard(step, level=3, group=group, reshard_after_forward=False)
        state = sharded.init(params)
        for _ in range(3):
            group.reset()
            state, _ = sharded(state, x)
        return [call.kind for call in group.calls if call.kind in ("all_gather", "reduce_scatter")]

    kinds = run_ranks(one_rank, 2)[0]
    # The unit of the second micro-batch alone is on its way since the first one's forward
    assert kinds == ["all_gather"] * 3 + ["reduce_scatter"] * 5


def parts_of(forward_parts: nn.ModuleDict) -> Net:
    """Two of three units for rows above 0, else all."""

    def forward(net: Any, x: Tensor) -> Any:
        y = net.parts["b"](net.parts["a"](x))
        return y if bool((x > 0).all()) else net.parts["c"](y)

    return Net(forward, parts=forward_parts)


def test_a_write_in_a_later_micro_batch_is_refused() -> None:
    num_calls = []

    def writes(params: Any, x: Tensor) -> None:
        num_calls.append(0)
        if len(num_calls) == 2:
            with torch.no_grad():
                fz.unshard(params["1.weight"]).data.mul_(2)

    step, params = made(2, loss=writes)
    with pytest.raises(StructureError, match="in place"):
        run(CountingGroup(2), step, params, torch.ones(4, 16, dtype=torch.float64), steps=1)


@THOROUGH
def test_they_are_freed_after_the_last_micro_batch() -> None:
    """As much memory after a step as where units are gathered again."""

    def held(**options: Any) -> int:
        step, params = made()
        state = run(CountingGroup(2), step, params, torch.ones(8, 16).double(), **options)
        gc.collect()
        here = [x for x in gc.get_objects() if type(x) is Tensor]
        del state
        return sum(x.untyped_storage().nbytes() for x in here if x.dim() == 1)

    assert held() == held(reshard_after_forward=True)
