"""The host never waits for a device in a step: it reads no value, and copies nothing to the device
from memory of its own.

"meta" stands for a GPU. A mode answers each question about a value, and notes the line of the
package that has asked.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero._torch_private import QuickDispatchMode
from functorch_zero.groups import CountingGroup, HybridGroup
from functorch_zero.layout.piece import Piece
from functorch_zero.model import buffer_copies
from functorch_zero.model.untouched import is_looked_at
from functorch_zero.optim.kernels import fused_adamw
from functorch_zero.runtime.reduce import GradientReduction
from functorch_zero.sharded.program import engine, ledger
from functorch_zero.sharded_optim import pointwise
from functorch_zero.step import loss
from tests.conformance.table import TABLE
from tests.modules import Net
from tests.tiers import THOROUGH, crossed, thinned

aten = torch.ops.aten
LEVELS = (0, 1, 2, 3)
# Up to step 4, and in step 7, they are looked at, and may wait
FIRST, LAST = 5, 6
BATCH = torch.empty(4, 16, device="meta")


class Audit(QuickDispatchMode):
    """Answers for the device, and counts what makes the host wait for it, by line of the
    package."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Piece in types:  # its operators run on what is here
            return NotImplemented
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func is aten._local_scalar_dense.default and first.is_meta:
            self._note("reads a value")
            return True if first.dtype == torch.bool else 1.0
        if first is not None and func is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or first.device)
            if first.is_meta and target.type == "cpu":
                self._note("copies to the host")
                return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if first.is_cpu and target.type == "meta":
                self._note("copies to the device")
        if func is aten.copy_.default and args[0].is_meta != args[1].is_meta:
            self._note("copies between host and device")
            return args[0]
        # Torch moves numbers that lie on the CPU to the device, for this operator
        if func is aten.where.self and len({x.device for x in args}) > 1:
            self._note("copies to the device, in `where`")
        return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            if "/functorch_zero/" in frame.filename:
                file = frame.filename.rpartition("/functorch_zero/")[2]
                self.found[f"{file}:{frame.lineno} {what}: {frame.line}"] += 1
                return
        self.found[f"the loss or torch {what}"] += 1


def net(num_blocks: int, buffers: bool = True) -> Net:
    """Some blocks, a table that stays, and running statistics; without buffers the table is an
    attribute, and nothing is normalised."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.norm(x * net.table)
        for block in net.blocks:
            x = x + block(x)
        return x

    block = lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    blocks = nn.ModuleList(block() for _ in range(num_blocks))
    if buffers:
        return Net(forward, blocks=blocks, table=torch.linspace(-1, 1, 16), norm=nn.BatchNorm1d(16))
    model = Net(forward, blocks=blocks, norm=nn.Identity())
    model.table = torch.linspace(-1, 1, 16, device="meta")
    return model


@dataclass(frozen=True)
class Case:
    """A step whose host never waits."""

    optimizer: Callable[[], optim.Transform] = lambda: optim.adamw(1e-3)
    weight: Callable[[Tensor], Any] = lambda x: None
    num_blocks: int = 2
    buffers: bool = True
    step_options: dict[str, Any] = field(default_factory=dict)  # of train_step
    shard_options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)  # of functionalize
    mesh: dict[str, Any] | None = None  # options of a mesh of 2 x 2 ranks; None: one axis of 2


clipped = lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
half = fz.Precision(compute=torch.bfloat16)
CASES = {
    "default": Case(),
    "clipped": Case(clipped, step_options={"metrics": ["grad_norm", "learning_rate"]}),
    "not donated": Case(shard_options={"donate": False}),
    "a weight on the device": Case(weight=lambda x: (x[:, 0] > 0).sum()),
    "a weight on the host": Case(weight=len),
    "accumulated": Case(step_options={"accumulate": 2}),
    "accumulated, with a weight on the device": Case(
        weight=lambda x: (x[:, 0] > 0).sum(), step_options={"accumulate": 2}
    ),
    "accumulated, with a weight on the host": Case(weight=len, step_options={"accumulate": 2}),
    "mixed precision": Case(model_options={"precision": half}),
    "two axes": Case(mesh={}),
}


def device_state(step: Any, *given: Any) -> Any:
    """A state on the device: all but the seed, and counts other than the buffers'."""
    whole = step.unshard(step.init(*given))

    def moved(x: Tensor) -> Tensor:
        return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)

    on_device = tree_map(lambda x: moved(x) if x.dim() else x, whole)
    return step.shard(on_device.replace(buffers=tree_map(moved, whole.value.buffers)))


def let_meta_be_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of this device have values, and the fused kernel runs on it."""
    monkeypatch.setattr(engine, "check_not_on_meta", lambda *args: None)
    monkeypatch.setattr(loss, "check_has_values", lambda *args, **how: None)
    for other in (pointwise, buffer_copies):
        monkeypatch.setattr(other, "has_values", lambda x: True)
    monkeypatch.setattr(fused_adamw, "_takes", lambda param: True)


class Prepared(NamedTuple):
    """What a test runs on the device."""

    step: Any
    evaluation: Any
    state: Any


def prepared(case: Case, level: int, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    let_meta_be_a_device(monkeypatch)
    apply, params, buffers = fz.functionalize(
        net(case.num_blocks, case.buffers), nn.Sequential, **case.model_options
    )

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        y, new = apply(params, buffers, x)
        value = y.square().mean()
        metrics = {"on the device": value * 2, "number": 0.5, "on the host": torch.tensor(3)}
        return value, fz.Aux(buffers=new, metrics=metrics, weight=case.weight(x))

    def evaluate(params: Any, buffers: Any, x: Tensor) -> Any:
        return replace(loss_fn(params, buffers, x)[1], buffers=None)

    group: Any = CountingGroup(2)
    if case.mesh is not None:
        group = HybridGroup(CountingGroup(4), shard_size=2, **case.mesh)
    step: Any = fz.train_step(loss_fn, case.optimizer(), **case.step_options)
    step = fz.shard(step, level=level, group=group, **case.shard_options)
    evaluation: Any = fz.shard(fz.eval_step(evaluate), level=level, group=group)
    return Prepared(step, evaluation, device_state(step, params, buffers))


def waits(case: Case, level: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The waits of some training steps."""
    step, _, state = prepared(case, level, monkeypatch)
    found = Counter[str]()
    for number in range(LAST + 1):
        with Audit() as audit:
            state, _ = step(state, BATCH)
        found += audit.found if number >= FIRST else Counter()
    return found


@pytest.mark.parametrize(("name", "level"), crossed([*CASES], [*LEVELS], n=2, quick=1))
def test_the_host_never_waits(name: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not waits(CASES[name], level, monkeypatch)


@pytest.mark.parametrize(("name", "level"), crossed([*CASES], [*LEVELS], n=2, quick=1))
def test_nor_in_an_evaluation(name: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, evaluation, state = prepared(CASES[name], level, monkeypatch)
    for number in range(LAST + 1):
        with Audit() as audit:
            evaluation(state, BATCH)
        assert number < FIRST or not audit.found


class Value(NamedTuple):
    params: Any
    opt: Any
    buffers: Any
    table: Tensor


@pytest.mark.parametrize("donate", thinned([False, True]))
@pytest.mark.parametrize("level", thinned(LEVELS))
def test_a_program(level: int, donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step, written as a program."""
    let_meta_be_a_device(monkeypatch)
    apply, params, buffers = fz.functionalize(net(2), nn.Sequential)
    optimizer = clipped()

    def loss_fn(params: Any, *, buffers: Any, batch: Tensor) -> Any:
        y, new = apply(params, buffers, batch)
        mean = y.square().mean()
        return mean, fz.Aux(buffers=new, metrics={"twice": mean * 2, "number": 0.5})

    def init(params: Any) -> Value:
        return Value(params, optimizer.init(params), buffers, torch.zeros(3))

    def program(value: Value, x: Tensor) -> Any:
        found, grads = fz.value_and_grad(loss_fn)(value.params, buffers=value.buffers, batch=x)
        mean, metrics, new = found
        metrics["norm"] = fz.dot(grads, grads).sqrt()
        params, opt = optimizer.apply(grads, value.opt, value.params)
        return Value(params, opt, new, value.table + 1), {"loss": mean, **metrics}

    options: dict[str, Any] = {"level": level, "donate": donate, "group": CountingGroup(2)}
    step = fz.shard(fz.program_step(program, init=init), **options)
    state, found = device_state(step, params), Counter[str]()
    read: list[Tensor] = []  # whose values are digested
    monkeypatch.setattr(ledger, "content_word", lambda leaf, look: str(read.append(leaf)))
    for number in range(LAST + 1):
        read.clear()
        with Audit() as audit:
            state, _ = step(state, BATCH)
        found += audit.found if number >= FIRST else Counter()
        assert any(x.is_meta for x in read) == is_looked_at(number)
    assert not found


OPTIMIZERS: dict[str, Callable[[], optim.Transform]] = {
    "lamb": lambda: optim.lamb(optim.warmup_cosine_decay_schedule(0.0, 1e-3, 3, 10)),
    "muon": lambda: optim.muon(1e-3),
    "adafactor": lambda: optim.adafactor(1e-3),
    "lbfgs": lambda: optim.lbfgs(1e-3),
    "soap": lambda: optim.soap(1e-3),
    "multi_steps": lambda: optim.multi_steps(optim.adamw(1e-3), 2),
    "lookahead": lambda: optim.lookahead(optim.sgd(0.1), 2, 0.5),
}


@pytest.mark.parametrize("name", thinned(OPTIMIZERS))
def test_optimizers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not waits(Case(OPTIMIZERS[name]), 3, monkeypatch)


# The host counts the steps that are taken, once in each
WAIT_ONCE = {
    "apply_if_finite": "optim/wrappers/wrappers.py",
    "apply_if_finite, whole leaf": "optim/wrappers/wrappers.py",
    "apply_if_nonzero": "optim/wrappers/masking.py",
    "apply_if_nonzero, by label, whole leaf": "optim/wrappers/masking.py",
}


@THOROUGH
@pytest.mark.parametrize("name", sorted(TABLE))
def test_all_optimizers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = waits(Case(TABLE[name].make, num_blocks=1), 3, monkeypatch)
    where = [line.partition(":")[0] for line in found]
    assert where == ([WAIT_ONCE[name]] if name in WAIT_ONCE else [])
    assert set(found.values()) <= {LAST - FIRST + 1}


@pytest.mark.parametrize(
    ("case", "line"),
    thinned(
        [
            (Case(weight=lambda x: x[:, 0].sum().item()), "step/train"),
            (Case(step_options={"nonfinite": "raise"}), "step/nonfinite.py"),
        ],
        rows=True,
    ),
)
def test_the_audit_can_fail(case: Case, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = waits(case, 3, monkeypatch)
    assert found and all(where.startswith(line) for where in found)


@pytest.mark.parametrize(
    ("case", "line"),
    thinned(
        [
            (Case(step_options={"nonfinite": "skip"}), "step/nonfinite.py"),
            (Case(step_options={"loss_scale": fz.LossScale(8.0)}), "step/nonfinite.py"),
            (
                Case(lambda: optim.apply_if_finite(optim.adamw(1e-3), 3)),
                "optim/wrappers/wrappers.py",
            ),
            (Case(mesh={"same_data": "shard"}), "sharded/average.py"),
        ],
        rows=True,
    ),
)
def test_a_step_that_waits_once(case: Case, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host counts the steps that are taken, for schedules and corrections of bias. And ranks of
    the same data compare what they found."""
    (place,) = waits(case, 3, monkeypatch).items()
    assert place[0].startswith(line) and place[1] == LAST - FIRST + 1


class Event:
    """Stands for one on a stream of the device."""

    def __init__(self, device: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def test_the_device_is_asked_about_large_buffers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_copies, "_SMALL", 0)
    monkeypatch.setattr(torch, "Event", Event)
    (place,) = waits(CASES["default"], 1, monkeypatch).items()
    assert place[0].startswith("step/host.py") and place[1] == LAST - FIRST + 1


def test_it_is_asked_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits until forward has ended, and backward is queued behind its question."""
    monkeypatch.setattr(buffer_copies, "_SMALL", 0)
    seen: list[str] = []

    class Noted(Event):
        def record(self) -> None:
            seen.append("asked")

        def synchronize(self) -> None:
            seen.append("waited")

    monkeypatch.setattr(torch, "Event", Noted)
    start = GradientReduction.start

    def noted(*args: Any, **named: Any) -> None:
        seen.append("reduced")
        start(*args, **named)

    monkeypatch.setattr(GradientReduction, "start", noted)
    waits(CASES["default"], 3, monkeypatch)
    steps = [what for what, _ in groupby(seen)]
    assert steps == ["asked", "reduced", "waited"] * (LAST + 1)


@pytest.mark.parametrize("kind", thinned(["attribute", "local"]))
def test_constant_tables_that_nobody_asks_about(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/begin/levels.md advises."""
    monkeypatch.setattr(buffer_copies, "_SMALL", 0)
    options = {"sync_buffers": "local"} if kind == "local" else {}
    case = Case(shard_options=options, buffers=kind == "local")
    assert not waits(case, 3, monkeypatch)
