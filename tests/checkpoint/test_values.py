"""All that a state may hold comes back to the bit, and `init` refuses the rest by its path."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from hypothesis import strategies as st
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.checkpoint.errors import CorruptError
from functorch_zero.checkpoint.plain_data import BITS
from functorch_zero.checkpoint.safetensors_file import strict_json
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.groups.single import SingleRank
from functorch_zero.savable import DTYPES, MAX_BITS
from functorch_zero.tree import paths
from tests.checkpoints import same_bits
from tests.tiers import drawn

X = torch.ones(4)


class Value(NamedTuple):
    params: Any
    rest: Any


def loss(params: Any, x: float) -> Tensor:
    return (params["w"] - x).square().sum()


def keeping(rest: Any, after: Callable[[Any], Any] = lambda rest: rest) -> Any:
    """A program that keeps `rest` in its value, and `after` of it from step to step."""

    def program(value: Value, x: float) -> Any:
        found, grads = fz.value_and_grad(loss)(value.params, x)
        params = fz.apply_updates(value.params, tree_map(lambda g: -0.1 * g, grads))
        return Value(params, after(value.rest)), {"loss": found}

    return fz.program_step(program, init=lambda params: Value(params, rest))


def params() -> dict[str, Tensor]:
    # Two pieces of 512 bytes
    return {"w": torch.arange(128, dtype=torch.float64).requires_grad_()}


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return same_bits(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())
    if type(a) is float and type(b) is float:
        return struct.pack(">d", a) == struct.pack(">d", b)
    return type(a) is type(b) and bool(a == b)


def assert_comes_back(rest: Any) -> None:
    """After a step, from a checkpoint, on one and on two ranks."""

    def run(step: Any) -> None:
        state, _ = step(step.init(params()), 0.5)
        checkpoint.save(root, step, state)
        loaded = checkpoint.load(root, step, like=step.init(params())).state
        assert checkpoint.verify(root) == {1: []}
        for kept in (state.value.rest, loaded.value.rest):
            assert paths(kept) == paths(rest)
            pairs = zip(optree.tree_leaves(rest), optree.tree_leaves(kept), strict=True)
            for one, other in pairs:
                assert is_same(one, other), (one, other)

    step = keeping(rest)
    with tempfile.TemporaryDirectory() as root:
        run(step)
    with tempfile.TemporaryDirectory() as root:
        run_ranks(lambda group: run(fz.shard(step, level=3, group=group)), 2)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[::2],
    lambda x: x[:, ::2],
    lambda x: x[:, 1],
    lambda x: x[0, 0],
    lambda x: x[:1].expand(3, *x.shape[1:]),
    lambda x: x[0, 0].expand(5),
    lambda x: x[:0],
    lambda x: x.as_strided((2, 3), (1, 1)),
    lambda x: x.conj() if x.is_complex() else x,
    lambda x: x.conj().imag if x.is_complex() and x.dtype != torch.complex32 else x,
]


@st.composite
def tensors(draw: Any) -> Tensor:
    dtype = draw(st.sampled_from([*DTYPES.values()]))
    made = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = (draw(st.integers(2, 5)), draw(st.integers(2, 5)))
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(high, (math.prod(shape) * dtype.itemsize,), generator=made)
    return draw(st.sampled_from(VIEWS))(data.to(torch.uint8).view(dtype).view(shape))


FLOATS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0])
SPECIAL = st.sampled_from([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 5e-324])
INTEGERS = st.integers(-(2**80), 2**80) | st.sampled_from([2**MAX_BITS - 1, 1 - 2**MAX_BITS])
LEAVES = tensors() | FLOATS | SPECIAL | INTEGERS | st.booleans() | st.none() | st.text(max_size=3)


class Pair(NamedTuple):
    one: Any
    two: Any


@optree.dataclasses.dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
class Registered:
    best: float
    table: Tensor


TREES = st.recursive(
    LEAVES,
    lambda trees: (
        st.lists(trees, max_size=3)
        | st.tuples(trees, trees)
        | st.builds(Pair, trees, trees)
        | st.dictionaries(st.integers(-3, 3), trees, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "\ud800", "x@0", BITS]), trees, max_size=2)
    ),
    max_leaves=5,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@drawn(TREES, thorough=60, full=500)
def test_what_a_value_holds_comes_back_to_the_bit(rest: Any) -> None:
    assert_comes_back(rest)


def test_nodes_that_are_registered_come_back() -> None:
    assert_comes_back(Registered(math.inf, torch.ones(2)))
    assert_comes_back(OrderedDict(b=[-math.inf], a={"x": (math.nan, torch.ones(6)[::2])}))


class Mode(enum.IntEnum):
    FAST = 1


class Name(enum.StrEnum):
    FAST = "fast"


class Plain(enum.Enum):
    FAST = 1


@dataclasses.dataclass
class Unregistered:
    best: float


class Labelled(Tensor):
    """A subclass."""


# What no state may hold, and the words about it
REFUSED: dict[str, tuple[Any, str]] = {
    "numpy float": (
        np.float64(1.5),
        r"got a numpy\.float64\. Remedy: .*torch\.as_tensor.*item\(\)",
    ),
    "numpy int": (np.int64(1), r"got a numpy\.int64\. Remedy: .*item\(\)"),
    "array": (np.zeros(3), r"got a numpy\.ndarray\. Remedy: keep torch\.as_tensor"),
    "int enum": (Mode.FAST, r"got a .*\.Mode\. Remedy: keep int\(leaf\)"),
    "str enum": (Name.FAST, r"got a .*\.Name\. Remedy: keep str\(leaf\)"),
    "enum": (Plain.FAST, r"got a .*\.Plain\. Remedy: keep leaf\.name, a string"),
    "complex": (1j, r"got a complex\. Remedy: .*complex128"),
    "bytes": (b"x", r"got a bytes\. Remedy: keep what stays"),
    "long int": (2**MAX_BITS, rf"expected at most {MAX_BITS} bits, got {MAX_BITS + 1} bits"),
    "set": ({1}, r"got a set\. Remedy: .*optree\.register_pytree_node"),
    "dataclass": (Unregistered(1.0), r"Remedy: .*NamedTuple.*@optree\.dataclasses\.dataclass\("),
    "sparse": (torch.eye(2).to_sparse(), r"got torch\.sparse_coo\. Remedy: keep leaf\.to_dense"),
    "subclass": (X.as_subclass(Labelled), r"expected torch\.Tensor, got a Labelled\. Remedy"),
    "bits": (torch.ones(3, dtype=torch.uint8).view(torch.bits8), r"torch\.bits8\. Remedy"),
    "float4": (
        torch.ones(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        r"got torch\.float4_e2m1fn_x2\. Remedy: keep leaf\.view\(torch\.uint8\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_checkpoint_can_hold_is_refused_by_init(name: str) -> None:
    """By its path, in a value and in an optimizer's state, in one process and on ranks."""
    leaf, words = REFUSED[name]
    value, rank = rf"path rest\.a\.0, .*{words}", words.replace(r"\. Remedy", ", on rank 0. Remedy")
    with pytest.raises(StructureError, match=value):
        keeping({"a": [leaf]}).init(params())
    sharded = fz.shard(keeping({"a": [leaf]}), level=3, group=SingleRank())
    with pytest.raises(StructureError, match=rf"path rest\.a\.0, .*{rank}"):
        sharded.init(params())

    made = itertools.repeat(leaf)  # an iterator is not described to other ranks
    step = fz.train_step(
        lambda p, b, x: loss(p, x),
        optim.with_statistics(
            lambda params: {"a": next(made)},
            lambda updates, state, params, across: (updates, state),
        ),
    )
    for trained in (step, fz.shard(step, level=3, group=SingleRank())):
        with pytest.raises(StructureError, match=rf"the optimizer's state.*path a, .*{words}"):
            trained.init(params())


@pytest.mark.parametrize("name", ["numpy float", "int enum", "sparse", "subclass", "long int"])
def test_a_next_value_is_refused_alike(name: str) -> None:
    leaf, _ = REFUSED[name]
    first = leaf.to_dense() if isinstance(leaf, Tensor) and leaf.is_sparse else leaf
    first = (
        first.as_subclass(Tensor)
        if isinstance(first, Tensor)
        else 1
        if name == "long int"
        else int(first)
    )
    step = keeping({"a": first}, lambda rest: {"a": leaf})
    for made in (step, fz.shard(step, level=3, group=SingleRank())):
        state = made.init(params())
        with pytest.raises(StructureError, match=r"next value holds what no .*path rest\.a, "):
            made(state, 0.5)


def test_buffers_that_no_checkpoint_can_hold_are_refused() -> None:
    step = fz.train_step(lambda p, b, x: loss(p, x), optim.sgd(0.1))
    for made in (step, fz.shard(step, level=3, group=SingleRank())):
        with pytest.raises(StructureError, match=r": path (buffers\.)?links, .*Remedy"):
            made.init(params(), {"links": torch.eye(2).to_sparse()})


@pytest.mark.parametrize("key", [object(), lambda: 0])
def test_keys_that_another_run_would_not_find(key: Any) -> None:
    """Their names are their places in memory."""
    with pytest.raises(StructureError, match="name changes from run to run: path rest"):
        keeping({key: 1.0}).init(params())


SEEDED = torch.Generator().manual_seed(0)
DRAWN = [torch.randn(shape, generator=SEEDED) for shape in ((2001,), (1, 300), (400, 600))]


@pytest.mark.parametrize(
    "rest",
    [DRAWN[0][::2], DRAWN[1].expand(200, 300), DRAWN[2][:, ::2]],
    ids=["strided", "expanded", "columns"],
)
def test_a_run_goes_on_as_it_would_have(tmp_path: Path, rest: Tensor) -> None:
    """Kernels round by strides, which a checkpoint doesn't have."""
    step = keeping((rest, X.sum()), lambda rest: (rest[0], rest[0].sum()))
    assert rest.sum() != rest.contiguous().sum()  # else the test shows nothing
    state, _ = step(step.init(params()), 0.5)
    checkpoint.save(tmp_path, step, state)
    loaded = checkpoint.load(tmp_path, step, like=step.init(params())).state
    (after, _), (again, _) = step(state, 0.5), step(loaded, 0.5)
    assert same_bits(after.value.rest[1], again.value.rest[1])


def test_numbers_of_the_manifest_are_strict_json(tmp_path: Path) -> None:
    """Those that JSON lacks are told from all others; a damaged one is an error."""
    step = keeping([math.inf, -math.nan, 1e300])
    state = step.init(params())
    folder = checkpoint.save(tmp_path, step, state, user={"best": -math.inf, "all": [math.nan]})
    text = (folder / "manifest.json").read_text().split("\n", 1)[1]
    rows = json.loads(text, parse_constant=pytest.fail)
    assert rows["values"]["rest.0"] == {BITS: "7ff0000000000000"}
    assert rows["values"]["rest.1"] == {BITS: "fff8000000000000"}
    assert rows["values"]["rest.2"] == 1e300
    user = checkpoint.load(tmp_path, step, like=state).user
    assert user["best"] == -math.inf and math.isnan(user["all"][0])


@pytest.mark.parametrize("bits", ["7ff0", "x" * 16, 1.5, None])
def test_bits_of_no_number_are_damage(bits: Any) -> None:
    with pytest.raises(CorruptError, match="not the JSON it should be"):
        strict_json(json.dumps({"a": {BITS: bits}}).encode(), "manifest.json")


def test_user_data_that_changes_while_it_is_saved(tmp_path: Path) -> None:
    """The save has a copy."""
    step = keeping(1.0)
    user = {"cursor": [1]}
    saving = checkpoint.async_save(tmp_path, step, step.init(params()), user=user)
    user["cursor"].append(2)
    saving.result()
    assert checkpoint.load(tmp_path, step, like=step.init(params())).user == {"cursor": [1]}
