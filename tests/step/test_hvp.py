"""Hessian-vector products of whole trees, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import functorch_zero as fz
from functorch_zero.errors import StructureError
from functorch_zero.testing.equality import assert_equal_values
from tests.models import MLP, ZOO

torch.manual_seed(0)
MODEL = MLP().double()
APPLY, PARAMS, _ = fz.functionalize(MODEL)
X = torch.randn(6, 7, dtype=torch.float64)
VECTOR = tree_map(torch.randn_like, fz.zero_updates(PARAMS))


def loss(params: Any, x: Tensor) -> Tensor:
    return APPLY(params, {}, x)[0].square().mean()


def test_equals_torch_autograd_functional() -> None:
    names = [name for name, _ in MODEL.named_parameters()]

    def plain(*leaves: Tensor) -> Tensor:
        named = dict(zip(names, leaves, strict=True))
        return torch.func.functional_call(MODEL, named, (X,)).square().mean()

    leaves = tuple(leaf.detach() for leaf in MODEL.parameters())
    along = tuple(VECTOR[name] for name in names)
    expected, of_hessian = torch.autograd.functional.hvp(plain, leaves, along)
    value, grads, product = fz.hvp(loss)(PARAMS, VECTOR, X)
    assert_equal_values(expected, value)
    assert_equal_values(dict(zip(names, of_hessian, strict=True)), dict(product))
    assert_equal_values((value, grads), fz.value_and_grad(loss)(PARAMS, X), grade="bitwise")
    assert all(leaf.grad is None and leaf.requires_grad for leaf in PARAMS.values())


def test_metrics_and_weights() -> None:
    def with_aux(params: Any, x: Tensor, weight: float) -> Any:
        return loss(params, x), fz.Aux(metrics={"loss of x": x.sum()}, weight=weight)

    (value, metrics), grads, product = fz.hvp(with_aux)(PARAMS, VECTOR, X, 3.0)
    expected = fz.hvp(loss)(PARAMS, VECTOR, X)
    assert_equal_values(expected, (value, grads, product), grade="bitwise")
    assert_equal_values(metrics, {"loss of x": X.sum()}, grade="bitwise")
    # A batch that weighs nothing counts for nothing, even where it is the mean of nothing
    (value, _), grads, product = fz.hvp(with_aux)(PARAMS, VECTOR, X[:0], 0.0)
    assert value == 0
    assert_equal_values(fz.zero_updates(PARAMS), grads, grade="bitwise")
    assert_equal_values(fz.zero_updates(PARAMS), product, grade="bitwise")


def normed() -> tuple[nn.Module, Any, Any]:
    """A module with running statistics, its params and its buffers."""
    torch.manual_seed(2)
    layers = [nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)]
    module = nn.Sequential(*layers).double()
    _, params, buffers = fz.functionalize(module)
    # Copies: the module writes to its own
    return module, params, tree_map(torch.clone, buffers)


def loss_of_normed(params: Any, *, buffers: Any, batch: Tensor) -> Any:
    y, new = fz.functionalize(normed()[0])[0](params, buffers, batch)
    mean = y.square().mean()
    return mean, fz.Aux(buffers=new, metrics={"mean": y.mean().detach()}, weight=len(batch))


def test_micro_batches_and_buffers_are_those_of_plain_torch() -> None:
    module, params, buffers = normed()
    vector = fz.random.normal(fz.zero_updates(params), seed=1)
    x = torch.randn(7, 4, dtype=torch.float64)
    leaves = [*module.parameters()]
    loss, product = torch.zeros(()), [torch.zeros_like(leaf) for leaf in leaves]
    for part in x.split([4, 3]):
        mean = module(part).square().mean()
        grads = torch.autograd.grad(mean, leaves, create_graph=True)
        slope = sum((g * vector[n]).sum() for g, n in zip(grads, params, strict=True))
        loss = loss + len(part) / 7 * mean.detach()
        for total, own in zip(product, torch.autograd.grad(slope, leaves), strict=True):
            total += len(part) / 7 * own

    of_hvp = fz.hvp(loss_of_normed, accumulate=2)(params, vector, buffers=buffers, batch=x)
    (value, metrics, after), grads, found = of_hvp
    assert_equal_values(loss, value)
    assert_equal_values(dict(zip(params, product, strict=True)), dict(found))
    assert_equal_values(dict(module.named_buffers()), after)
    expected = fz.value_and_grad(loss_of_normed, accumulate=2)(params, buffers=buffers, batch=x)
    assert_equal_values(expected, ((value, metrics, after), grads), grade="bitwise")


def test_what_a_loss_is_given_by_name_is_checked() -> None:
    _, params, buffers = normed()
    vector, x = fz.zero_updates(params), torch.randn(4, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"fz.hvp\(accumulate=2\) was given no batch.*Remedy"):
        fz.hvp(loss, accumulate=2)(PARAMS, VECTOR, X)
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        fz.hvp(loss, accumulate=0)
    with pytest.raises(StructureError, match=r"loss of fz.hvp returned Aux\(buffers=.*Remedy"):
        fz.hvp(lambda p, x: loss_of_normed(p, buffers=buffers, batch=x))(params, vector, x)


def test_frozen_leaves_and_missing_directions() -> None:
    params = tree_map(lambda p: p.detach().requires_grad_(p.dim() == 2), PARAMS)
    vector = tree_map(lambda p: p.new_ones(p.shape) if p.dim() == 2 else None, params)
    _, grads, product = fz.hvp(loss)(params, vector, X)
    assert grads["norm.bias"] is None and product["norm.bias"] is None
    # Without a direction in one leaf: as with zeros in it
    path = "layers.0.weight"
    other = fz.Params({**vector, path: None}, params.units)
    zeros = fz.Params({**vector, path: torch.zeros_like(params[path])}, params.units)
    found, expected = fz.hvp(loss)(params, other, X), fz.hvp(loss)(params, zeros, X)
    assert_equal_values(expected, found, grade="bitwise")


def test_nones_of_the_params_themselves() -> None:
    def cubes(params: Any) -> Tensor:
        return (params["first"] ** 3).sum() + (params["last"] ** 3).sum()

    first, last = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    params = {"first": first, "free": None, "last": last}
    _, _, product = fz.hvp(cubes)(params, fz.pieces(params))
    assert_equal_values({"first": torch.full((2,), 6.0), "free": None, "last": 6 * last}, product)
    with pytest.raises(StructureError, match=r"path free, expected None.*got \(2,\)"):
        fz.hvp(cubes)(params, {"first": None, "free": torch.ones(2), "last": None})


def test_complex_leaves() -> None:
    """Real and imaginary parts are coordinates of their own."""
    z = torch.randn(4, dtype=torch.complex128)
    along = torch.randn(4, dtype=torch.complex128)

    def of_complex(params: Any) -> Tensor:
        return (params["z"] ** 3).abs().square().sum() + params["z"].imag.pow(3).sum()

    def of_parts(parts: Tensor) -> Tensor:
        return of_complex({"z": torch.view_as_complex(parts)})

    parts = torch.view_as_real(z)
    expected = torch.autograd.functional.hvp(of_parts, parts, torch.view_as_real(along))[1]
    _, _, product = fz.hvp(of_complex)({"z": z.clone().requires_grad_()}, {"z": along})
    assert_equal_values(torch.view_as_complex(expected), product["z"])


def test_a_loss_without_curvature() -> None:
    params = {"w": torch.ones(3, requires_grad=True), "unused": torch.ones(2, requires_grad=True)}
    vector = {"w": torch.ones(3), "unused": torch.ones(2)}
    _, grads, product = fz.hvp(lambda p: 2 * p["w"].sum())(params, vector)
    zeros = {"w": torch.zeros(3), "unused": torch.zeros(2)}
    assert_equal_values({"w": torch.full((3,), 2.0), "unused": zeros["unused"]}, grads)
    assert_equal_values(zeros, product)


def test_a_vector_unlike_the_gradients_is_refused() -> None:
    wide = fz.Params({**VECTOR, "norm.bias": torch.ones(1, dtype=torch.float64)}, VECTOR.units)
    with pytest.raises(StructureError, match=r"norm.bias.*\(5,\).*\(1,\).*zero_updates"):
        fz.hvp(loss)(PARAMS, wide, X)
    with pytest.raises(StructureError, match=r"the vector.*norm.bias"):
        fz.hvp(loss)(PARAMS, {k: v for k, v in VECTOR.items() if k != "norm.bias"}, X)
    frozen = tree_map(lambda p: p.detach().requires_grad_(p.dim() == 2), PARAMS)
    with pytest.raises(StructureError, match=r"layers.0.bias.*None: no leaf is trained there"):
        fz.hvp(loss)(frozen, VECTOR, X)


def test_a_complex_vector_is_refused_for_real_leaves() -> None:
    along = fz.Params({**VECTOR, "norm.bias": VECTOR["norm.bias"] * 1j}, VECTOR.units)
    found = r"path norm.bias, expected torch.float64, got torch.complex128.*Remedy: .*\.real"
    with pytest.raises(StructureError, match=found):
        fz.hvp(loss)(PARAMS, along, X)
    # An update as well, which params are moved by
    with pytest.raises(StructureError, match=found):
        fz.apply_updates(PARAMS, along)


def test_a_loss_that_uses_no_param_is_refused() -> None:
    other = torch.ones((), requires_grad=True)
    with pytest.raises(StructureError, match="does not depend on any trained leaf"):
        fz.hvp(lambda params, x: other * x.sum())(PARAMS, VECTOR, X)


class RunsAgain(torch.autograd.Function):
    """As reversible layers do: runs a module again in its backward, and goes back through it."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            made: Tensor = run(x)
            return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(own), grad)
        return None, own.grad


def reversible(params: Any, x: Tensor) -> Tensor:
    first = torch.tanh(x @ params["layers.0.weight"].T).requires_grad_()
    made: Tensor = RunsAgain.apply(lambda x: x @ params["layers.1.weight"].T, first)  # type: ignore[no-untyped-call]
    return made.square().mean()


def test_a_backward_inside_of_a_custom_functions_backward_is_refused() -> None:
    fz.value_and_grad(reversible)(PARAMS, X)  # once it may
    with pytest.raises(StructureError, match=r"fz.hvp met a custom autograd.Function"):
        fz.hvp(reversible)(PARAMS, VECTOR, X)


def test_a_reentrant_checkpoint_is_refused() -> None:
    """Its params would get no gradient, beside others that do."""

    def checkpointed(params: Any, x: Tensor, reentrant: bool) -> Tensor:
        x = x.clone().requires_grad_()
        inside = checkpoint(lambda x: loss(params, x), x, use_reentrant=reentrant)
        return inside + params["norm.bias"].square().sum()

    for _ in range(4):  # at every call, not only at those that look closely
        with pytest.raises(StructureError, match="use_reentrant=False"):
            fz.hvp(checkpointed)(PARAMS, VECTOR, X, True)
    found = fz.hvp(checkpointed)(PARAMS, VECTOR, X, False)[2]
    plain = fz.hvp(loss)(PARAMS, VECTOR, X)[2]
    assert_equal_values(plain["layers.0.weight"], found["layers.0.weight"])


def test_an_operator_without_a_second_derivative_is_explained() -> None:
    def attend(params: Any, x: Tensor) -> Tensor:
        q = (x @ params["w"]).view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    params = {"w": torch.randn(8, 8, requires_grad=True)}
    vector, x = fz.zero_updates(params), torch.randn(8, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError) as caught:
        fz.hvp(attend)(params, vector, x)
    assert "SDPBackend.MATH" in "".join(caught.value.__notes__)
    with sdpa_kernel(SDPBackend.MATH):
        fz.hvp(attend)(params, vector, x)


def test_recomputed_units() -> None:
    """Activations that are made again in backward, by `functionalize(remat=...)`."""
    case = ZOO["gpt"]
    torch.manual_seed(0)
    model = case.model().double()
    (batch,) = case.batches(1, 4)
    found = []
    for remat in (None, case.units):
        apply, params, _ = fz.functionalize(model, units=case.units, remat=remat)

        def loss(params: Any, batch: Any, apply: Any = apply) -> Tensor:
            return case.criterion(apply(params, {}, batch["x"])[0], batch["y"])

        vector = fz.random.normal(fz.zero_updates(params), seed=1)
        with sdpa_kernel(SDPBackend.MATH):
            found.append(fz.hvp(loss)(params, vector, batch))
    assert_equal_values(found[0], found[1])


def test_params_are_no_vector() -> None:
    """As on ranks, where they are held and the vector is in pieces."""
    params = {"w": torch.ones(3, requires_grad=True)}
    with pytest.raises(
        StructureError, match=r"trained params in the place of the vector.*fz.pieces"
    ):
        fz.hvp(lambda p: p["w"].pow(3).sum())(params, params)
