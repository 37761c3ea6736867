"""Leaves that are buckets of their own, whose gradients are reduced as autograd gives them, without
a copy."""

import pytest
import torch
from optree import tree_map
from torch import nn

from functorch_zero import functionalize, optim, shard_tree, train_step
from functorch_zero.layout import build
from functorch_zero.step.loss import Aux
from functorch_zero.step.program import unshard
from functorch_zero.testing import assert_sharded_equals_unsharded, run_ranks
from tests.modules import Net, Residual
from tests.tiers import THOROUGH, crossed, tiers


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(build, "LARGE", 1)


def net() -> Net:
    """A tied embedding, and a block that is called twice."""
    model = Net(
        lambda net, x: net.head(net.last(net.block(net.block(net.embed(x))))),
        embed=nn.Embedding(48, 24),
        block=Residual(24, 48, norm=True),
        last=Residual(24, 48, norm=True),
        head=nn.Linear(24, 48, bias=False),
    )
    model.head.weight = model.embed.weight
    return model


@THOROUGH
@pytest.mark.parametrize(
    "options", tiers([{}], [{"reshard_after_forward": False}, {"reduce_gradients": "once"}])
)
@pytest.mark.parametrize(("accumulate", "weighted"), crossed([1, 2], [False, True]))
def test_equal_to_the_unsharded_step(options, accumulate, weighted):
    torch.manual_seed(0)
    apply, params, buffers = functionalize(net().double(), units=Residual)

    def loss_fn(params, buffers, batch):
        logits, _ = apply(params, buffers, batch["x"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        return (loss, Aux(weight=batch["y"].numel())) if weighted else loss

    batches = [{k: torch.randint(48, (12, 5)) for k in "xy"} for _ in range(2)]
    step = train_step(loss_fn, optim.adamw(1e-2), accumulate=accumulate)
    assert_sharded_equals_unsharded(
        step, params, buffers, batches, levels=(2, 3), ranks=(2, 3), **options
    )


def test_two_leaves_may_be_given_one_gradient():
    params = {name: torch.randn(6, 16, dtype=torch.float64, requires_grad=True) for name in "ab"}

    def loss_fn(params, buffers, batch):
        p = unshard(params)
        return ((p["a"] + p["b"]) * batch["x"].mean(0)).sum() + (p["a"] * p["a"]).sum()

    batches = [{"x": torch.randn(6, 6, 16, dtype=torch.float64)} for _ in range(2)]
    step = train_step(loss_fn, optim.sgd(1e-1))
    assert_sharded_equals_unsharded(step, params, {}, batches, levels=(2, 3), ranks=(2, 3))
    assert_sharded_equals_unsharded(
        step, params, {}, batches, levels=({"a": 3, "b": 0},), ranks=(2,)
    )


@pytest.mark.parametrize("trained", ["", "b"])
@pytest.mark.parametrize(("level", "ranks"), crossed((0, 1, 2, 3), (2, 3)))
def test_a_frozen_twin_is_cut_alike(level, ranks, trained):
    """A moving average of the params, say: `tree_map` pairs the pieces."""
    if trained and level < 2:
        pytest.skip("trained and frozen leaves lie in two buckets, unless each is alone in its own")
    params = {name: torch.randn(6, 16, requires_grad=True) for name in "abc"}
    twin = {name: leaf.detach() * 2 for name, leaf in params.items()}
    for name in trained:
        twin[name].requires_grad_()

    def run(group):
        own, other = (shard_tree(tree, level=level, group=group) for tree in (params, twin))
        mean = tree_map(lambda a, b: (a.detach() + b.detach()) / 2, own, other)
        return unshard(mean)

    for whole in run_ranks(run, ranks):
        for name, leaf in params.items():
            torch.testing.assert_close(whole[name], 1.5 * leaf.detach(), rtol=0, atol=0)


def test_a_twin_that_is_cut_otherwise_is_refused():
    """Of small leaves the trained ones share a bucket, so these are pieces of other elements."""
    params = {name: torch.randn(5, requires_grad=True) for name in "ab"}
    twin = {"a": torch.zeros(5), "b": torch.zeros(5, requires_grad=True)}

    def run(group):
        own, other = (shard_tree(tree, level=3, group=group) for tree in (params, twin))
        with pytest.raises(ValueError, match="Mismatch custom node data"):
            tree_map(torch.add, own, other)
        alike = shard_tree(tree_map(torch.detach, twin), layout_like=own)
        return unshard(tree_map(torch.add, own, alike))["b"].detach()

    for b in run_ranks(run, 2):
        assert torch.equal(b, params["b"].detach())
