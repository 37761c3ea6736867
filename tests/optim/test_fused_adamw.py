"""The fused kernels give the pure chain's numbers, and are used where they may be."""

import optree
import pytest
import torch

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.groups.single import SingleRank
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.tiers import crossed, tiers


def loss_fn(params, buffers, batch):
    return sum(((p - batch) ** 2 * (k + 1)).mean() for k, p in enumerate(params.values()))


def run(step, params, num_steps=6):
    """The params after each step."""
    state, seen = step.init(params), []
    for k in range(num_steps):
        state, _ = step(state, torch.tensor(0.3 + k, dtype=params["a"].dtype))
        seen.append({name: p.detach().clone() for name, p in state.params.items()})
    return seen


def decay(count):
    return 0.1 * 0.5**count


@pytest.mark.parametrize("dtype", tiers([torch.float32], [torch.float64]))
@pytest.mark.parametrize(
    "optimizer",
    tiers(
        [optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05, b1=0.8, eps=1e-6))],
        [optim.adamw(decay, weight_decay=0.1)],
    ),
)
def test_a_fused_kernel_gives_the_pure_chains_updates(optimizer, dtype):
    torch.manual_seed(0)
    params = {
        k: torch.randn(s, dtype=dtype).requires_grad_()
        for k, s in {"a": (7, 5), "b": (3,), "c": ()}.items()
    }
    step = train_step(loss_fn, optimizer)
    pure = run(shard(step, level=0, group=SingleRank(), donate=False), params)
    fused = run(shard(step, level=0, group=SingleRank(), donate=True), params)
    before = params
    for expected, got in zip(pure, fused, strict=True):
        for name, old in before.items():
            update = expected[name] - old.detach()
            assert (update != 0).all()
            # the sums are rounded to the params' precision, and the update's own error is 1e-5
            # (1e-12) of the largest
            rounding = 2 * torch.finfo(dtype).eps * expected[name].abs().max().item()
            error = (1e-12 if dtype is torch.float64 else 1e-5) * update.abs().max().item()
            assert (got[name] - old.detach() - update).abs().max() <= rounding + error
        before = expected


def test_the_kernel_runs_only_on_donated_storage(monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kwargs: calls.append(1))
    params = {"a": torch.ones(3, requires_grad=True)}
    step = train_step(loss_fn, optim.adamw(0.1))
    run(shard(step, level=0, group=SingleRank(), donate=False), params, 1)
    assert not calls
    run(shard(step, level=0, group=SingleRank(), donate=True), params, 1)
    assert calls == [1]


def test_hyperparameters_that_are_tensors_or_masked_run_the_pure_chain():
    assert optim.adamw(0.1).fused is not None
    assert optim.adamw(0.1, b1=torch.tensor(0.9, dtype=torch.float64)).fused is None
    assert optim.adamw(0.1, mask=lambda path, leaf: True).fused is None
    assert optim.adamw(0.1, eps_root=1e-8).fused is None


def by_name(path, leaf):
    return "adam" if path in ("b", "c") else "other"


IN_PARTS = {
    "partition": lambda: optim.partition(
        {"adam": optim.adamw(decay, weight_decay=0.1), "other": optim.sgd(0.1)}, by_name
    ),
    "chain in partition": lambda: optim.partition(
        {
            "adam": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05)),
            "other": optim.lion(0.01),
        },
        by_name,
    ),
    "masked": lambda: optim.chain(
        optim.scale(-0.1), optim.masked(optim.adamw(0.1), lambda path, leaf: path != "b")
    ),
    "muon": lambda: optim.muon(0.1),
    "two kernels": lambda: optim.partition(
        {"adam": optim.adamw(0.1), "other": optim.adamw(0.05)}, by_name
    ),
}


@pytest.mark.parametrize(("name", "level"), crossed([*IN_PARTS], [3, 0], quick=1))
def test_a_kernel_runs_for_some_of_the_leaves(name, level, monkeypatch):
    """On donated storage, with the pure chain's numbers; one call per transform, of all its
    leaves."""
    torch.manual_seed(0)
    sizes = {"a": (7, 5), "b": (3,), "c": (), "d": (2, 2)}
    params = {k: torch.randn(s, dtype=torch.float64).requires_grad_() for k, s in sizes.items()}
    calls = []
    kernel = torch._fused_adamw_

    def counted(params, *args, **kwargs):
        calls.append(len(params))
        return kernel(params, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)

    def run_all(donate):
        def run_rank(group):
            step = train_step(loss_fn, IN_PARTS[name]())
            step = shard(step, level=level, group=group, donate=donate)
            state = step.init(params)
            for k in range(4):
                state, _ = step(state, torch.tensor(0.3 + k, dtype=torch.float64))
            return fz.unshard(state.params), step.unshard(state).opt_state

        return run_ranks(run_rank, 2)

    pure = run_all(donate=False)
    assert not calls
    fused = run_all(donate=True)
    num_kernels = 2 if name == "two kernels" else 1
    assert len(calls) == 2 * 4 * num_kernels  # ranks, steps
    for expected, got in zip(pure, fused, strict=True):
        for x, y in zip(optree.tree_leaves(expected), optree.tree_leaves(got), strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_no_kernel_runs_where_updates_are_measured(monkeypatch):
    monkeypatch.setattr(torch, "_fused_adamw_", None)  # would raise
    params = {"a": torch.ones(3, 2, requires_grad=True), "b": torch.ones(3, requires_grad=True)}
    step = train_step(loss_fn, optim.muon(0.1), metrics=["update_norm"])
    step = shard(step, level=0, group=SingleRank(), donate=True)
    _, metrics = step(step.init(params), torch.tensor(0.3))
    assert metrics["update_norm"] > 0


@pytest.mark.parametrize("odd", tiers(["negative"], ["expanded"]))
def test_a_kernel_is_given_dense_updates(odd):
    """It reads memory, and functions in place write to it."""

    def update(updates, state, params):
        def one(u):
            if odd == "expanded":
                return torch.full((1,), 0.5).expand(u.shape)
            return torch._neg_view(u)

        return optree.tree_map(one, updates), state

    head = optim.with_statistics(lambda params: (), update)
    optimizer = optim.chain(
        head, optim.partition({"adam": optim.adamw(0.1), "other": optim.sgd(0.1)}, by_name)
    )
    params = {k: torch.randn(s).requires_grad_() for k, s in {"a": (4, 2), "b": (3,)}.items()}
    step = train_step(loss_fn, optimizer)
    pure = run(shard(step, level=0, group=SingleRank(), donate=False), params)
    fused = run(shard(step, level=0, group=SingleRank(), donate=True), params)
    for expected, got in zip(pure, fused, strict=True):
        for name in params:
            torch.testing.assert_close(expected[name], got[name], rtol=1e-5, atol=1e-6)


def test_a_nested_chain_runs_as_a_flat_one(monkeypatch):
    """Its last kernel, too, where a program keeps its gradients."""
    calls, kernel = [], torch._fused_adamw_

    def counted(*args, **kwargs):
        calls.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    clip, scale, adamw = optim.clip_by_global_norm(0.1), optim.scale(0.5), optim.adamw(0.05)

    def trained_by(optimizer):
        def init(params):
            return {"params": params, "state": optimizer.init(params)}

        def program(value, batch):
            take = fz.value_and_grad(lambda params: loss_fn(params, {}, batch))
            loss, grads = take(value["params"])
            params, state = optimizer.apply(grads, value["state"], value["params"])
            return {"params": params, "state": state}, {"loss": loss}

        step = shard(fz.program_step(program, init=init), level=1, group=SingleRank())
        torch.manual_seed(0)
        state = step.init({"a": torch.randn(7, 5, requires_grad=True)})
        for k in range(3):
            state, _ = step(state, torch.tensor(0.3 + k))
        return fz.unshard(state.value["params"])["a"]

    flat = trained_by(optim.chain(clip, scale, adamw))
    assert len(calls) == 3
    nested = trained_by(optim.chain(clip, optim.chain(scale, adamw)))
    assert len(calls) == 6 and torch.equal(flat, nested)
