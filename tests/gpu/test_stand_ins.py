"""Branches for CUDA, over tensors that say they lie there and have no values, on a machine that
needs no GPU. Other stand-ins: played streams in tests/benchmarks/test_simulated.py and
tests/checkpoint/test_async_save.py, generators in tests/model/test_generators.py, gloo under
another name in tests/groups/test_accelerated.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optree import tree_map, tree_structure
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import functorch_zero as fz
from functorch_zero import _torch_private, optim
from functorch_zero.checkpoint.block_io import BLOCK, chunks_of
from functorch_zero.checkpoint.snapshot import devices_of
from functorch_zero.devices import number_on
from functorch_zero.groups import CountingGroup, launch
from functorch_zero.groups.launchers import Task
from functorch_zero.groups.rendezvous import init
from functorch_zero.layout.build import make_layout
from functorch_zero.optim.across import Pointwise
from functorch_zero.sharded import grad_mean
from functorch_zero.sharded_optim.across import Sharded
from functorch_zero.sharded_optim.pointwise import IN_CACHE, _Operand, _run_in_chunks
from functorch_zero.step import weights
from functorch_zero.step.weights import unless_weightless

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    """Tensors made meanwhile have no values, and may lie on any device."""
    with FakeTensorMode() as mode:
        yield mode


# ---- Ranks ----


class FakeCuda:
    """The part of torch.cuda that chooses a rank's device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
        self.events: list[Any] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda number: self.events.append(number))
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(dist, "init_process_group", self._init)

    def _init(self, backend: str, **meeting: Any) -> None:
        self.events.append(backend)


@pytest.mark.parametrize(
    ("asked", "num_gpus", "expected"),
    [
        (None, 2, [1, "cpu:gloo,cuda:nccl"]),  # a GPU per rank; it is current before the group is
        (None, 1, ["gloo"]),
        (None, 0, ["gloo"]),
        ("nccl", 2, [1, "nccl"]),
        ("gloo", 2, ["gloo"]),
    ],
)
def test_a_ranks_backend_and_device(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, num_gpus: int, expected: list[Any]
) -> None:
    cuda = FakeCuda(monkeypatch, num_gpus)
    init(asked, None, Task("", "", 1, 2, 1, 2))
    assert cuda.events == expected


def test_nccl_needs_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: pytest.fail("looked for interfaces"))
    launch.__globals__["_check_loopback"]("nccl")


# ---- Saves ----


def test_tensors_leave_the_device_a_few_blocks_at_a_time(fake: FakeTensorMode) -> None:
    flat = torch.empty(9 * BLOCK // 4 + 1, dtype=torch.float32, device=CUDA)
    runs = [*chunks_of(flat)]
    assert [run.nbytes for run in runs] == [4 * BLOCK, 4 * BLOCK, BLOCK + 4]
    assert all(run.is_cpu for run in runs)


def test_the_devices_of_a_snapshot(fake: FakeTensorMode) -> None:
    places = ("cpu", CUDA, "cuda:1", CUDA, "cuda:2")
    read = [SimpleNamespace(tensor=torch.empty(1, device=device)) for device in places]
    found = devices_of(SimpleNamespace(runs=read[:4], left_out=read[4:]))  # type: ignore[arg-type]
    assert found == {CUDA, torch.device("cuda", 1), torch.device("cuda", 2)}


# ---- Updates ----


class SaysCuda(Tensor):
    """A tensor of the CPU that says that it lies on a GPU: fake ones can't be sliced there."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


@pytest.mark.parametrize(
    ("kind", "expected"), [(Tensor, 2 * [IN_CACHE] + [1]), (SaysCuda, [2 * IN_CACHE + 1])]
)
def test_a_pointwise_update_takes_a_whole_flat_of_a_device(kind: Any, expected: list[int]) -> None:
    """On a CPU, chunk by chunk."""
    sizes: list[int] = []

    def double(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x * 2

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return tree_map(double, updates), state

    flat = torch.ones(2 * IN_CACHE + 1)
    operand = _Operand(flat.as_subclass(kind), is_flat=True, donated=False)
    part = Pointwise(lambda params: (), update)
    (result,) = _run_in_chunks(part, tree_structure(()), [operand], [flat])
    assert sizes == expected and torch.equal(result.as_subclass(Tensor), 2 * flat)


def test_adamws_kernel_takes_floats_of_a_device(fake: FakeTensorMode) -> None:
    kernel = optim.adamw(0.1).fused
    assert kernel is not None
    for dtype, takes in ((torch.float32, True), (torch.float64, True), (torch.bfloat16, False)):
        assert kernel.takes(torch.empty(4, dtype=dtype, device=CUDA)) is takes


def test_its_step_number_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def noting(params: Any, grads: Any, mu: Any, nu: Any, largest: Any, of: Any, **_: Any) -> None:
        steps.extend(of)

    monkeypatch.setattr(torch, "_fused_adamw_", noting)
    optimizer = optim.adamw(0.1)
    assert optimizer.fused is not None
    with FakeTensorMode(shape_env=ShapeEnv()):  # an unknown number may be read, as the count is
        param = torch.empty(4, device=CUDA, requires_grad=True)
        state = optimizer.init({"": param})
        after = optimizer.fused.update([param], [torch.empty_like(param)], state)
    assert [(step.device, step.dtype) for step in steps] == [(CUDA, torch.float32)]
    assert after[0].count.is_cpu, "the count that is kept, which the host reads"


def test_a_first_state_leaves_the_gpus_generators_alone(
    fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = []

    @contextmanager
    def fork_rng(devices: Any) -> Iterator[None]:
        forked.append({*devices})
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    optim.adam(0.1).init_on_meta({"a": torch.empty(4), "b": torch.empty(4, device=CUDA)})
    assert forked == [{CUDA}]


def test_a_message_with_counts_goes_to_the_device(fake: FakeTensorMode) -> None:
    """Numbers of the CPU and of the device in one all-reduce: its group may take no other."""
    params = {"w": torch.empty(8, device=CUDA)}
    layout = make_layout(params, 2, trainable=lambda path, leaf: True)
    devices: list[torch.device] = []

    class Noting(CountingGroup):
        def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Any:
            devices.append(tensor.device)
            return super().all_reduce(tensor, op)

    across = Sharded(layout, Noting(2))
    values = [torch.ones((), device="cpu"), torch.ones((), device=CUDA)]
    across._all_reduce(values, "sum")
    assert devices == [CUDA]


# ---- Numbers ----


def test_a_hosts_number_without_a_value_goes_to_the_device(fake: FakeTensorMode) -> None:
    """A metric that a planned loss computes on the CPU."""
    made = number_on(CUDA, torch.ones(()) * 2)
    assert (made.device, made.dtype) == (CUDA, torch.float64)


def test_a_weight_on_a_device_is_not_asked_for() -> None:
    """A tensor on the meta device has no value, and asking raises."""
    value, weight = torch.ones(3, device="meta"), torch.ones((), device="meta")
    chosen = unless_weightless(value, weight)
    assert chosen is not value and chosen.device.type == "meta" and chosen.shape == value.shape


class LargeChoices(TorchDispatchMode):
    """Counts large tensors of which elements are chosen."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.where.self, torch.ops.aten.where.ScalarSelf):
            self.num += result.numel() > 32
        return result


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_gradients_of_a_weight_on_a_device_are_chosen_in_place(
    level: int, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the CPU stand for a device's."""
    for module in (weights, grad_mean):
        monkeypatch.setattr(module, "is_on_device", lambda w: isinstance(w, Tensor))
    params = {name: torch.ones(9, 7, requires_grad=True) for name in ("a", "b")}

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        value = (x @ params["a"] * params["b"][0]).sum()
        value = value if weight else value * torch.nan
        return value, fz.Aux(weight=torch.tensor(weight))

    step = fz.shard(fz.train_step(loss_fn, optim.sgd(1.0)), level=level, group=CountingGroup(2))
    state = step.init(params)
    with LargeChoices() as choices:
        state, _ = step(state, torch.ones(2, 9))
    assert choices.num == 0
    new = step.unshard(state).params
    assert torch.equal(new["a"], torch.full((9, 7), 1.0 if weight == 0 else -1.0))


def test_a_devices_generator_takes_a_whole_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[Any] = []

    class Generator:
        def __init__(self, device: torch.device) -> None:
            seeds.append(device)

        def manual_seed(self, seed: int) -> Generator:
            seeds.append(seed)
            return self

    monkeypatch.setattr(torch, "Generator", Generator)
    _torch_private.generator_of(2**62 + 1, CUDA)
    assert seeds == [CUDA, 2**62 + 1]


# ---- Metrics for the host ----


class PinnedRoom(TorchDispatchMode):
    """The memory that copies from GPUs arrive in: their numbers are there once an event behind them
    has come.

    Attributes:
        queued: what was given to the GPUs, in order.
    """

    def __init__(self, num_copies: int, length: int) -> None:
        super().__init__()
        self.queued: list[str] = []
        self.rooms = [torch.zeros(length, dtype=torch.float64) for _ in range(num_copies)]
        self.num_taken = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._to_copy.default or kwargs.get("device") != CPU:
            return func(*args, **kwargs)
        (source,) = args
        # Else torch waits for the copy, and with it for all before it
        assert source.device.type == "cuda" and kwargs["non_blocking"]
        self.queued.append(f"copy {len(source)} from {source.device}")
        self.num_taken += 1
        return self.rooms[self.num_taken - 1]

    def event(self, device: torch.device) -> PlayedEvent:
        return PlayedEvent(self, device)


class PlayedEvent:
    """Stands for a `torch.Event` of a GPU."""

    def __init__(self, pinned: PinnedRoom, device: torch.device) -> None:
        self._pinned, self._device = pinned, device
        self._behind = 0  # copies
        self._has_come = False

    def record(self) -> None:
        self._pinned.queued.append(f"event on {self._device}")
        self._behind = self._pinned.num_taken

    def query(self) -> bool:
        return self._has_come

    def synchronize(self) -> None:
        self._has_come = True
        for number, room in enumerate(self._pinned.rooms[: self._behind], start=1):
            room.fill_(number)


def test_metrics_come_to_the_host_by_one_copy_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event stands behind each copy, on the same device."""
    pinned = PinnedRoom(num_copies=2, length=2)
    monkeypatch.setattr(torch, "Event", pinned.event)
    with FakeTensorMode(), pinned:
        metrics = {
            "loss": torch.empty((), device="cuda:1"),
            "other": torch.empty((), device=CUDA),
            "grad_norm": torch.empty((), dtype=torch.bfloat16, device="cuda:1"),
        }
        got = fz.host(metrics)
    assert pinned.queued == [
        "copy 2 from cuda:1",
        "event on cuda:1",
        "copy 1 from cuda:0",
        "event on cuda:0",
    ]
    assert not got.is_here
    assert (got["loss"], got["grad_norm"], got.is_here) == (1.0, 1.0, False)
    assert (got["other"], got.is_here) == (2.0, True)
