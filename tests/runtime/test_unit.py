"""What users do inside a loss: it is equal at every level, or raises; never silently different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import CountingGroup, run_ranks
from functorch_zero.model.functionalize import functionalize
from functorch_zero.sharded.api import shard
from functorch_zero.step.program import unshard
from functorch_zero.step.train import train_step
from tests.compare import (
    assert_equal_on_ranks,
    train,
    train_sharded,
)
from tests.models import GPT, MLP, Block, even, rows, tokens
from tests.modules import Net, Unit, in_turn, routed, seeded
from tests.tiers import crossed, tiers

LEVELS = (0, 1, 2, 3)
Loss = Callable[[Any, Any, Any], Any]


def build(make: Callable[[], nn.Module], units: Any = None) -> tuple[Any, Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
        for p in model.parameters():  # zeros and ones would hide mistakes
            nn.init.normal_(p, std=0.5)
        return functionalize(model, units=units)


def batches_of(batch: Callable[[int], Any], n: int = 12, num: int = 2) -> list[Any]:
    return seeded(lambda: [batch(n) for _ in range(num)], 1)


def check(
    make_loss: Callable[[Any], Loss],
    make: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    level: int,
    ranks: int = 3,
    *,
    units: Any = None,
    unused: tuple[str, ...] = (),
    sizes: list[int] | None = None,
    **options: Any,
) -> None:
    """Two steps of momentum on ranks against the whole batch in one process."""
    batches = batches_of(batch)

    def step() -> tuple[Any, Any, Any]:
        apply, params, buffers = build(make, units)
        return train_step(make_loss(apply), optim.sgd(0.05, momentum=0.9)), params, buffers

    parts = sizes or even(12, ranks)
    assert_equal_on_ranks(step, batches, parts, level=level, unused=unused, **options)


def regression(call: Callable[[Any, Any, Tensor], Tensor]) -> Callable[[Any], Loss]:
    """A loss from `call(apply, params, x)`."""

    def make_loss(apply: Any) -> Loss:
        return lambda params, buffers, batch: (
            (call(apply, params, batch["x"]) - batch["y"]) ** 2
        ).mean()

    return make_loss


def scalar(apply: Any, params: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: apply(params, {}, x)[0].sum()


def derivatives(transform: str) -> Callable[[Any], Loss]:
    """The mean square of a derivative by the input, as physics-informed losses have it."""

    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            f, x = scalar(apply, params), batch["x"]
            ways = {
                "vmap(grad)": lambda: vmap(grad(f))(x),
                "vmap(hessian)": lambda: vmap(hessian(f))(x),
                "vmap(jacrev)": lambda: vmap(jacrev(lambda v: apply(params, {}, v)[0]))(x),
                "grad of grad": lambda: vmap(grad(lambda v: grad(f)(v).square().sum()))(x),
                "loop of hessians": lambda: torch.stack([hessian(f)(v) for v in x]),
                "vmap(jvp)": lambda: vmap(lambda v: jvp(f, (v,), (torch.ones_like(v),))[1])(x),
            }
            fit = (apply(params, buffers, x)[0] - batch["y"]).square().mean()
            return fit + ways[transform]().square().mean()

        return loss_fn

    return make_loss


TRANSFORMS = [
    "vmap(grad)",
    "vmap(hessian)",
    "vmap(jacrev)",
    "grad of grad",
    "loop of hessians",
    "vmap(jvp)",
]
# Hessian is jacfwd(jacrev): torch's forward-mode level belongs to the whole process
FORWARD = (
    "hessian",
    "jvp",
)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own use of it
@pytest.mark.parametrize(("transform", "level"), crossed(TRANSFORMS, LEVELS, n=6, quick=1))
def test_torch_func_inside(transform: str, level: int) -> None:
    ranks = 1 if level == 3 and any(name in transform for name in FORWARD) else 2
    check(derivatives(transform), MLP, rows(7, 3), level, ranks)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_only_derivatives(level: int) -> None:
    """No plain call before: the first time a unit is entered is inside the transform."""

    def make_loss(apply: Any) -> Loss:
        return lambda params, _, batch: (
            vmap(grad(scalar(apply, params)))(batch["x"]).square().mean()
        )

    def model() -> Net:
        forward = lambda net, x: net.b(torch.tanh(net.a(x)))
        return Net(forward, a=nn.Linear(7, 5), b=nn.Linear(5, 3, bias=False))

    check(make_loss, model, rows(7, 3), level)


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_gradient_penalty(level: int) -> None:
    """Double backward: the gradient by the input, taken by autograd.grad with create_graph."""

    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            x = batch["x"].clone().requires_grad_()
            output, _ = apply(params, buffers, x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return (output - batch["y"]).square().mean() + slope.square().mean()

        return loss_fn

    check(make_loss, MLP, rows(7, 3), level)


def checkpointed(where: str) -> Net:
    """torch.utils.checkpoint around units, and inside one."""

    def forward(net: Any, x: Tensor) -> Any:
        if where == "all":
            return checkpoint(net.gpt, x, use_reentrant=False)
        if where == "inside":
            return net.gpt(x)
        h = net.gpt.embed(x) + net.gpt.place(torch.arange(x.shape[1]))
        for block in net.gpt.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return net.gpt.head(net.gpt.norm(h))

    gpt = GPT(depth=3)
    if where == "inside":
        for block in gpt.blocks:
            block.forward = _recomputing(block.forward)  # type: ignore[method-assign]
    return Net(forward, gpt=gpt)


def _recomputing(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def next_token(apply: Any) -> Loss:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        output, _ = apply(params, buffers, batch["x"])
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten())

    return loss_fn


@pytest.mark.parametrize(
    ("where", "level"), crossed(["around", "inside", "all"], LEVELS, n=4, quick=1)
)
def test_checkpoint(where: str, level: int) -> None:
    check(next_token, lambda: checkpointed(where), tokens, level, 2, units=Block)


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_checkpoint_around_apply(level: int) -> None:
    def make_loss(apply: Any) -> Loss:
        def run(x: Tensor, params: Any) -> Tensor:
            return apply(params, {}, x)[0]

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            output = checkpoint(run, batch["x"], params, use_reentrant=False)
            return (output - batch["y"]).square().mean()

        return loss_fn

    check(make_loss, MLP, rows(7, 3), level)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_checkpoint_inside_the_forward_of_a_unit(level: int) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return in_turn([net.b], checkpoint(lambda v: in_turn([net.a], v), x, use_reentrant=False))

    def model() -> nn.Module:
        halves = [Unit(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 7)) for _ in range(2)]
        return nn.Sequential(*halves, nn.Linear(7, 3))

    check(regression(lambda apply, p, x: apply(p, {}, x)[0]), model, rows(7, 3), level, units=Unit)


def l2(params: Any) -> Tensor:
    return sum(p.square().sum() for p in optree.tree_leaves(params))


@pytest.mark.parametrize(("when", "level"), crossed(["before", "after", "only"], LEVELS, quick=1))
def test_l2_penalty(when: str, level: int) -> None:
    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            penalty = l2(params) if when != "after" else 0.0
            fit = (
                (apply(params, buffers, batch["x"])[0] - batch["y"]).square().mean()
                if when != "only"
                else 0.0
            )
            return fit + 0.1 * (l2(params) if when == "after" else penalty)

        return loss_fn

    check(make_loss, MLP, rows(7, 3), level)


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_touching_params_in_many_ways(level: int) -> None:
    """Whatever a torch operator or a method of Tensor reads of a parameter is the whole leaf."""

    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            w, b = params["layers.0.weight"], params["layers.0.bias"]
            assert (
                isinstance(w, Tensor)
                and w.shape == (5, 7)
                and w.dtype == torch.float64
                and w.requires_grad
            )
            assert (
                w.ndim == w.dim() == 2
                and w.numel() == 35
                and len(w) == 5
                and w.size(1) == 7
                and not w.is_complex()
            )
            x = batch["x"]
            parts = [
                x @ w.T + b,
                torch.addmm(b, x, w.mT),
                torch.einsum("ni,oi->no", x, w),
                nn.functional.linear(x, w[:], bias=b.view(-1)),
                torch.stack([w, 2 * w]).sum((0, 2)).expand(len(x), 5),
                x[:, :5].clone().add_(b),
                x[:, :1] * torch.cat([b, b])[5:],
            ]
            loss = (
                sum(p.square().mean() for p in parts)
                + torch.nn.utils.parameters_to_vector(params.values()).norm()
            )
            loss = loss + torch.stack(torch._foreach_norm(list(params.values()))).sum()
            return loss + 0 * float(w.detach().abs().max()) + 0 * len(w.tolist())

        return loss_fn

    check(make_loss, MLP, rows(7, 3), level)


@pytest.mark.parametrize(
    ("how", "level"),
    crossed(
        ["plain", "changed", "one changed", "detached", "dict", "deep", "functional_call"],
        LEVELS,
        n=4,
        quick=1,
    ),
)
def test_params_in_other_trees(how: str, level: int) -> None:
    """Trees made of params go into `apply` as params do."""

    def make_loss(apply: Any) -> Loss:
        # Each rank's own: functional_call puts the params into it meanwhile
        module = MLP().double()

        def call(params: Any, x: Tensor) -> Tensor:
            if how == "functional_call":
                return torch.func.functional_call(module, dict(params), (x,))
            given = {
                "plain": lambda: params,
                "changed": lambda: optree.tree_map(lambda p: 2 * p, params),
                "one changed": lambda: {**params, "norm.weight": params["norm.weight"] + 1},
                "detached": lambda: {**params, "norm.weight": params["norm.weight"].detach()},
                "dict": lambda: dict(params),
                "deep": lambda: {k: torch.roll(p, 1, 0) for k, p in params.items()},
            }[how]()
            return apply(given, {}, x)[0] + 0.1 * params["norm.weight"].sum()

        return lambda params, _, batch: (call(params, batch["x"]) - batch["y"]).square().mean()

    check(make_loss, MLP, rows(7, 3), level)


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_per_example_gradients(level: int) -> None:
    """`unshard` gives whole leaves that torch.func may differentiate by."""

    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            whole = dict(unshard(params))

            def one(p: Any, x: Tensor, y: Tensor) -> Tensor:
                return (apply(p, {}, x)[0] - y).square().mean()

            grads = vmap(grad(one), in_dims=(None, 0, 0))(whole, batch["x"], batch["y"])
            norms = sum(g.flatten(1).square().sum(1) for g in grads.values())
            return (
                norms.sqrt().mean()
                + vmap(one, in_dims=(None, 0, 0))(whole, batch["x"], batch["y"]).mean()
            )

        return loss_fn

    check(make_loss, MLP, rows(7, 3), level)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_an_inner_step(level: int) -> None:
    """A gradient by gathered params, with create_graph, and a loss of the params after it
    (MAML)."""

    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            whole = unshard(params)
            inner = (apply(whole, {}, batch["x"])[0] - batch["y"]).square().mean(1)
            total = 0.0
            for loss in inner:
                grads = torch.autograd.grad(loss, list(whole.values()), create_graph=True)
                moved = {k: p - 0.1 * g for (k, p), g in zip(whole.items(), grads, strict=True)}
                total = total + (apply(moved, {}, batch["x"][:1] * 0 + 1)[0]).square().mean()
            return total / len(inner)

        return loss_fn

    check(make_loss, MLP, rows(7, 3), level)


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_a_use_without_gradients_before_the_real_one(level: int) -> None:
    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            with torch.no_grad():
                target = apply(params, buffers, batch["x"])[0]
                size = params["layers.0.weight"].abs().mean()
            output = apply(params, buffers, batch["x"])[0]
            with torch.no_grad():
                size = size + params["layers.0.weight"].abs().mean()
            return (output - 0.5 * target - batch["y"]).square().mean() + size * params[
                "norm.bias"
            ].square().sum()

        return loss_fn

    check(make_loss, MLP, rows(7, 3), level)


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_a_frozen_teacher_and_a_student(level: int) -> None:
    """Two models in one tree."""
    teacher, old, _ = build(MLP)

    def step() -> tuple[Any, Any, Any]:
        apply, params, _ = build(lambda: GPT(tied=False), Block)

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            output, _ = apply(params["student"], {}, batch["x"])
            wanted, _ = teacher(params["teacher"], {}, output[:, 0, :7])
            return (
                (output[:, 0, :3] - wanted.detach()).square().mean()
                + output.square().mean()
                + wanted.mean()
            )

        trainable = optree.tree_map(lambda p: True, params)
        flags = {"student": trainable, "teacher": optree.tree_map(lambda p: False, old)}
        return (
            train_step(loss_fn, optim.sgd(0.1), trainable=flags),
            {"student": params, "teacher": old},
            {},
        )

    batches = batches_of(tokens)
    assert_equal_on_ranks(step, batches, even(12, 2), level=level)


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_autocast(level: int) -> None:
    def make_loss(apply: Any) -> Loss:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output, _ = apply(params, buffers, batch["x"].float())
            return (output.double() - batch["y"]).square().mean()

        return loss_fn

    def step() -> Any:
        apply, params, buffers = seeded(lambda: functionalize(MLP()))
        return train_step(make_loss(apply), optim.sgd(0.05)), params, buffers

    batches = batches_of(rows(7, 3))
    assert_equal_on_ranks(step, batches, [12], level=level, tolerance=1e-5)


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_a_plain_tree(level: int) -> None:
    """No module at all: nested containers with None, an empty leaf, and a leaf of another dtype."""

    def step() -> tuple[Any, Any, Any]:
        g = torch.Generator().manual_seed(0)
        params = {
            "in": [torch.randn(7, 5, generator=g, dtype=torch.float64), None],
            "out": {"w": torch.randn(5, 3, generator=g, dtype=torch.float64), "b": torch.zeros(3)},
            "scale": torch.tensor(0.5, dtype=torch.float64),
            "nothing": torch.zeros(0, 3, dtype=torch.float64),
            "count": torch.tensor([3, 4]),
        }

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            h = torch.tanh(batch["x"] @ params["in"][0]) * params["count"].sum()
            output = (
                params["scale"] * (h @ params["out"]["w"])
                + params["out"]["b"]
                + params["nothing"].sum()
            )
            return (output - batch["y"]).square().mean()

        trainable = lambda path, leaf: leaf.is_floating_point()
        return train_step(loss_fn, optim.adamw(0.01), trainable=trainable), params, None

    batches = batches_of(rows(7, 3))
    runs = assert_equal_on_ranks(
        step, batches, even(12, 3), level=level, unused=("nothing",), tolerance=1e-5
    )
    assert torch.equal(runs[0].states[-1].params["count"], torch.tensor([3, 4]))


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_units_that_follow_the_data(level: int) -> None:
    """The same on all ranks, other units in every step: prefetching by the last step's order must
    not matter."""

    def make_loss(apply: Any) -> Loss:
        num_calls = [0]

        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            route = [[0, 1, 2, 3], [3, 1, 3], [2, 0], [0, 1, 2, 3]][num_calls[0] % 4]
            num_calls[0] += 1
            return (apply(params, buffers, batch["x"], route)[0] - batch["y"]).square().mean()

        return loss_fn

    batches = batches_of(rows(7, 3), num=4)

    def step() -> tuple[Any, Any, Any]:
        apply, params, buffers = build(lambda: routed(4, 7, 3))
        return train_step(make_loss(apply), optim.sgd(0.05, momentum=0.9)), params, buffers

    assert_equal_on_ranks(step, batches, even(12, 2), level=level)


def test_a_transform_by_lazy_params_is_refused() -> None:
    def run(how: str) -> Callable[[Any], None]:
        def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
            ways = {
                "grad": lambda: grad(lambda p: (batch["x"] @ p).sum())(params["w"]).sum(),
                "vmap": lambda: vmap(lambda row: row.sum())(params["w"]).sum(),
                "autograd": lambda: torch.autograd.grad((params["w"] ** 2).sum(), params["w"])[
                    0
                ].sum(),
            }
            return (batch["x"] @ params["w"]).sum() + ways[how]()

        step = train_step(loss_fn, optim.sgd(0.1), trainable=lambda path, leaf: True)
        params = {"w": torch.ones(7, 3, dtype=torch.float64)}
        return lambda group: train_sharded(
            group, step, params, None, batches_of(rows(7, 3)), [6, 6], level=3
        )

    for how in ("grad", "vmap", "autograd"):
        with pytest.raises(StructureError, match=r"Remedy.*unshard"):
            run_ranks(run(how), 2)


@pytest.mark.parametrize("level", tiers([3], [0, 1], [2]))
def test_changing_params_in_place_is_an_error(level: int) -> None:
    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            params["w"].mul_(0.5)
        return (batch["x"] @ params["w"]).square().mean()

    step = train_step(loss_fn, optim.sgd(0.1), trainable=lambda path, leaf: True)
    params = {"w": torch.ones(7, 3, dtype=torch.float64)}
    batches = batches_of(rows(7, 3))
    with pytest.raises(StructureError, match="in place"):
        run_ranks(
            lambda group: train_sharded(group, step, params, None, batches, [6, 6], level=level), 2
        )
    with pytest.raises(StructureError, match="in place"):
        train(step, params, None, batches)


@pytest.mark.parametrize("level", tiers([1], [3, 0], [2]))
def test_what_a_loss_is_given_are_not_the_states_own_leaves(level: int) -> None:
    seen = []

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            seen.append(unshard(params["frozen"]).requires_grad_())
        seen.append(unshard(params["w"]))
        return (batch["x"] @ seen[-1]).square().mean()

    step = train_step(loss_fn, optim.sgd(0.1), trainable=lambda path, leaf: path == "w")
    sharded = shard(step, level=level, group=CountingGroup(2))
    leaf = torch.ones(7, 3, dtype=torch.float64)
    state = sharded.init({"w": leaf, "frozen": leaf.clone()})
    state, _ = sharded(state, batches_of(rows(7, 3))[0])
    assert all(whole.requires_grad for whole in seen)
    own = state.params["w"], state.params["frozen"]
    assert not any(whole is leaf for whole in seen for leaf in own)
    assert [leaf.requires_grad for leaf in own] == [True, False]


@pytest.mark.parametrize("level", tiers([3], [2, 0], [1]))
def test_a_saved_activation_changed_in_place_is_an_error(level: int) -> None:
    """As it is in one process: saved-tensor hooks would switch that check off."""

    def forward(net: Any, x: Tensor) -> Any:
        h = net.a(x)
        y = h * h
        h.add_(1)
        return net.b(y)

    apply, params, buffers = build(lambda: Unit(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 3)))
    step = train_step(regression(lambda apply, p, x: apply(p, {}, x)[0])(apply), optim.sgd(0.1))
    batches = batches_of(rows(7, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(step, params, buffers, batches)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(
            lambda group: train_sharded(group, step, params, buffers, batches, [6, 6], level=level),
            2,
        )
