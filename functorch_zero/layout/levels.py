"""The levels, as rows of one table: the form of params between steps, and all collectives.

| level | params between steps | before the loss | gradient | after the update |
|---|---|---|---|---|
| 0 | whole | - | whole, one all-reduce | - |
| 1 | whole | - | whole, one reduce-scatter | one all-gather |
| 2 | whole | - | one reduce-scatter at each use of its unit, freed | one all-gather |
| 3 | pieces | one all-gather at each use of its unit | one reduce-scatter at each, freed | - |
| table | pieces of rows | all-to-alls of rows at each lookup | one all-to-all at each lookup | - |

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

from ..errors import StructureError
from ..tree import PyTree, check_patterns, path_matches, paths, pattern_of
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
    by_rows: bool = False  # pieces of whole rows, which are never all in one place

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
            by_rows=self.by_rows,
        )


LEVELS = (
    Level(0, "replicated", cuts_state=False, streams=False, cuts_params=False),
    Level(1, "oss", cuts_state=True, streams=False, cuts_params=False),
    Level(2, "sdp", cuts_state=True, streams=True, cuts_params=False),
    Level(3, "fsdp", cuts_state=True, streams=True, cuts_params=True),
    Level(4, "table", cuts_state=True, streams=False, cuts_params=True, by_rows=True),
)
*OF_ANY_LEAF, TABLE = LEVELS  # a table goes by its name only


def find_level(level: int | str) -> Level:
    """A level by number or name."""
    if type(level) in (int, str):  # True is no level, though it equals 1
        for known in LEVELS:
            if level == known.name or (level == known.number and known is not TABLE):
                return known
    names = ", ".join(f"{known.number} ({known.name!r})" for known in OF_ANY_LEAF)
    raise ValueError(f"level must be one of {names}, {TABLE.name!r}; got {level!r}")


@dataclass(frozen=True)
class Levels:
    """The level of each leaf, as `shard` was asked for it.

    Args:
        rule: one level for all; levels by patterns of paths, where the innermost that names a leaf
            or a tree around it counts; or a function `(path, leaf) -> level`. Leaves of modules
            with `sparse=True` are tables at levels 1 to 3, unless a pattern names the leaf itself,
            or a function is given.
    """

    rule: LevelRule

    def __post_init__(self) -> None:
        if isinstance(self.rule, Mapping):
            if not self.rule:
                # Else every leaf would raise, and none of the errors would name the cause
                raise ValueError('level={} names no level. Remedy: level={"": 3}, say, or level=3')
            for pattern, level in self.rule.items():
                if not isinstance(pattern, str):  # 0 would be taken for "", and name all leaves
                    raise TypeError(
                        f"level={self.rule!r} has a pattern that is no text, {pattern!r}. Remedy: "
                        f'level={{"{pattern}": 3}}, say'
                    )
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
        """0 to 3; None where leaves may differ in it, and where they are tables."""
        level = find_level(self.rule) if isinstance(self.rule, int | str) else TABLE
        return None if level is TABLE else level.number

    @property
    def in_words(self) -> str:
        """The level for errors: "level 3", "levels 1 and 3"."""
        if isinstance(self.rule, Mapping):
            return level_in_words(None, [find_level(level).number for level in self.rule.values()])
        if callable(self.rule):
            return "levels by a function"
        return level_in_words(self.number, [find_level(self.rule).number])

    def describe(self) -> Any:
        """The rule as plain data. A function's levels are in the layout, leaf by leaf."""
        if isinstance(self.rule, Mapping):
            return {pattern: find_level(level).name for pattern, level in self.rule.items()}
        return "by a function" if callable(self.rule) else find_level(self.rule).name

    def of(self, path: str, leaf: Any, *, is_sparse: bool = False) -> Level:
        """The level of one leaf. `is_sparse`: whether modules with `sparse=True` alone use it."""
        if callable(self.rule):  # asked once per leaf, at `init`
            return find_level(self.rule(path, leaf))
        if not isinstance(self.rule, Mapping):
            return _or_table(find_level(self.rule), is_sparse)
        if (pattern := pattern_of(path, self.rule)) is not None:
            names_it = path_matches(path, pattern)
            return _or_table(find_level(self.rule[pattern]), is_sparse and not names_it)
        raise StructureError(
            "no pattern of `level` names a leaf",
            path=path,
            got=f"patterns {', '.join(map(repr, self.rule))}",
            remedy='add a pattern for it, or "" for all the rest',
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


def _or_table(level: Level, is_sparse: bool) -> Level:
    """The level, or a table's where it cuts a leaf of which few rows are used."""
    return TABLE if is_sparse and level.cuts_state else level


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
    >>> level_in_words(None, [4, 0])
    'levels 0 and table'
    """
    if level is not None:
        return f"level {level}"
    numbers = sorted({*levels})
    names = [TABLE.name if number == TABLE.number else str(number) for number in numbers]
    if not names:
        return "levels by leaf"
    *others, last = names
    if not others:
        return f"levels by leaf, all of them {last}"
    return f"levels {', '.join(others)} and {last}"
