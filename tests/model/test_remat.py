"""Recomputation: the same numbers, sharded or not, with less memory and no more traffic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from functorch_zero import optim
from functorch_zero.groups import CheckedGroup, CountingGroup, ProcessGroup, launch, run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.compare import assert_equal_updates, assert_same_on_all_ranks, train, train_sharded
from tests.models import GPT, Block, even
from tests.modules import seeded
from tests.runtime import test_skipped_units as skipped_units
from tests.runtime import test_unit as unit_tests
from tests.runtime.test_memory import LiveBytes
from tests.tiers import THOROUGH, crossed, tiers

LEVELS = (0, 1, 2, 3)


class Stateful(nn.Module):
    """Its output depends on a buffer that it changes, so a second run must not see the change."""

    def __init__(self, width: int, dropout: float = 0.3):
        super().__init__()
        self.linear, self.norm, self.dropout = (
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.Dropout(dropout),
        )
        self.register_buffer("calls", torch.ones((), dtype=torch.float64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.norm(torch.tanh(self.linear(x)))) / self.calls
        self.calls = self.calls + 1
        return x + y


class Net(nn.Module):
    """Units, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(Stateful(7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.last(x)


def build(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any, Any]:
    return seeded(lambda: functionalize(make().double(), **options))


def step_of(
    make: Callable[[], nn.Module] = Net, accumulate: int = 1, **options: Any
) -> tuple[Any, Any, Any]:
    apply, params, buffers = build(make, **options)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, new = apply(params, buffers, batch["x"])
        return (output - batch["y"]).square().mean(), Aux(buffers=new, weight=len(batch["x"]))

    return train_step(loss_fn, optim.sgd(0.1, momentum=0.9), accumulate=accumulate), params, buffers


def batches_of(rows: int = 12, num: int = 2) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    return [{"x": draw(rows, 5), "y": draw(rows, 3)} for _ in range(num)]


def assert_same_runs(a: Any, b: Any) -> None:
    """Bit for bit: params, buffers, metrics."""
    for one, other in zip(a.states, b.states, strict=True):
        for have, want in ((one.params, other.params), (one.buffers, other.buffers)):
            assert list(have) == list(want) and all(
                torch.equal(have[path], want[path]) for path in want
            )
    assert a.metrics == b.metrics


RULES: dict[str, Any] = {
    "all": True,
    "class": Stateful,
    "some": lambda path, module: path == "blocks.1",
    "pattern": ["blocks.*", "last"],
}


@pytest.mark.parametrize(("rule", "accumulate"), crossed(RULES, [1, 2]))
def test_the_numbers_are_those_of_keeping_everything(rule: str, accumulate: int) -> None:
    """Dropout draws the same again, and buffers are neither counted twice nor seen changed."""
    plain = train(*step_of(units=Stateful, accumulate=accumulate), batches_of())
    again = train(*step_of(units=Stateful, accumulate=accumulate, remat=RULES[rule]), batches_of())
    assert_same_runs(plain, again)
    assert float(again.states[-1].buffers["blocks.0.calls"]) == 1 + 2 * 2 * accumulate


class Dropped(nn.Module):
    """Counts its calls in a plain attribute, and depends on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(5, 5), nn.Linear(5, 3), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.down(self.dropout(torch.tanh(self.up(x))))
        return y / self.calls


class SetsItsUnit(nn.Module):
    """Its forward calls a unit in one way, and then in another one."""

    def __init__(self, way: str):
        super().__init__()
        self.block, self.way = Dropped(), way

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for first in (True, False):
            if self.way == "mode":
                self.block.train(not first)
            elif self.way == "rate":
                self.block.dropout.p = 0.1 if first else 0.9
            results.append(self.block(x))
        return results[0] - 3 * results[1]


@pytest.mark.parametrize("way", ["mode", "rate", "count"])
def test_a_second_run_has_the_settings_of_the_first(way: str) -> None:
    """As many rows as columns, so that torch can't tell a dropout's mask by its shape."""
    options = {"make": lambda: SetsItsUnit(way), "units": Dropped}
    plain = train(*step_of(**options), batches_of(rows=5))
    again = train(*step_of(**options, remat=True), batches_of(rows=5))
    assert_same_runs(plain, again)


@pytest.mark.parametrize(
    ("accumulate", "ranks"), tiers([(2, (2,))], [(2, (3,))], [(1, (2, 3))], rows=True), ids=str
)
def test_sharded_is_unsharded(accumulate: int, ranks: tuple[int, ...]) -> None:
    step, params, buffers = step_of(units=Stateful, remat=True, accumulate=accumulate)
    assert_sharded_equals_unsharded(
        step, params, buffers, batches_of(), levels=LEVELS, ranks=ranks, per_rank=True
    )


@pytest.mark.parametrize("reshard", tiers([False], [True]))
def test_params_may_stay_gathered(reshard: bool) -> None:
    step, params, buffers = step_of(units=Stateful, remat=Stateful)
    assert_sharded_equals_unsharded(
        step,
        params,
        buffers,
        batches_of(),
        levels=(3,),
        ranks=(2,),
        per_rank=True,
        reshard_after_forward=reshard,
    )


@pytest.mark.parametrize("level", tiers(thorough=[3, 1], full=[0, 2]))
def test_on_processes(level: int) -> None:
    make = lambda: step_of(lambda: without_chance(Net()), units=Stateful, remat=True)

    def run(group: Any) -> Any:
        return train_sharded(group, *make(), batches_of(), [6, 6], level=level)

    runs = launch(lambda: run(ProcessGroup()), 2, start_method="fork", timeout=100)
    assert_same_on_all_ranks(runs)
    assert_equal_updates(train(*make(), batches_of()), runs[0])


def without_chance(model: nn.Module) -> nn.Module:
    """Without what makes the mean of two halves another than the whole's."""
    for module in model.modules():
        if isinstance(module, Stateful):
            module.norm, module.dropout = nn.Identity(), nn.Identity()
    return model


class Checkpointed(nn.Module):
    """A model with torch.utils.checkpoint of its own, around a BatchNorm, inside units that are
    recomputed too."""

    def __init__(self, checkpoints: bool = True):
        super().__init__()
        self.net, self.checkpoints = Net(), checkpoints
        for block in self.net.blocks if checkpoints else ():
            inner = block.norm.forward
            block.norm.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False) if self.checkpoints else self.net(x)


@THOROUGH
@pytest.mark.parametrize(
    ("remat", "levels"),
    tiers(
        [(Stateful, (3,))],
        [(False, (1, 3)), (True, (2, 3))],
        [(False, (0, 2)), (Stateful, (0, 1, 2)), (True, (0, 1))],
        rows=True,
    ),
    ids=str,
)
def test_beside_a_models_own_checkpoint(remat: Any, levels: tuple[int, ...]) -> None:
    calls = "net.blocks.{}.norm.num_batches_tracked"
    plain = train(
        *step_of(lambda: without_state(Checkpointed(False)), units=Stateful), batches_of()
    )
    own = train(
        *step_of(lambda: without_state(Checkpointed()), units=Stateful, remat=remat), batches_of()
    )
    assert_same_runs(plain, own)
    assert [int(own.states[-1].buffers[calls.format(i)]) for i in range(3)] == [4, 2, 2]
    step, params, buffers = step_of(
        lambda: without_state(Checkpointed()), units=Stateful, remat=remat
    )
    assert_sharded_equals_unsharded(
        step, params, buffers, batches_of(), levels=levels, ranks=(2,), per_rank=True
    )


def without_state(model: nn.Module) -> nn.Module:
    """torch's checkpoint itself runs a module again on the buffers as they are by then."""
    for module in model.modules():
        if isinstance(module, Stateful):
            module.forward = lambda x, m=module: x + m.dropout(m.norm(torch.tanh(m.linear(x))))  # type: ignore[method-assign]
    return model


def test_returned_buffers_do_not_change_in_backward() -> None:
    """They are values: a recomputation writes elsewhere, the model's own too."""
    for options in ({"remat": True}, {}):
        apply, params, buffers = build(
            lambda: without_state(Checkpointed()), units=Stateful, **options
        )
        output, new = apply(params, buffers, batches_of()[0]["x"])
        before = {path: buffer.clone() for path, buffer in new.items()}
        output.sum().backward()
        assert all(torch.equal(before[path], new[path]) for path in before)


def test_derivatives_inside_the_loss() -> None:
    """torch.func refuses the hooks that recomputing takes: there activations stay."""
    apply, params, buffers = build(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), remat=True
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        slopes = vmap(grad(lambda x: apply(params, {}, x)[0].sum()))(batch["x"])
        return (
            slopes.square().mean() + (apply(params, {}, batch["x"])[0] - batch["y"]).square().mean()
        )

    step = train_step(loss_fn, optim.adamw(0.01))
    assert_sharded_equals_unsharded(step, params, buffers, batches_of(), levels=LEVELS, ranks=(2,))


def test_skeletons_are_used_again() -> None:
    step, params, buffers = step_of(units=Stateful, remat=True)
    apply = step.loss_fn.__closure__[0].cell_contents
    state = step.init(params, buffers)
    for batch in batches_of(num=4):
        state, _ = step(state, batch)
    assert len(apply._skeletons) == 1


def test_a_rule_that_matches_no_unit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"remat=.*matches no module that is a unit.*blocks\.0"):
        build(Net, units=Stateful, remat=nn.BatchNorm1d)


def test_a_unit_around_others_is_left_out_unless_asked_for() -> None:
    apply, _, _ = build(GPT, units=Block, remat=True)
    assert {"blocks.0", "blocks.1"} <= apply._anatomy.remat and "" not in apply._anatomy.remat
    apply, _, _ = build(GPT, units=Block, remat=lambda path, module: path == "")
    assert apply._anatomy.remat == {""}


@pytest.mark.parametrize("level", tiers([3], [0, 2], [1]))
def test_no_byte_more_is_sent(level: int) -> None:
    sent = []
    for remat in (False, Stateful):
        step, params, buffers = step_of(lambda: without_chance(Net()), units=Stateful, remat=remat)
        group = CountingGroup(4)
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        for batch in batches_of(num=2):
            state, _ = sharded(state, batch)
        group.reset()
        sharded(state, batches_of(num=1)[0])
        sent.append(sorted(group.calls, key=str))
    assert sent[0] == sent[1]


def test_a_unit_that_runs_again_is_gathered_once_for_it() -> None:
    """From the first step on, when no step before has shown the order."""
    sent = []
    for remat in (False, Stateful):
        step, params, buffers = step_of(lambda: without_chance(Net()), units=Stateful, remat=remat)
        group = CountingGroup(4)
        sharded = shard(step, level=3, group=group)
        state = sharded.init(params, buffers)
        group.reset()
        sharded(state, batches_of(num=1)[0])
        sent.append(sorted(group.calls, key=str))
    assert sent[0] == sent[1]


@pytest.mark.parametrize("accumulate", tiers([1], [2]))
def test_units_that_one_ranks_loss_leaves_out(accumulate: int) -> None:
    """It sends zeros, and gathers when the others run them again."""
    batches = unit_tests.batches_of(skipped_units.half_chosen)

    def make() -> tuple[Any, Any, Any]:
        net = lambda: skipped_units.skipping_net("a b? c? a b?")
        apply, params, buffers = build(net, remat=True)
        optimizer = optim.sgd(0.05, momentum=0.9)
        return (
            train_step(skipped_units.skipping(apply), optimizer, accumulate=accumulate),
            params,
            buffers,
        )

    expected = train(*make(), batches)
    for level in (2, 3):
        run = lambda group, k=level: train_sharded(
            CheckedGroup(group), *make(), batches, even(12, 2), level=k
        )
        runs = run_ranks(run, 2)
        assert_same_on_all_ranks(runs)
        assert_equal_updates(expected, runs[0])


def test_a_backward_inside_the_loss_that_runs_every_unit_again() -> None:
    apply, params, buffers = build(lambda: skipped_units.skipping_net("a b"), remat=True)
    step = train_step(skipped_units.skipping(apply, inner=True), optim.sgd(0.05))
    batches = unit_tests.batches_of(skipped_units.half_chosen)
    assert_sharded_equals_unsharded(step, params, buffers, batches, levels=LEVELS, ranks=(2,))


WIDTH, ROWS = 8, 512


class Wide(nn.Module):
    """A block whose activations are many times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


INPUT = WIDTH * ROWS * 8  # bytes of a block's input; its activations are eight times that, and more


def peak(depth: int, remat: Any, level: int, group: int = 1) -> float:
    """The most bytes that a step of `depth` blocks holds beside its state, in inputs of a block."""
    make = lambda: nn.Sequential(
        *(nn.Sequential(*(Wide() for _ in range(group))) for _ in range(depth // group))
    )
    apply, params, _ = build(make, units=lambda path, module: path.count(".") == 0, remat=remat)
    step = train_step(lambda p, b, x: apply(p, b, x)[0].square().mean(), optim.sgd(0.1))
    sharded = shard(step, level=level, group=CountingGroup(4))
    state, x = sharded.init(params), torch.ones(ROWS, WIDTH, dtype=torch.float64)
    for _ in range(2):
        with torch.autograd.set_multithreading_enabled(False), LiveBytes() as live:
            state, _ = sharded(state, x)
    return live.peak / INPUT


@pytest.mark.parametrize("level", tiers(thorough=[0, 3]))
def test_a_block_more_costs_its_input_only(level: int) -> None:
    """Its params' gradients (and pieces of them) are small here."""
    kept = (peak(16, False, level) - peak(8, False, level)) / 8
    again = (peak(16, True, level) - peak(8, True, level)) / 8
    assert kept >= 8 and again <= 2, (kept, again)


def test_the_peak_is_one_units_activations_and_all_inputs() -> None:
    one = peak(1, False, 3)
    assert peak(16, True, 3) <= one + 16 * 1.5


@THOROUGH
def test_with_units_of_several_blocks_it_grows_with_the_square_root() -> None:
    """n blocks in units of sqrt(n): sqrt(n) inputs, and sqrt(n) blocks' activations at a time."""
    four, sixteen = peak(4, True, 3, group=2), peak(16, True, 3, group=4)
    assert sixteen <= 2.3 * four
    assert sixteen < peak(16, False, 3) / 2


@pytest.mark.parametrize("level", tiers(thorough=[1, 3], full=[0, 2]))
def test_hugging_faces_own_and_ours_together(level: int) -> None:
    from tests.model.test_hugging_face import batches, checkpointed, llama

    def make(remat: Any, own: bool) -> tuple[Any, Any, Any]:
        model = lambda: (checkpointed() if own else llama()).train()
        apply, params, buffers = build(model, units="model.layers.*", remat=remat)

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
            output, new = apply(params, buffers, input_ids=batch["x"], use_cache=False)
            logits, wanted = output.logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten()
            return nn.functional.cross_entropy(logits, wanted), Aux(
                buffers=new, weight=len(batch["x"])
            )

        return train_step(loss_fn, optim.sgd(0.1, momentum=0.9)), params, buffers

    plain = train(*make(False, False), batches())
    assert_same_runs(plain, train(*make("model.layers.*", True), batches()))
    for own in (False, True):
        run = lambda group, o=own: train_sharded(
            group, *make("model.layers.*", o), batches(), even(6, 2), level=level
        )
        runs = run_ranks(run, 2)
        assert_same_on_all_ranks(runs)
        assert_equal_updates(plain, runs[0], tolerance=1e-5)  # Llama's norms are taken in float32


class Log:
    """An object that units write to."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class Writes(nn.Module):
    """Layers that write to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Written(3, 3), Written(3, 3)])

    def forward(self, x: Tensor, what: str) -> Any:
        kept: Any = {
            "list": [],
            "dict": {},
            "object": Log(),
            "tuple": ([],),
            "generator": torch.Generator().manual_seed(1),
        }[what]
        for layer in self.layers:
            x = layer(x, kept)
        return x, kept


class Written(nn.Linear):
    """Adds the sum of what was written before, and writes."""

    def forward(self, x: Tensor, kept: Any) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        if isinstance(kept, torch.Generator):
            return y * torch.rand(y.shape, generator=kept)
        if isinstance(kept, dict):
            kept[len(kept)] = y
            return torch.stack([*kept.values()]).sum(0).tanh()
        values = kept.seen if isinstance(kept, Log) else kept
        values = values[0] if isinstance(values, tuple) else values
        values.append(y)
        return torch.stack(values).sum(0).tanh()


@pytest.mark.parametrize("what", ["list", "dict", "object", "tuple", "generator"])
def test_units_that_write_to_their_arguments(what: str) -> None:
    """The second run finds them as the first did, and the caller's are written to once."""
    model, x = seeded(lambda: (Writes(), torch.randn(2, 3)))
    results = []
    for remat in (False, True):
        apply, params, buffers = functionalize(model, units=nn.Linear, remat=remat)
        (y, kept), _ = apply(params, buffers, x, what)
        results.append(torch.autograd.grad(y.square().sum(), [*params.values()]))
        if what == "list":
            assert len(kept) == 2
    assert all(map(torch.equal, *results))


def test_a_units_forward_keeps_its_signature() -> None:
    """A hook or the model itself may ask for it."""

    class Asked(nn.Linear):
        def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
            """Scaled."""
            return super().forward(x) * scale

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = Asked(2, 2)

        def forward(self, x: Tensor) -> Any:
            forward = self.unit.forward
            return forward(x), (str(inspect.signature(forward)), forward.__doc__)

    asked = []
    for remat in (False, True):
        apply, params, buffers = functionalize(Asking(), units=Asked, remat=remat)
        (_, found), _ = apply(params, buffers, torch.ones(1, 2))
        asked.append(found)
    assert asked[0] == asked[1] and "scale: " in asked[0][0] and asked[0][1] == "Scaled."
