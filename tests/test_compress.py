"""Codecs by themselves: what they send, what comes back, what rounding does to derivatives, and
which are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.compress import Blocks, Codec, decoded, encoded, rounded
from functorch_zero.groups import CountingGroup

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
# Of a block's largest magnitude: half a step of 127; a half last place of 3 and of 2 bits
ERRORS = dict(zip(DTYPES, (1 / 254, 1 / 16, 1 / 8), strict=True))
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", DTYPES)
def test_blocks_come_back_rounded(kind: torch.dtype, dtype: torch.dtype) -> None:
    """In the bytes that are promised, off by what is promised, twice as by once."""
    codec, x = Blocks(kind, 5), numbers(60).to(dtype)
    messages = encoded(x, codec, num=3)
    assert messages.dtype == torch.uint8 and messages.numel() == 60 + 12 * dtype.itemsize
    found = decoded(messages, codec, 3, dtype)
    assert found.dtype == dtype and torch.equal(found, rounded(x, codec))
    largest = x.view(-1, 5).abs().amax(1, keepdim=True).double()
    error = (found - x).view(-1, 5).double().abs()
    allowed = ERRORS[kind] * largest + 4 * torch.finfo(dtype).eps * largest
    assert error.max() > 0 and bool((error <= allowed).all())
    torch.testing.assert_close(
        rounded(found, codec), found, rtol=4 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("kind", DTYPES)
def test_rounding_goes_with_a_share(kind: torch.dtype) -> None:
    """In float64 and in float32: scales have the leaf's dtype."""
    for dtype in (torch.float64, torch.float32):
        x = numbers(600, dtype=dtype)
        whole, third = rounded(x, Blocks(kind, 64)), rounded(x / 3, Blocks(kind, 64))
        torch.testing.assert_close(third * 3, whole, rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("kind", DTYPES)
def test_zeros_denormals_and_what_is_not_finite(kind: torch.dtype) -> None:
    inf, nan, tiny = torch.inf, torch.nan, 5e-324
    blocks = torch.tensor(
        [[0, 0, -0.0], [tiny, 0, -tiny], [1, inf, 2], [nan, 1, 2], [-inf, inf, nan], [2, -2, 0]],
        dtype=torch.float64,
    )
    found = rounded(blocks.view(-1), Blocks(kind, 3)).view(-1, 3)
    assert not found[:2].any() and found[2:5].isnan().all()
    torch.testing.assert_close(found[5], blocks[5], rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)])
def test_a_leaf_of_any_shape(shape: tuple[int, ...]) -> None:
    """Its last block is filled up with zeros, so what is beside it doesn't count."""
    x, codec = numbers(*shape), Blocks(torch.int8, 4)
    found = rounded(x, codec)
    assert found.shape == x.shape and found.is_contiguous()
    filled = torch.zeros(8 + x.numel(), dtype=x.dtype)
    filled[: x.numel()] = x.reshape(-1)
    filled[-(-x.numel() // 4) * 4 :] = 1e9
    again = rounded(filled, codec)[: x.numel()]
    assert torch.equal(found.reshape(-1), again)
    assert rounded(x.to("meta"), codec).shape == x.shape


def test_derivatives_pass_rounding_over() -> None:
    codec, x, v = Blocks(torch.int8, 4), numbers(3, 5), numbers(3, 5).flip(0)
    f = lambda x: rounded(x, codec).sin().sum()
    slope = rounded(x, codec).cos()
    own = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(own), own, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), own)
    torch.testing.assert_close(first, slope)
    torch.testing.assert_close(second, -rounded(x, codec).sin() * v)
    torch.testing.assert_close(grad(f)(x), slope)
    torch.testing.assert_close(jvp(f, (x,), (v,))[1], (slope * v).sum())
    torch.testing.assert_close(jvp(grad(f), (x,), (v,))[1], second)
    torch.testing.assert_close(vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0], slope)
    many = numbers(2, 4, 3, 5)
    # Each leaf of a batch by itself, as those of an ensemble are
    by_leaf = torch.stack([rounded(leaf, codec) for leaf in many.flatten(0, 1)]).view(many.shape)
    assert torch.equal(vmap(vmap(lambda x: rounded(x, codec)))(many), by_leaf)
    assert torch.equal(
        vmap(lambda x: rounded(x, codec), in_dims=1)(many[0].movedim(0, 1)), by_leaf[0]
    )
    torch.testing.assert_close(vmap(grad(f))(many[0]), by_leaf[0].cos())


def test_a_model_under_torch_func() -> None:
    """`apply` rounds given params, differentiably, as by hand."""
    torch.manual_seed(0)
    model, codec = nn.Linear(5, 3).double(), Blocks(torch.int8, 4)
    apply, params, _ = fz.functionalize(model, precision=fz.Precision(gather=codec))
    x = numbers(2, 5)
    by_hand = lambda p, x: functional_call(model, {k: rounded(v, codec) for k, v in p.items()}, x)
    plain = {name: leaf.detach() for name, leaf in params.items()}
    found = apply(params, {}, x)[0]
    assert torch.equal(found, by_hand(plain, x)) and not torch.equal(found, model(x))
    slopes = [
        grad(lambda p, f=f: f(p).square().sum())(plain)
        for f in (lambda p: apply(p, {}, x)[0], lambda p: by_hand(p, x))
    ]
    for name in plain:
        assert slopes[0][name].any() and torch.equal(slopes[0][name], slopes[1][name])
    tangents = {name: torch.ones_like(leaf) for name, leaf in plain.items()}
    outs = [
        jvp(f, (plain,), (tangents,))[1]
        for f in (lambda p: apply(p, {}, x)[0], lambda p: by_hand(p, x))
    ]
    assert torch.equal(*outs)


# What is refused


@dataclass(frozen=True)
class Own:
    """A right one, which the wrong ones below differ from in one thing."""

    block: Any = 2

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return messages.to(dtype)


class Mutable(Own):
    __hash__ = None  # type: ignore[assignment]


class Flat(Own):
    def encode(self, x: Tensor) -> Tensor:
        return x.view(-1)


class OfNoNumber(Own):
    def encode(self, x: Tensor) -> Any:
        return [x]


class Short(Own):
    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return messages.to(dtype)[:, 1:]


class OfOneDtype(Own):
    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return messages


class Packed(Own):
    """The numbers that are not zero."""

    def encode(self, x: Tensor) -> Tensor:
        return x[:, x.any(0)]


class ByRow(Own):
    """One scale for a whole row."""

    def encode(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True) / 100
        return torch.cat([scale, (x / scale).round()], 1)

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return (messages[:, 1:] * messages[:, :1]).to(dtype)


class Stochastic(Own):
    def encode(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class InPlace(Own):
    def encode(self, x: Tensor) -> Tensor:
        return x.mul_(2).to(torch.bfloat16)


class Clean(Own):
    def encode(self, x: Tensor) -> Tensor:
        return x.nan_to_num(0.0, 0.0, 0.0)


WRONG = {
    "it lacks something": ["int8", 8, Own],
    "its block is no number": [Own(0), Own(2.0), Own(True), Own(None)],
    "it can't be hashed": [Mutable()],
    "encode has returned another form": [Flat(), OfNoNumber()],
    "decode has returned another form": [Short(), OfOneDtype()],
    "length of its messages depends on the numbers": [Packed()],
    "its blocks depend on each other, or on chance": [ByRow(), Stochastic()],
    "encode has written to the numbers": [InPlace()],
    "comes back as finite numbers": [Clean()],
}


@pytest.mark.parametrize(("story", "codecs"), WRONG.items())
@pytest.mark.parametrize("field", ["gather", "reduce"])
def test_wrong_codecs_are_refused(field: str, story: str, codecs: list[Any]) -> None:
    for codec in codecs:
        with pytest.raises(ValueError, match=rf"Precision\.{field} is no codec.*{story}.*Remedy"):
            fz.Precision(**{field: codec})
    with pytest.raises(ValueError, match=r"Precision\.compute"):
        fz.Precision(compute=Own())  # type: ignore[arg-type]
    assert isinstance(Own(), Codec) and fz.Precision(**{field: Own()})


def test_wrong_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Blocks\.dtype.*int8, float8_e4m3fn.*int16"):
        Blocks(torch.int16)
    with pytest.raises(ValueError, match="its block is no number"):
        fz.Precision(gather=Blocks(torch.int8, 0))


class OfFloat32(Own):
    """Right where it was tried."""

    def decode(self, messages: Tensor, dtype: torch.dtype) -> Tensor:
        return messages.to(torch.float32)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("field", ["gather", "reduce"])
def test_what_a_codec_forgets_in_another_dtype_is_named(field: str, level: int) -> None:
    policy = fz.Precision(**{field: OfFloat32()})
    apply, params, _ = fz.functionalize(nn.Linear(3, 2).double(), precision=policy)
    step = fz.train_step(lambda p, b, x: apply(p, b, x)[0].sum(), optim.sgd(0.1))
    sharded = fz.shard(step, level=level, group=CountingGroup(2))
    for made in (step, sharded):
        with pytest.raises(fz.errors.StructureError, match=r"decode of OfFloat32.*float64.*Remedy"):
            made(made.init(params), numbers(4, 3))


def test_a_codec_that_only_views_its_numbers() -> None:
    """No use's leaves lie in the state's storage, with which they would be freed."""

    class Same(Own):
        def encode(self, x: Tensor) -> Tensor:
            return x

    x = numbers(4)
    found = rounded(x, Same())
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()
