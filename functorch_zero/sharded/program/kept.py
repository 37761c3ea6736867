"""The tensors that a reduction keeps of the trees of a program's value.

Each tree that is trained has its own, by its path in the value. Its gradients follow one another
through them, in one step and from step to step, whichever losses they are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import optree

from ...errors import StructureError, explain
from ...layout.joined import join_layouts
from ...layout.layout import Layout
from ...layout.sharded_tree import ShardedTree
from ...params import is_on_engine
from ...runtime.reduce import Kept, Reduction
from ...tree import paths
from ..options import Options
from ..parts import Parts, ReductionParts

# Each tree whose gradients are taken, with the number of its first bucket in the pass
Trained = Sequence[tuple[ShardedTree, int]]


class TrainedTrees:
    """The trees of a program's value that are trained, and what a reduction keeps of all of them.

    Args:
        layouts: of the trees, by their paths in the value.
        options: those of `shard`.

    Attributes:
        layouts: as given.
        reduction: that of the options.
        parts: of the states whose values hold these trees. Paths of leaves begin with those of the
            trees.
    """

    def __init__(self, layouts: Mapping[str, Layout], options: Options):
        self.layouts, self.reduction = layouts, options.reduction
        names = [*layouts]
        joined = join_layouts([*layouts.values()], [True] * len(names), names)
        self.parts = ReductionParts(options.reduction, joined.layout, options.axes)
        self._first_buckets = dict(zip(names, joined.first_buckets, strict=True))
        self._rank = options.group.rank

    def first_bucket_of(self, tree: ShardedTree) -> int:
        """The number of a tree's first bucket among those of all trees.

        Raises:
            StructureError: the value holds no such tree.
        """
        name = tree.holding.name
        # Another tree's layout is another object, even where both are equal
        if self.layouts.get(name) is tree.sharding.layout:
            return self._first_buckets[name]
        raise StructureError(
            explain(
                f"a gradient was asked of a tree of which reduction={self._reduction_name} keeps "
                "nothing",
                path=name,
                expected=f"a trained tree of the program's value, {[*self.layouts]}",
                got=tree.holding.label,
                rank=self._rank,
                remedy="let the program's init put the tree into the value, with leaves that "
                "require grad; or shard without the reduction",
            )
        )

    def refuse_twice(self, tree: ShardedTree) -> StructureError:
        """The error of a gradient that is asked of a tree and of a copy of it."""
        return StructureError(
            explain(
                f"a gradient was asked of two copies of one tree, and reduction="
                f"{self._reduction_name} keeps tensors of each tree once",
                path=tree.holding.name,
                rank=self._rank,
                remedy="take two gradients, one of each copy; let the value hold both; or shard "
                "without the reduction",
            )
        )

    @property
    def _reduction_name(self) -> str:
        return type(self.reduction).__name__


class PartsOfValues:
    """The `TrainedTrees` of a program's values. Those of the last value are kept: the next one has
    the same.

    Args:
        options: those of `shard`.
    """

    def __init__(self, options: Options):
        self._options = options
        self._known: TrainedTrees | None = None

    def of(self, value: Any) -> TrainedTrees:
        """Those of a value whose trees know whether they are trained."""
        layouts: dict[str, Layout] = {}
        nodes = optree.tree_leaves(value, is_leaf=is_on_engine)
        for path, node in zip(paths(value, is_on_engine), nodes, strict=True):
            if _is_trained(node):
                # A tree that is the whole value has the name of init's argument
                layouts[path or node.holding.name] = node.sharding.layout
        if self._known is None or not _same(self._known.layouts, layouts):
            self._known = TrainedTrees(layouts, self._options)
        return self._known


def _is_trained(node: Any) -> bool:
    """Whether this is a tree, in the form of params, whose gradients may be asked for."""
    if not isinstance(node, ShardedTree) or node.holding.form != "held":
        return False
    is_trainable = any(bucket.trainable for bucket in node.sharding.layout.buckets)
    return is_trainable and not node.holding.read_only


def _same(known: Mapping[str, Layout], layouts: Mapping[str, Layout]) -> bool:
    """Whether these are layouts of the same trees: the same objects, since to compare them takes
    long."""
    return [*known] == [*layouts] and all(known[name] is layouts[name] for name in known)


class KeptTensors:
    """The tensors that a reduction keeps, in one call of a program: each gradient is given those
    that the one before has kept of its tree.

    Args:
        trees: of the value that the program was given.
        parts: of the state. They stay as they are.
    """

    def __init__(self, trees: TrainedTrees, parts: Any):
        self._trees = trees
        self._kept = trees.parts.kept_in(parts)  # by bucket of all trees

    @property
    def reduction(self) -> Reduction:
        """The reduction that keeps them."""
        return self._trees.reduction

    @property
    def parts(self) -> Parts | None:
        """Those of the next state."""
        return self._trees.parts.parts_of(self._kept)

    def before(self, trained: Trained) -> dict[int, Kept]:
        """The tensors that a gradient's reduction begins with, by bucket of its pass.

        Raises:
            StructureError: the value holds no such tree, or the gradient is by copies of one.
        """
        return {b: self._kept[number] for b, number in self._numbers(trained).items()}

    def replace(self, trained: Trained, kept: Mapping[int, Kept]) -> None:
        """Note the tensors that the gradient's reduction has kept, by bucket of its pass."""
        for b, number in self._numbers(trained).items():
            self._kept[number] = kept[b]

    def _numbers(self, trained: Trained) -> dict[int, int]:
        """By trained bucket of a pass, its number among those of the value's trees."""
        numbers: dict[int, int] = {}
        seen: set[int] = set()  # first buckets
        for tree, first in trained:
            own_first = self._trees.first_bucket_of(tree)
            if own_first in seen:
                raise self._trees.refuse_twice(tree)
            seen.add(own_first)
            for k, bucket in enumerate(tree.sharding.layout.buckets):
                if bucket.trainable:
                    numbers[first + k] = own_first + k
        return numbers


def kept_here() -> KeptTensors | None:
    """Those of the step whose program runs in this thread; None: its reduction keeps nothing."""
    return _RUNNING.get()


@contextmanager
def keeping(kept: KeptTensors | None) -> Iterator[None]:
    """Around a program: its gradients read the kept tensors, and replace them."""
    token = _RUNNING.set(kept)
    try:
        yield
    finally:
        _RUNNING.reset(token)


_RUNNING: ContextVar[KeptTensors | None] = ContextVar("_RUNNING", default=None)
