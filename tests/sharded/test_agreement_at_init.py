"""Ranks that were given different things find out at init, on every rank, and by name."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from optree import tree_map
from torch import Tensor, nn

from functorch_zero import optim
from functorch_zero.compress import Blocks
from functorch_zero.errors import MismatchError, PeerError, StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.precision import Precision
from functorch_zero.sharded.agreement import agree, first_difference
from functorch_zero.sharded.api import shard
from functorch_zero.sharded.loop import broadcast
from functorch_zero.step.train import train_step
from functorch_zero.tree import content_digests
from tests.places import Away
from tests.sharded.test_seams import Rounded
from tests.tiers import drawn


class Given:
    """What a rank is given; a test changes one thing of it on the last rank."""

    def __init__(self) -> None:
        self.width, self.bias, self.dtype, self.seed, self.frozen = 4, True, torch.float32, 0, False
        self.units: Any = None
        self.precision: Any = None
        self.optimizer: Callable[[], optim.Transform] = lambda: optim.adamw(1e-3)
        self.options: dict[str, Any] = {"level": 1}
        self.buffers: dict[str, Tensor] = {"count": torch.zeros(2)}
        self.accumulate = 1

    def init(self, group: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            first = nn.Sequential(nn.Linear(3, self.width, bias=self.bias), nn.Tanh())
            model = nn.Sequential(first, nn.Linear(self.width, 1))
        model[0].requires_grad_(not self.frozen)
        _, params, _ = functionalize(model.to(self.dtype), self.units, precision=self.precision)
        step = train_step(
            lambda p, b, x: p["1.weight"].sum(), self.optimizer(), accumulate=self.accumulate
        )
        shard(step, group=group, **self.options).init(params, self.buffers)


LAST = 2  # the rank that differs
Change = Callable[[Given, int], None]  # of what a rank is given


def changed(name: str, value: Any) -> Change:
    return lambda given, rank: setattr(given, name, value) if rank == LAST else None


def other(name: str, value: Any, of_last: Any) -> Change:
    return lambda given, rank: setattr(given, name, of_last if rank == LAST else value)


def other_options(option: str, value: Any, of_last: Any, level: int = 1) -> Change:
    """Another value of one option of `shard`."""
    return other("options", *({"level": level, option: own} for own in (value, of_last)))


DIFFERENCES: dict[str, tuple[Change, str]] = {
    "shape": (
        changed("width", 5),
        r"layout of params\.leaves\.0\.0\.weight\.shape is \[4, 3\] on rank 0 and \[5, 3\]",
    ),
    "leaf": (changed("bias", False), r"layout of params\.\S+ is .* on rank 0 and .* on rank 2"),
    "dtype": (
        changed("dtype", torch.float64),
        r"layout of params\.leaves\.0\.0\.\w+\S* is .*torch\.float32.*torch\.float64",
    ),
    "values": (changed("seed", 1), r"values of params\.0\.0\.\w+ is \[-?\d\.\d+, .*fz\.broadcast"),
    "frozen": (
        changed("frozen", True),
        r"layout of params\.leaves\.0\.0\.weight\.trained is True on rank 0",
    ),
    "units": (
        changed("units", "0"),
        r"layout of params\.units\.\S+ is .* on rank 0 and .* on rank 2",
    ),
    "learning rate": (
        changed("optimizer", lambda: optim.adamw(1e-2)),
        r"optimizer\.adamw\.learning_rate is 0\.001 on rank 0 and 0\.01 on rank 2",
    ),
    "optimizer": (
        changed("optimizer", lambda: optim.sgd(1e-3)),
        r"optimizer is adamw\(learning_rate=0\.001, .* on rank 0 and sgd\(.* on rank 2",
    ),
    "clipping": (
        changed("optimizer", lambda: optim.chain(optim.clip(1.0), optim.adamw(1e-3))),
        r"optimizer is adamw\(.* on rank 0 and chain\(clip\(.* on rank 2",
    ),
    "accumulate": (changed("accumulate", 2), r"accumulate is 1 on rank 0 and 2 on rank 2"),
    "level": (changed("options", {"level": 2}), r"level is oss on rank 0 and sdp on rank 2"),
    "level 3": (changed("options", {"level": 3}), r"level is oss on rank 0 and fsdp on rank 2"),
    "level 0": (
        changed("options", {"level": 0}),
        r"level is oss on rank 0 and replicated on rank 2",
    ),
    "level of a leaf": (
        other_options("level", {"": 3, "0": 0}, {"": 3, "0": 1}),
        r"level\.0 is replicated on rank 0 and oss on rank 2",
    ),
    "precision": (
        changed("precision", Precision(compute=torch.bfloat16)),
        r"params\.precision\.0\.0\.\w+ is absent on rank 0 and bfloat16, gathered",
    ),
    "codec": (
        other("precision", *(Precision(gather=Blocks(block=size)) for size in (64, 128))),
        r"gathered as int8 by 64.* on rank 0 and .*int8 by 128",
    ),
    "donate": (
        other_options("donate", True, False),
        r"options\.donate is True on rank 0 and False",
    ),
    "buffer rule": (
        other_options("sync_buffers", "mean", "local"),
        r"options\.sync_buffers",
    ),
    "reduction": (
        other_options("reduction", Rounded(torch.float32), Rounded(torch.bfloat16), level=3),
        r"options\.reduction.*bfloat16",
    ),
    "reduce_bucket": (
        other_options("reduce_bucket", 1000, 1001),
        r"options\.reduce_bucket is 1000 on rank 0 and 1001",
    ),
    "place of a layer": (
        other_options("place", *({"state": {unit: Away()}} for unit in "01"), level=3),
        r"options\.place of state",
    ),
    "buffers": (
        changed("buffers", {"count": torch.zeros(3)}),
        r"buffers\.count'.* is \[0\.0, 0\.0\] on rank 0 and \[0\.0, 0\.0, 0\.0\] on rank 2",
    ),
    "missing buffer": (
        changed("buffers", {}),
        r"the first value.* is buffers\.count on rank 0",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_named_on_every_rank(what: str) -> None:
    change, message = DIFFERENCES[what]

    def run(group: Any) -> str:
        given = Given()
        change(given, group.rank)
        with pytest.raises(MismatchError, match=message) as caught:
            given.init(group)
        assert "Remedy" in str(caught.value) and f"this is rank {group.rank}" in str(caught.value)
        return str(caught.value).partition("(this is")[0]

    start = time.monotonic()
    messages = run_ranks(run, 3)
    assert len(set(messages)) == 1 and time.monotonic() - start < 10


class Constant:
    """A schedule that is an object, or its method."""

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, count: Tensor) -> float:
        return self.rate

    def method(self, count: Tensor) -> float:
        return self.rate


def constant(count: Tensor, rate: float) -> float:
    return rate


def with_keyword(rate: float) -> Any:
    return lambda count, *, own=rate: own


def own_scale(factor: float) -> optim.Transform:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree_map(lambda u: u * factor, updates), state

    return optim.pointwise(lambda params: (), update)


HYPERPARAMETERS: dict[str, tuple[Callable[[float], optim.Transform], str]] = {
    "in a chain": (
        lambda x: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, weight_decay=x)),
        r"optimizer\.chain\.1\.adamw\.weight_decay is",
    ),
    "in a schedule": (
        lambda x: optim.sgd(optim.linear_schedule(0.1, x, 10)),
        r"optimizer\.sgd\.learning_rate\.linear_schedule\.end_value is",
    ),
    "in a wrapper": (
        lambda x: optim.params_ema(optim.sgd(x), 0.9),
        r"optimizer\.params_ema\.inner\.sgd\.learning_rate is",
    ),
    "injected": (
        lambda x: optim.inject_hyperparams(optim.sgd)(x),
        r"optimizer\.inject_hyperparams\.learning_rate is",
    ),
    "in a function of one's own": (own_scale, r"own_scale\.<locals>\.update\.factor is"),
    "in a lambda": (
        lambda x: optim.sgd(lambda count: x if count < 1000 else 0.0),
        r"optimizer\.sgd\.learning_rate\..*<lambda>\.x is",
    ),
    "in a partial": (lambda x: optim.sgd(partial(constant, rate=x)), "learning_rate.* is"),
    "in an object": (lambda x: optim.sgd(Constant(x)), "learning_rate.* is"),
    "in a method's object": (lambda x: optim.sgd(Constant(x).method), "learning_rate.* is"),
    "in a keyword": (lambda x: optim.sgd(with_keyword(x)), "learning_rate.* is"),
}


@pytest.mark.parametrize("where", HYPERPARAMETERS)
def test_a_hyperparameter_is_named_with_both_values(where: str) -> None:
    make, message = HYPERPARAMETERS[where]

    def run(group: Any) -> None:
        given = Given()
        given.optimizer = lambda: make(0.25 if group.rank == 0 else 0.5)
        with pytest.raises(MismatchError, match=message + r" 0\.25 on rank 0 and 0\.5 on rank 1"):
            given.init(group)

    run_ranks(run, 2)


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(group: Any) -> str:
        with pytest.raises(MismatchError) as caught, monkeypatch.context() as context:
            context.setattr(
                sys.modules["functorch_zero.sharded.agreement"], "__version__", f"0.{group.rank}"
            )
            Given().init(group)
        return str(caught.value)

    assert "functorch_zero is 0.0 on rank 0 and 0.1 on rank 1" in run_ranks(run, 2)[0]


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast(source: int) -> None:
    """P8. Then `init` agrees; the trees given stay as they are."""

    def run(group: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(group.rank)
        params = {
            "w": torch.randn(3, 2, generator=generator).mT.requires_grad_(),
            "none": torch.randn(0, 2, generator=generator),
            "scale": torch.randn((), generator=generator, dtype=torch.float64),
            "flags": torch.randn(3, generator=generator) > 0,
        }
        old = {k: v.detach().clone() for k, v in params.items()}
        step = shard(train_step(lambda p, b, x: p["w"].sum(), optim.sgd(0.1)), level=1, group=group)
        with pytest.raises(MismatchError, match=r"values.*Remedy.*fz\.broadcast"):
            step.init(params)
        mine = broadcast((params, {}), group, source=source)[0]
        assert mine["w"].requires_grad and not mine["none"].requires_grad
        step.init(mine)
        assert all(torch.equal(v, params[k]) for k, v in old.items())
        assert group.rank != source or all(torch.equal(v, mine[k]) for k, v in old.items())
        return [v.detach() for v in mine.values()]

    first, *others = run_ranks(run, 3)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_broadcast_of_different_trees() -> None:
    def run(group: Any, tree: Any, kind: type[Exception], text: str) -> None:
        with pytest.raises((kind, PeerError), match=text):
            broadcast(tree, group)

    run_ranks(
        lambda g: run(
            g, {"w": torch.ones(3 + g.rank)}, MismatchError, r"leaves\.w\.shape is \[3\] on rank 0"
        ),
        2,
    )
    run_ranks(
        lambda g: run(
            g, {"w": 3 if g.rank else torch.ones(3)}, StructureError, r"path w, got int, on rank 1"
        ),
        2,
    )
    run_ranks(
        lambda g: run(g, [torch.ones(2, device="meta")], StructureError, r"path 0, got meta"), 2
    )


def test_equal_things_agree() -> None:
    run_ranks(lambda group: Given().init(group), 3)


plain = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@drawn(plain, plain)
def test_first_difference(a: Any, b: Any) -> None:
    field, x, y = first_difference({"x": a}, {"x": b})
    if a != b:
        assert x != y and "x" in field


@drawn(st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_agreement_is_equality(numbers: list[int]) -> None:
    def run(group: Any) -> bool:
        try:
            agree(group, {"number": numbers[group.rank]})
        except MismatchError:
            return False
        return True

    assert run_ranks(run, len(numbers)) == [len(set(numbers)) == 1] * len(numbers)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_digests_see_values_and_places(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0]).to(dtype)
    digest = content_digests({"x": x})
    assert digest == content_digests({"x": x.clone()}) == content_digests({"x": x[None].mT[:, 0]})
    swapped = x.clone()
    swapped[0], swapped[1] = x[1], x[0]
    assert digest != content_digests({"x": swapped})
    assert content_digests({"x": x[:0]}) == content_digests({"x": x[:0]})
    nan = torch.tensor([float("nan")])
    assert content_digests([nan]) == content_digests([nan.clone()])
    assert content_digests({"x": x.to("meta")}) == {}
