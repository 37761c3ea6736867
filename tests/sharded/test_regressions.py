"""Regressions that a review found: aliased storage, stale traces, mixed dtypes, and what ranks must
agree on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from optree import tree_leaves, tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import run_ranks
from functorch_zero.layout.build import make_layout
from functorch_zero.layout.flat_buffers import flat_of_pieces
from functorch_zero.params import map_local
from functorch_zero.sharded import update
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.tiers import thinned

LEVELS = (0, 1, 2, 3)


def trained(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()


def square(params: Any, buffers: Any, batch: Any) -> Tensor:
    return torch.stack([(p**2).sum() for p in tree_leaves(fz.unshard(params))]).sum()


def prove(step: Any, params: Any, level: int) -> None:
    """To the bit: both ranks have the gradients of one process."""
    assert_sharded_equals_unsharded(
        step, params, {}, [torch.ones(2)] * 2, levels=(level,), ranks=(2,), grade="bitwise"
    )


@pytest.mark.parametrize("level", thinned([3, 0, 1, 2]))
def test_single_elements_may_have_any_stride(level: int) -> None:
    """Torch calls them contiguous, and shows no bytes of them."""

    def single(dtype: torch.dtype) -> Tensor:
        return torch.ones(1, 2, dtype=dtype)[:, 0]

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        squares = sum((p.abs() ** 2).sum() for p in tree_leaves(fz.unshard(params)))
        return squares, fz.Aux(buffers={"seen": buffers["seen"] + batch.sum()})

    assert single(torch.float64).stride() == (2,)
    params = [single(dtype).requires_grad_() for dtype in (torch.float64, torch.complex128)]
    buffers = {"seen": single(torch.float64)}
    assert_sharded_equals_unsharded(
        fz.train_step(loss, optim.adamw(0.1)), params, buffers, [torch.ones(2)] * 2,
        levels=(level,), ranks=(2,), grade="bitwise", per_rank=True,
    )  # fmt: skip


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize(("ranks", "rule"), [(1, "mean"), (2, "local")])
def test_a_buffer_that_is_a_param_keeps_its_value_when_the_param_moves(
    level: int, ranks: int, rule: Any
) -> None:
    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        return (params["w"] ** 2).sum(), fz.Aux(buffers={"target": params["w"]})

    def run(group: fz.Group) -> Any:
        step = fz.shard(
            fz.train_step(loss, optim.sgd(0.1)), level=level, group=group, sync_buffers=rule
        )
        state, _ = step(step.init({"w": trained(16)}, {"target": torch.zeros(16)}), None)
        return fz.named_leaves(step.unshard(state).buffers)["target"]

    for target in run_ranks(run, ranks):
        torch.testing.assert_close(target, trained(16).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_frozen_param_can_become_a_buffer(level: int) -> None:
    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        return (params["w"] ** 2).sum(), fz.Aux(buffers={"copy": params["frozen"]})

    def run(group: fz.Group) -> Any:
        step = fz.shard(fz.train_step(loss, optim.sgd(0.1)), level=level, group=group)
        state, _ = step(
            step.init({"w": trained(3), "frozen": torch.ones(2)}, {"copy": torch.zeros(2)}), None
        )
        return fz.named_leaves(state.buffers)["copy"]

    for copy in run_ranks(run, 2):
        assert type(copy) is Tensor and copy.tolist() == [1, 1]


@pytest.mark.parametrize("level", thinned([0, 1, 2, 3]))
@pytest.mark.parametrize("optimizer", [optim.adamw(0.1), optim.muon(0.1)])
def test_a_state_that_fits_is_not_looked_at_leaf_by_leaf(
    level: int, optimizer: optim.Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of many small leaves would pay for it at each step."""

    def called(*args: Any, what: str) -> None:
        raise AssertionError("each leaf was looked at")

    monkeypatch.setattr(update, "check_opt_state", called)

    def run(group: Any) -> None:
        step = shard(train_step(square, optimizer), level=level, group=group)
        state = step.init({"w": trained(5, 3), "b": trained(3)})
        for _ in range(2):
            state, _ = step(state, None)
        narrow = map_local(lambda x: x.new_zeros(1) if x.ndim else x, state.opt_state)
        with pytest.raises(AssertionError, match="each leaf"):
            step(state.replace(opt_state=narrow), None)

    run_ranks(run, 1)


def test_one_step_serves_trees_with_other_units() -> None:
    def run(group: fz.Group) -> None:
        step = fz.shard(fz.train_step(square, optim.sgd(0.1)), level=3, group=group)
        a = step.init({"a": {"w": trained(5)}, "b": {"w": trained(4)}})
        b = step.init({"a": {"w": trained(6)}, "c": {"w": trained(4)}})
        for _ in range(2):
            a, _ = step(a, None)
            b, _ = step(b, None)

    run_ranks(run, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("level", [3, 2, 1, 0])
def test_without_donation_old_states_go_without_gc(level: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    apply, params, buffers = fz.functionalize(model)

    def live() -> int:
        # An error of an earlier test may keep a wrapper of torch.func alive, which has no storage
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        tensors = [x for x in gc.get_objects() if type(x) is Tensor and not wrapped(x)]
        storages = [x.untyped_storage() for x in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def run(group: fz.Group) -> list[int]:
        def loss(params: Any, buffers: Any, batch: Any) -> Any:
            return apply(params, buffers, batch)[0].square().mean()

        step = fz.shard(fz.train_step(loss, optim.sgd(0.1)), level=level, group=group, donate=False)
        state, sizes = step.init(params, buffers), []
        for _ in range(6):
            state, _ = step(state, torch.ones(2, 64))
            sizes.append(live())
        return sizes

    gc.collect()
    gc.disable()
    try:
        sizes = run_ranks(run, 1)[0]
    finally:
        gc.enable()
    assert sizes[-1] - sizes[1] < 64 * 64 * 4


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_state_may_have_another_dtype_for_each_leaf(level: int) -> None:
    def init(params: Any, across: Any) -> Any:
        return tree_map(
            lambda p, e: p.new_zeros(p.shape, dtype=torch.bfloat16 if e.numel > 20 else p.dtype),
            params,
            across.extents,
        )

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        state = tree_map(lambda s, u: (s * 0.9 + u).to(s.dtype), state, updates)
        return tree_map(lambda s, u: s.to(u.dtype), state, updates), state

    step = fz.train_step(square, optim.chain(optim.with_statistics(init, update), optim.sgd(0.1)))
    params = {"large": trained(30), "small": trained(10)}
    prove(step, params, level)


def _wide(path: str) -> torch.dtype:
    return torch.float64 if "wide" in path else torch.float32


def _trace_by_path() -> optim.Transform:
    """A pointwise transform whose state has another dtype for some paths."""

    def init(params: Any) -> Any:
        return {path: torch.zeros_like(p, dtype=_wide(path)) for path, p in params.items()}

    def update(updates: Any, state: Any, params: Any) -> Any:
        state = tree_map(lambda s, u: s * 0.9 + u, state, updates)
        return tree_map(lambda s, u: s.to(u.dtype), state, updates), state

    return optim.pointwise(init, update)


def _widened() -> optim.Transform:
    """Updates that have another dtype for some paths."""

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return {path: u.to(_wide(path)) for path, u in updates.items()}, state

    return optim.with_statistics(lambda params: (), update)


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize(
    "parts",
    thinned([[_widened, lambda: optim.trace(0.9)], [_trace_by_path], [_widened]]),
    ids=["updates before a pointwise part", "state", "updates"],
)
def test_a_dtype_may_be_chosen_by_path(parts: list[Any], level: int) -> None:
    optimizer = optim.chain(*(part() for part in parts), optim.scale(-0.1))
    step = fz.train_step(square, optimizer)
    params = {"wide": trained(5, 3), "other": trained(10)}

    prove(step, params, level)


def test_an_eval_batch_without_weight_counts_for_nothing_unsharded_too() -> None:
    def evaluate(params: Any, buffers: Any, batch: Any) -> Any:
        return fz.Aux(metrics={"mean": params["w"].sum() * torch.nan}, weight=0)

    state = fz.train_step(square, optim.sgd(0.1)).init({"w": trained(3)})
    assert fz.eval_step(evaluate)(state, None)["mean"] == 0


def test_an_integer_leaf_that_is_to_be_trained_is_named() -> None:
    step = fz.train_step(square, optim.sgd(0.1), trainable=lambda path, leaf: True)
    with pytest.raises(fz.errors.StructureError, match=r"path ids.*trainable"):
        step.init({"w": trained(3), "ids": torch.arange(3)})


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_unit_of_empty_leaves(level: int, ranks: int) -> None:
    params = {"a": {"w": trained(0, 3)}, "b": {"w": trained(4, 4)}}

    def run(group: fz.Group) -> None:
        step = fz.shard(fz.train_step(square, optim.muon(0.1)), level=level, group=group)
        state = step.init(params)
        others = tree_map(
            lambda x: torch.cat([x.reshape(-1), x.new_zeros(3)])[: x.numel()].view(x.shape),
            state.params.local_tree,
        )
        step(state.replace(params=state.params.with_local(others)), None)

    run_ranks(run, ranks)


def test_only_contiguous_pieces_of_one_dtype_are_taken_for_views_of_a_flat() -> None:
    layout = make_layout({"w": torch.zeros(8)}, 1, trainable=lambda path, leaf: True)
    strided = torch.arange(16.0)[::2]
    assert flat_of_pieces([strided], layout.buckets[0], 0)[:8].tolist() == strided.tolist()


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
@pytest.mark.parametrize("call", ["step", "accumulated", "program", "evaluation"])
def test_a_param_can_be_a_metric_and_a_frozen_one_the_weight(level: int, call: str) -> None:
    params = {
        "w": trained(6),
        "temperature": torch.tensor(1.5, requires_grad=True),
        "share": torch.tensor(2.0),
    }

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        value = ((params["w"] ** 2).sum() * params["temperature"] * x).mean()
        metrics = {"temperature": params["temperature"], "share": params["share"]}
        return value, fz.Aux(metrics=metrics, weight=params["share"])

    def run(group: fz.Group | None) -> dict[str, float]:
        step: Any = fz.train_step(
            loss, optim.sgd(0.1), accumulate=2 if call == "accumulated" else 1
        )
        evaluation: Any = fz.eval_step(lambda p, b, x: loss(p, b, x)[1])
        if group is not None:
            step = fz.shard(step, level=level, group=group)
            evaluation = fz.shard(evaluation, level=level, group=group)
        state, x = step.init(params), torch.ones(2)
        if call == "program":
            (_, metrics), _ = fz.value_and_grad(lambda p, x: loss(p, None, x))(state.params, x)
        elif call == "evaluation":
            metrics = evaluation(state, x)
        else:
            _, metrics = step(state, x)
        assert not any(value.requires_grad for value in metrics.values())
        return {name: float(metrics[name]) for name in ("temperature", "share")}

    for metrics in (run(None), *run_ranks(run, 2)):
        assert metrics == {"temperature": 1.5, "share": 2.0}


@pytest.mark.parametrize("way", ["a step", "step.shard", "a step, and init reads values"])
def test_a_state_from_elsewhere_is_checked_without_a_second_one(way: str) -> None:
    """It would take the memory once more. Where `init` reads values, nothing is checked."""
    seen: list[str] = []  # the devices that `init` was called on

    def init(params: Any) -> Any:
        seen.append(params["w"].device.type)
        if way.endswith("values"):
            float(params["w"].sum())
        return tree_map(torch.zeros_like, params)

    def update(updates: Any, state: Any, params: Any, across: Any) -> Any:
        return updates, state

    def step() -> Any:
        return train_step(square, optim.with_statistics(init, update))

    state = step().init({"w": trained(4)})
    assert seen == ["cpu"]
    # Another step, which has not made this state
    if way == "step.shard":
        run_ranks(lambda group: shard(step(), level=1, group=group).shard(state), 1)
    else:
        step()(state, None)
    assert seen[1] == "meta" and seen.count("cpu") == 1


def test_frequencies_in_an_embedding_are_those_of_each_ranks_part() -> None:
    """As BatchNorm's statistics: docs/begin/testing.md, Limits."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 3, scale_grad_by_freq=True), torch.nn.Linear(3, 2)
    ).double()
    apply, params, buffers = fz.functionalize(model)

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        return (apply(params, buffers, batch["x"])[0] - batch["y"]).square().mean()

    step = fz.train_step(loss, optim.sgd(0.1))
    batch = {"x": torch.arange(12) % 5, "y": torch.randn(12, 2, dtype=torch.float64)}
    case = step, params, buffers, [batch]
    assert_sharded_equals_unsharded(*case, levels=(0, 3), ranks=(2,), per_rank=True)
    with pytest.raises(AssertionError, match=r"the updates differ .* leaf 0.weight"):
        assert_sharded_equals_unsharded(*case, levels=(0,), ranks=(2,))


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_a_sparse_tensor_that_a_module_holds(level: int) -> None:
    """Autograd saves it for backward beside gathered leaves."""

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(trained(64, 4).detach().double())
            self.links = (torch.eye(64) + torch.eye(64).roll(3, 0)).double().to_sparse()

        def forward(self, x: Tensor) -> Tensor:
            return (torch.sparse.mm(self.links, self.w) @ x.T).square().mean()

    apply, params, buffers = fz.functionalize(Graph())
    step = train_step(lambda p, b, x: apply(p, b, x)[0], optim.sgd(0.1))
    x = torch.linspace(0, 1, 24).double().view(6, 4)
    assert_sharded_equals_unsharded(step, params, buffers, [x, x], levels=(level,), ranks=(2,))
