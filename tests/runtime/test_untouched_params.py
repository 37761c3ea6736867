"""Params that a loss changes: past the version counter too, inside of modules and outside."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.model.untouched import Untouched, is_looked_at
from functorch_zero.precision import Precision
from functorch_zero.runtime.unit import Pass
from functorch_zero.sharded.api import shard
from functorch_zero.step.evaluate import eval_step
from functorch_zero.step.loss_calls import PerLoss
from functorch_zero.step.train import train_step
from tests.modules import Net
from tests.tiers import crossed, tiers

WAYS = (None, 0, 1, 2, 3)  # None: the unsharded step


def clamped_data(weight: Tensor) -> None:
    weight.data.clamp_(-0.01, 0.01)


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] *= 0.5


def other_data(weight: Tensor) -> None:
    weight.data = 0.5 * weight.data


def in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


WRITES = {
    "clamped data": clamped_data,
    "numpy": by_numpy,
    "other data": other_data,
    "in place": in_place,
}


class Layer(nn.Linear):
    """A layer that writes to its weight when called for the `when`-th time."""

    write: Callable[[Tensor], None]
    when, calls = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        Layer.calls += 1
        if Layer.calls > Layer.when:
            Layer.write(self.weight)
        return super().forward(x)


def model_of(write: Callable[[Tensor], None]) -> nn.Module:
    torch.manual_seed(0)
    Layer.write, Layer.when, Layer.calls = staticmethod(write), 0, 0
    return nn.Sequential(nn.Linear(4, 4), Layer(4, 4), nn.Linear(4, 4)).double()


def one_step(loss_fn: Any, params: Any, buffers: Any, way: int | None) -> None:
    step = train_step(loss_fn, optim.sgd(0.1))
    x = torch.ones(2, 4, dtype=torch.float64)
    if way is None:
        step(step.init(params, buffers), x)
        return

    def run(group: Any) -> None:
        sharded = shard(step, level=way, group=group)
        sharded(sharded.init(params, buffers), x)

    run_ranks(run, 1)


@pytest.mark.parametrize(("name", "way"), crossed([*WRITES], WAYS))
def test_a_forward_that_writes_to_its_params(name: str, way: int | None) -> None:
    apply, params, buffers = functionalize(model_of(WRITES[name]))

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x)[0].square().mean()

    with pytest.raises(StructureError, match=r"changed in place.*1"):
        one_step(loss_fn, params, buffers, way)


@pytest.mark.parametrize(("name", "way"), crossed([*WRITES], WAYS))
def test_a_loss_that_writes_to_params(name: str, way: int | None) -> None:
    apply, params, buffers = functionalize(model_of(lambda weight: None))

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        WRITES[name](params["1.weight"])
        return apply(params, buffers, x)[0].square().mean()

    with pytest.raises(StructureError, match=r"changed in place|data of a sharded parameter"):
        one_step(loss_fn, params, buffers, way)


@pytest.mark.parametrize("way", [None, 0, 3])
def test_leaves_that_a_policy_casts(way: int | None) -> None:
    model = model_of(clamped_data)
    apply, params, buffers = functionalize(model, precision=Precision(compute=torch.float32))

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x.float())[0].square().mean()

    with pytest.raises(StructureError, match="changed in place"):
        one_step(loss_fn, params, buffers, way)


@pytest.mark.parametrize("way", [None, 0, 3])
def test_an_evaluation_that_writes_to_params(way: int | None) -> None:
    apply, params, buffers = functionalize(model_of(clamped_data))

    def measure(params: Any, buffers: Any, x: Tensor) -> Any:
        return {"mean": apply(params, buffers, x)[0].mean()}

    step = train_step(lambda p, b, x: p["0.weight"].square().mean(), optim.sgd(0.1))
    x = torch.ones(2, 4, dtype=torch.float64)

    def run(group: Any) -> None:
        sharded = shard(step, level=way, group=group)
        evaluate = shard(eval_step(measure), level=way, group=group)
        evaluate(sharded.init(params, buffers), x)

    with pytest.raises(StructureError, match="changed in place"):
        if way is None:
            eval_step(measure)(step.init(params, buffers), x)
        else:
            run_ranks(run, 1)


def test_the_calls_at_which_values_are_compared() -> None:
    calls = [0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 99, 100, 127, 128, 199, 200]
    assert [call for call in range(220) if is_looked_at(call)] == calls


def test_no_period_up_to_100_stays_unseen() -> None:
    """Work that comes every k calls, counted from 0 or from 1."""
    looked_at = [call for call in range(10_001) if is_looked_at(call)]
    assert len(looked_at) < 2.5 * 100
    for first in (0, 1):
        assert all(any((n + first) % k == 0 for n in looked_at[5:]) for k in range(1, 101))


class Model:
    def loss(self, params: Any) -> Tensor:
        return params["w"].sum()


class Unreferenced:
    """A loss without a place for weak references."""

    __slots__ = ()

    def __call__(self, params: Any) -> Tensor:
        return params["w"].sum()


def test_calls_are_counted_by_the_loss() -> None:
    counts = PerLoss(itertools.count)

    def numbers_of(*losses: Any) -> list[int]:
        return [next(counts.of(loss)) for loss in losses]

    # Each of one name, one of them of the code of another
    several = [*(lambda p, n=n: p["w"] * n for n in range(3)), lambda p: p["w"]]
    for step in range(3):
        assert numbers_of(*several) == [step] * 4
    # Made anew for each step, as one or as several at a time
    model = Model()
    for step in range(3):
        assert numbers_of(model.loss) == [step]
        assert numbers_of(*[lambda p, n=n: p["w"] * n for n in range(3)]) == [step] * 3
    # A partial goes on with its function's
    assert numbers_of(partial(Model.loss, model)) == [3]


def test_partials_of_different_functions_have_counts_of_their_own() -> None:
    counts = PerLoss(itertools.count)

    def one(params: Any, scale: float, shift: float) -> Tensor:
        return params["w"].sum() * scale + shift

    def other(params: Any, scale: float, shift: float) -> Tensor:
        return params["w"].mean() * scale + shift

    # Each is gone before the next is made
    assert [next(counts.of(partial(one, scale=k))) for k in range(3)] == [0, 1, 2]
    assert next(counts.of(partial(other, scale=1))) == 0
    assert next(counts.of(partial(partial(other, scale=1), shift=2))) == 1


def test_losses_in_cycles_are_few() -> None:
    """Each refers to itself, and so stays until a garbage collection."""
    made = []

    def new_object() -> Any:
        made.append(itertools.count())
        return made[-1]

    counts = PerLoss(new_object)

    def recursive() -> Callable[..., Any]:
        again = lambda n: again(n - 1) if n else 0.0
        return again

    kept = recursive()
    gc.disable()
    try:
        numbers = []
        for step in range(100):
            assert next(counts.of(kept)) == step
            numbers.append(next(counts.of(recursive())))
    finally:
        gc.enable()
    assert len(made) == 16
    # Each of the 15 beside the kept one's is asked in turn
    assert numbers == [step // 15 for step in range(100)]


def test_losses_that_no_weak_reference_can_have_share_a_count() -> None:
    counts = PerLoss(itertools.count)
    assert [next(counts.of(Unreferenced())) for _ in range(3)] == [0, 1, 2]
    kept = Unreferenced()
    assert [next(counts.of(kept)) for _ in range(3)] == [3, 4, 5]


def past_the_counter(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x.sum()


@pytest.mark.parametrize("level", [None, 3])
def test_each_lambda_is_looked_at_in_its_first_call(level: int | None) -> None:
    """Also the fourth one, whose number among all calls is 3."""
    x = torch.ones(2)

    losses = [lambda params, x: params["w"].sum() for _ in range(3)]
    losses.append(lambda params, x: params["w"].sum() * past_the_counter(x))

    def run(group: Any) -> None:
        params: Any = {"w": torch.ones(3, requires_grad=True)}
        if level is not None:
            params = fz.shard_tree(params, level=level, group=group)
        for loss in losses[:3]:
            fz.value_and_grad(loss)(params, x)
        with pytest.raises(StructureError, match="has written to one of its arguments"):
            fz.value_and_grad(losses[3])(params, x)

    run_ranks(run, 1)


@pytest.mark.parametrize("level", [None, 3])
def test_a_partial_is_looked_at_in_the_first_call_of_its_function(level: int | None) -> None:
    x = torch.ones(2)

    def harmless(scale: float, params: Any, x: Tensor) -> Tensor:
        return params["w"].sum() * scale

    def writes(scale: float, params: Any, x: Tensor) -> Tensor:
        return params["w"].sum() * scale * past_the_counter(x)

    def run(group: Any) -> None:
        params: Any = {"w": torch.ones(3, requires_grad=True)}
        if level is not None:
            params = fz.shard_tree(params, level=level, group=group)
        for scale in range(3):
            fz.value_and_grad(partial(harmless, scale))(params, x)
        with pytest.raises(StructureError, match="has written to one of its arguments"):
            fz.value_and_grad(partial(writes, 2))(params, x)

    run_ranks(run, 1)


@pytest.mark.parametrize("way", tiers([None], [0, 1, 2, 3]))
def test_a_write_that_begins_late_is_seen_within_100_steps(way: int | None) -> None:
    apply, params, buffers = functionalize(model_of(clamped_data))
    step = train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1))
    x = torch.ones(2, 4, dtype=torch.float64)
    seen = []

    def run(group: Any) -> None:
        mine = step if way is None else shard(step, level=way, group=group)
        state = mine.init(params, buffers)
        Layer.when = 97
        for number in range(101):
            seen.append(number)
            state, _ = mine(state, x)

    with pytest.raises(StructureError, match=r"changed in place.*1"):
        run_ranks(run, 1)
    assert seen[-1] == 99


CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "one element": lambda x: x.view(-1)[-1].add_(1),
    "a sign": lambda x: x.view(-1)[0].neg_(),
    "neighbours exchanged": lambda x: x.view(-1)[:2].copy_(x.view(-1)[:2].flip(0)),
    "rows exchanged": lambda x: x.copy_(x.flip(0)),
    "columns exchanged": lambda x: x.copy_(x.flip(1)),
    "halves exchanged": lambda x: x.copy_(x.roll(len(x) // 2, 0)),
}


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)


@pytest.mark.parametrize(
    ("change", "shape", "dtype", "offset"),
    crossed(CHANGED, [(2, 3), (64, 64), (6, 61)], DTYPES, (0, 1)),
)
def test_changes_that_show(
    change: str, shape: tuple[int, int], dtype: torch.dtype, offset: int
) -> None:
    numel = shape[0] * shape[1]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(numel + offset, generator=generator, dtype=dtype)[offset:].view(shape)
    untouched = Untouched([weight], look=True)
    untouched.check({"w": weight})
    CHANGED[change](weight.data)
    with pytest.raises(StructureError, match="path w"):
        untouched.check({"w": weight})


def test_values_are_compared_only_when_asked() -> None:
    weight = torch.ones(3)
    looking, other = Untouched([weight], look=True), Untouched([weight], look=False)
    weight.data.mul_(2)
    other.check({"w": weight})
    with pytest.raises(StructureError, match="w"):
        looking.check({"w": weight})


# Reentrant checkpoints


def reentrant() -> Net:
    """Frozen embeddings whose output requires grad, then a block in a reentrant checkpoint."""

    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.embed(x).requires_grad_()
        return net.head(checkpoint(net.block, hidden, use_reentrant=True))

    embed = nn.Linear(4, 4).requires_grad_(False)
    return Net(forward, embed=embed, block=nn.Linear(4, 4), head=nn.Linear(4, 1))


@pytest.mark.parametrize("way", WAYS)
def test_a_reentrant_checkpoint_after_frozen_layers(way: int | None) -> None:
    """Its params would get no gradients, without a sign."""
    apply, params, buffers = functionalize(reentrant().double())

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return apply(params, buffers, x)[0].square().mean()

    with pytest.raises(StructureError, match=r"reentrant.*use_reentrant=False"):
        one_step(loss_fn, params, buffers, way)


# Hooks and attributes of sharded parameters


def hooked_in_forward() -> Any:
    class Hooked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.register_hook(lambda grad: grad.clamp(-1, 1))
            return super().forward(x)

    apply, params, buffers = functionalize(nn.Sequential(Hooked(4, 4)).double())
    return lambda p, b, x: apply(p, b, x)[0].square().mean(), params, buffers


@pytest.mark.parametrize("level", [0, 3])
def test_a_hook_on_a_whole_leaf(level: int) -> None:
    loss_fn, params, buffers = hooked_in_forward()
    one_step(loss_fn, params, buffers, None)
    with pytest.raises(StructureError, match=r"0\.weight.*hook|hook.*0\.weight"):
        one_step(loss_fn, params, buffers, level)


REFUSED = {
    "register_hook": lambda p: p.register_hook(lambda grad: 2 * grad),
    "post accumulate hook": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
    "retain_grad": lambda p: p.retain_grad(),
    "grad": lambda p: p.grad,
    "set grad": lambda p: setattr(p, "grad", None),
    "set data": lambda p: setattr(p, "data", torch.zeros(4, 4, dtype=torch.float64)),
    "requires_grad_": lambda p: p.requires_grad_(False),
    "set requires_grad": lambda p: setattr(p, "requires_grad", False),
}


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", [*REFUSED])
def test_attributes_that_mean_the_leaf_of_a_whole_step(name: str, level: int) -> None:
    params = {"w": torch.ones(4, 4, dtype=torch.float64).requires_grad_()}

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        REFUSED[name](params["w"])
        return (x @ params["w"]).square().mean()

    with pytest.raises(StructureError, match="of a sharded parameter"):
        one_step(loss_fn, params, {}, level)


@pytest.mark.parametrize("level", [0, 3])
def test_a_sharded_parameter_is_a_leaf(level: int) -> None:
    params = {"w": torch.ones(4, 4, dtype=torch.float64).requires_grad_()}
    seen = []

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        p = params["w"]
        seen.append((p.is_leaf, p.requires_grad, p.grad_fn, p.data.sum().item()))
        return (x @ p).square().mean()

    one_step(loss_fn, params, {}, None)
    one_step(loss_fn, params, {}, level)
    assert seen[0] == seen[1] == (True, True, None, 16.0)


@pytest.mark.parametrize("level", tiers([3], [1]))
def test_a_loss_that_fails_leaves_nothing_behind(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves of a pass lead to autograd's nodes, and these to the pass: a cycle that Python's
    collector doesn't see."""
    passes: list[weakref.ref[Pass]] = []
    made = Pass.lazy_params

    def noted(self: Pass) -> Any:
        passes.append(weakref.ref(self))
        return made(self)

    monkeypatch.setattr(Pass, "lazy_params", noted)
    apply, params, buffers = functionalize(model_of(other_data))

    def fails(params: Any, buffers: Any, x: Tensor) -> Tensor:
        other_data(params["1.weight"])
        return apply(params, buffers, x)[0].square().mean()

    with pytest.raises(StructureError):
        one_step(fails, params, buffers, level)
    gc.collect()
    assert [reference() for reference in passes] == [None]


def test_conjugate_views_are_looked_at() -> None:
    turned = torch.tensor([1 + 2j]).conj()
    Untouched([turned, turned.imag], look=True).check({"a": turned, "b": turned.imag})
