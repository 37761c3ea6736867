"""The fused kernels give the pure chain's numbers, and are used where they may be."""

import pytest
import torch

from functorch_zero import optim
from functorch_zero.groups.single import SingleRank
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adamw(decay, weight_decay=0.1),
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05, b1=0.8, eps=1e-6)),
    ],
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
