"""Backwards that aren't linear in their gradient: refused on ranks, in calls that look closely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import FunctorchZeroError, PeerError, StructureError
from functorch_zero.groups import launch, run_ranks
from functorch_zero.testing.equality import assert_equal_values
from tests.compare import (
    assert_equal_on_ranks,
)
from tests.models import even
from tests.modules import Net
from tests.tiers import THOROUGH, crossed, thinned

LEVELS = (0, 1, 2, 3)
LIMIT = 1e-3  # of a gradient, where one is clipped: all are larger


class Custom(torch.autograd.Function):
    """x -> x; a gradient is what `change` makes of the one that comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


class AddGradientOf(torch.autograd.Function):
    """x, loss -> x; the loss's gradient is added in backward, as in mixtures of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class Product(torch.autograd.Function):
    """x, factor -> their product. Its backward writes over what it has saved, past the version
    counter, as kernels do that save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor.expand_as(x).clone())
        ctx.unsaved = [torch.ones_like(x)]
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        made = factor.numpy()
        made *= grad.numpy()
        made *= ctx.unsaved[0].numpy()
        ctx.unsaved[0].zero_()
        del ctx.unsaved
        return torch.from_numpy(made), None


def clip(x: Tensor) -> Tensor:
    return x.clamp(-LIMIT, LIMIT)


def normalised(x: Tensor) -> Tensor:
    return x / x.norm()


def layer(change: Callable[[Tensor], Tensor], hooks: str = "") -> Net:
    """`change` is done to its hidden rows. With a kind of hooks, they clip."""
    middle = nn.Tanh()
    if hooks == "full":
        middle.register_full_backward_hook(lambda m, given, out: (clip(given[0]),))
    if hooks == "full, before":
        middle.register_full_backward_pre_hook(lambda m, out: (clip(out[0]),))
    forward = lambda net, x: net.down(change(net.middle(net.up(x))))
    return Net(forward, up=nn.Linear(4, 5), middle=middle, down=nn.Linear(5, 3))


def by_custom(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: Custom.apply(x, change)


def added(x: Tensor) -> Tensor:
    return AddGradientOf.apply(x, 0.1 * x.square().mean())


def hooked(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x * 1.5
        x.register_hook(hook)
        return x

    return change


def used_twice(x: Tensor) -> Tensor:
    x = hooked(clip)(x)
    return x + x.square()


def in_place(change: Callable[[Tensor], Any]) -> Callable[..., None]:
    """A hook that writes to the gradient, or the first of those, that it is given."""

    def hook(given: Any, *_: Any) -> None:
        change(given if isinstance(given, Tensor) else given[0])

    return hook


def clip_(x: Tensor) -> Tensor:
    return x.clamp_(-LIMIT, LIMIT)


def halve_(x: Tensor) -> Tensor:
    return x.mul_(0.5)


def around_a_node(method: str, hook: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x * 1.5
        getattr(x.grad_fn, method)(hook)
        return x

    return change


def hooked_node(x: Tensor) -> Tensor:
    x = x * 1.5
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda made, given: (clip(made[0]), None))
    return x


def hooked_before_node(x: Tensor) -> Tensor:
    x = x * 1.5
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda given: (clip(given[0]),))
    return x


def in_a_checkpoint(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(lambda v: change(v.sin()), x, use_reentrant=False)


@torch.library.custom_op("functorch_zero_tests::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    return x.clone()


same.register_autograd(lambda ctx, grad: grad.sign())


def by_operator(x: Tensor) -> Tensor:
    made: Tensor = same(x)
    return made


Model = Callable[[], tuple[nn.Module, dict[str, Any]]]  # with options of functionalize


def of(change: Callable[[Tensor], Tensor], hooks: str = "", **options: Any) -> Model:
    return lambda: (layer(change, hooks), options)


# With words of the error
WRONG: dict[str, tuple[Model, str]] = {
    "a loss's gradient is added": (of(added), "AddGradientOf"),
    "in a checkpoint": (of(in_a_checkpoint(added)), "AddGradientOf"),
    "recomputed": (of(added, remat=True), "AddGradientOf"),
    "in halves": (of(by_custom(clip), precision=fz.Precision(compute=torch.bfloat16)), "Custom"),
    "sign": (of(by_custom(torch.sign)), r"Custom \(.*test_two_seeds.py:\d+\)"),
    "normalised": (of(by_custom(normalised)), "Custom"),
    "a hook on the loss": (of(torch.sin), "hook on an output of MeanBackward0"),
    "a tensor's hook": (of(hooked(clip)), "hook on an output of MulBackward0"),
    "a tensor used twice": (of(used_twice), "hook on an output of MulBackward0"),
    "in a loss of custom operators": (of(by_operator), "backward of GeneratedBackwardFor"),
    "a node's hook": (of(hooked_node), "hook on MulBackward0, hooked_node"),
    "a node's hook before it": (of(hooked_before_node), "hook on MulBackward0, hooked_before"),
    "in place, by a tensor's hook": (of(hooked(clip_)), "hook on an output of MulBackward0"),
    "in place, and no result": (of(hooked(in_place(clip_))), "hook on an output of MulBackward0"),
    "in place, by a node's hook": (
        of(around_a_node("register_hook", in_place(clip_))),
        "hook on MulBackward0",
    ),
    "in place, before a node": (
        of(around_a_node("register_prehook", in_place(clip_))),
        "hook on MulBackward0",
    ),
    "a module's hook": (of(torch.sin, "full"), "backward hook of Tanh"),
    "a module's hook before it": (of(torch.sin, "full, before"), "backward hook of Tanh"),
}

OF_THE_LOSS, _ = WRONG["a hook on the loss"]

RIGHT: dict[str, Model] = {
    "reversed": of(by_custom(torch.neg)),
    "straight through": of(lambda x: x + (x.round() - x).detach()),
    "doubled by a hook": of(hooked(lambda grad: 2 * grad)),
    "masked by a hook": of(hooked(lambda grad: grad * (torch.arange(5) < 3))),
    "halved before a node": of(around_a_node("register_prehook", lambda given: (given[0] / 2,))),
    "halved in place": of(hooked(halve_)),
    "halved in place, and no result": of(hooked(in_place(halve_))),
    "halved in place by a node's hook": of(around_a_node("register_hook", in_place(halve_))),
    "halved in place before a node": of(around_a_node("register_prehook", in_place(halve_))),
    "noted in lists and dicts": of(lambda x: Noting.apply(x)),
    "logged by a hook": of(hooked(lambda grad: None)),
    "clipped far off": of(hooked(lambda grad: grad.clamp(-100, 100))),
    "written over": of(lambda x: Product.apply(x, torch.arange(5.0, dtype=x.dtype))),
    "written over in a checkpoint": of(
        in_a_checkpoint(lambda x: Product.apply(x, torch.arange(5.0, dtype=x.dtype)))
    ),
    "recomputed": of(lambda x: Product.apply(x, torch.arange(5.0, dtype=x.dtype)), remat=True),
    "of two results": of(lambda x: sum(TwoResults.apply(x))),
    "under vmap": of(lambda x: torch.func.vmap(lambda row: Both.apply(row, 2.0))(x)),
}


class Both(torch.autograd.Function):
    """x -> factor x, which transforms take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return factor * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grad, None


class Noting(torch.autograd.Function):
    """x -> x exp(1). Its backward notes that it ran, and writes over a tensor that lies in a dict
    of `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.ran, ctx.by_name = [], {"factor": torch.ones_like(x).exp()}
        return x * ctx.by_name["factor"]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.ran.append(1)
        assert ctx.ran == [1]
        return ctx.by_name["factor"].mul_(grad)


class TwoResults(torch.autograd.Function):
    """x -> 2 x and 3 x; a gradient that doesn't come is None. `ctx` has names of a user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx._node, ctx._saved = [2.0, 3.0], 0
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        ctx._saved += 1
        assert ctx._saved == 1, "what is written aside is dropped"
        parts = [f * grad for f, grad in zip(ctx._node, grads, strict=True) if grad is not None]
        return sum(parts[1:], parts[0]) if parts else None


def build(model: Model) -> tuple[Any, Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, options = model()
        model = nn.Sequential(nn.Linear(4, 4), module).double()
        return fz.functionalize(model, **options)


def step_of(model: Model, *, weighted: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    apply, params, buffers = build(model)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        loss = (apply(params, buffers, batch["x"])[0] - 1).square().mean()
        if model is OF_THE_LOSS:
            loss.register_hook(clip)
        return loss, fz.Aux(weight=3.0 * len(batch["x"]) if weighted else None)

    return fz.train_step(loss_fn, optim.sgd(0.1), **options), params, buffers


def batches(num: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(12, 4, generator=generator).double()} for _ in range(num)]


ROWS = batches()[0]["x"]


@pytest.mark.parametrize(("name", "level"), crossed(WRONG, LEVELS, quick=4))
def test_what_is_not_linear_is_refused(name: str, level: int) -> None:
    (model, words), ranks = WRONG[name], 2 + level % 2

    def run(group: Any) -> None:
        step, params, buffers = step_of(model)
        sharded = fz.shard(step, level=level, group=group)
        sharded(sharded.init(params, buffers), {"x": ROWS.tensor_split(ranks)[group.rank]})

    with pytest.raises(StructureError, match=f"{words}.*not linear.*on rank.*Remedy.*add it to"):
        run_ranks(run, ranks)


@pytest.mark.parametrize(("name", "weighted"), crossed(WRONG, (False, True), quick=1))
def test_one_rank_is_one_process(name: str, weighted: bool) -> None:
    """Its backward has the seed of one process."""
    model, _ = WRONG[name]

    def parts() -> tuple[Any, Any, Any]:
        return step_of(model, weighted=weighted, accumulate=2)

    assert_equal_on_ranks(parts, batches(), [12], level=3)


@pytest.mark.parametrize(("name", "level"), crossed(RIGHT, LEVELS, quick=3))
def test_what_is_linear_is_right(name: str, level: int) -> None:
    ranks = 2 + level % 2

    def parts() -> tuple[Any, Any, Any]:
        return step_of(RIGHT[name], weighted=level in (1, 2), accumulate=2)

    assert_equal_on_ranks(parts, batches(), even(12, ranks), level=level)


def product(loss: Any, params: Any, x: Tensor) -> Any:
    """The vector is zero, so that nothing but the inner gradient shows a fault."""
    _, grads, product = fz.hvp(loss)(params, fz.zero_updates(params), x)
    return [grads, product]


def products(model: Model, level: int, ranks: int) -> Any:
    """Gradients, and their products with the Hessian."""
    apply, params, _ = build(model)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (apply(params, {}, x)[0] - 1).square().mean()

    if not level and ranks == 1:
        return product(loss, params, ROWS)

    def run(group: Any) -> Any:
        sharded = fz.shard_tree(params, level=level, group=group)
        return fz.unshard(product(loss, sharded, ROWS.tensor_split(ranks)[group.rank]))

    return run_ranks(run, ranks)[0]


@pytest.mark.parametrize(
    ("name", "level"), crossed(["normalised", "a tensor's hook", "a node's hook"], LEVELS)
)
def test_in_a_product(name: str, level: int) -> None:
    model, words = WRONG[name]
    with pytest.raises(StructureError, match=f"{words}.*not linear"):
        products(model, level, 2)


@pytest.mark.parametrize(
    ("name", "level"), crossed(["reversed", "masked by a hook", "doubled by a hook"], LEVELS)
)
def test_right_in_a_product(name: str, level: int) -> None:
    expected = products(RIGHT[name], 0, 1)
    assert_equal_values(expected, products(RIGHT[name], level, 2))


def on_ranks(
    change: Callable[[Tensor], Tensor], level: int, rows: Callable[[Any], Tensor], *, steps: int
) -> Callable[[Any], Any]:
    def run(group: Any) -> None:
        step, params, buffers = step_of(of(change))
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(params, buffers)
        for _ in range(steps):
            state, _ = sharded(state, {"x": rows(group)})

    return run


@pytest.mark.parametrize("level", thinned([3, 2, 1, 0]))
def test_only_calls_that_look_pay(level: int) -> None:
    """Aside, and for real: in steps 0 to 4 of 6. A hook that changes nothing runs once, and so does
    everything on one rank."""
    for ranks, backwards in (1, 6), (2, 11):
        ran: list[str] = []

        def change(grad: Tensor, ran: list[str] = ran) -> Tensor:
            ran.append("backward")
            return grad

        def log(grad: Tensor, ran: list[str] = ran) -> None:
            ran.append("hook")

        def both(x: Tensor, change: Any = change, log: Any = log) -> Tensor:
            return hooked(log)(Custom.apply(x, change))

        run_ranks(on_ranks(both, level, lambda group: ROWS, steps=6), ranks)
        assert ran.count("backward") == ranks * backwards and ran.count("hook") == ranks * 6


def test_a_clip_is_found_at_the_next_call_that_looks() -> None:
    done: list[int] = []

    def late(grad: Tensor) -> Tensor:
        return clip(grad) if len(done) >= 5 else grad

    def run(group: Any) -> None:
        step, params, buffers = step_of(of(hooked(late)))
        sharded = fz.shard(step, level=1, group=group)
        state = sharded.init(params, buffers)
        for n in range(8):
            state, _ = sharded(state, batches()[n % 2])
            done[:] = range(n + 1)

    with pytest.raises(StructureError, match="not linear"):
        run_ranks(run, 2)
    assert len(done) == 7, "steps 5 and 6 don't look, step 7 does"


def test_random_numbers_and_kept_gradients() -> None:
    """A run aside draws the numbers of the real one, and leaves later draws as they are. A gradient
    that is kept is that of the real one."""

    def run(group: Any) -> Any:
        drawn: list[Tensor] = []
        kept: list[Tensor] = []

        def noisy(x: Tensor) -> Tensor:
            drawn.append(torch.rand_like(x))
            return x * drawn[-1]

        def change(x: Tensor) -> Tensor:
            x = Custom.apply(Custom.apply(hooked(lambda grad: 2 * grad)(x), noisy), noisy)
            x.retain_grad()
            kept.append(x)
            return x

        on_ranks(change, 3, lambda group: ROWS, steps=1)(group)
        return drawn, kept[0].grad

    (alone, expected), (drawn, grad) = run_ranks(run, 1)[0], run_ranks(run, 2)[0]
    # Rank 0 has the random numbers of one process, and both ranks have its rows
    first, second = alone
    assert_equal_values([first, first, second, second], drawn)
    assert_equal_values(expected / 2, grad)


def test_an_error_aside_says_so() -> None:
    """And on one rank nothing runs aside."""

    def run(group: Any) -> None:
        first: list[float] = []

        def limited(grad: Tensor) -> Tensor:
            first.append(float(grad.norm()))
            if len(first) == 1 and group.size > 1:
                raise RuntimeError("too large")
            return grad

        on_ranks(by_custom(limited), 0, lambda group: ROWS, steps=1)(group)
        assert len(first) == 1

    run_ranks(run, 1)
    with pytest.raises(RuntimeError, match="too large") as caught:
        run_ranks(run, 2)
    assert any("ran aside, on twice its gradient" in note for note in caught.value.__notes__)


def each_error(group: Any) -> str:
    """On two ranks, of which one clips."""
    change = hooked(clip if group.rank else torch.clone)
    try:
        on_ranks(change, 3, lambda group: ROWS, steps=1)(group)
    except FunctorchZeroError as error:
        return type(error).__name__
    return "none"


def each_error_in_a_process() -> str:
    return each_error(fz.ProcessGroup())


def test_a_fault_of_one_rank_reaches_all() -> None:
    assert run_ranks(each_error, 2) == [PeerError.__name__, StructureError.__name__]


@THOROUGH
def test_a_fault_of_one_process_reaches_all() -> None:
    found = launch(each_error_in_a_process, 2, start_method="fork", timeout=60)
    assert found == [PeerError.__name__, StructureError.__name__]
