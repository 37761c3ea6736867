"""Compiled units: the same numbers, sharded or not; compiled once; collectives, hooks and skeletons
as ever."""

from __future__ import annotations

import importlib
from importlib import util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup, ProcessGroup, launch, run_ranks
from functorch_zero.model.compile import options_for_torch
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.loss import Aux
from functorch_zero.step.train import train_step
from functorch_zero.testing import assert_sharded_equals_unsharded, models
from functorch_zero.testing.models import Block
from tests.compare import (
    assert_equal_updates,
    assert_same_on_all_ranks,
    train,
    train_by_rank,
    train_sharded,
)
from tests.model.test_remat import Net, Stateful, assert_same_runs, batches_of
from tests.modules import seeded
from tests.tiers import THOROUGH, tiers

# Torch's compiler looks at it
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
LEVELS = (0, 1, 2, 3)
compiles: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    """A backend that runs the operators (autograd's too), and counts how often it is asked."""
    from torch._dynamo.backends.debugging import aot_eager

    compiles.append(1)
    return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    if util.find_spec("tqdm"):
        importlib.import_module(
            "tqdm"
        ).tqdm.monitor_interval = 0  # torch's compiler would start a thread that stays
    torch._dynamo.reset()
    compiles.clear()
    yield
    torch._dynamo.reset()


def gpt(**options: Any) -> tuple[Any, Any, Any]:
    case = models.gpt()
    apply, params, buffers = functionalize(case.module(), units=Block, **options)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, new = apply(params, buffers, batch["x"])
        return case.criterion(output, batch), Aux(buffers=new, weight=len(batch["x"]))

    return train_step(loss_fn, optim.adamw(0.01)), params, buffers


COMPILED = {"compile": Block, "compile_options": {"backend": counting, "fullgraph": True}}


@pytest.mark.parametrize(
    ("levels", "more"),
    [
        pytest.param(LEVELS, {}, id="levels", marks=THOROUGH),
        pytest.param((0, 3), {"remat": Block}, id="remat", marks=THOROUGH),
    ],
)
def test_sharded_is_unsharded_from_one_compilation(levels: Any, more: Any) -> None:
    batches = models.gpt().batches(2, 6)
    assert_sharded_equals_unsharded(*gpt(**COMPILED, **more), batches, levels=levels, ranks=(2, 3))
    assert len(compiles) == 2, "for the first number of rows, and then for any"
    assert_equal_updates(train(*gpt(), batches), train(*gpt(**COMPILED, **more), batches))


@THOROUGH
def test_on_processes() -> None:
    batches = models.gpt().batches(2, 6)

    def run() -> Any:
        group = ProcessGroup()
        return {
            level: train_sharded(group, *gpt(**COMPILED), batches, [3, 3], level=level)
            for level in (1, 3)
        }

    runs = launch(run, 2, start_method="fork", timeout=100)
    expected = train(*gpt(**COMPILED), batches)
    for level in (1, 3):
        assert_same_on_all_ranks([run[level] for run in runs])
        assert_equal_updates(expected, runs[0][level])


def stateful(**options: Any) -> tuple[Any, Any, Any]:
    apply, params, buffers = seeded(
        lambda: functionalize(Net().double(), units=Stateful, **options)
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        output, new = apply(params, buffers, batch["x"])
        return (output - batch["y"]).square().mean(), Aux(buffers=new, weight=len(batch["x"]))

    return train_step(loss_fn, optim.sgd(0.1, momentum=0.9), accumulate=2), params, buffers


@pytest.mark.parametrize("remat", tiers(thorough=[True, False]))
def test_buffers_and_dropout(remat: bool) -> None:
    """BatchNorm, a buffer that is replaced and one that is read, dropout (this backend draws as
    eager does)."""
    options = {"compile": True, "compile_options": {"backend": counting}, "remat": remat}
    assert_same_runs(train(*stateful(), batches_of()), train(*stateful(**options), batches_of()))
    assert compiles
    step = stateful(**options)
    assert_sharded_equals_unsharded(*step, batches_of(), levels=(0, 3), ranks=(2,), per_rank=True)


@pytest.mark.parametrize("level", tiers(thorough=[0, 1, 2, 3]))
def test_the_same_collectives(level: int) -> None:
    """At level 3, too: regions save lazy parameters, not gathered leaves."""
    calls = []
    for options in ({}, COMPILED):
        step, params, buffers = gpt(**options)
        group = CountingGroup(4)
        sharded = shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        for batch in models.gpt().batches(3, 6):
            group.reset()
            state, _ = sharded(state, batch)
        calls.append([str(call) for call in group.calls])
    assert calls[0] == calls[1] and compiles


@THOROUGH
def test_skeletons_are_used_again() -> None:
    step, params, buffers = gpt(**COMPILED)
    apply = step.loss_fn.__closure__[0].cell_contents
    state = step.init(params, buffers)
    for batch in models.gpt().batches(4, 6):
        state, _ = step(state, batch)
    assert len(apply._skeletons) == 1


def test_derivatives_inside_the_loss() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    apply, params, buffers = functionalize(
        model, compile=True, compile_options={"backend": counting}
    )

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        slopes = vmap(grad(lambda x: apply(params, {}, x)[0].sum()))(batch["x"])
        return (
            slopes.square().mean() + (apply(params, {}, batch["x"])[0] - batch["y"]).square().mean()
        )

    step = train_step(loss_fn, optim.adamw(0.01))
    assert_sharded_equals_unsharded(
        step, params, buffers, batches_of(num=1), levels=(0, 3), ranks=(2,)
    )


def regression(**options: Any) -> tuple[Any, Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        halves = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.4)) for _ in range(2)]
        apply, params, buffers = functionalize(
            nn.Sequential(*halves, nn.Linear(5, 3)).double(), **options
        )
    loss_fn = lambda p, b, batch: (apply(p, b, batch["x"])[0] - batch["y"]).square().mean()
    return train_step(loss_fn, optim.sgd(0.1)), params, buffers


def with_inductor() -> float:
    """The largest difference of an update, relative to the largest update, from the one without
    compilation.

    Ranks have other numbers of rows, and dropouts of their own.
    """
    torch._inductor.config.compile_threads = 1
    batches = batches_of()
    make = lambda: regression(
        units=nn.Sequential, compile=nn.Sequential, compile_options={"dynamic": True}
    )
    plain, made = train(*regression(), batches), train(*make(), batches)
    runs = run_ranks(lambda group: train_sharded(group, *make(), batches, [5, 7], level=3), 2)
    assert_equal_updates(train_by_rank(*make(), batches, [5, 7]), runs[0])
    start, end = plain.states[0].params, plain.states[-1].params
    size = max(float((end[path] - start[path]).detach().abs().max()) for path in start)
    return (
        max(float((end[p] - made.states[-1].params[p]).detach().abs().max()) for p in start) / size
    )


@THOROUGH
@pytest.mark.filterwarnings("ignore::functorch_zero.errors.UnequalBatchesWarning")
@pytest.mark.usefixtures("cpp_compiler")
def test_inductor() -> None:
    # The compiler leaves threads behind
    (difference,) = launch(with_inductor, 1, start_method="fork", timeout=150)
    assert difference < 1e-9


def test_wrong_options() -> None:
    make = lambda **options: functionalize(models.gpt().module(), units=Block, **options)
    with pytest.raises(ValueError, match=r"compile=.*matches no module that is a unit.*blocks\.0"):
        make(compile=nn.Conv2d)
    with pytest.raises(ValueError, match="'the model', which has other units inside"):
        make(compile=lambda path, module: path == "")
    with pytest.raises(ValueError, match=r"no such compile_options: \['speed'\]"):
        make(compile=True, compile_options={"speed": 1})
    with pytest.raises(ValueError, match="compile=True"):
        make(compile_options={"mode": "default"})


def test_inductor_is_told_to_draw_as_torch_does() -> None:
    made = lambda **options: options_for_torch(options, compiles=True)
    assert made()["options"]["fallback_random"]
    assert not made(options={"fallback_random": False})["options"]["fallback_random"]
    of_mode = made(mode="max-autotune-no-cudagraphs")
    assert (
        "mode" not in of_mode
        and of_mode["options"]["max_autotune"]
        and of_mode["options"]["fallback_random"]
    )
    assert made(backend="aot_eager") == {"backend": "aot_eager"}


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
        {"backend": "cudagraphs"},
    ],
    ids=str,
)
def test_cuda_graphs_are_refused(given: dict[str, Any]) -> None:
    """A graph would read weights where they lay once. The options tell, on a CPU, too."""
    with pytest.raises(ValueError, match=r"records CUDA graphs.*Remedy: leave"):
        functionalize(models.gpt().module(), units=Block, compile=True, compile_options=given)


def test_cuda_graphs_for_the_whole_process_leave_units_out() -> None:
    """As `TORCHINDUCTOR_CUDAGRAPHS=1` switches them on."""
    for given in ({}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_autotune": True}}):
        made = options_for_torch(given, compiles=True)
        assert made["options"]["triton.cudagraphs"] is False


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", ["compile", "in place", "script"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_that_is_compiled_already_is_refused(how: str, inside: bool) -> None:
    made: nn.Module = nn.Linear(3, 3)
    if how == "in place":
        made.compile()
    else:
        made = torch.compile(made) if how == "compile" else torch.jit.script(made)
    path = "0.1" if inside else r"\(root\)"
    with pytest.raises(StructureError, match=f"path {path},.*functionalize\\(model, compile=True"):
        functionalize(nn.Sequential(nn.Sequential(nn.Tanh(), made)) if inside else made)
