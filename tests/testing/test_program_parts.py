"""Programs whose losses see the rows of one rank together, or draw random numbers: the proof runs
copies of the unsharded program on the ranks' parts of the batch."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import GroupError, UnequalBatchesWarning
from functorch_zero.sharded.program import engine as engine_module
from functorch_zero.sharded.program import gradient as gradient_module
from functorch_zero.step.program_step import ProgramStep
from functorch_zero.testing import assert_equal_values, assert_sharded_equals_unsharded
from functorch_zero.testing.runs import Start, run_in_parts, split
from tests.tiers import crossed, tiers

F64 = torch.float64
ROWS = 25  # 2 and 3 ranks get unequal parts

torch.manual_seed(0)
# Dropout comes first, so that it changes what BatchNorm sees
NORMED = nn.Sequential(
    nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 5, False), nn.BatchNorm1d(5),
    nn.Tanh(), nn.Linear(5, 1),
).double()  # fmt: skip
PLAIN = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
judge, DISC, BUFFERS = fz.functionalize(NORMED, units=nn.Linear)
generate, GEN, _ = fz.functionalize(PLAIN, units=nn.Linear)


def batches(num_steps: int = 2) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randn(ROWS, width, generator=made, dtype=F64)

    return [{"noise": draw(3), "real": draw(4)} for _ in range(num_steps)]


# Two networks that take turns


class Gan(NamedTuple):
    gen: Any
    disc: Any
    gen_opt: Any
    disc_opt: Any
    buffers: Any  # of the disc


def disc_loss(disc: Any, gen: Any, *, buffers: Any, batch: Any) -> Any:
    fake, _ = generate(gen, {}, batch["noise"])
    of_fake, after = judge(disc, buffers, fake)
    of_real, after = judge(disc, after, batch["real"])
    loss = F.softplus(of_fake).mean() + F.softplus(-of_real).mean()
    return loss, fz.Aux(buffers=after, metrics={"real": of_real.mean()})


def gen_loss(gen: Any, disc: Any, *, buffers: Any, batch: Any) -> Any:
    fake, _ = generate(gen, {}, batch["noise"])
    of_fake, after = judge(disc, buffers, fake)
    return F.softplus(-of_fake).mean(), fz.Aux(buffers=after)


def weighted(loss: Any) -> Any:
    """Each part counts by its rows."""

    def of_rows(*trees: Any, buffers: Any, batch: Any) -> Any:
        value, aux = loss(*trees, buffers=buffers, batch=batch)
        return value, fz.Aux(buffers=aux.buffers, metrics=aux.metrics, weight=len(batch["noise"]))

    return of_rows


def gan(*, by_rows: bool = False, accumulate: int = 1) -> tuple[ProgramStep, Any, Any]:
    losses = [weighted(disc_loss), weighted(gen_loss)] if by_rows else [disc_loss, gen_loss]
    of_disc, of_gen = (fz.value_and_grad(loss, accumulate=accumulate) for loss in losses)
    sgd, adam = optim.sgd(0.1, momentum=0.9), optim.adam(0.02)

    def init(gen: Any, disc: Any) -> Gan:
        return Gan(gen, disc, sgd.init(gen), adam.init(disc), BUFFERS)

    def program(value: Gan, batch: Any) -> Any:
        gen, disc, gen_opt, disc_opt, buffers = value
        (d_loss, seen, buffers), grads = of_disc(disc, gen, buffers=buffers, batch=batch)
        disc, disc_opt = adam.apply(grads, disc_opt, disc)
        (g_loss, _, buffers), grads = of_gen(gen, disc, buffers=buffers, batch=batch)
        gen, gen_opt = sgd.apply(grads, gen_opt, gen)
        return Gan(gen, disc, gen_opt, disc_opt, buffers), {"d": d_loss, "g": g_loss, **seen}

    return fz.program_step(program, init=init), GEN, DISC


def curved(*, by_rows: bool = False) -> tuple[ProgramStep, Any, Any]:
    """A program that walks against the gradient and its product with the Hessian."""
    loss = weighted(disc_loss) if by_rows else disc_loss

    def init(gen: Any, disc: Any) -> Any:
        return {"gen": tree_map(torch.detach, gen), "disc": disc, "buffers": BUFFERS}

    def program(value: Any, batch: Any) -> Any:
        disc, gen, buffers = value["disc"], value["gen"], value["buffers"]
        along = fz.random.normal(fz.zero_updates(disc))
        (found, _, buffers), grads, product = fz.hvp(loss)(
            disc, along, gen, buffers=buffers, batch=batch
        )
        disc = fz.apply_updates(disc, tree_map(lambda g, h: -0.1 * g - 0.1 * h, grads, product))
        return {"gen": gen, "disc": disc, "buffers": buffers}, {"loss": found}

    return fz.program_step(program, init=init), GEN, DISC


PROGRAMS = {
    "gan": gan,
    "by rows": lambda: gan(by_rows=True),
    "accumulate": lambda: gan(accumulate=2),
    "accumulate by rows": lambda: gan(by_rows=True, accumulate=2),
    "hvp": curved,
    "hvp by rows": lambda: curved(by_rows=True),
}


@pytest.mark.parametrize(
    ("name", "level", "ranks"), crossed([*PROGRAMS], [0, 1, 2, 3], [1, 2, 3], quick=2)
)
def test_losses_that_see_their_rank(name: str, level: int, ranks: int) -> None:
    """Parts are unequal, and nobody is warned: pytest raises warnings."""
    program = PROGRAMS[name]()
    assert_sharded_equals_unsharded(
        *program, batches(), levels=[level], ranks=[ranks], per_rank=True
    )


@pytest.mark.parametrize("name", tiers(thorough=PROGRAMS))
def test_whole_batches_are_no_oracle_of_them(name: str) -> None:
    """Else the proofs above would show nothing about parts."""
    with pytest.raises(AssertionError, match="updates differ") as caught:
        assert_sharded_equals_unsharded(*PROGRAMS[name](), even(), levels=[0], ranks=[2])
    assert any("compare with per_rank=True" in note for note in caught.value.__notes__)


def even() -> list[Any]:
    """Batches that two ranks can share: unequal parts would get a warning."""
    return [tree_map(lambda x: x[:24], batch) for batch in batches()]


@pytest.mark.parametrize("seed", tiers([3], [None]))
def test_buffers_of_rank_0(seed: int | None) -> None:
    assert_sharded_equals_unsharded(
        *gan(), batches(), levels=[2], ranks=[3], per_rank=True, sync_buffers="rank0", seed=seed
    )
    with pytest.raises(ValueError, match='sync_buffers="local"'):
        assert_sharded_equals_unsharded(
            *gan(), batches(), levels=[2], ranks=[2], per_rank=True, sync_buffers="local"
        )


def test_a_sum_is_averaged_like_any_loss() -> None:
    """As of training steps: the mean over ranks of sums is what per_rank=True asks for."""

    def program(value: Any, x: Tensor) -> Any:
        found, grads = fz.value_and_grad(lambda p, x: (p["w"] - x).square().sum())(value, x)
        return fz.apply_updates(value, tree_map(lambda g: -0.1 * g, grads)), {"loss": found}

    step = fz.program_step(program, init=lambda net: net)
    net, given = {"w": torch.ones(3, dtype=F64, requires_grad=True)}, [torch.randn(6, 3).double()]
    assert_sharded_equals_unsharded(step, net, given, per_rank=True)
    with pytest.raises(AssertionError, match="updates differ"):
        assert_sharded_equals_unsharded(step, net, given, ranks=[2])


# The oracle itself


@pytest.mark.filterwarnings("ignore::functorch_zero.errors.UnequalBatchesWarning")
@pytest.mark.parametrize("rule", ["mean", "rank0", "local"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("weights", tiers([[5.0, 0.0, 2.0]], [[None] * 3]))
def test_the_oracle_by_hand(weights: list[float | None], accumulate: int, rule: str) -> None:
    """Of a training step: a part of weight 0 counts for nothing, and its loss is NaN."""

    def loss(params: Any, *, buffers: Any, batch: Any) -> Any:
        found = (batch["real"] @ params["w"] - buffers["seen"]).square().mean()
        after = {"seen": buffers["seen"] * 0.9 + batch["real"].mean()}
        return found + batch["spoil"], fz.Aux(after, {"twice": 2 * found}, batch["weight"])

    parts = []
    for batch in batches():
        of_batch = split(batch, 3)
        for part, weight in zip(of_batch, weights, strict=True):
            part |= {"weight": weight, "spoil": math.nan if weight == 0 else 0.0}
        parts.append(of_batch)
    optimizer = optim.adam(0.02)
    step = fz.train_step(
        lambda p, b, batch: loss(p, buffers=b, batch=batch), optimizer, accumulate=accumulate
    )
    params = {"w": torch.ones(4, dtype=F64, requires_grad=True)}
    buffers = {"seen": torch.ones((), dtype=F64)}
    runs = run_in_parts(step, Start((params, buffers), 5), parts, rule=rule)

    known = [0.0 if weight == 0 else weight or 1.0 for weight in weights]
    gradient = fz.value_and_grad(loss, accumulate=accumulate)
    opt_state, held = optimizer.init(params), [buffers] * 3

    def mean(values: Any) -> Any:
        return sum(x * w for x, w in zip(values, known, strict=True)) / sum(known)

    for of_batch, *copies in zip(parts, *(run.steps for run in runs), strict=True):
        pairs = zip(held, of_batch, strict=True)
        found, grads = zip(*(gradient(params, buffers=b, batch=x) for b, x in pairs), strict=True)
        losses, metrics, after = zip(*found, strict=True)
        params, opt_state = optimizer.apply({"w": mean([g["w"] for g in grads])}, opt_state, params)
        counted = [b["seen"] for b, w in zip(after, known, strict=True) if w]
        by_rule = {"mean": sum(counted) / len(counted), "rank0": after[0]["seen"]}
        held = [*after] if rule == "local" else [{"seen": by_rule[rule]}] * 3
        assert_equal_values(params, copies[0].params)
        assert_equal_values(held, [done.others["buffers"] for done in copies])
        expected = {"loss": mean(losses), "twice": mean([m["twice"] for m in metrics])}
        assert_equal_values(expected, copies[0].others["metrics"])


# Mistakes of the sharded step


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine_module.finish

    def finish(*arguments: Any) -> Any:
        results, grads = right(*arguments)
        return results, tree_map(lambda g: g * (1 + 1e-3), grads)

    monkeypatch.setattr(engine_module, "finish", finish)


def draws_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine_module.next_streams
    monkeypatch.setattr(engine_module, "next_streams", lambda part, device: right(0, device))


def keeps_buffers_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradient_module.synchronize

    def synchronize(old: Any, new: Any, changed: Any, rule: Any, *rest: Any) -> Any:
        return right(old, new, changed, "rank0", *rest)

    monkeypatch.setattr(gradient_module, "synchronize", synchronize)


def divides_by_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradient_module.to_means

    def to_means(reduced: Any, total: Tensor | None, scale: Any) -> None:
        right(reduced, None if total is None else total + 1, scale)

    monkeypatch.setattr(gradient_module, "to_means", to_means)


MISTAKES = {
    # Adam hides the scale in the disc's updates, but for its eps
    "scaled": (scaled, gan, "updates differ"),
    "scaled hvp": (scaled, curved, r"updates differ.*leaf disc\."),
    "draws alike": (draws_alike, gan, "updates differ"),
    "buffers": (keeps_buffers_of_rank_0, curved, r"opt_state differ.*leaf buffers\."),
    "weights": (divides_by_too_much, PROGRAMS["hvp by rows"], r"updates differ.*leaf disc\."),
}


@pytest.mark.parametrize(("name", "level"), crossed([*MISTAKES], [0, 3], quick=1))
def test_mistakes_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str, level: int) -> None:
    break_it, make, story = MISTAKES[name]
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=rf"(?s){story}"):
        assert_sharded_equals_unsharded(
            *make(), batches(), levels=[level], ranks=[2], per_rank=True
        )


# Mistakes of a program


def walking(walk: Any) -> tuple[Any, ...]:
    """A program whose step goes `walk(params, grads, loss, x)`, and its arguments."""

    def program(value: Any, x: Tensor) -> Any:
        found, grads = fz.value_and_grad(square)(value, x)
        return walk(value, grads, found, x), {"loss": found}

    net = {"w": torch.ones(5, 3, dtype=F64, requires_grad=True)}
    return fz.program_step(program, init=lambda net: net), net, [torch.arange(12.0).view(6, 2)]


def square(params: Any, x: Tensor) -> Tensor:
    return params["w"].square().sum() * x.square().mean()


def moved(params: Any, grads: Any, size: Any) -> Any:
    return fz.apply_updates(params, tree_map(lambda g: -0.1 * g * size, grads))


def prove(program: tuple[Any, ...], **options: Any) -> None:
    assert_sharded_equals_unsharded(*program, levels=[3], per_rank=True, **options)


def test_a_step_by_its_own_part_is_told() -> None:
    """Sharded, each rank would move its own piece by its own rows."""
    prove(walking(lambda params, grads, found, x: moved(params, grads, found)))
    with pytest.raises(AssertionError, match="part 0's results and this part's differ") as caught:
        prove(walking(lambda params, grads, found, x: moved(params, grads, x.mean())), ranks=[3])
    assert "at step 0, part 1: leaf params.w[0, 0]" in str(caught.value)
    (note,) = caught.value.__notes__
    assert "3 copies of the unsharded program" in note and "only what fz.value_and_grad" in note


def test_other_gradients_on_one_part_are_told_at_once() -> None:
    def walk(params: Any, grads: Any, found: Any, x: Tensor) -> Any:
        if x[0, 0] > 3:  # on the second part
            _, grads = fz.value_and_grad(square)(params, x)
        return moved(params, grads, 1)

    begin = time.monotonic()
    with pytest.raises(GroupError, match="no rank can go on") as caught:
        prove(walking(walk), ranks=[2])
    assert time.monotonic() - begin < 10
    assert any("2 copies of the unsharded program" in note for note in caught.value.__notes__)


def test_an_error_on_one_part_ends_all() -> None:
    def walk(params: Any, grads: Any, found: Any, x: Tensor) -> Any:
        return moved(params, grads, 1 if x[0, 0] < 3 else 1 / 0)

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError) as caught:
        prove(walking(walk), ranks=[2])
    assert time.monotonic() - begin < 10
    assert "Raised on rank 1 of 2." in caught.value.__notes__


def test_a_proof_uses_up_no_reminder() -> None:
    """Unequal parts mean to count the same there, and in a later call nobody has said so."""

    def loss(params: Any, buffers: Any, batch: Tensor) -> Tensor:
        return (batch @ params["w"]).square().mean()

    step = fz.train_step(loss, optim.sgd(0.1), accumulate=2)
    params = {"w": torch.ones(4, dtype=F64, requires_grad=True)}
    batch = torch.randn(7, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert_sharded_equals_unsharded(step, params, {}, [batch], levels=[1], ranks=[1], per_rank=True)
    with pytest.warns(UnequalBatchesWarning):
        step(step.init(params, {}), batch)
