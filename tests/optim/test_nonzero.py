"""`apply_if_nonzero`: leaves that no loss reaches rest, as those without a gradient do under
torch.optim."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import launch
from functorch_zero.groups.threads import ThreadGroup, run_ranks
from functorch_zero.testing import assert_equal_updates, assert_sharded_equals_unsharded
from functorch_zero.tree import named_leaves
from tests.modules import Net, seeded
from tests.tiers import THOROUGH, crossed, thinned, tiers

F64 = torch.float64
RATE, DECAY = 0.1, 0.2
TURNS = (0, 0, 1, 2, 0, 1)  # the head of each step: they begin, rest and come back
ROWS = 12
Batch = dict[str, Any]


def model() -> Net:
    return seeded(
        lambda: Net(
            lambda net, x, head: net.heads[head](torch.tanh(net.body(x))),
            body=nn.Linear(4, 5),
            heads=nn.ModuleList(nn.Linear(5, 3) for _ in range(3)),
        ).double()
    )


def batches() -> list[Batch]:
    g = torch.Generator().manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randn(ROWS, width, generator=g, dtype=F64)

    return [{"x": draw(4), "y": draw(3), "head": head} for head in TURNS]


def loss_of(module: Callable[..., Tensor], batch: Batch) -> Tensor:
    return F.mse_loss(module(batch["x"], batch["head"]), batch["y"])


# What torch has, and what is to be the same
TWINS: dict[str, tuple[Any, Callable[[], optim.Transform]]] = {
    "adamw": (
        partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY),
        lambda: optim.adamw(RATE, weight_decay=DECAY),
    ),
    "adam": (
        partial(torch.optim.Adam, lr=RATE, weight_decay=DECAY),
        lambda: optim.adam(RATE, weight_decay=DECAY),
    ),
    # The first step takes the gradient undamped, and each leaf has its own first step
    "sgd": (
        partial(torch.optim.SGD, lr=RATE, momentum=0.9, dampening=0.3, weight_decay=DECAY),
        lambda: optim.sgd(RATE, 0.9, dampening=0.3, weight_decay=DECAY),
    ),
    # Whose rate falls by the leaf's own steps
    "adagrad": (
        partial(torch.optim.Adagrad, lr=RATE, lr_decay=0.3, weight_decay=DECAY),
        lambda: optim.adagrad(RATE, lr_decay=0.3, weight_decay=DECAY),
    ),
}


def params_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def with_torch(make: Any, after: Callable[[Any], Any] | None = None) -> list[dict[str, Tensor]]:
    """The params before the first step and after each, of a plain loop."""
    module = model()
    optimizer = make(module.parameters())
    scheduler = None if after is None else after(optimizer)
    seen = [params_of(module)]
    for batch in batches():
        optimizer.zero_grad()
        loss_of(module, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        seen.append(params_of(module))
    return seen


def step_of(optimizer: optim.Transform, **settings: Any) -> tuple[fz.TrainStep, Any]:
    apply, params, _ = fz.functionalize(model(), units=nn.Linear)

    def loss_fn(params: Any, buffers: Any, batch: Batch) -> Tensor:
        return loss_of(lambda *args: apply(params, buffers, *args)[0], batch)

    return fz.train_step(loss_fn, optimizer, **settings), params


def run(step: Any, params: Any, part: Callable[[Batch], Batch] = lambda b: b) -> list[Any]:
    """The states before the first step and after each, whole."""
    unshard = getattr(step, "unshard", lambda state: state)
    state = step.init(params)
    states = [unshard(state)]
    for batch in batches():
        state, _ = step(state, part(batch))
        states.append(unshard(state))
    return states


def assert_updates(expected: list[Any], states: list[Any]) -> None:
    """Of every step; leaves that rest are equal to the bit."""
    got = [dict(state.params) for state in states]
    pairs = zip(pairwise(expected), pairwise(got), strict=True)
    for k, ((old, new), (old_got, new_got)) in enumerate(pairs):
        resting = [name for name in old if torch.equal(old[name], new[name])]
        assert len(resting) == 4, "two heads"
        assert all(torch.equal(old_got[name], new_got[name]) for name in resting)
        assert_equal_updates(
            old, new, new_got, old_got=old_got, unused=resting, context={"step": k}
        )


@pytest.mark.parametrize("name", thinned(TWINS))
def test_torch_optim_in_one_process(name: str) -> None:
    theirs, ours = TWINS[name]
    assert_updates(with_torch(theirs), run(*step_of(optim.apply_if_nonzero(ours()))))
    # The comparison can fail: zeros decay, and move by old momentum
    with pytest.raises(AssertionError):
        assert_updates(with_torch(theirs), run(*step_of(ours())))


def part_of(group: Any) -> Callable[[Batch], Batch]:
    def rows(x: Any) -> Any:
        return x.chunk(group.size)[group.rank] if isinstance(x, Tensor) else x

    return lambda batch: tree_map(rows, batch)


@pytest.mark.parametrize(("name", "level", "ranks"), crossed(TWINS, range(4), (1, 2, 3), quick=1))
def test_torch_optim_on_ranks(name: str, level: int, ranks: int) -> None:
    theirs, ours = TWINS[name]
    step, params = step_of(optim.apply_if_nonzero(ours()))

    def on_a_rank(group: ThreadGroup) -> list[Any]:
        return run(fz.shard(step, level=level, group=group), params, part_of(group))

    expected = with_torch(theirs)
    for states in run_ranks(on_a_rank, ranks):
        assert_updates(expected, states)


@pytest.mark.parametrize(
    ("make", "level", "ranks"),
    crossed([optim.lamb, optim.muon, optim.adamw], range(4), (2, 3), quick=1),
)
def test_sharded_is_unsharded(make: Any, level: int, ranks: int) -> None:
    step, params = step_of(optim.apply_if_nonzero(make(0.01)))
    assert_sharded_equals_unsharded(step, params, {}, batches(), levels=[level], ranks=[ranks])


def test_state_of_a_leaf_that_rests() -> None:
    """Its count and moments stand still, to the bit, and go on from there."""
    states = run(*step_of(optim.apply_if_nonzero(optim.scale_by_adam())))
    for path in ("heads.0.weight", "heads.1.bias", "body.weight"):
        for k, (before, after) in enumerate(pairwise(states)):
            old, new = before.opt_state[path], after.opt_state[path]
            moves = path.startswith("body") or path.startswith(f"heads.{TURNS[k]}")
            assert int(new.count) == int(old.count) + moves
            mu, new_mu = named_leaves(old.mu)[path], named_leaves(new.mu)[path]
            assert torch.equal(mu, new_mu) == (not moves)


@pytest.mark.parametrize("ranks", tiers([2], [1, 3]))
def test_one_element_on_one_rank_is_enough(ranks: int) -> None:
    """However small it is, and if it is no number. An exact zero is none."""
    optimizer = optim.apply_if_nonzero(optim.sgd(1.0, weight_decay=0.5))
    values = {"tiny": 1e-300, "nan": torch.nan, "negative": -1.0, "zero": 0.0, "minus_zero": -0.0}

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        # The last element of each leaf, on the last rank
        return sum(params[name][-1] * value for name, value in values.items())

    step = fz.train_step(loss_fn, optimizer)
    params = {name: torch.ones(7, dtype=F64, requires_grad=True) for name in values}

    def on_a_rank(group: ThreadGroup) -> Any:
        sharded = fz.shard(step, level=3, group=group)
        state, _ = sharded(sharded.init(params), torch.zeros(1))
        return sharded.unshard(state).params

    for new in run_ranks(on_a_rank, ranks):
        moved = {name for name, leaf in new.items() if not torch.equal(leaf, params[name])}
        assert moved == {"tiny", "nan", "negative"}


def test_schedules_behind_count_all_steps() -> None:
    """As torch's schedulers do; one inside counts the leaf's own steps."""
    schedule = optim.exponential_decay(RATE, 1, 0.8)
    inside = optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(DECAY))
    behind = optim.chain(optim.apply_if_nonzero(inside), optim.scale_by_learning_rate(schedule))
    expected = with_torch(
        TWINS["adamw"][0], partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
    )
    assert_updates(expected, run(*step_of(behind)))
    own = optim.apply_if_nonzero(optim.adamw(schedule, weight_decay=DECAY))
    with pytest.raises(AssertionError):
        assert_updates(expected, run(*step_of(own)))


def test_a_norm_of_all_leaves_comes_before() -> None:
    """Zeros add nothing to it."""
    theirs = TWINS["adamw"][0]

    class Clipped(torch.optim.AdamW):
        def step(self) -> None:  # type: ignore[override]
            grads = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
            factor = 0.1 / torch.cat([g.reshape(-1) for g in grads]).norm().clamp(min=0.1)
            for grad in grads:
                grad.mul_(factor)
            super().step()

    ours = optim.chain(
        optim.clip_by_global_norm(0.1),
        optim.apply_if_nonzero(optim.adamw(RATE, weight_decay=DECAY)),
    )
    expected = with_torch(partial(Clipped, **theirs.keywords))
    assert_updates(expected, run(*step_of(ours)))


# A unit that one rank alone uses is refused at levels 2 and 3
@pytest.mark.parametrize(
    ("half", "level"),
    tiers([("micro-batch", 3), ("rank", 1)], [("micro-batch", 0), ("rank", 0)], rows=True),
)
def test_a_leaf_that_half_of_the_batch_reaches(half: str, level: int) -> None:
    theirs, ours = TWINS["adamw"]
    apply, params, _ = fz.functionalize(model(), units=nn.Linear)

    def loss_of_half(module: Callable[..., Tensor], batch: Batch) -> Tensor:
        return loss_of(module, {**batch, "head": int(batch["heads"][0])})

    def loss_fn(params: Any, buffers: Any, batch: Batch) -> Tensor:
        return loss_of_half(lambda *args: apply(params, buffers, *args)[0], batch)

    # Head 0 sees the first half, and another one the second
    given = []
    for k, batch in enumerate(batches()[:3]):
        given.append({**batch, "heads": torch.tensor([0] * 6 + [k % 3] * 6), "head": 0})

    module = model()
    optimizer = theirs(module.parameters())
    for batch in given:
        optimizer.zero_grad()
        for part in (slice(6), slice(6, None)):
            own = {k: x[part] if isinstance(x, Tensor) else x for k, x in batch.items()}
            (loss_of_half(module, own) / 2).backward()
        optimizer.step()

    accumulate = 2 if half == "micro-batch" else 1
    step = fz.train_step(loss_fn, optim.apply_if_nonzero(ours()), accumulate=accumulate)

    def in_order_of(group: ThreadGroup, batch: Batch) -> Batch:
        """All rows, each half in an order of the rank's own: ranks are not fed the same."""
        order = [*range(12)] if group.rank == 0 else [*range(5, -1, -1), *range(11, 5, -1)]
        return {k: x[order] if isinstance(x, Tensor) else x for k, x in batch.items()}

    def on_a_rank(group: ThreadGroup) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(params)
        for batch in given:
            own = part_of(group)(batch) if half == "rank" else in_order_of(group, batch)
            state, _ = sharded(state, own)
        return sharded.unshard(state).params

    for got in run_ranks(on_a_rank, 2):
        for name, leaf in params_of(module).items():
            torch.testing.assert_close(got[name].detach(), leaf, rtol=0, atol=1e-12)


def test_leaves_of_one_label_rest_together() -> None:
    """They share a state; frozen and masked leaves are in none."""
    params = {
        "a": torch.ones(2, requires_grad=True),
        "b": torch.ones(3, requires_grad=True),
        "c": torch.ones(2, requires_grad=True),
        "frozen": torch.ones(2),
    }
    optimizer = optim.masked(
        optim.apply_if_nonzero(optim.trace(0.5), lambda path, leaf: leaf.numel()),
        lambda path, leaf: path != "c",
    )
    grads = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.ones(2), "frozen": None}
    state = optimizer.init(params)
    assert {label: sorted(named_leaves(inner.trace)) for label, inner in state.items()} == {
        2: ["a"],
        3: ["b"],
    }
    together = optim.apply_if_nonzero(optim.trace(0.5), lambda path, leaf: "all")
    state = together.init(params)
    _, state = together.update({**grads, "a": torch.ones(2)}, state, params)
    updates, state = together.update({**grads, "c": torch.zeros(2)}, state, params)
    assert not any(u.any() for u in (updates["a"], updates["b"], updates["c"]))
    updates, state = together.update({**grads, "b": torch.ones(3)}, state, params)
    assert torch.equal(updates["a"], torch.full((2,), 0.5)) and updates["frozen"] is None


def with_ddp(make: Any, rank: int, ranks: int) -> list[dict[str, Tensor]]:
    module = model()
    wrapped = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = make(module.parameters())
    seen = [params_of(module)]
    for batch in batches():
        own = {k: x.chunk(ranks)[rank] if isinstance(x, Tensor) else x for k, x in batch.items()}
        optimizer.zero_grad()
        loss_of(wrapped, own).backward()
        optimizer.step()
        seen.append(params_of(module))
    return seen


def beside_ddp() -> None:
    group = fz.ProcessGroup()
    for name, level in (("adamw", 0), ("sgd", 3)):
        theirs, ours = TWINS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, at its first use
            expected = with_ddp(theirs, group.rank, group.size)
        step, params = step_of(optim.apply_if_nonzero(ours()))
        sharded = fz.shard(step, level=level, group=group)
        assert_updates(expected, run(sharded, params, part_of(group)))


@THOROUGH
def test_ddp_with_unused_parameters() -> None:
    launch(beside_ddp, 2, start_method="fork", timeout=100)
