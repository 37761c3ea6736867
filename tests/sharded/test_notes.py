"""What `describe` and `plan` say of a model beside their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import CountingGroup
from tests.tiers import thinned

DENSE = "sparse ones, of an embedding, are made dense"
TABLES = "of tables, the rows that a loss looks up travel"
HEAVY = "of the parameters, which level 3 gathers all at once"


def embedded(rows: int, *, sparse: bool = False) -> nn.Module:
    embedding = nn.Embedding(rows, 8, sparse=sparse)
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Linear(8, 8))


def step_of(apply: Any) -> Any:
    def loss(params: Any, buffers: Any, x: Any) -> Any:
        return apply(params, buffers, x)[0].square().mean()

    return fz.train_step(loss, optim.sgd(0.1))


MODELS: dict[str, nn.Module] = {
    "0": embedded(64),
    "": embedded(8),
    "root": nn.Embedding(8, 8),
}


def without_units(made: Any) -> list[str]:
    """Its notes, but for those on the units that were found."""
    return [note for note in made.notes if not note.startswith("units found")]


@pytest.mark.parametrize("heavy", thinned([*MODELS][::-1]))
def test_descriptions_and_plans(heavy: str) -> None:
    apply, params, _ = fz.functionalize(MODELS[heavy])
    step = step_of(apply)
    sharded = fz.shard(step, level=3, group=CountingGroup(2))
    described = fz.describe(sharded, sharded.init(params))
    planned = fz.plan(params, step, level=3, ranks=2, batch=torch.zeros(4, dtype=torch.int64))
    for made in (described, planned):
        assert all(note in str(made) for note in made.notes)
        notes = without_units(made)
        assert DENSE in notes[0]
        named = [note for note in notes if HEAVY in note]
        assert len(named) == bool(heavy)
        assert not heavy or f"{heavy} holds " in named[0]


def test_the_share() -> None:
    apply, params, _ = fz.functionalize(embedded(64))
    made = fz.plan(params, step_of(apply), level=3, ranks=2)
    assert f"unit 0 holds {512 / (512 + 144):.0%} {HEAVY}" in str(made)


def test_tables_are_never_gathered() -> None:
    apply, params, _ = fz.functionalize(embedded(64, sparse=True))
    step = step_of(apply)
    sharded = fz.shard(step, level=3, group=CountingGroup(2))
    described = fz.describe(sharded, sharded.init(params))
    planned = fz.plan(params, step, level=3, ranks=2, batch=torch.zeros(4, dtype=torch.int64))
    for made in (described, planned):
        rows, dense = without_units(made)
        assert TABLES in rows and DENSE in dense


def test_one_process_has_none() -> None:
    apply, params, _ = fz.functionalize(embedded(64))
    step = step_of(apply)
    assert not fz.describe(step, step.init(params)).notes
