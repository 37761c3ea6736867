"""What `describe` and `plan` say of a model beside their numbers."""

from __future__ import annotations

from collections.abc import Mapping

from ..layout.layout import Layout

_DENSE = "gradients are reduced dense: sparse ones, of an embedding, are made dense before"


def elements_by_unit(layout: Layout) -> dict[str, int]:
    """Elements of the units' leaves, without padding."""
    return {
        unit.name or "root": sum(sum(layout.buckets[b].numels) for b in unit.buckets)
        for unit in layout.units
    }


def notes_of(elements: Mapping[str, int], num_ranks: int) -> tuple[str, ...]:
    """The notes on a model, a line each; one rank has none.

    `elements`: of each unit's leaves.
    """
    if num_ranks == 1:
        return ()
    total = sum(elements.values())
    notes = [_DENSE]
    for name, num in elements.items():
        if num > total / 2:
            notes.append(
                f"unit {name} holds {num / total:.0%} of the parameters, which level 3 gathers all "
                "at once: smaller units, functionalize(units=...), take less memory"
            )
    return tuple(notes)
