"""`Piece` by itself: the operators that run on a part, those that are refused, and its words."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn

from functorch_zero.errors import StructureError
from functorch_zero.layout.extent import Extent
from functorch_zero.layout.piece import History, Piece, story_of
from tests.tiers import tiers

SHAPE, START, STOP = (3, 4), 2, 8
PART, OTHER_LEAF = Extent(SHAPE, START, STOP), Extent((4, 3), START, STOP)
WHOLE = Extent(SHAPE, 0, 12)
NUMBER, NO_NUMBER = Extent((), 0, 1), Extent((), 0, 0)


def values(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def part_of(whole: Tensor) -> Tensor:
    return whole.reshape(-1)[START:STOP]


def piece_of(local: Tensor, extent: Extent, name: str, *, is_whole: bool = False) -> Piece:
    return Piece(local, extent, is_whole=is_whole, history=History(name))


def part(seed: int, name: str = "") -> Piece:
    return piece_of(part_of(values(seed)).clone(), PART, name or f"leaf {seed}")


def whole(seed: int) -> Piece:
    return piece_of(values(seed), WHOLE, f"leaf {seed}", is_whole=True)


def number(value: Any) -> Piece:
    return piece_of(torch.tensor([value]), NUMBER, "number")


def jvp(function: Any, x: Tensor, y: Tensor) -> Any:
    return torch.autograd.functional.jvp(function, x, y)[1]


def gradient(x: Tensor, y: Tensor) -> Tensor:
    """Of a pointwise function, whose slope is given."""
    own = x.clone().requires_grad_()
    return torch.autograd.grad(2 * torch.sin(own), own, y)[0]


POINTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda p, q: p * q,
    "number": lambda p, q: 0.1 * p / 3 - 1,
    "0-d": lambda p, q: p / torch.tensor(3.0) + torch.tensor(2.0) * q,
    "where": lambda p, q: torch.where(p > q, p, 0.0) + torch.where(p > 0, p, q),
    "clamp": lambda p, q: p.clamp(-1, 1).clamp(min=torch.tensor(0.0)),
    "lerp": lambda p, q: p.clone().lerp_(q, 0.1) + torch.lerp(p, q, 0.5),
    "addcmul": lambda p, q: torch.addcmul(p, p, q, value=2.0),
    "powers": lambda p, q: p**2 + 2**p,
    "casts": lambda p, q: p.double().bfloat16().to(torch.float64),
    "like": lambda p, q: torch.zeros_like(p) + torch.full_like(p, 2.0) + torch.ones_like(q),
    "logic": lambda p, q: (p > 0) & (q > 0) | torch.isfinite(p).logical_not(),
    "activations": lambda p, q: nn.functional.gelu(p) * nn.functional.silu(q) + torch.relu(p),
    "masked": lambda p, q: p.masked_fill(p > 0, 0.0) + p.clone().masked_fill_(q > 0, 1.0),
    "in place": lambda p, q: p.clone().mul_(2).add_(q).sub_(1),
    "copied": lambda p, q: torch.empty_like(p).copy_(q).fill_(3.0) + torch.zeros_like(p).copy_(q),
    "several": lambda p, q: [*torch.frexp(p)],
    "complex": lambda p, q: torch.complex(p, q).conj() * 2,
    "real": lambda p, q: torch.complex(p, q).abs(),
    "foreach": lambda p, q: [*torch._foreach_add([p, q], [q, p]), *torch._foreach_sqrt([p.abs()])],
    "foreach in place": lambda p, q: foreach_in_place(p.clone(), q.clone()),
    "foreach lerp": lambda p, q: [*torch._foreach_lerp([p], [q], 0.5)],
    "foreach numbers": lambda p, q: [
        *torch._foreach_mul([p, q], [1.0, 2.0]),
        *torch._foreach_mul([p, q], torch.tensor(2.0)),
        *torch._foreach_addcmul([p, q], [q, p], [p, q], [1.0, 2.0]),
    ],
    "optimizer": lambda p, q: by_torch(torch.optim.Adam, p, q) + by_torch(torch.optim.SGD, p, q),
    "close": lambda p, q: torch.isclose(p, q) | torch.heaviside(p, torch.tensor(1.0)).bool(),
    "detached": lambda p, q: p.detach() + q.data,
    "parameter": lambda p, q: (nn.Parameter(p) * 2).detach(),
    "deepcopy": lambda p, q: copy.deepcopy(p) * 2,
    "pickled": lambda p, q: pickle.loads(pickle.dumps(p)) * 2,
    "gradient": gradient,
    "jvp": lambda p, q: jvp(torch.sin, p, q),
    "func.vjp": lambda p, q: torch.func.vjp(torch.sin, p)[1](q)[0],
    "sum of leaves": lambda p, q: sum([p, q]),
    "forms": lambda p, q: p * (len(p) + p.numel() + p.ndim + p.shape[1] + sum(p.stride())),
    "order": lambda p, q: p * len(p.dim_order()) * q.size(0),
    "out": lambda p, q: torch.add(p, q, out=torch.empty_like(p)),
}


def by_torch(optimizer: Any, p: Tensor, q: Tensor) -> Tensor:
    own = with_gradient(p, q)
    optimizer([own], lr=0.1).step()
    return own.detach()


def foreach_in_place(p: Any, q: Any) -> Any:
    torch._foreach_mul_([p, q], 2.0)
    torch._foreach_copy_([p], [q])
    return [p, q]


def plain(found: Any) -> Any:
    return optree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, found)


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_operators_run(name: str) -> None:
    function = POINTWISE[name]
    expected = optree.tree_leaves(plain(function(values(1), values(2))))
    found = optree.tree_leaves(function(part(1), part(2)))
    for want, got in zip(expected, found, strict=True):
        assert isinstance(got, Piece)
        assert (got.extent, got.shape, got.dtype) == (PART, want.shape, want.dtype)
        assert torch.equal(got.local.detach(), part_of(want))
    again = function(part(1), part(2))
    assert story_of(found, ()).word == story_of(optree.tree_leaves(again), ()).word
    # Of whole pieces nobody need know the difference
    for want, got in zip(expected, optree.tree_leaves(function(whole(1), whole(2))), strict=True):
        local = got.local if isinstance(got, Piece) else got
        assert torch.equal(plain(local), want)


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "t_.default": lambda leaf: leaf.t_(),
    "unsqueeze_.default": lambda leaf: leaf.unsqueeze_(0),
    "set_.source_Tensor": lambda leaf: leaf.set_(torch.zeros(2, 2)),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_whole_leaf_stays_where_it_lies(name: str) -> None:
    """Under the shape that it shows, its values would be turned."""
    leaf = whole(1)
    before = leaf.local.clone()
    with pytest.raises(StructureError, match=f"{name} moves them"):
        MOVES[name](leaf)
    assert torch.equal(leaf.local, before)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "sum": (lambda p, q: p.sum(), "not elementwise"),
    "max": (lambda p, q: p.max(), "not elementwise"),
    "foreach max": (lambda p, q: torch._foreach_max([p]), "not elementwise"),
    "subclass": (lambda p, q: p.as_subclass(Tensor).sum(), "not elementwise"),
    "foreach norm": (lambda p, q: torch._foreach_norm([p]), "not elementwise"),
    "clip": (lambda p, q: nn.utils.clip_grad_norm_([with_gradient(p, q)], 1.0), "not elementwise"),
    "slice": (lambda p, q: p[:1], "not elementwise"),
    "written": (lambda p, q: p.clone().__setitem__(0, 1.0), "not elementwise"),
    "reshape": (lambda p, q: p.reshape(-1), "not elementwise"),
    "cat": (lambda p, q: torch.cat([p, q]), "not elementwise"),
    "einsum": (lambda p, q: torch.einsum("ij,ij->", p, q), "not elementwise"),
    "layer norm": (lambda p, q: nn.functional.layer_norm(p, (4,)), "not elementwise"),
    "all": (lambda p, q: bool((p > 0).all()), "not elementwise"),
    "sparse": (lambda p, q: p.to_sparse(), "not elementwise|reads their"),
    "set": (lambda p, q: p.clone().set_(torch.zeros(3)), "not elementwise"),
    "resized": (lambda p, q: p.clone().resize_(2), "not elementwise"),
    "indexed": (lambda p, q: p[p > 0], "reads their|not elementwise"),
    "put": (lambda p, q: p.clone().__setitem__(p > 0, torch.ones(3)), "not elementwise"),
    "nonzero": (lambda p, q: p.nonzero(), "reads their"),
    "unique": (lambda p, q: p.unique(), "reads their|not elementwise"),
    "equal": (lambda p, q: torch.equal(p, q), "reads their"),
    "close": (lambda p, q: torch.allclose(p, q), "reads their|not elementwise"),
    "read": (lambda p, q: number(1.0).item(), "reads their"),
    "float": (lambda p, q: float(number(1.0)), "reads their"),
    "branch": (lambda p, q: bool(number(1.0) > 0), "reads their"),
    "empty branch": (
        lambda p, q: bool(piece_of(torch.zeros(0), NO_NUMBER, "number") > 0),
        "reads their",
    ),
    "list": (lambda p, q: p.tolist(), "reads their"),
    "numpy": (lambda p, q: p.numpy(), "reads their"),
    "array": (lambda p, q: np.asarray(p), "reads their"),
    "dlpack": (lambda p, q: torch.from_dlpack(p), "reads their|not elementwise"),
    "pointer": (lambda p, q: p.data_ptr(), "reads their"),
    "storage": (lambda p, q: p.untyped_storage(), "reads their"),
    "random": (lambda p, q: torch.randn_like(p), "draws other"),
    "dropout": (lambda p, q: torch.dropout(p, 0.5, True), "draws other"),
    "drawn": (lambda p, q: p.clone().normal_(), "draws other"),
    "bernoulli": (lambda p, q: torch.bernoulli(p.sigmoid()), "draws other"),
    "table": (lambda p, q: p * torch.ones(p.shape), r"tensor of shape \(3, 4\)"),
    "own table": (lambda p, q: p * torch.ones(6), r"tensor of shape \(6,\)"),
    "another leaf": (lambda p, q: p * piece_of(p.local, OTHER_LEAF, "v"), "pieces of another leaf"),
    "whole leaf": (lambda p, q: p * whole(2), "whole leaves"),
    "a leaf's number": (lambda p, q: p * number(2.0), "pieces of another leaf"),
    "foreach of two": (lambda p, q: torch._foreach_add([p], [whole(2)]), "whole leaves"),
    "foreach of tables": (
        lambda p, q: torch._foreach_add([p, torch.ones(3, 4)], [q, torch.ones(3, 4)]),
        "other tensors",
    ),
    "to a tensor": (lambda p, q: torch.empty(3, 4).copy_(p), "writes them to another"),
    "to a number": (lambda p, q: torch.zeros(()).add_(number(1.0)), "writes them to another"),
    "foreach to numbers": (
        lambda p, q: torch._foreach_add_([torch.zeros(())], [number(1.0)]),
        "writes them to another",
    ),
    "out": (lambda p, q: torch.add(p, q, out=torch.empty(3, 4)), "writes them to another"),
    "to new": (lambda p, q: p.new_zeros(3, 4).copy_(p), "writes them to another"),
    "data": (lambda p, q: setattr(p.clone(), "data", torch.zeros(3, 4)), "data is assigned to"),
    "func.jvp": (lambda p, q: torch.func.jvp(torch.sin, (p,), (q,)), "not elementwise"),
    "vmap": (lambda p, q: torch.func.vmap(lambda x: x / x.norm())(p), "not elementwise"),
    "grad": (lambda p, q: torch.func.grad(lambda x: x.sum())(p), "not elementwise"),
    "backward": (lambda p, q: p.clone().requires_grad_().sum().backward(), "not elementwise"),
    "contains": (lambda p, q: 0.5 in p, "not elementwise|reads their"),
}


def with_gradient(p: Tensor, q: Tensor) -> Tensor:
    own = p.clone().requires_grad_()
    own.grad = q
    return own


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str) -> None:
    function, story = REFUSED[name]
    with pytest.raises(StructureError, match=rf"as if they were whole: .*({story}).*Remedy: "):
        function(part(1), part(2))


# ---- Words ----


@pytest.mark.parametrize("make", [part, whole])
def test_words(make: Callable[[int], Piece]) -> None:
    p, q = make(1), make(2)
    assert (p * 2).word == (make(1) * 2).word != (q * 2).word
    assert (p * 2).word != (p * 2.0).word != (p * 2.5).word
    # Python's hash of -1 is that of -2, and NaN is not itself
    assert (p * -1).word != (p * -2).word
    assert (p * float("nan")).word == (p * float("nan")).word
    assert (p * torch.tensor(0.1)).word != (p * torch.tensor(0.2)).word
    assert torch.where(p > 0, p, q).word != torch.where(p > 0, q, p).word
    assert p.clone().add_(q).word != p.clone().add_(q, alpha=2).word
    assert copy.deepcopy(p).word == (p.detach().clone()).word
    assert pickle.loads(pickle.dumps(p)).word == p.word
    one, two = optree.tree_leaves([torch.frexp(p).mantissa, torch.frexp(p).exponent])
    assert one.word != two.word
    long = p
    for _ in range(100):
        long = long * 2
    assert len(long.history.text) < 300


def test_numbers_on_a_device_stay_few() -> None:
    """They are remembered unread, and neither double with each product nor grow with each step."""
    p = piece_of(torch.ones(6, device="meta"), PART, "leaf 1")
    rates = [torch.ones((), device="meta") for _ in range(100)]
    made = (p * rates[0]) * (p * rates[1])
    for _ in range(20):
        made = made * made
    assert [*map(id, made.history.numbers)] == [*map(id, rates[:2])]
    for rate in rates:
        made = 0.9 * made + rate
        assert len(made.history.numbers) <= 16
    assert len(story_of([made, made], ()).unread) <= 16


@pytest.mark.parametrize("make", [part, whole])
def test_aliases_have_one_word(make: Callable[[int], Piece]) -> None:
    p = make(1)
    aliases = [p.detach(), p.data, copy.copy(p), nn.Parameter(p, requires_grad=False)]
    before = p.word
    with torch.no_grad():
        p.mul_(0.5)
    assert {alias.word for alias in aliases} == {p.word} != {before}
    assert all(torch.equal(alias.local, p.local) for alias in aliases)
    with torch.no_grad():
        aliases[0].add_(1)
        aliases[3].add_(1)
    assert {alias.word for alias in aliases} == {p.word}
    again = make(1)
    with torch.no_grad():
        again.mul_(0.5).add_(1).add_(1)
    assert again.word == p.word


def test_a_write_to_a_view_of_a_whole_leaf() -> None:
    def written(write: Callable[[Piece], Any]) -> Piece:
        p = whole(1).clone()
        assert isinstance(p, Piece)
        version, before = p.here._version, p.word
        write(p)
        assert p.word != before and p.here._version > version
        return p

    writes: list[Callable[[Piece], Any]] = [
        lambda p: p.view(-1)[:2].mul_(0.5),
        lambda p: p.__setitem__(0, 1.0),
        lambda p: p.detach()[1].zero_(),
        lambda p: torch._foreach_zero_([p, torch.ones(2)]),
        lambda p: p.mul_(torch.ones(3, 4) * 2),
    ]
    for write in writes:  # nobody has asked for the word before an operator
        p = whole(1).clone()
        write(p)
        assert (p * 2).word != (whole(1).clone() * 2).word
    words = [[written(write).word for write in writes] for _ in range(2)]
    assert words[0] == words[1] and len({*words[0]}) == len(writes)


def test_a_write_counts_for_the_local_tensor() -> None:
    p = part(1)
    version = p.here._version
    p.mul_(2)
    torch._foreach_add_([p], 1.0)
    assert p.here._version == version + 2


# ---- Of other kinds ----


def test_a_leaf_without_dims_promotes_as_a_whole_one() -> None:
    double = torch.tensor(2.0, dtype=torch.float64)
    for value, operation in (
        (0.5, lambda x: x * double),
        (2, lambda x: x * 0.5),
        (0.5, lambda x: torch.where(x > 0, x, double)),
        (0.5, lambda x: (x.reshape(1) * double).reshape(())),
        (0.5, lambda x: (x.view(-1) * double).view(())),
    ):
        expected = operation(torch.tensor(value))
        here, there = number(value), piece_of(torch.tensor([value])[:0], NO_NUMBER, "number")
        for p in (here, there):
            made = operation(p)
            assert made.dtype == expected.dtype and made.shape == () and made.extent == p.extent
        assert operation(here).local.tolist() == [expected.item()]
        assert (
            operation(there).local.tolist() == [] and operation(there).word == operation(here).word
        )


def test_empty_pieces_have_the_word_of_full_ones() -> None:
    nothing = piece_of(torch.zeros(0), Extent(SHAPE, 12, 12), "leaf 1")
    made = (nothing * 2).clamp(0, 1)
    assert made.local.shape == (0,) and made.shape == SHAPE
    assert made.word == (part(1) * 2).clamp(0, 1).word


def test_whole_leaves_of_two_shapes_make_plain_tensors() -> None:
    row = piece_of(torch.ones(4), Extent((4,), 0, 4), "row", is_whole=True)
    assert type(whole(1) * row) is Tensor
    assert type(whole(1) * torch.ones(3, 4)) is Tensor
    assert type(whole(1).sum()) is Tensor and type(whole(1)[0]) is Tensor
    assert f"{whole(1).sum():.1f}" == f"{values(1).sum():.1f}"
    assert torch.equal(torch.stack([whole(1), whole(2)]), torch.stack([values(1), values(2)]))


def test_what_a_rank_holds_is_given_as_a_copy() -> None:
    for make in (part, whole):
        p = make(1)
        before = p.word
        p.local.zero_()
        assert p.word == before and p.local.any()


def test_a_write_to_an_array_of_a_whole_leaf() -> None:
    p = whole(1)
    before = p.word
    array = p.numpy()
    assert p.word == before
    array[0] = 7
    written = p.word
    assert written != before and torch.equal(p.local, torch.from_numpy(array))
    with torch.no_grad():
        p.mul_(2)
    after = p.word
    array[0] = 8
    assert len({written, after, p.word}) == 3


def test_a_write_in_inference_mode() -> None:
    with torch.inference_mode():
        p = whole(1).clone()
        before = p.word
        p.view(-1)[:2].mul_(0.5)
    assert p.word != before


def test_views_of_the_same_shape_are_aliases() -> None:
    p = part(1)
    for made in (p.view_as(p), p.reshape(-1, 4), p.expand_as(p)):
        assert made.extent == p.extent and made.history is p.history


def test_new_tensors_of_a_part_are_plain() -> None:
    p = part(1)
    for made in (p.new_zeros(3), p.new_full((), 2.0), p.new_ones((2, 2)), p.new_empty(0)):
        assert type(made) is Tensor and made.dtype == p.dtype


def test_a_tensor_of_one_element_is_a_number() -> None:
    for number_of in (torch.tensor([0.5]), torch.tensor([[0.5]]), torch.tensor(0.5)):
        made = part(1) * number_of
        assert torch.equal(made.local, part_of(values(1) * 0.5))
        assert made.word == (part(1) * torch.tensor(0.5)).word
    # Its result has a dim more
    with pytest.raises(StructureError, match=r"of shape \(1, 1, 1\)"):
        part(1) * torch.ones(1, 1, 1)


def test_an_integer_without_dims_that_is_elsewhere_may_be_divided_by() -> None:
    elsewhere = piece_of(torch.tensor([3])[:0], NO_NUMBER, "number")
    assert (12 // elsewhere).local.shape == (0,)


def test_copies_have_tensors_of_their_own() -> None:
    p = part(1).requires_grad_()
    torch.save(p, file := io.BytesIO())
    file.seek(0)
    for made in (
        copy.deepcopy(p),
        pickle.loads(pickle.dumps(p)),
        torch.load(file, weights_only=False),
        p.detach().clone().requires_grad_(),
    ):
        assert isinstance(made, Piece) and made.requires_grad and made.extent == p.extent
        assert torch.equal(made.local, p.local)
        assert made.local.untyped_storage().data_ptr() != p.local.untyped_storage().data_ptr()


def test_gradients_by_a_part() -> None:
    own = part(1).clone().requires_grad_()
    (own * 2).sin().backward(part(2))
    assert isinstance(own.grad, Piece)
    expected = 2 * torch.cos(2 * values(1)) * values(2)
    assert torch.allclose(own.grad.local, part_of(expected))


def test_text() -> None:
    assert "elements 2 to 8 of a leaf of shape (3, 4)" in repr(part(1)) and "Piece" in f"{part(1)}"
    assert "the whole leaf" in repr(whole(1))


def test_an_error_names_the_leaf_and_the_line() -> None:
    with pytest.raises(
        StructureError,
        match=r"aten\.sum\.default is not elementwise \(test_piece\.py:\d+\): .*"
        r"got elements 2 to 8 of a leaf of shape \(3, 4\), aten\.mul\.Tensor\(head\.weight, 2\)",
    ):
        (part(1, "head.weight") * 2).sum()


@pytest.mark.parametrize("backend", tiers(thorough=["eager", "aot_eager"]))
def test_compiled(backend: str) -> None:
    compiled = torch.compile(lambda x: (2 * x).sin() / x.numel(), backend=backend)
    made = compiled(part(1))
    assert isinstance(made, Piece)
    assert torch.allclose(made.local, part_of((2 * values(1)).sin() / 12))
    assert made.word == (2 * part(1)).sin().div(12).word
    for function in (lambda x: x / x.norm(), lambda x: x[:1]):
        with pytest.raises(StructureError, match="as if they were whole"):
            torch.compile(function, backend=backend)(part(1))
    p = part(1)
    with pytest.raises(StructureError, match="as if they were whole"):
        torch.compile(lambda x: (x * p).sum(), backend=backend)(torch.ones(3, 4))
