"""The four levels, as rows of one table: the form of params between steps, and all collectives.

| level | params between steps | before the loss | gradient | after the update |
|---|---|---|---|---|
| 0 | whole | - | whole, one all-reduce | - |
| 1 | whole | - | whole, one reduce-scatter | one all-gather |
| 2 | whole | - | one reduce-scatter at each use of its unit, freed | one all-gather |
| 3 | pieces | one all-gather at each use of its unit | one reduce-scatter at each, freed | - |

At levels 1 and 2 params that are gathered in fewer bytes than they are stored in are in pieces
between steps, beside the whole ones as they were gathered: see Note [published flats] in `layout`.

Collectives are per bucket, and backward uses a unit again. Each bucket has a level of its own, so
the units of a model may differ in it. On a mesh, levels 1 to 3 also sum gradients along the
replicate axis, once per step; `state_axes="both"` adds an all-gather along it after the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import StructureError, explain
from ..tree import PyTree, check_patterns, paths, pattern_of
from .layout import Bucket, Cut, Layout

LevelRule = int | str | Mapping[str, int | str] | Callable[[str, Any], int | str]


@dataclass(frozen=True)
class Level:
    """One row of the table."""

    number: int
    name: str
    cuts_state: bool  # optimizer state in pieces
    streams: bool  # gradients reduced and freed at each use of a unit
    cuts_params: bool  # params in pieces between steps, and gathered at each use of a unit

    def cut(self, shard: int, replicate: int = 1, *, narrows: bool = False) -> Cut:
        """The cut of a bucket at this level, over an axis of `shard` ranks; its optimizer state is
        cut over `replicate` times as many.

        `narrows`: whether its leaves are gathered in fewer bytes than they are stored in.
        """
        # See Note [published flats] in `layout`
        holds_pieces = self.cuts_params or (narrows and self.cuts_state)
        return Cut(
            level=self.number,
            # See Note [two cuts] in `layout`
            num_pieces=shard * replicate if self.cuts_state else 1,
            num_held=shard if holds_pieces else 1,
        )


LEVELS = (
    Level(0, "replicated", cuts_state=False, streams=False, cuts_params=False),
    Level(1, "oss", cuts_state=True, streams=False, cuts_params=False),
    Level(2, "sdp", cuts_state=True, streams=True, cuts_params=False),
    Level(3, "fsdp", cuts_state=True, streams=True, cuts_params=True),
)


def find_level(level: int | str) -> Level:
    """A level by number or name."""
    if type(level) in (int, str):  # True is no level, though it equals 1
        for known in LEVELS:
            if level in (known.number, known.name):
                return known
    names = ", ".join(f"{known.number} ({known.name!r})" for known in LEVELS)
    raise ValueError(f"level must be one of {names}; got {level!r}")


@dataclass(frozen=True)
class Levels:
    """The level of each leaf, as `shard` was asked for it.

    Args:
        rule: one level for all; levels by patterns of paths, where the innermost that names a leaf
            or a tree around it counts; or a function `(path, leaf) -> level`.
    """

    rule: LevelRule

    def __post_init__(self) -> None:
        if isinstance(self.rule, Mapping):
            if not self.rule:
                # Else every leaf would raise, and none of the errors would name the cause
                raise ValueError('level={} names no level. Remedy: level={"": 3}, say, or level=3')
            for pattern, level in self.rule.items():
                if isinstance(level, Mapping):
                    raise ValueError(
                        f"level={self.rule!r} has a rule inside of a rule, at {pattern!r}. Remedy: "
                        f'name whole paths in one rule, level={{"{pattern}.head": 3}}, say'
                    )
                find_level(level)
        elif not callable(self.rule):
            find_level(self.rule)

    @property
    def number(self) -> int | None:
        """0 to 3, or None where leaves may differ in it."""
        return find_level(self.rule).number if isinstance(self.rule, int | str) else None

    @property
    def in_words(self) -> str:
        """The level for errors: "level 3", "levels 1 and 3"."""
        if isinstance(self.rule, Mapping):
            return level_in_words(None, [find_level(level).number for level in self.rule.values()])
        return "levels by a function" if callable(self.rule) else level_in_words(self.number, ())

    def describe(self) -> Any:
        """The rule as plain data. A function's levels are in the layout, leaf by leaf."""
        if isinstance(self.rule, Mapping):
            return {pattern: find_level(level).name for pattern, level in self.rule.items()}
        return "by a function" if callable(self.rule) else find_level(self.rule).name

    def of(self, path: str, leaf: Any) -> Level:
        """The level of one leaf."""
        if callable(self.rule):  # asked once per leaf, at `init`
            return find_level(self.rule(path, leaf))
        if not isinstance(self.rule, Mapping):
            return find_level(self.rule)
        if (pattern := pattern_of(path, self.rule)) is not None:
            return find_level(self.rule[pattern])
        raise StructureError(
            explain(
                "no pattern of `level` names a leaf",
                path=path,
                got=f"patterns {', '.join(map(repr, self.rule))}",
                remedy='add a pattern for it, or "" for all the rest',
            )
        )

    def check(self, params: PyTree[Any], arguments: Sequence[str] = ()) -> None:
        """Raise if a pattern names nothing in this tree.

        Args:
            params: a training step's; of a program, its trees by the arguments of `init`.
            arguments: their names.
        """
        if isinstance(self.rule, Mapping):
            check_patterns(
                self.rule,
                paths(params),
                option="level",
                names="leaf",
                remedy="fz.named_leaves(params) has all paths",
                arguments=arguments,
            )


def level_of(bucket: Bucket) -> Level:
    """The row of a bucket's level."""
    return LEVELS[bucket.cut.level]


def levels_of(layout: Layout) -> list[int]:
    """The levels of a layout's leaves, each once."""
    return sorted({bucket.cut.level for bucket in layout.buckets})


def level_in_words(level: int | None, levels: Iterable[int]) -> str:
    """The level of a state or plan, for people.

    Args:
        level: the one that was asked for; None: levels by leaf were.
        levels: those of the leaves, for levels by leaf.

    >>> level_in_words(3, [3]), level_in_words(None, [3, 1, 3]), level_in_words(None, [3])
    ('level 3', 'levels 1 and 3', 'levels by leaf, all of them 3')
    """
    if level is not None:
        return f"level {level}"
    numbers = sorted({*levels})
    if not numbers:
        return "levels by leaf"
    *others, last = numbers
    if not others:
        return f"levels by leaf, all of them {last}"
    return f"levels {', '.join(map(str, others))} and {last}"
