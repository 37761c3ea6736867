"""Buffers that a loss writes to in place are those of the next state, and the state given stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.model.buffer_copies import copy_of
from tests.modules import Net

F64 = torch.float64


def a_norm() -> nn.Module:
    """A linear layer and a BatchNorm, whose running statistics torch writes without counting."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


def loss_of(model: nn.Module, weighted: bool = False) -> Any:
    """A loss that gives the model its buffers, says nothing of them, and may return a weight."""

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        output = functional_call(model, {**fz.unshard(params), **buffers}, (x,))
        loss = (output - x[:, :1]).square().mean()
        return (loss, fz.Aux(weight=len(x))) if weighted else loss

    return loss_fn


def snapshot(state: fz.State) -> list[tuple[Tensor, int, Tensor]]:
    """The state's buffers: the very tensors, how often they were written to, and their values."""
    return [(b, b._version, b.clone()) for b in state.buffers.values()]


def check_unchanged(state: fz.State, before: list[tuple[Tensor, int, Tensor]]) -> None:
    for now, (tensor, version, values) in zip(state.buffers.values(), before, strict=True):
        assert now is tensor and now._version == version and torch.equal(now, values)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_running_statistics_are_those_of_a_plain_loop(accumulate: int) -> None:
    model = a_norm()
    step = fz.train_step(loss_of(model), optim.sgd(0.1), accumulate=accumulate)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = step.init(params, buffers)
    given, first = snapshot(state), state
    plain = a_norm()
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    for k in range(3):
        x = torch.randn(6, 3, dtype=F64, generator=torch.Generator().manual_seed(k))
        state, _ = step(state, x)
        sgd.zero_grad()
        for part in x.tensor_split(accumulate):
            ((plain(part) - part[:, :1]).square().mean() / accumulate).backward()
        sgd.step()
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(state.buffers[name], expected, rtol=1e-12, atol=1e-14)
    assert state.buffers["1.num_batches_tracked"] == 3 * accumulate
    check_unchanged(first, given)
    assert buffers["1.num_batches_tracked"] == 0


def test_a_buffer_that_stays_is_the_same_tensor() -> None:
    """So that nothing is copied or synchronised for it: masks, tables, complex and empty ones."""

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        buffers["count"] += 1
        buffers["mean"].lerp_(x.mean(), 0.1)
        return (params["w"] * x).sum()

    step = fz.train_step(loss_fn, optim.sgd(0.1))
    buffers = {
        "count": torch.tensor(0),
        "mean": torch.tensor(0.0, dtype=F64),
        "mask": torch.ones(3, 3, dtype=torch.bool),
        "table": torch.arange(3.0),
        "phases": torch.ones(2, dtype=torch.complex64),
        "none": torch.zeros(0),
    }
    state = step.init({"w": torch.ones(3, dtype=F64, requires_grad=True)}, buffers)
    new, _ = step(state, torch.ones(3, dtype=F64))
    same = {name for name in buffers if new.buffers[name] is state.buffers[name]}
    assert same == set(buffers) - {"count", "mean"}
    assert state.buffers["count"] == 0 and new.buffers["count"] == 1
    assert state.buffers["mean"] == 0 and math.isclose(new.buffers["mean"], 0.1)


def test_buffers_replaced_in_their_containers() -> None:
    """Another tensor in the dict, or deeper in it, counts as if it was written to."""

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        buffers["nested"]["mean"] = buffers["nested"]["mean"] + x.mean()
        # In an autograd graph, and written to in a list
        buffers["list"][0] = buffers["list"][0] + (params["w"] * x).sum()
        buffers["list"][1].add_((params["w"] * x).sum())
        return (params["w"] * x).sum()

    step = fz.train_step(loss_fn, optim.sgd(0.0))
    zero = torch.tensor(0.0)
    buffers = {"nested": {"mean": zero}, "list": [zero, zero], "tuple": (zero,)}
    state = step.init({"w": torch.ones(3, requires_grad=True)}, buffers)
    new, _ = step(state, torch.ones(3))
    assert new.buffers == {"nested": {"mean": 1.0}, "list": [3.0, 3.0], "tuple": (0.0,)}
    assert state.buffers == {"nested": {"mean": 0.0}, "list": [0.0, 0.0], "tuple": (0.0,)}
    assert not new.buffers["list"][0].requires_grad and not new.buffers["list"][1].requires_grad
    again, _ = step(new, torch.ones(3))
    assert again.buffers["list"] == [6.0, 6.0]


def test_returned_buffers_count_and_not_those_given() -> None:
    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        buffers["dropped"].add_(1)
        buffers["kept"].add_(1)
        new = {"dropped": buffers["dropped"] - 1, "kept": buffers["kept"], "same": buffers["same"]}
        return (params["w"] * x).sum(), fz.Aux(buffers=new)

    step = fz.train_step(loss_fn, optim.sgd(0.1))
    buffers = dict.fromkeys(("dropped", "kept", "same"), torch.tensor(5))
    state = step.init({"w": torch.ones(3, requires_grad=True)}, buffers)
    new, _ = step(state, torch.ones(3))
    assert new.buffers == {"dropped": 5, "kept": 6, "same": 5} and state.buffers == buffers
    assert new.buffers["same"] is state.buffers["same"]


def test_what_is_no_buffer_is_refused() -> None:
    def step_of(change: Any) -> Any:
        def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
            change(buffers)
            return (params["w"] * x).sum()

        step = fz.train_step(loss_fn, optim.sgd(0.1))
        state = step.init({"w": torch.ones(3, requires_grad=True)}, {"a": torch.tensor(1.0)})
        return lambda: step(state, torch.ones(3))

    with pytest.raises(StructureError, match=r"loss's buffers.*path b.*not expected"):
        step_of(lambda buffers: buffers.update(b=torch.tensor(1.0)))()
    with pytest.raises(StructureError, match=r"loss's buffers.*path a.*missing"):
        step_of(lambda buffers: buffers.clear())()
    with pytest.raises(StructureError, match=r"no tensor: path a.*got float.*Remedy"):
        step_of(lambda buffers: buffers.update(a=1.0))()


@pytest.mark.parametrize("ends", ["weightless", "skipped", "raises"])
def test_steps_that_keep_the_old_buffers(ends: str) -> None:
    model = a_norm()
    of_model = loss_of(model)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        loss = of_model(params, buffers, x)
        if ends == "raises":
            raise RuntimeError("at the end")
        weight = 0.0 if ends == "weightless" else 1.0
        return loss * (math.inf if ends == "skipped" else 1.0), fz.Aux(weight=weight)

    step = fz.train_step(loss_fn, optim.sgd(0.1), nonfinite="skip")
    state = step.init(dict(model.named_parameters()), dict(model.named_buffers()))
    before = snapshot(state)
    if ends == "raises":
        with pytest.raises(RuntimeError, match="at the end"):
            step(state, torch.ones(4, 3, dtype=F64))
    else:
        new, _ = step(state, torch.ones(4, 3, dtype=F64))
        check_unchanged(new, before)
    check_unchanged(state, before)


def test_an_evaluation_keeps_the_states_buffers() -> None:
    """The model is in training mode, and a second call of the function sees the same statistics."""
    model = a_norm()
    loss_fn = loss_of(model)
    step = fz.train_step(loss_fn, optim.sgd(0.1))
    state = step.init(dict(model.named_parameters()), dict(model.named_buffers()))
    before = snapshot(state)

    def evaluate(params: Any, buffers: Any, x: Tensor) -> Any:
        loss = loss_fn(params, buffers, x)
        buffers["1.running_mean"] = torch.zeros(())
        return {"loss": loss, "count": buffers["1.num_batches_tracked"]}

    x = torch.arange(12.0, dtype=F64).view(4, 3)
    assert fz.eval_step(evaluate)(state, x)["count"] == 1
    assert fz.eval_step(evaluate)(state, x)["count"] == 1
    check_unchanged(state, before)


def test_the_first_buffers_are_in_no_autograd_graph() -> None:
    step = fz.train_step(lambda p, b, x: (p["w"] * x).sum(), optim.sgd(0.1))
    buffer = torch.ones(2, requires_grad=True)
    state = step.init({"w": torch.ones(3, requires_grad=True)}, {"a": buffer * 2})
    assert not state.buffers["a"].requires_grad


def test_apply_beside_writes_of_the_losss_own() -> None:
    """`apply` gives new buffers, which are then written to; and it may be called twice."""
    model = a_norm()
    apply, params, buffers = fz.functionalize(model)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        output, new = apply(params, buffers, x)
        twice, _ = apply(params, buffers, x + 1)
        new["1.num_batches_tracked"].add_(10)
        return F.mse_loss(output, twice.detach()), fz.Aux(buffers=new)

    step = fz.train_step(loss_fn, optim.sgd(0.1))
    state = step.init(params, buffers)
    before = snapshot(state)
    x = torch.arange(12.0, dtype=F64).view(4, 3)
    new, _ = step(state, x)
    _, expected = apply(params, buffers, x)
    assert new.buffers["1.num_batches_tracked"] == 11
    assert torch.equal(new.buffers["1.running_mean"], expected["1.running_mean"])
    check_unchanged(state, before)


def past_the_counter() -> Net:
    """Buffers that a forward writes to in ways that no version counter shows."""

    def forward(net: Any, x: Tensor) -> Any:
        net.count.data += 1
        net.flags.numpy()[1] = True
        net.mean.data.lerp_(torch.ones(3, 3), 0.5)
        return net.linear(x)

    flags = torch.zeros(2, dtype=torch.bool)
    linear, count, mean = nn.Linear(3, 1).double(), torch.tensor(0), torch.zeros(3, 3)
    return Net(forward, linear=linear, count=count, flags=flags, mean=mean)


@pytest.mark.parametrize("by_apply", [True, False])
def test_writes_that_no_version_counter_shows(by_apply: bool) -> None:
    model = past_the_counter()
    apply, params, buffers = fz.functionalize(model)

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        if by_apply:
            output, new = apply(params, buffers, x)
            return output.mean(), fz.Aux(buffers=new)
        return functional_call(model, {**params, **buffers}, (x,)).mean()

    step = fz.train_step(loss_fn, optim.sgd(0.1))
    state = step.init(params, buffers)
    for _ in range(2):
        state, _ = step(state, torch.ones(2, 3, dtype=F64))
    assert state.buffers["count"] == 2 and state.buffers["flags"].tolist() == [False, True]
    assert torch.equal(state.buffers["mean"], torch.full((3, 3), 0.75))
    assert model.count == 0


@pytest.mark.parametrize("shape", [(16, 8), (8,), (), (3, 5), (0,)])
@pytest.mark.parametrize("make", [torch.clone, lambda x: x.mT.clone() if x.dim() == 2 else x])
def test_masks_are_compared_as_words_where_they_lie_in_words(shape: Any, make: Any) -> None:
    first = make(torch.ones(shape, dtype=torch.bool))
    part = torch.ones(first.numel() + 1, dtype=torch.bool)[1:].view(first.shape)
    for mask in (first, part, torch.ones((), dtype=torch.bool).expand(first.shape)):
        copied = copy_of(mask)
        assert not copied.is_changed(copied.tensor)
        if mask.numel():
            copied.tensor.numpy()[(-1,) * mask.dim()] = False
            assert copied.is_changed(copied.tensor)


def test_a_nan_that_stays_is_no_change() -> None:
    old = torch.tensor([float("nan"), 1.0])
    copied = copy_of(old)
    assert not copied.is_changed(copied.tensor)
    copied.tensor.data[1] = 2.0
    assert copied.is_changed(copied.tensor)


def test_another_dtype_is_a_change() -> None:
    copied = copy_of(torch.ones(2))
    copied.tensor.data = copied.tensor.data.half()
    assert copied.is_changed(copied.tensor)
