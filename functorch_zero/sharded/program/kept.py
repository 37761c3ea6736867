"""The tensors that a reduction keeps of the trees of a program's value.

Each tree that is trained has its own, by its path in the value. Its gradients follow one another
through them, in one step and from step to step, whichever losses they are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from ...errors import StructureError
from ...layout.layout import Layout
from ...layout.sharded_tree import ShardedTree, is_held
from ...runtime.reduce import Kept, Reduction
from ..options import Options
from ..parts import Parts, ReductionParts, TreeBucket
from .value import Nodes

# Each tree whose gradients are taken, with the number of its first bucket in the pass
Trained = Sequence[tuple[ShardedTree, int]]


class TrainedTrees:
    """The trees of a program's value that are trained, and what a reduction keeps of all of them.

    Args:
        layouts: of the trees, by their places: paths in the value, "" of a tree that is the value,
            or has no name.
        options: those of `shard`.

    Attributes:
        layouts: as given.
        reduction: that of the options.
        parts: of the states whose values hold these trees. Paths of leaves begin with the places.
    """

    def __init__(self, layouts: Mapping[str, Layout], options: Options):
        self.layouts, self.reduction = layouts, options.reduction
        self.parts = ReductionParts(options.reduction, layouts, options.axes)
        self._rank = options.group.rank

    @classmethod
    def of(
        cls, value: Nodes, nameless: str | None, options: Options, known: TrainedTrees | None
    ) -> TrainedTrees:
        """Those of a value whose trees know whether they are trained.

        Args:
            nameless: the place of a tree whose leaves keep their own paths.
            options: those of `shard`.
            known: of another value of the program, which mostly has the same trees.
        """
        layouts: dict[str, Layout] = {}
        for path, node in value.by_path.items():
            if _keeps(node):
                layouts["" if path == nameless else path] = node.sharding.layout
        if known is None or [*known.layouts] != [*layouts]:
            return cls(layouts, options)
        # By identity, since to compare layouts takes long
        is_same = all(map(is_, known.layouts.values(), layouts.values()))
        return known if is_same else cls(layouts, options)

    def place_of(self, tree: ShardedTree) -> str:
        """The place whose tensors a gradient by this tree goes through.

        Raises:
            StructureError: the value holds no such tree.
        """
        place = "" if "" in self.layouts else tree.holding.name
        # Another tree's layout is another object, even where both are equal
        if self.layouts.get(place) is tree.sharding.layout:
            return place
        raise StructureError(
            f"a gradient was asked of a tree of which reduction={self._reduction_name} keeps "
            "nothing",
            path=tree.holding.name or None,
            expected=f"a trained tree of the program's value, {[*self.layouts]}, or one that "
            "tree_map or fz.apply_updates has made of it",
            got=tree.holding.label,
            rank=self._rank,
            remedy="give the tree to init, with leaves that require grad, and let init put it "
            "into the value; or shard without the reduction",
        )

    def check_next(self, after: TrainedTrees) -> None:
        """Raise unless a program's next value has the same trained trees."""
        if [*after.layouts] != [*self.layouts]:
            raise StructureError(
                f"reduction={self._reduction_name} keeps tensors of other trees of the "
                "program's next value than of the one that it was given",
                expected=[*self.layouts],
                got=[*after.layouts],
                rank=self._rank,
                remedy="cut a tree that takes another one's place like that one, "
                "fz.shard_tree(tree, layout_like=other)",
            )

    def check_once(self, places: Sequence[str]) -> None:
        """Raise if a gradient was asked of a tree and of a copy of it."""
        again = [place for place in places if places.count(place) > 1]
        if again:
            raise StructureError(
                "a gradient was asked of two copies of one tree, and "
                f"reduction={self._reduction_name} keeps tensors of each tree once",
                path=again[0] or None,
                rank=self._rank,
                remedy="take two gradients, one of each copy; let the value hold both; or "
                "shard without the reduction",
            )

    @property
    def _reduction_name(self) -> str:
        return type(self.reduction).__name__


def _keeps(node: Any) -> bool:
    """Whether this is a tree, in the form of params, whose gradients may be asked for, and go by
    the reduction. Those of a tree that `fz.shard_tree` has cut with a level of its own don't."""
    if not is_held(node):
        return False
    engine = node.holding.engine
    # A pickled tree has none, and whatever is asked of it says so
    goes_by_reduction = engine is None or engine.keeps_tensors
    return goes_by_reduction and any(node.holding.trained)


class KeptTensors:
    """The tensors that a reduction keeps, in one call of a program: each gradient is given those
    that the one before has kept of its tree.

    Args:
        trees: of the value that the program was given.
        parts: of the state. They stay as they are.
    """

    def __init__(self, trees: TrainedTrees, parts: Any):
        self._trees = trees
        self._kept = trees.parts.kept_in(parts)

    @property
    def reduction(self) -> Reduction:
        """The reduction that keeps them."""
        return self._trees.reduction

    def of_gradient(self, trained: Trained) -> KeptOfGradient:
        """The tensors of the trees of one gradient.

        Raises:
            StructureError: the value holds no such tree, or the gradient is by copies of one.
        """
        places = [self._trees.place_of(tree) for tree, _ in trained]
        self._trees.check_once(places)
        firsts = dict(zip(places, [first for _, first in trained], strict=True))
        numbers = {(tree, b): firsts[tree] + b for tree, b in self._kept if tree in firsts}
        return KeptOfGradient(self._kept, numbers)

    def next_parts(self, value: Nodes, after: TrainedTrees) -> Parts | None:
        """Those of the next state. Trees that have changed places take theirs along.

        Args:
            value: the program's next one, whose trees still have the names of their places before.
            after: the trees of the next state's value, which are named by their new places.

        Raises:
            StructureError: other trees of the next value are trained.
        """
        self._trees.check_next(after)
        moved = _moved(value, [*after.layouts])
        kept = {(tree, b): self._kept[moved.get(tree, tree), b] for tree, b in self._kept}
        return after.parts.parts_of(kept)


class KeptOfGradient(NamedTuple):
    """The tensors that a reduction keeps of the trees of one gradient."""

    kept: dict[TreeBucket, Kept]  # of all trees. It is written to
    numbers: Mapping[TreeBucket, int]  # of its own trees' buckets, in the gradient's pass

    @property
    def before(self) -> dict[int, Kept]:
        """Those that the reduction begins with, by bucket of the pass."""
        return {number: self.kept[at] for at, number in self.numbers.items()}

    def replace(self, kept: Mapping[int, Kept]) -> None:
        """Note those that it has kept, by bucket of the pass."""
        self.kept.update({at: kept[number] for at, number in self.numbers.items()})


def _moved(value: Nodes, places: Sequence[str]) -> dict[str, str]:
    """By new place, the old one of each tree that has changed places with others. A tree that is
    put into another place besides its own has not moved. One that `tree_map` has made of several
    counts as the first of them."""
    names: dict[str, str] = {}
    for path, node in value.by_path.items():
        # A tree that is the value, or has no name, has no other place
        if path and path in places and node.holding.name != path:
            names[path] = node.holding.name
    return names if sorted(names) == sorted(names.values()) else {}
