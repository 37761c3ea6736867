"""Rows of a batch: whatever is one per row is cut along them, and what can't be told is refused."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.step.rows import leading_sizes, split_rows, without_rows
from functorch_zero.testing import assert_sharded_equals_unsharded
from tests.tiers import thinned

F64 = torch.float64
X = torch.arange(10.0, dtype=F64).view(5, 2)  # 5 rows, in parts of 3 and 2
NAMES = ["cat", "dog", "cat", "eel", "dog"]


class Fixed(Mapping[str, Any]):
    """A mapping that isn't made of a dict."""

    def __init__(self, names: list[str], values: list[Any]):
        self.names, self.values_of = names, values

    def __getitem__(self, key: str) -> Any:
        return self.values_of[self.names.index(key)]

    def __iter__(self) -> Any:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


CUT = {
    "texts": (NAMES, NAMES[:3], NAMES[3:]),
    "a tuple": (tuple(NAMES), tuple(NAMES[:3]), tuple(NAMES[3:])),
    "numbers": ([1, 2, 3, 4, 5], [1, 2, 3], [4, 5]),
    "numpy's numbers": ([np.float64(n) for n in range(5)], [0.0, 1.0, 2.0], [3.0, 4.0]),
    "Nones and texts": ([None, *NAMES[1:]], [None, "dog", "cat"], NAMES[3:]),
    "ragged lists": ([[1], [], [2, 3], [4], [5]], [[1], [], [2, 3]], [[4], [5]]),
    "dicts": ([{"id": n} for n in range(5)], [{"id": n} for n in range(3)], [{"id": 3}, {"id": 4}]),
    "objects": ([int, str, float, set, dict], [int, str, float], [set, dict]),
    "tags per place": ([tuple(NAMES)] * 2, [tuple(NAMES[:3])] * 2, [tuple(NAMES[3:])] * 2),
    "a nested dict": ({"in": {"names": NAMES}}, {"in": {"names": NAMES[:3]}}, None),
    "none at all": ([], [], []),
    "a text as long": ("abcde", "abcde", "abcde"),
    "a number": (0.5, 0.5, 0.5),
    "numpy's number": (np.int64(7), 7, 7),
    "None": (None, None, None),
    "a list of 0-d tensors": ([torch.tensor(1.0)] * 2, [torch.tensor(1.0)] * 2, None),
}


@pytest.mark.parametrize("name", CUT)
def test_parts(name: str) -> None:
    value, first, second = CUT[name]
    parts = split_rows({"x": X, "value": value}, 2)
    assert [len(part["x"]) for part in parts] == [3, 2]
    assert parts[0]["value"] == first and type(parts[0]["value"]) is type(value)
    assert second is None or parts[1]["value"] == second
    assert len(without_rows({"x": X, "value": value})["x"]) == 0


def test_arrays_tell_rows_as_tensors_do() -> None:
    batch = {"x": X.numpy(), "name": np.array(NAMES), "scale": np.array(2.0), "label": NAMES}
    parts = split_rows(batch, 2)
    assert [part["x"].tolist() for part in parts] == [X[:3].tolist(), X[3:].tolist()]
    assert [list(part["name"]) for part in parts] == [NAMES[:3], NAMES[3:]]
    assert [part["label"] for part in parts] == [NAMES[:3], NAMES[3:]]
    assert parts[0]["scale"] is batch["scale"] and leading_sizes(batch) == [5, 5]


@pytest.mark.parametrize("kind", [UserDict, MappingProxyType])
def test_mappings_are_opened(kind: Any) -> None:
    batch = kind({"x": X, "more": [kind({"names": NAMES, "x": X})]})
    parts = split_rows(batch, 2)
    assert type(parts[1]) is kind and type(parts[1]["more"][0]) is kind
    assert parts[1]["more"][0]["names"] == NAMES[3:] and parts[1]["more"][0]["x"].equal(X[3:])
    assert leading_sizes(batch) == [5, 5]
    assert without_rows(batch)["more"][0]["names"] == []


def test_in_a_list_of_tensors_each_is_cut() -> None:
    first, second = split_rows([X, X + 1, NAMES], 2)
    assert first[1].equal(X[:3] + 1) and second[0].equal(X[3:]) and second[2] == NAMES[3:]


def test_a_batch_that_is_a_tuple_has_several_parts() -> None:
    """Of a program its arguments: numbers there are no list of values."""
    assert split_rows((0.5, 7), 2) == [(0.5, 7), (0.5, 7)]


TWICE = [[1, 2, 3, 4, 5]] * 5  # rows are either lists' entries or the lists
REFUSED: dict[str, tuple[Any, str]] = {
    "an object": (object(), "path value, .*with 5 rows.*got a object"),
    "an object inside": ({"deep": [X, {1, 2}]}, r"path value\.deep\.1, .*got a set"),
    "in a mapping": (UserDict(a={"b": object()}), r"path value\.a\.b, "),
    "a list of others": (NAMES[:4], "path value, .*got a list of 4, the first of them a str"),
    "a pair of numbers": ((0.9, 0.999), "path value, .*got a tuple of 2"),
    "two readings": (TWICE, "path value, .*got a list of 5, the first of them a list"),
    "0-d tensors, one per row": ([torch.tensor(1.0)] * 5, "got a list of 5, the first .*a Tensor"),
    "a mapping of its own": (
        Fixed(["names"], [NAMES]),
        "can't be made again.*TypeError from Fixed",
    ),
    "rows of others": (X[:4], "unequal rows: path x, expected 4, as value has, got 5"),
    "a deque": (UserDict(a=deque(NAMES)), r"path value\.a, .*got a deque"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(StructureError, match=f"{message}.*Remedy"):
        split_rows({"value": value, "x": X}, 2)


def test_lists_alone_tell_no_rows() -> None:
    """A pair of lists, or lists of pairs?"""
    with pytest.raises(StructureError, match=r"path \(root\).*got a list of 2.*Remedy"):
        split_rows([NAMES, NAMES], 2)


def loss(params: Any, buffers: Any, batch: Any) -> Any:
    """Means over rows of which each is paired with its own name."""
    size = torch.tensor([len(name) + ord(name[0]) % 7 for name in batch["name"]], dtype=F64)
    found = (params["w"] * batch["x"]).sum(1) - size * batch["scale"]
    return found.square().mean(), fz.Aux(weight=len(found))


def batch_of(rows: int, k: int = 0) -> dict[str, Any]:
    x = torch.randn(rows, 2, dtype=F64, generator=torch.Generator().manual_seed(k))
    return {"x": x, "name": [NAMES[n % 5] for n in range(rows)], "scale": 0.5}


PARAMS = {"w": torch.tensor([0.3, -0.2], dtype=F64, requires_grad=True)}


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_pairs_each_row_with_its_own_name(accumulate: int) -> None:
    one, many = (fz.train_step(loss, optim.sgd(0.1), accumulate=k) for k in (1, accumulate))
    whole, _ = one(one.init(PARAMS), batch_of(7))
    in_parts, _ = many(many.init(PARAMS), UserDict(batch_of(7)))
    update = whole.params["w"] - PARAMS["w"]
    assert update.abs().min() > 1e-3
    torch.testing.assert_close(in_parts.params["w"] - PARAMS["w"], update, rtol=1e-12, atol=0)

    taken = fz.value_and_grad(lambda p, batch: loss(p, {}, batch), accumulate=accumulate)
    _, grads = taken(PARAMS, batch=batch_of(7))
    torch.testing.assert_close(-0.1 * grads["w"], update, rtol=1e-12, atol=0)


def test_an_object_is_refused_by_each_accumulation_and_by_none_that_cuts_nothing() -> None:
    batch = batch_of(4) | {"tree": object()}
    step = fz.train_step(loss, optim.sgd(0.1), accumulate=2)
    with pytest.raises(StructureError, match="path tree, "):
        step(step.init(PARAMS), batch)
    whole = fz.train_step(loss, optim.sgd(0.1))
    whole(whole.init(PARAMS), batch)

    def run(group: Any) -> None:
        sharded = fz.shard(step, level=1, group=group)
        with pytest.raises(StructureError, match="path tree, "):
            sharded(sharded.init(PARAMS), batch)

    run_ranks(run, 1)


@pytest.mark.parametrize(("ranks", "level"), thinned([(2, 0), (2, 3), (3, 1), (3, 3)], rows=True))
def test_the_proof_cuts_batches_for_ranks_as_steps_cut_them(ranks: int, level: int) -> None:
    step = fz.train_step(loss, optim.adamw(0.1), accumulate=2)
    batches = [UserDict(batch_of(7, k)) for k in range(3)]
    assert_sharded_equals_unsharded(step, PARAMS, {}, batches, ranks=(ranks,), levels=(level,))


def test_a_rank_that_has_run_out_gets_no_names_either() -> None:
    def run(group: Any) -> list[Any]:
        own = [UserDict(batch_of(2)) for _ in range(1 + group.rank)]
        return [batch["name"] for batch in fz.data.equalize_batches(own, group)]

    assert run_ranks(run, 2) == [[["cat", "dog"], []], [["cat", "dog"]] * 2]


def test_a_rank_that_has_run_out_of_objects_must_be_given_an_empty_one() -> None:
    def run(group: Any) -> None:
        own = [batch_of(2) | {"tree": object()} for _ in range(1 + group.rank)]
        batches = fz.data.equalize_batches(own, group)
        next(batches)
        with pytest.raises(fz.errors.FunctorchZeroError, match="path tree, ") as error:
            group.barrier()
            next(batches)
            group.barrier()
        if group.rank == 0:
            assert "empty=" in error.value.__notes__[0]

    run_ranks(run, 2)
