"""`functionalize`: modules as pure functions, whatever the module does."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from functorch_zero.errors import StructureError
from functorch_zero.model.functionalize import Apply, functionalize
from functorch_zero.params import Params
from tests.models import GPT, MLP, Block, ConvNet, Shared
from tests.tiers import tiers

ROWS = {"mlp": (MLP, (4, 7)), "convnet": (ConvNet, (4, 1, 6, 6)), "shared": (Shared, (4, 5))}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def snapshot(model: nn.Module) -> Any:
    """All that a call could change in a module."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(t), t._version, t.requires_grad, t.grad is None) for name, t in tensors.items()},
        {
            path: (m.training, sorted(m.__dict__), sorted(m._parameters))
            for path, m in model.named_modules()
        },
    )


def values(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("name", ROWS)
def test_output_and_gradients_are_the_modules(name: str) -> None:
    make, shape = ROWS[name]
    model, x = make(), torch.randn(shape)
    apply, params, buffers = functionalize(model)
    output, _ = apply(params, buffers, x)
    grads = torch.autograd.grad(output.square().sum(), list(params.values()))
    twin = copy.deepcopy(model)
    expected = twin(x)
    assert torch.equal(output, expected)
    for got, want in zip(
        grads, torch.autograd.grad(expected.square().sum(), list(twin.parameters())), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ROWS)
def test_the_module_is_untouched(name: str) -> None:
    make, shape = ROWS[name]
    model = make()
    before, old = snapshot(model), values(model)
    apply, params, buffers = functionalize(model, units=nn.Module)
    output, _ = apply(params, buffers, torch.randn(shape))
    output.sum().backward()
    apply.eval()(params, buffers, torch.randn(shape))
    for p in model.parameters():
        p.grad = None  # the params of functionalize share storage with the module's, not gradients
    assert snapshot(model) == before
    assert all(torch.equal(a, b) for a, b in zip(old, values(model), strict=True))


def test_batchnorm_gives_new_buffers_and_keeps_the_old() -> None:
    model = ConvNet()
    apply, params, buffers = functionalize(model)
    old = {name: b.clone() for name, b in buffers.items()}
    versions = {name: b._version for name, b in buffers.items()}
    x = torch.randn(8, 1, 6, 6)
    _, new = apply(params, buffers, x)
    for name, b in buffers.items():
        assert torch.equal(b, old[name]) and b._version == versions[name]
        assert not torch.equal(new[name], b)
        assert not new[name].requires_grad and new[name].grad_fn is None
    twin = copy.deepcopy(model)
    twin(x)
    for name, b in twin.named_buffers():
        assert torch.equal(new[name], b)


def test_eval_changes_no_buffer_and_train_does() -> None:
    model = ConvNet()
    apply, params, buffers = functionalize(model)
    x = torch.randn(8, 1, 6, 6)
    output, new = apply.eval()(params, buffers, x)
    assert all(new[name] is buffers[name] for name in buffers)
    assert torch.equal(output, copy.deepcopy(model).eval()(x))
    _, again = apply.eval().train()(params, buffers, x)
    assert not any(again[name] is buffers[name] for name in buffers)
    assert isinstance(apply.eval(), Apply) and model.training


def test_a_module_in_eval_mode_stays_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9)).eval()
    apply, params, buffers = functionalize(model)
    x = torch.randn(4, 3)
    assert torch.equal(apply(params, buffers, x)[0], model(x))
    assert not torch.equal(apply.train()(params, buffers, x)[0], model(x))


def test_a_reassigned_buffer_comes_back() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return self.weight * x

    apply, params, buffers = functionalize(Counter())
    _, new = apply(params, buffers, torch.ones(()))
    _, newer = apply(params, new, torch.ones(()))
    assert (float(buffers["count"]), float(new["count"]), float(newer["count"])) == (0, 1, 2)


def test_tied_weights_are_one_leaf() -> None:
    apply, params, buffers = functionalize(GPT())
    assert "embed.weight" in params and "head.weight" not in params
    tokens = torch.randint(11, (2, 5))
    (grad,) = torch.autograd.grad(apply(params, buffers, tokens)[0].sum(), [params["embed.weight"]])
    model = GPT()
    model.load_state_dict({**params, "head.weight": params["embed.weight"]})
    (expected,) = torch.autograd.grad(model(tokens).sum(), [model.embed.weight])
    assert torch.allclose(grad, expected, atol=1e-5) and grad.any()


def test_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT()
    apply, params, buffers = functionalize(model, units=Block)
    assert all(p.is_meta for p in params.values())
    real = tree_map(lambda p: torch.randn(p.shape).requires_grad_(), params)
    output, _ = apply(real, buffers, torch.randint(11, (2, 5)))
    assert output.shape == (2, 5, 11) and not output.is_meta


def unit_names(model: nn.Module, units: Any) -> list[str]:
    """The units' names; every leaf must be in exactly one."""
    _, params, _ = functionalize(model, units=units)
    leaves = [leaf for unit in params.units for leaf in unit.leaves]
    assert sorted(leaves) == sorted(params) and len(set(leaves)) == len(leaves)
    return [unit.name for unit in params.units]


class Nested(nn.Module):
    """Units inside a ModuleDict, a ModuleList and each other, one called with kwargs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": MLP((4, 4, 4))})
        self.more = nn.ModuleList([MLP((4, 4, 4)), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        x = self.parts["b"](x=self.parts["a"](x))
        for part in self.more:
            x = part(x)
        return self.scale * (self.forward(x) if twice else x)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (Block, ["embed+place", "blocks.0", "blocks.1", "norm"]),
        ([Block, nn.Embedding], ["embed", "place", "blocks.0", "blocks.1", "norm"]),
        ("blocks.*", ["embed+place", "blocks.0", "blocks.1", "norm"]),
        (lambda path, module: path == "blocks.1", ["embed+place", "blocks.0", "blocks.1", "norm"]),
        (None, ["embed+place", "blocks.0", "blocks.1", "norm"]),
    ],
)
def test_units_are_named(units: Any, expected: list[str]) -> None:
    with torch.device("meta"):
        names = unit_names(GPT(tied=False), units)
    assert "blocks.1" in names and ".".join(names).count("blocks.0") == 1
    if units is not None and not callable(units):
        assert [n for n in names if n.startswith("blocks")] == ["blocks.0", "blocks.1"], (
            names,
            expected,
        )


def test_a_tied_weight_belongs_to_the_common_parent() -> None:
    _, params, _ = functionalize(GPT(), units=Block)
    (unit,) = [u for u in params.units if "embed.weight" in u.leaves]
    assert unit.modules == ("",)


def test_nested_units() -> None:
    names = unit_names(Nested(), [MLP, nn.Linear])
    assert {"parts.a", "parts.b.layers.0", "more.0.layers.1", "more.1"} <= set(names)
    assert unit_names(Nested(), MLP).count("more.0") == 1


def test_small_units_join() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    assert unit_names(model, None) == ["0", "1", "2", "3"], "chosen ones stay apart"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm, self.head = (
                nn.Linear(64, 64),
                nn.LayerNorm(64),
                nn.Linear(64, 64),
            )

    assert unit_names(Net(), "block") == ["block", "norm+head"]


def test_units_that_match_nothing_are_an_error() -> None:
    with pytest.raises(ValueError, match="matches no module"):
        functionalize(MLP(), units="nothing.*")


def test_kwargs_and_recursion() -> None:
    model = Nested()
    apply, params, buffers = functionalize(model, units=[MLP, nn.Linear])
    x = torch.randn(2, 4)
    assert torch.equal(apply(params, buffers, x, twice=True)[0], model(x, twice=True))


@dataclass
class Answer:
    """An output as a dataclass."""

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


Pair = namedtuple("Pair", "first second")


class Talkative(nn.Module):
    """Outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, kind: str) -> Any:
        y = self.linear(x)
        kinds = {
            "tuple": (y, x),
            "dict": {"y": y},
            "dataclass": Answer(y, (x, y)),
            "named": Pair(y, None),
            "list": [y],
        }
        return kinds[kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "named", "list"])
def test_outputs_of_every_kind(kind: str) -> None:
    model = Talkative()
    apply, params, buffers = functionalize(model)
    x = torch.randn(4, 3)
    output, _ = apply(params, buffers, x, kind=kind)
    expected = model(x, kind)
    assert type(output) is type(expected)
    y = {"tuple": lambda o: o[0], "dict": lambda o: o["y"], "dataclass": lambda o: o.logits}.get(
        kind, lambda o: o[0]
    )
    assert torch.equal(y(output), y(expected)) and y(output).requires_grad


def test_wrong_trees_are_named() -> None:
    apply, params, buffers = functionalize(ConvNet())
    x = torch.randn(4, 1, 6, 6)
    with pytest.raises(StructureError, match=r"path head\.weight.*no such leaf.*Remedy"):
        apply({k: v for k, v in params.items() if k != "head.weight"}, buffers, x)
    with pytest.raises(StructureError, match=r"path other"):
        apply({**params, "other": x}, buffers, x)
    with pytest.raises(StructureError, match=r"buffers.*path \w+\.1\.\w+"):
        apply(params, {}, x)
    with pytest.raises(StructureError, match=r"path head\.bias, expected \(3,\), got \(4,\)"):
        apply({**params, "head.bias": torch.zeros(4)}, buffers, x)


def test_a_users_error_leaves_apply_usable() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ArithmeticError("bad batch")
            return super().forward(x)

    model = nn.Sequential(Fails(3, 3), nn.BatchNorm1d(3))
    apply, params, buffers = functionalize(model)
    x = torch.randn(4, 3)
    expected = apply(params, buffers, x)[0]
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="bad batch"):
            apply(params, buffers, torch.full((4, 3), float("nan")))
    assert torch.equal(apply(params, buffers, x)[0], expected)


def test_apply_is_reentrant() -> None:
    inner, params, buffers = functionalize(nn.Linear(3, 3))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            if depth == 0:
                return self.linear(x)
            doubled = {k: 2 * v for k, v in outer_params.items()}
            return self.linear(apply(doubled, {}, inner(params, buffers, x)[0], depth - 1)[0])

    model = Outer()
    apply, outer_params, _ = functionalize(model)
    x = torch.randn(2, 3)

    def twice(x: Tensor, times: int) -> Tensor:
        y = F.linear(x, params["weight"], params["bias"])
        return F.linear(
            y, times * outer_params["linear.weight"], times * outer_params["linear.bias"]
        )

    expected = F.linear(twice(x, 2), outer_params["linear.weight"], outer_params["linear.bias"])
    assert torch.equal(apply(outer_params, {}, x, 1)[0], expected)


def test_a_call_lets_go_of_the_values() -> None:
    apply, params, buffers = functionalize(MLP())
    mine = tree_map(lambda p: p.detach().clone(), params)
    references = [sys.getrefcount(mine[path]) for path in mine]
    apply(mine, buffers, torch.randn(2, 7))
    assert [sys.getrefcount(mine[path]) for path in mine] == references
    (skeleton,) = apply._skeletons
    assert all(p.is_meta for p in skeleton.root.parameters())


def test_a_checkpoint_inside_recomputes_with_the_values_of_its_call() -> None:
    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    plain, params, buffers = functionalize(MLP())
    apply, _, _ = functionalize(Checkpointed())
    x = torch.randn(4, 7)
    twice = tree_map(lambda p: (2 * p).detach().requires_grad_(), params)
    first = apply(params, buffers, x)[0].square().sum()
    second = apply(twice, buffers, x)[0].square().sum()  # before the first one's backward
    for loss, tree in ((first, params), (second, twice)):
        expected = torch.autograd.grad(
            plain(tree, buffers, x)[0].square().sum(), list(tree.values())
        )
        for a, b in zip(torch.autograd.grad(loss, list(tree.values())), expected, strict=True):
            assert torch.equal(a, b)


def test_a_checkpoint_of_a_forward_keeps_its_skeleton() -> None:
    """The bound method, or the function that a unit has in its place, is all that checkpoint holds
    on to."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(
                self.b.forward,
                checkpoint(self.a.forward, x, use_reentrant=False),
                use_reentrant=False,
            )

    model = Checkpointed()
    apply, params, buffers = functionalize(model, units=nn.Linear)
    x = torch.randn(4, 3)
    other = {name: 2 * p.detach() for name, p in params.items()}
    loss = apply(params, buffers, x)[0].square().sum()
    apply(other, buffers, x)
    for a, b in zip(
        torch.autograd.grad(loss, list(params.values())),
        torch.autograd.grad(model(x).square().sum(), list(model.parameters())),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_skeletons_are_used_again() -> None:
    apply, params, buffers = functionalize(MLP())
    for _ in range(5):
        apply(params, buffers, torch.randn(2, 7))[0].sum().backward()
    assert len(apply._skeletons) == 1


def test_functions_that_modules_share_hold_no_skeleton() -> None:
    """Another copy of the model refers to them, too."""

    class Net(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.act = F.relu

    apply, params, buffers = functionalize(Net())
    apply(params, buffers, torch.randn(2, 7))
    evaluate = apply.eval()
    for _ in range(3):
        evaluate(params, buffers, torch.randn(2, 7))
        apply(params, buffers, torch.randn(2, 7))
    assert len(apply._skeletons) == len(evaluate._skeletons) == 1


def test_inference_mode() -> None:
    model = ConvNet()
    apply, params, buffers = functionalize(model)
    x = torch.randn(4, 1, 6, 6)
    with torch.inference_mode():
        output, new = apply(params, buffers, x)
    expected, by_grad = apply(params, buffers, x)
    assert torch.equal(output, expected.detach())
    assert all(torch.equal(new[name], by_grad[name]) for name in buffers)


def test_torch_func_over_apply() -> None:
    apply, params, buffers = functionalize(ConvNet())
    x = torch.randn(8, 1, 6, 6)

    def loss(p: Any) -> tuple[Tensor, Any]:
        output, new = apply(p, buffers, x)
        return output.square().mean(), new

    grads, new = torch.func.grad(loss, has_aux=True)(dict(params))
    value, expected_new = loss(params)
    expected = torch.autograd.grad(value, list(params.values()))
    assert all(torch.allclose(a, b) for a, b in zip(grads.values(), expected, strict=True))
    assert all(torch.equal(new[name], expected_new[name]) for name in buffers)


def test_vmap_of_grad_over_apply() -> None:
    apply, params, buffers = functionalize(MLP())
    x = torch.randn(4, 7)
    grads = torch.func.vmap(
        torch.func.grad(lambda p, x: apply(p, buffers, x)[0].sum()), in_dims=(None, 0)
    )(dict(params), x)
    for i in range(4):
        expected = torch.autograd.grad(apply(params, buffers, x[i])[0].sum(), list(params.values()))
        assert all(
            torch.allclose(a[i], b, atol=1e-6)
            for a, b in zip(grads.values(), expected, strict=True)
        )


class Recurrent(nn.Module):
    """An RNN keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    """MultiheadAttention reads the weights of a child it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Normed(nn.Module):
    """Parametrised weights, a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.gains = nn.ParameterList([nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(()))])
        self.shifts = nn.ParameterDict({"one": nn.Parameter(torch.rand(3))})

    def forward(self, x: Tensor) -> Tensor:
        return self.gains[0] * self.linear(x) * self.gains[1] + self.shifts["one"]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Recurrent, (2, 5, 3)), (Attention, (2, 5, 8)), (Normed, (2, 3))],
    ids=lambda v: str(v),
)
def test_modules_with_ways_of_their_own(make: Any, shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    apply, params, buffers = functionalize(model)
    tripled = tree_map(lambda p: (3 * p).detach().requires_grad_(), params)
    output, _ = apply(tripled, buffers, x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(3)
    expected = twin(x)
    assert torch.allclose(output, expected)
    grads = torch.autograd.grad(output.square().sum(), list(tripled.values()))
    wanted = torch.autograd.grad(expected.square().sum(), list(twin.parameters()))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grads, wanted, strict=True))
    assert torch.allclose(apply.eval()(tripled, buffers, x)[0], twin.eval()(x), atol=1e-5)


def test_functions_that_a_module_holds_are_about_the_skeleton() -> None:
    """Closures over the model, as its own forward or as hooks: deepcopy leaves them as they are."""
    model, seen = MLP(), []

    def wrapped(module: nn.Module, forward: Any) -> Any:
        return lambda x: forward(x) + module.bias

    model.layers[0].forward = wrapped(model.layers[0], model.layers[0].forward)
    shift = lambda module, args, output: seen.append(output) or output + model.norm.bias[:3]
    model.layers[1].register_forward_hook(shift)
    x = torch.randn(4, 7)
    apply, params, buffers = functionalize(model)
    for mode in (apply, apply.eval(), apply.eval().train()):
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        assert not mode(zeros, buffers, x)[0].any()
        output, _ = mode(params, buffers, x)
        assert torch.equal(output, model(x))
        grads = torch.autograd.grad(output.square().sum(), list(params.values()))
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert seen, "the list that the hook fills is still the caller's"


class Holder:
    """An object that a hook may be closed over."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


INDIRECT: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "a list": lambda model: shifted_by(in_closure([model], lambda kept: kept[0].norm.bias)),
    "a dict": lambda model: shifted_by(
        in_closure({"model": model}, lambda d: d["model"].norm.bias)
    ),
    "an object": lambda model: shifted_by(in_closure(Holder(model), lambda o: o.model.norm.bias)),
    "a parameter": lambda model: shifted_by(in_closure(model.norm.bias, lambda bias: bias)),
    "a partial": lambda model: shifted_by(functools.partial(lambda m: m.norm.bias, model)),
    "a function in a list": lambda model: shifted_by(
        in_closure([lambda: model.norm.bias], lambda functions: functions[0]())
    ),
}


def in_closure(held: Any, look: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    return lambda: look(held)


def shifted_by(bias: Callable[[], Tensor]) -> Callable[..., Any]:
    return lambda module, args, output: output + bias()[:3]


@pytest.mark.parametrize("through", INDIRECT)
def test_functions_that_refer_to_the_model_indirectly_are_refused(through: str) -> None:
    """They would go on using the model's own parameters."""
    model = MLP()
    model.layers[1].register_forward_hook(INDIRECT[through](model))
    with pytest.raises(
        StructureError, match=r"another reference.*layers\.1\._forward_hooks.*Remedy"
    ):
        functionalize(model)


def test_functions_in_a_list_of_a_module_are_refused() -> None:
    model = MLP()
    model.callbacks = [lambda: model.norm.bias]
    with pytest.raises(StructureError, match=r"holds the model by.*callbacks.*<lambda>"):
        functionalize(model)


def test_objects_that_modules_hold_are_copied_with_them() -> None:
    """As deepcopy does, methods and partials as well."""
    model = MLP()
    model.holder = Holder(model)
    model.bias = functools.partial(lambda module: module.norm.bias, model)
    model.layers[1].register_forward_hook(lambda module, args, output: output * 1.0)
    apply, params, buffers = functionalize(model)
    x = torch.randn(4, 7)
    assert torch.equal(apply(params, buffers, x)[0], model(x))


@pytest.mark.parametrize("decorated", tiers([True], [False]))
def test_functions_about_the_copy_keep_no_weights_alive(decorated: bool) -> None:
    """A hook is made anew over the copy; the original one may go, and its model with it."""

    def hook_over(model: nn.Module) -> Callable[..., Tensor]:
        def shift(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output + model.norm.bias[:3]

        return torch.no_grad()(shift) if decorated else shift

    model = MLP()
    model.layers[1].register_forward_hook(hook_over(model))
    apply, params, buffers = functionalize(model)
    weight = weakref.ref(model.layers[1].weight)
    x = torch.randn(4, 7)
    assert torch.equal(apply(params, buffers, x)[0], model(x))
    del model, params, buffers
    gc.collect()
    assert weight() is None, "apply keeps the user's model alive"


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(StructureError, match="lazy module"):
        functionalize(nn.LazyLinear(3))


def test_params_are_a_pytree_of_both_kinds() -> None:
    _, params, _ = functionalize(MLP())
    for mapper in (tree_map, torch.utils._pytree.tree_map):
        doubled = mapper(lambda p: 2 * p, params)
        assert isinstance(doubled, Params) and doubled.units == params.units
        assert list(doubled) == list(params) and torch.equal(
            doubled["norm.bias"], 2 * params["norm.bias"]
        )


def test_names_that_a_state_dict_has() -> None:
    """Those of tied leaves, of modules in two places, and of buffers that aren't persistent; but of
    a module that lies in itself, which has no state_dict, each place once."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.append(nn.Sequential(model[1]))
    model.register_buffer("table", torch.ones(2), persistent=False)
    apply, params, _ = functionalize(model)
    assert params.names is apply.names
    assert params.names.aliases == {"1.weight": "0.weight", "2.0.weight": "0.weight"}
    assert params.names.unsaved == {"table"}
    assert {*params, *params.names.aliases} == {*model.state_dict()}
    # They are no part of the structure
    bare = Params(params, params.units)
    assert tree_map(torch.add, params, bare).names is params.names and not bare.names.aliases

    model.append(model)
    apply, params, _ = functionalize(model)
    assert params.names.aliases == {"1.weight": "0.weight"}


def test_what_functionalize_returns_prints_without_values() -> None:
    model = nn.Sequential(nn.Linear(300, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
    apply, params, _ = functionalize(model)
    assert repr(apply) == "Apply(Sequential in training mode: 6 params in 3 units, 3 buffers)"
    assert "in evaluation mode" in repr(apply.eval())
    assert repr(params) == (
        "Params(6 leaves, 48,808 bytes, 3 units; 0.weight: (40, 300) torch.float32, "
        "0.bias: (40,) torch.float32, 1.weight: (40,) torch.float32, 1.bias: (40,) torch.float32, "
        "and 2 more)"
    )
    mask = tree_map(lambda leaf: leaf.dim() > 1, params)
    assert repr(mask).startswith("Params(6 leaves, 0 bytes, 3 units; 0.weight: True, 0.bias: False")
    assert (
        repr(Params({"w": None, "b": 2.5})) == "Params(2 leaves, 0 bytes, 0 units; w: None, b: 2.5)"
    )
