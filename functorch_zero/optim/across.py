"""What a transform is given to ask about whole tensors: `across`.

`Local` answers in one process with plain torch: it is the oracle. `Sharded` answers on pieces with
a group. All communication of an optimizer goes through these questions.

Questions take trees of leaves (or this rank's pieces of them) and answer with a tree of 0-d
tensors, vectors, or one 0-d tensor. The scalar questions take several trees at once,
`across.norm(params, updates)`, and then answer with a tuple, from one collective. Sums are taken,
and answered, in at least float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import TransformError
from ..layout.extent import Extent
from ..tree import PyTree, paths, select

Tree = PyTree[Tensor]
Dims = int | tuple[int, ...]
Dim = Dims | Callable[[tuple[int, ...]], Dims | None]  # or by a leaf's full shape; None: not asked
Question = tuple[Tree, Dim]


@dataclass(frozen=True)
class Pointwise:
    """A pointwise author's functions, as `Across.pointwise` runs them: on leaves, pieces or whole
    buckets.

    Attributes:
        in_place: `update` for updates and state that were donated, bit by bit: results may lie
            where they did.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    in_place: Callable[[Tree, Any, Tree], tuple[Tree, Any]] | None = None


@dataclass(frozen=True)
class Fused:
    """A pointwise update as a kernel that changes params and state in place; for storage that was
    donated.

    Attributes:
        update: `(params, updates, states) -> states` for some flats; each state is that of a tree
            of one leaf, `{"": flat}`, and what follows no leaf (a count of steps) is the same in
            all of them.
        takes: whether the kernel takes params of this dtype, on this device.
    """

    update: Callable[[list[Tensor], list[Tensor], list[Any]], list[Any]]
    takes: Callable[[Tensor], bool]


@dataclass(frozen=True)
class WholeLeaf:
    """A whole-leaf author's functions, as `Across.whole` runs them."""

    init: Callable[[Tensor], Any]
    update: Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any]]
    wants_param: bool
    cost: Callable[[tuple[int, ...]], float]
    batched: bool


class Owned:
    """A pytree node around one leaf's state in a whole-leaf transform; `leaf` is that leaf's number
    in the tree.

    Sharded, the leaf's owner holds the state; elsewhere its tensors are empty, shape (0,).
    """

    def __init__(self, state: Any, leaf: int):
        self.state, self.leaf = state, leaf


optree.register_pytree_node(
    Owned,
    lambda owned: ((owned.state,), owned.leaf, ("owned",)),
    lambda leaf, children: Owned(children[0], leaf),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


class Across(Protocol):
    """The questions. Trees may hold this rank's 1-D pieces; answers are about whole tensors, the
    same on every rank."""

    @property
    def extents(self) -> PyTree[Extent]:
        """For each leaf, its full `shape` and the element range [start, stop) that is here."""
        ...

    def sum(self, *trees: Tree) -> Any:
        """Per leaf, the sum of its elements, 0-d."""
        ...

    def mean(self, *trees: Tree) -> Any:
        """Per leaf, the mean of its elements, 0-d (0 for an empty leaf). The trees are shaped like
        params."""
        ...

    def norm(self, *trees: Tree) -> Any:
        """Per leaf, the Euclidean norm, 0-d."""
        ...

    def max(self, *trees: Tree) -> Any:
        """Per leaf, the largest element, 0-d (-inf for an empty leaf)."""
        ...

    def total(self, *trees: Tree) -> Any:
        """The sum over all elements of all leaves, one 0-d tensor."""
        ...

    def dot(self, a: Tree, b: Tree) -> Tensor:
        """The inner product of two trees, one 0-d tensor."""
        ...

    def dots(self, *pairs: tuple[Tree, Tree]) -> tuple[Tensor, ...]:
        """The inner products of several pairs of trees, from one collective; no product of two
        trees is held whole."""
        ...

    def sum_dim(self, tree: Tree, dim: Dim) -> Tree:
        """Per leaf, the sum over `dim` (one dim or several, all or none) of the full shape; those
        dims are gone.

        `dim` may be a function from a leaf's full shape to its dims, or to None: then the answer
        for that leaf is None.
        """
        ...

    def sum_dims(self, *questions: Question) -> tuple[Tree, ...]:
        """Several questions `(tree, dim)` of `sum_dim`, answered with one collective."""
        ...

    def max_dim(self, tree: Tree, dim: Dim) -> Tree:
        """As `sum_dim`, the maximum (-inf where there are no elements)."""
        ...

    def max_dims(self, *questions: Question) -> tuple[Tree, ...]:
        """Several questions `(tree, dim)` of `max_dim`, answered with one collective."""
        ...

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        """The inverse direction of `sum_dim`: its answers put back beside each element
        (broadcastable to the pieces).

        Leaves without an answer are None in `tree`, and in what is returned.
        """
        ...

    def select(self, mask: PyTree[bool]) -> Across:
        """The same for the leaves where `mask` is true; the others are None in every tree."""
        ...

    def keep(self, state: Any, *passing: Tree) -> Any:
        """A state to be kept: leaves that lie in the storage of updates or params, which may be
        overwritten, copied."""
        ...

    def pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        """Run a pointwise update."""
        ...

    def whole_init(self, part: WholeLeaf, params: Tree) -> Any:
        """The state of a whole-leaf transform: a tree shaped like params of `Owned`."""
        ...

    def whole(self, part: WholeLeaf, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        """Run a whole-leaf update, each leaf at its owner."""
        ...

    def whole_tree_init(self, init: Callable[[Tree], Any], params: Tree, limit: int) -> Any:
        """The state of a whole-tree transform."""
        ...

    def whole_tree(
        self, update: Callable[..., Any], updates: Tree, state: Any, params: Tree | None, limit: int
    ) -> tuple[Tree, Any]:
        """Run a whole-tree update; params are None where it wants none."""
        ...


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are taken in: itself, or float32 for the half precisions."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def each(question: Callable[[Tree], Any], trees: Sequence[Tree]) -> Any:
    """Answer for one tree, or a tuple of answers for several."""
    answers = tuple(question(tree) for tree in trees)
    return answers[0] if len(answers) == 1 else answers


class Local:
    """One process, whole leaves, plain torch."""

    def __init__(self, params: Tree):
        self._extents = tree_map(Extent.of, params)

    @property
    def extents(self) -> PyTree[Extent]:
        return self._extents

    def sum(self, *trees: Tree) -> Any:
        return each(lambda tree: tree_map(lambda x: x.sum(dtype=sum_dtype(x.dtype)), tree), trees)

    def mean(self, *trees: Tree) -> Any:
        return each(
            lambda tree: tree_map(
                lambda x: x.sum(dtype=sum_dtype(x.dtype)) / max(x.numel(), 1), tree
            ),
            trees,
        )

    def norm(self, *trees: Tree) -> Any:
        return each(
            lambda tree: tree_map(
                lambda x: torch.linalg.vector_norm(x, dtype=sum_dtype(x.dtype)), tree
            ),
            trees,
        )

    def max(self, *trees: Tree) -> Any:
        return each(
            lambda tree: tree_map(
                lambda x: x.max() if x.numel() else x.new_full((), -math.inf), tree
            ),
            trees,
        )

    def total(self, *trees: Tree) -> Any:
        return each(lambda tree: total_of(optree.tree_leaves(self.sum(tree))), trees)

    def dot(self, a: Tree, b: Tree) -> Tensor:
        return self.total(tree_map(torch.mul, a, b))  # type: ignore[no-any-return]

    def dots(self, *pairs: tuple[Tree, Tree]) -> tuple[Tensor, ...]:
        return tuple(self.dot(a, b) for a, b in pairs)

    def sum_dim(self, tree: Tree, dim: Dim) -> Tree:
        def add(x: Tensor) -> Any:
            dims = dims_of(dim, tuple(x.shape))
            if not dims:
                return dims if dims is None else x.to(sum_dtype(x.dtype), copy=True)
            return x.sum(dims, dtype=sum_dtype(x.dtype))

        return tree_map(add, tree)

    def sum_dims(self, *questions: Question) -> tuple[Tree, ...]:
        return tuple(self.sum_dim(*question) for question in questions)

    def max_dim(self, tree: Tree, dim: Dim) -> Tree:
        def largest(x: Tensor) -> Any:
            dims = dims_of(dim, tuple(x.shape))
            if not dims:
                return dims if dims is None else x.clone()
            return (
                x.amax(dims) if x.numel() else x.new_full(without(tuple(x.shape), dims), -math.inf)
            )

        return tree_map(largest, tree)

    def max_dims(self, *questions: Question) -> tuple[Tree, ...]:
        return tuple(self.max_dim(*question) for question in questions)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        def put_back(extent: Extent, x: Tensor | None) -> Any:
            dims = dims_of(dim, extent.shape)
            if x is None or dims is None:
                return None
            return x.reshape([1 if d in dims else size for d, size in enumerate(extent.shape)])

        return tree_map(put_back, self.extents, tree)

    def select(self, mask: PyTree[bool]) -> Local:
        narrowed = object.__new__(type(self))
        narrowed.__dict__.update(self.__dict__, _extents=select(self._extents, mask))
        return narrowed

    def keep(self, state: Any, *passing: Tree) -> Any:
        return state

    def pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return part.update(updates, state, params)

    def whole_init(self, part: WholeLeaf, params: Tree) -> Any:
        leaves, treedef = optree.tree_flatten(params)
        return treedef.unflatten([Owned(part.init(leaf), i) for i, leaf in enumerate(leaves)])

    def whole(self, part: WholeLeaf, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        leaves, treedef = optree.tree_flatten(updates)
        states = treedef.flatten_up_to(state)
        results = [
            one_leaf(part, *leaf)
            for leaf in zip(leaves, states, optree.tree_leaves(params), strict=True)
        ]
        for i, (update, old, (new, owned)) in enumerate(zip(leaves, states, results, strict=True)):
            check_whole(updates, i, (update, old.state), (new, owned.state))
        return treedef.unflatten([u for u, _ in results]), treedef.unflatten(
            [s for _, s in results]
        )

    def whole_tree_init(self, init: Callable[[Tree], Any], params: Tree, limit: int) -> Any:
        check_limit(optree.tree_leaves(self.extents), optree.tree_leaves(params), limit)
        return init(params)

    def whole_tree(
        self, update: Callable[..., Any], updates: Tree, state: Any, params: Tree | None, limit: int
    ) -> tuple[Tree, Any]:
        check_limit(optree.tree_leaves(self.extents), optree.tree_leaves(updates), limit)
        new_updates, new_state = update(updates, state, params)
        return new_updates, new_state


class Refusing:
    """The `across` of a pointwise transform: it refuses every question."""

    def __getattr__(self, question: str) -> NoReturn:
        raise TransformError(
            f"a pointwise transform asked across.{question}, so it isn't pointwise. "
            "Remedy: make it with optim.with_statistics"
        )


def check_whole(tree: Tree, i: int, before: tuple[Tensor, Any], after: tuple[Tensor, Any]) -> None:
    """Refuse a whole-leaf author's (update, state) of the i-th leaf, of other shapes than what it
    was made of."""
    shapes = [[tuple(x.shape) for x in optree.tree_leaves(pair)] for pair in (before, after)]
    if shapes[0] != shapes[1]:
        raise TransformError(
            f"a whole-leaf update of leaf {paths(tree)[i]} must make an update and a state of the "
            f"shapes that it was given: expected {shapes[0]}, got {shapes[1]}"
        )


def one_leaf(part: WholeLeaf, update: Tensor, owned: Owned, param: Tensor) -> tuple[Tensor, Owned]:
    """Run a whole-leaf update on one whole leaf; a batched one sees a batch of one."""
    if not part.batched:
        new, state = part.update(update, owned.state, param if part.wants_param else None)
        return new, Owned(state, owned.leaf)
    batch = tree_map(lambda x: x.unsqueeze(0), owned.state)
    new, state = part.update(
        update.unsqueeze(0), batch, param.unsqueeze(0) if part.wants_param else None
    )
    return new.squeeze(0), Owned(tree_map(lambda x: x.squeeze(0), state), owned.leaf)


def total_of(sums: Sequence[Tensor]) -> Tensor:
    """The sum of 0-d tensors, added in order, in the widest of their dtypes."""
    if not sums:
        return torch.zeros(())
    dtype = sums[0].dtype
    for x in sums:
        dtype = torch.promote_types(dtype, x.dtype)
    return torch.stack([x.to(dtype) for x in sums]).sum()


def dims_of(dim: Dim, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dims, in order, that `dim` names in a tensor of this shape, or None where a function
    `dim` answers None."""
    named = dim(shape) if callable(dim) else dim
    if named is None:
        return None
    dims = named if isinstance(named, tuple) else (named,)
    if any(not -len(shape) <= d < len(shape) for d in dims) or len(
        {d % len(shape) for d in dims}
    ) < len(dims):
        raise ValueError(
            f"expected distinct dims of a leaf of shape {shape}, got {named}. Remedy: a function "
            f"from a leaf's full shape to its dims, or to None where it is not asked"
        )
    return tuple(sorted(d % len(shape) for d in dims))


def without(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with `dims` gone: the shape of `sum_dim`'s answer."""
    return tuple(size for d, size in enumerate(shape) if d not in dims)


def check_limit(extents: Sequence[Extent], leaves: Sequence[Tensor], limit: int) -> None:
    """Refuse a tree too large to be gathered."""
    size = sum(e.numel * leaf.element_size() for e, leaf in zip(extents, leaves, strict=True))
    if size > limit:
        raise TransformError(
            f"a whole-tree transform was given a tree of {size} bytes, above its limit of {limit}. "
            "Remedy: use a per-leaf variant, or raise `limit` if every rank can hold that much"
        )
