"""Sentences about a model that `describe` and `plan` give beside their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from .._torch_private import storage_id
from ..compress import Form
from ..layout.layout import Bucket, Layout, Unit
from ..precision import short

_DENSE = "gradients are reduced dense: sparse ones, of an embedding, are made dense before"
_TABLES = "of tables, the rows that a loss looks up travel, and their gradients"


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that the tensors lie in, each once: leaves share their flat's."""
    # A view counts as all of its storage, which it keeps alive
    storages = {storage_id(x): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def elements_by_unit(layout: Layout) -> dict[str, int]:
    """Elements of the units' leaves, without padding."""
    return {
        unit.name or "root": sum(sum(layout.buckets[b].numels) for b in unit.buckets)
        for unit in layout.units
    }


def tables_of(layout: Layout) -> list[str]:
    """The units that are tables."""
    units = zip(layout.units, layout.contents, strict=True)
    return [unit.name for unit, content in units if content.is_table]


def notes_of(
    elements: Mapping[str, int], num_ranks: int, tables: Collection[str]
) -> tuple[str, ...]:
    """The notes on a model, a line each; one rank has none.

    Args:
        elements: of each unit's leaves.
        tables: the units that are tables.
    """
    if num_ranks == 1:
        return ()
    total = sum(elements.values())
    notes = [_TABLES] if tables else []
    if len(tables) < len(elements):
        notes.append(_DENSE)
    for name, num in elements.items():
        if num > total / 2 and name not in tables:
            notes.append(
                f"unit {name} holds {num / total:.0%} of the parameters, which level 3 gathers all "
                "at once: smaller units, functionalize(units=...), take less memory"
            )
    return tuple(notes)


def found_units(units: Iterable[Unit], tree: str = "") -> tuple[str, ...]:
    """The units that `functionalize` has found by itself, a line per kind; none where they were
    chosen. `tree`: the name of the tree that they are units of, where there are several."""
    numbers = Counter(unit.why for unit in units if unit.why)
    found = f"units found in {tree}" if tree else "units found"
    return tuple(f"{found}: {number} ({why})" for why, number in numbers.items())


def wire_of(bucket: Bucket, is_updated: bool) -> tuple[tuple[str, Form], ...]:
    """The traffic of a bucket in a step: gathers on use, or rows of a table; where it is updated,
    reductions, and the all-gather after the update."""
    wire: list[tuple[str, Form]] = []
    if bucket.cut.by_rows:
        wire.append(("rows", bucket.gather))
    elif bucket.cut.level == 3:
        wire.append(("gather", bucket.gather))
    if is_updated:
        wire.append(("reduce", bucket.reduce))
    # Pieces are updated, and larger parts held: levels 1 and 2, and on a mesh `state_axes="both"`
    if is_updated and bucket.cut.num_pieces > bucket.cut.num_held:
        wire.append(("publish", bucket.dtype))
    if is_updated and bucket.is_published:
        wire.append(("publish", bucket.gather))
    return tuple(wire)


def codecs_of(layout: Layout, num_ranks: int) -> tuple[str, ...]:
    """A line about the codecs by which a step's messages travel; none where none does."""
    found = []
    for bucket in layout.buckets if num_ranks > 1 else ():
        for message, form in wire_of(bucket, bucket.trainable):
            if not isinstance(form, torch.dtype):
                found.append(f"{message} {short(form)}")
    return (f"by codecs: {', '.join(dict.fromkeys(found))}",) if found else ()
