"""Which leaves form a unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from functorch_zero.model.functionalize import functionalize
from functorch_zero.tree import path_matches
from tests.models import GPT, MLP, Block
from tests.modules import Net
from tests.tiers import drawn


def units_of(model: nn.Module, units: Any = None) -> dict[str, tuple[str, ...]]:
    """Leaves by unit; each is in exactly one."""
    _, params, _ = functionalize(model, units=units)
    found = {unit.name: unit.leaves for unit in params.units}
    assert sorted(leaf for leaves in found.values() for leaf in leaves) == sorted(params)
    return found


def linear(width: int = 4) -> nn.Linear:
    return nn.Linear(width, width, device="meta")


def layers() -> Net:
    """Children of every kind: plain, in containers, nested containers, and a leaf of its own."""
    return Net(
        first=linear(),
        listed=nn.ModuleList([linear(), nn.Sequential(linear(), linear())]),
        named=nn.ModuleDict({"x": linear(), "y": nn.ModuleList([linear()])}),
        scale=nn.Parameter(torch.empty(64, device="meta")),
    )


def test_by_default_each_child_is_a_unit_and_containers_are_opened() -> None:
    assert list(units_of(layers())) == [
        "", "first", "listed.0", "listed.1.0", "listed.1.1", "named.x", "named.y.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("units", "chosen"),
    [
        (Block, {"blocks.0", "blocks.1"}),
        ("blocks.*", {"blocks.0", "blocks.1"}),
        ("blocks.1", {"blocks.1"}),
        (lambda path, module: path.endswith("0"), {"blocks.0"}),
        ([Block, "embed"], {"blocks.0", "blocks.1", "embed"}),
        (
            [nn.LayerNorm],
            {"blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"},
        ),
    ],
)
def test_units_by_class_pattern_predicate_and_several(units: Any, chosen: set[str]) -> None:
    assert chosen <= set(units_of(GPT(tied=False), units))


def test_a_pattern_goes_name_by_name() -> None:
    assert "blocks.0.up" not in units_of(GPT(), "blocks.*")
    assert {"blocks.0.up", "blocks.1.up"} <= set(units_of(GPT(), "blocks.*.up"))


def test_the_innermost_unit_has_the_leaf() -> None:
    found = units_of(GPT(), [Block, nn.Linear])
    assert found["blocks.0.up"] == ("blocks.0.up.weight", "blocks.0.up.bias")
    assert all("norm" in leaf for leaf in found["blocks.0"])


def test_a_tied_weight_goes_to_the_innermost_unit_around_all_its_places() -> None:
    model = Net(block=nn.Sequential(linear(), linear()), head=linear())
    model.block[1].weight = model.block[0].weight
    found = units_of(model, [nn.Sequential, nn.Linear])
    assert found["block"] == ("block.0.weight",)
    assert found["block.1"] == ("block.1.bias",)
    model.head.weight = model.block[0].weight
    assert units_of(model, [nn.Sequential, nn.Linear])[""] == ("block.0.weight",)


def test_a_shared_module_is_one_unit_under_its_first_name() -> None:
    shared = linear()
    twice = Net(a=shared, b=shared)
    assert units_of(twice) == {"a": ("a.weight", "a.bias")}
    assert units_of(twice, nn.Linear) == {"a": ("a.weight", "a.bias")}


def test_what_nobody_chose_is_apart_and_small_ones_join() -> None:
    model = Net(
        embed=nn.Embedding(50, 32, device="meta"),
        small=nn.LayerNorm(32, device="meta"),
        blocks=nn.ModuleList([linear(32), linear(32)]),
        norm=nn.LayerNorm(32, device="meta"),
        head=nn.Linear(32, 50, device="meta"),
    )
    assert list(units_of(model, "blocks.*")) == ["embed+small", "blocks.0", "blocks.1", "norm+head"]
    big = units_of(GPT(vocab=100, width=32, length=100, tied=False), Block)
    assert "embed" in big and "place" in big, "of one size they stay apart"


def test_no_match_is_an_error() -> None:
    for units in ("block.*", nn.Conv1d, lambda path, module: False, []):
        with pytest.raises(ValueError, match="matches no module of MLP"):
            functionalize(MLP(), units=units)


@drawn(
    st.lists(
        st.sampled_from([nn.Linear, nn.LayerNorm, Block, nn.Embedding, "blocks.*", "*.1", "head"]),
        min_size=1,
    )
)
def test_every_leaf_is_in_one_unit(units: list[Any]) -> None:
    for tied in (True, False):
        with torch.device("meta"):
            model = GPT(tied=tied)
        _, params, _ = functionalize(model, units=units)
        leaves = [leaf for unit in params.units for leaf in unit.leaves]
        assert sorted(leaves) == sorted(params)
        for unit in params.units:
            assert len(unit.modules) >= 1 and len({*unit.modules}) == len(unit.modules)
            for leaf in unit.leaves:
                assert any(leaf.startswith(path) for path in unit.modules), (unit, leaf)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**", {"", "a", "a.b", "a.b.c", "d.c"}),
        ("*", {"a"}),
        ("*.*", {"a.b", "d.c"}),
        ("**.c", {"a.b.c", "d.c"}),
        ("a.**", {"a", "a.b", "a.b.c"}),
        ("a.**.c", {"a.b.c"}),
        ("a.**.*", {"a.b", "a.b.c"}),
        ("**.**", {"", "a", "a.b", "a.b.c", "d.c"}),
        ("", {""}),
    ],
)
def test_patterns(pattern: str, found: set[str]) -> None:
    paths = ["", "a", "a.b", "a.b.c", "d.c"]
    assert {path for path in paths if path_matches(path, pattern)} == found


def test_patterns_of_any_depth_name_units() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    _, params, _ = functionalize(model, units="**.1")
    assert {"0.1", "1"} <= {path for unit in params.units for path in unit.modules}
    with pytest.raises(ValueError, match=r"one name.*`\*\*` is any number"):
        functionalize(model, units="*.*.*")
