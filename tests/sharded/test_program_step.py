"""Steps of the user's own: sharded they give what they give on whole trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.testing.equality import assert_equal_values
from tests.models import MLP


def model(dims: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    apply, params, _ = fz.functionalize(MLP(dims).double(), units=torch.nn.Linear)
    return lambda params, x: apply(params, {}, x)[0], params


generate, first_gen = model((3, 5, 4), 1)
judge, first_disc = model((4, 7, 1), 2)
gen_optimizer = optim.lamb(0.02)
disc_optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.01))


class Gan(NamedTuple):
    gen: Any
    disc: Any
    gen_opt: Any
    disc_opt: Any
    num_updates: Tensor


def init(gen: Any, disc: Any) -> Gan:
    opts = gen_optimizer.init(gen), disc_optimizer.init(disc)
    return Gan(gen, disc, *opts, torch.zeros((), dtype=torch.int64))


def disc_loss(disc: Any, gen: Any, batch: Any) -> Any:
    fake = generate(gen, batch["noise"])
    gap = judge(disc, fake).mean() - judge(disc, batch["real"]).mean()
    return gap + judge(disc, batch["real"]).square().mean(), fz.Aux(metrics={"gap": gap})


def gen_loss(gen: Any, disc: Any, batch: Any) -> Tensor:
    return -judge(disc, generate(gen, batch["noise"])).mean()


def gan(value: Gan, batch: Any) -> Any:
    (d_loss, seen), grads = fz.value_and_grad(disc_loss)(value.disc, value.gen, batch)
    disc, disc_opt = disc_optimizer.apply(grads, value.disc_opt, value.disc)
    g_loss, grads = fz.value_and_grad(gen_loss)(value.gen, disc, batch)
    gen, gen_opt = gen_optimizer.apply(grads, value.gen_opt, value.gen)
    metrics = {"d_loss": d_loss, "g_loss": g_loss, **seen}
    return Gan(gen, disc, gen_opt, disc_opt, value.num_updates + 2), metrics


def batches(num: int) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(7)

    def rows(width: int) -> Tensor:
        return torch.randn(12, width, generator=made, dtype=torch.float64)

    return [{"noise": rows(3), "real": rows(4)} for _ in range(num)]


def part(batch: Any, group: Any) -> Any:
    return tree_map(lambda x: x.chunk(group.size)[group.rank], batch)


@pytest.mark.parametrize("level", [0, 3, {"gen": 3, "disc": 1}, {"": 2, "gen.layers.0": 3}])
def test_a_gan(level: Any) -> None:
    step = fz.program_step(gan, init=init)
    oracle = step.init(first_gen, first_disc)
    seen = []
    for batch in batches(3):
        oracle, metrics = step(oracle, batch)
        seen.append(metrics)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(first_gen, first_disc)
        found = []
        for batch in batches(3):
            state, metrics = sharded(state, part(batch, group))
            found.append(metrics)
        return sharded.unshard(state), found

    for whole, found in run_ranks(run, 2):
        assert_equal_values(oracle, whole)
        assert_equal_values(seen, found)


def test_a_state_goes_whole_and_back() -> None:
    step = fz.program_step(gan, init=init)

    def run(group: Any) -> Any:
        sharded = fz.shard(step, level={"gen": 3, "disc": 1}, group=group)
        state = sharded.init(first_gen, first_disc)
        first, second = batches(2)
        state, _ = sharded(state, part(first, group))
        again = sharded.shard_state(sharded.unshard(state))
        one, _ = sharded(state, part(second, group))
        other, _ = sharded(again, part(second, group))
        return sharded.unshard(one), sharded.unshard(other)

    for one, other in run_ranks(run, 3):
        assert_equal_values(one, other, grade="bitwise")


def test_a_checkpoint_at_another_level_and_number_of_ranks(tmp_path: Any) -> None:
    step = fz.program_step(gan, init=init)
    first, second = batches(2)
    oracle, _ = step(step.init(first_gen, first_disc), first)
    expected, _ = step(oracle, second)

    def save(group: Any) -> None:
        sharded = fz.shard(step, level={"gen": 3, "disc": 1}, group=group)
        state, _ = sharded(sharded.init(first_gen, first_disc), part(first, group))
        fz.checkpoint.save(tmp_path, sharded, state)

    def go_on(group: Any) -> Any:
        sharded = fz.shard(step, level=2, group=group)
        like = sharded.init(first_gen, first_disc, seed=5)
        state = fz.checkpoint.load(tmp_path, sharded, like=like).state
        state, _ = sharded(state, part(second, group))
        return sharded.unshard(state)

    run_ranks(save, 2)
    for whole in run_ranks(go_on, 3):
        assert_equal_values(expected, whole)
    # And without ranks
    like = step.init(first_gen, first_disc)
    alone, _ = step(fz.checkpoint.load(tmp_path, step, like=like).state, second)
    assert_equal_values(expected, alone)
