"""`across`: the questions of a transform about whole tensors.

`Across` has the questions, each written once over a few primitives. `optim.local.Local` gives these
in one process with plain torch: it is the oracle. `Sharded` gives them on pieces with a group. All
communication of an optimizer goes through these questions.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import TransformError, first_few
from ..layout.extent import Extent, elements
from ..tree import PyTree, grouped, map_with_paths, same_structure
from .random_numbers import Kind, Number, draw_leaf, key_of

Tree = PyTree[Tensor]  # leaves whole, pieces, or flats
Shape = tuple[int, ...]  # of a whole leaf; also some of its dims, in order
Dims = int | Shape  # of the full shape; negative ones count from its end
Dim = Dims | Callable[[Shape], Dims | None]  # or by a leaf's full shape; None: not asked
Question = tuple[Tree, Dim]  # a tree, and the dims that its leaves are reduced over
Factors = tuple[Tree] | tuple[Tree, Tree]  # a tree, or two to be multiplied element by element
LeafOp = Literal["sum", "max", "norm"]  # over all elements of a leaf
DimOp = Literal["sum", "max"]  # over some dims of a leaf


@dataclass(frozen=True, eq=False)
class Pointwise:
    """A pointwise author's functions, as `Across.run_pointwise` runs them: on leaves, pieces or
    whole buckets.

    Attributes:
        in_place: `update` for updates and state that were donated, bit by bit: results may lie
            where they did.
        keeps_zeros: whether it makes zeros of zeros, and has neither a state of each element nor a
            look at params. Then rows of an update are as good as all of it.
    """

    init: Callable[[Tree], Any]  # params -> state
    # (updates, state, params) -> (updates, state)
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    in_place: Callable[[Tree, Any, Tree], tuple[Tree, Any]] | None = None
    keeps_zeros: bool = False


@dataclass(frozen=True)
class Fused:
    """A pointwise update as a kernel that changes params and state in place; for storage that was
    donated.

    Attributes:
        update: `(params, updates, state) -> state` for some flats; the state is that of the tree of
            the flats, in this order: `{0: flat, 1: flat, ...}`. Of the new one, leaves that follow
            no param (a count of steps) are read.
        takes: whether the kernel takes params of this dtype, on this device.
        plain: the update that it stands for, which runs where the kernel can't.
        one_by_one: whether it is given one flat at a time.
    """

    update: Callable[[list[Tensor], list[Tensor], Any], Any]
    takes: Callable[[Tensor], bool]
    plain: Pointwise
    one_by_one: bool = False


@dataclass(frozen=True)
class WholeLeaf:
    """A whole-leaf author's functions, as `Across.run_whole` runs them.

    Attributes:
        init: `(param) -> state` of one whole leaf.
        update: `(update, state) -> (update, state)`, or `(update, state, param)`.
        wants_param: whether `update` takes the param.
        cost: of an update, by the leaf's full shape, for balancing owners.
        batched: whether `update` takes leaves of one shape together, in a leading dim.
        by_rows: whether results of a row follow from that row: then a part of the leaf that is
            whole rows is as good as all of it.
        in_place: the same for an update and a state that were donated, over which it writes.
    """

    init: Callable[[Tensor], Any]
    update: Callable[..., tuple[Tensor, Any]]
    wants_param: bool
    cost: Callable[[Shape], float]
    batched: bool
    by_rows: bool = False
    in_place: Callable[..., tuple[Tensor, Any]] | None = None


class Owned:
    """A pytree node around one leaf's state in a whole-leaf transform; `leaf` is that leaf's number
    in the tree.

    Sharded, the leaf's owner holds the state; elsewhere its tensors are empty, shape (0,).
    """

    def __init__(self, state: Any, leaf: int):
        # A tree of tensors, as the author's `init` made it; the number is part of the structure
        self.state, self.leaf = state, leaf


optree.register_pytree_node(
    Owned,
    # Flattened to (children, static part, entries): "owned" is its entry in paths, checkpoint
    # files' among them
    lambda owned: ((owned.state,), owned.leaf, ("owned",)),
    lambda leaf, children: Owned(children[0], leaf),
    # The global one: users' `tree_map` finds it without naming a namespace
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


# Of `Across`, as its error lists them
_QUESTIONS = (
    *("extents", "sum", "mean", "norm", "max", "total", "dot", "dots"),
    *("sum_dim", "sum_dims", "max_dim", "max_dims", "spread"),
    *("normal", "uniform", "rademacher"),
)


class Across(ABC):
    """The questions of a transform's author, and under them the primitives that answer them.

    Questions take trees of leaves, which may be this rank's 1-D pieces; answers are about whole
    tensors, the same on every rank. Those that take `*trees` answer for one tree, or with a tuple
    for several, from one collective. Sums are taken, and answered, in at least float32; those of
    integers and bools in int64.

    An implementation gives `extents` and the abstract methods, and inherits the questions.
    """

    extents: PyTree[Extent]
    """Per leaf, its full `shape` and the range [start, stop) of its elements that is here."""

    def __getattr__(self, name: str) -> Any:
        """Say which questions there are, where somebody asks another one."""
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith("_"):  # asked by copy, say
            raise AttributeError(text)
        raise AttributeError(
            f"across has no question {name!r}: expected one of {', '.join(_QUESTIONS)}. Remedy: "
            "make it of these (a variance is mean(u * u) - mean(u)**2), or take whole leaves "
            "(optim.with_whole_leaves)"
        )

    # One number per leaf

    def sum(self, *trees: Tree) -> Any:
        """Per leaf, the sum of its elements, 0-d."""
        return _one_or_all(self.reduce(trees, "sum"))

    def mean(self, *trees: Tree) -> Any:
        """Per leaf, the mean of its elements, 0-d (0 for an empty leaf). The trees are shaped like
        params."""

        def divide(total: Tensor, extent: Extent) -> Tensor:
            return total / max(extent.numel, 1)

        # By the whole leaf's number of elements: every rank divides the same sum by the same number
        sums = self.reduce(trees, "sum")
        return _one_or_all(tree_map(divide, tree, self.extents) for tree in sums)

    def norm(self, *trees: Tree) -> Any:
        """Per leaf, the Euclidean norm, 0-d."""
        return _one_or_all(self.reduce(trees, "norm"))

    def max(self, *trees: Tree) -> Any:
        """Per leaf, the largest element, 0-d (for an empty leaf -inf, or the smallest integer).

        Raises:
            TransformError: a leaf is complex, and has no order.
        """
        if any(leaf.is_complex() for leaf in optree.tree_leaves(trees)):
            raise TransformError(
                "across.max was asked of a complex leaf, whose elements have no order. Remedy: "
                "across.max(tree_map(torch.abs, tree))"
            )
        return _one_or_all(self.reduce(trees, "max"))

    # One number per tree

    def total(self, *trees: Tree) -> Any:
        """The sum over all elements of all leaves, one 0-d tensor."""
        return _one_or_all(self.totals([(tree,) for tree in trees]))

    def dot(self, a: Tree, b: Tree) -> Tensor:
        """The inner product of two trees, one 0-d tensor."""
        return self.dots((a, b))[0]

    def dots(self, *pairs: tuple[Tree, Tree]) -> tuple[Tensor, ...]:
        """The inner products of several pairs of trees, from one collective; no product of two
        trees is ever whole."""
        return self.totals(pairs)

    # Over some dims of each leaf, and back

    def sum_dim(self, tree: Tree, dim: Dim) -> Tree:
        """Per leaf, the sum over `dim` (one dim or several, all or none) of the full shape; those
        dims are gone.

        `dim` may be a function from a leaf's full shape to its dims, or to None: then the answer
        for that leaf is None.
        """
        return self.sum_dims((tree, dim))[0]

    def sum_dims(self, *questions: Question) -> tuple[Tree, ...]:
        """Several questions `(tree, dim)` of `sum_dim`, answered with one collective."""
        return self.reduce_dims(questions, "sum")

    def max_dim(self, tree: Tree, dim: Dim) -> Tree:
        """As `sum_dim`, the maximum (where there are no elements, -inf or the smallest integer)."""
        return self.max_dims((tree, dim))[0]

    def max_dims(self, *questions: Question) -> tuple[Tree, ...]:
        """Several questions `(tree, dim)` of `max_dim`, answered with one collective."""
        return self.reduce_dims(questions, "max")

    @abstractmethod
    def spread(self, tree: Tree, dim: Dim) -> Tree:
        """The inverse direction of `sum_dim`: its answers put back beside each element
        (broadcastable to the pieces).

        Leaves without an answer are None in `tree`, and in the result.
        """

    # Random numbers, as a function of seed, step, the leaf's path and the element's place in the
    # whole leaf: the same however leaves are cut, and without communication

    def normal(self, like: Tree, *, seed: Number, step: Number) -> Tree:
        """Numbers of the standard normal distribution, shaped like params or updates.

        They are drawn in float32, float64 or complex, and rounded to the leaf's dtype. See Note
        [random numbers by block] in `random_numbers`.

        Args:
            like: a tree shaped like params. None leaves stay None; values are not read.
            seed: an integer, or a 0-d integer tensor of the state. Another seed, another stream.
            step: the number of the step, such as a count in the state. The same seed and step draw
                the same numbers again.
        """
        return self._draw("normal", like, seed, step)

    def uniform(self, like: Tree, *, seed: Number, step: Number) -> Tree:
        """As `normal`, uniform in [0, 1). Rounding doesn't reach 1."""
        return self._draw("uniform", like, seed, step)

    def rademacher(self, like: Tree, *, seed: Number, step: Number) -> Tree:
        """As `normal`, -1 or 1, each half of the time."""
        return self._draw("rademacher", like, seed, step)

    def _draw(self, kind: Kind, like: Tree, seed: Number, step: Number) -> Tree:
        same_structure(self.extents, like, what=f"the tree of across.{kind}")
        draw = functools.partial(draw_leaf, kind, key_of(seed, step))
        return map_with_paths(draw, like, self.extents)

    # For chains and wrappers

    def dense(self, updates: Tree) -> Tree:
        """The updates with tensors in place of `Rows`, for whatever doesn't know these."""
        return updates

    @abstractmethod
    def select(self, mask: PyTree[bool]) -> Across:
        """An `across` for the leaves where `mask` is true; the others are None in every tree."""

    @abstractmethod
    def keep(self, state: Any, *passing: Tree) -> Any:
        """A state for later steps: its leaves that lie in the storage of `passing`, copied.

        Args:
            state: the new one, of a link of a chain.
            passing: the updates before and after it, and params. Later links may overwrite
                their storage.
        """

    # Primitives of the questions: at most one collective per call

    @abstractmethod
    def reduce(self, trees: Sequence[Tree], op: LeafOp) -> tuple[Tree, ...]:
        """For each tree, per leaf, the sum, maximum or norm of all its elements, 0-d, as
        `reduce_leaf` takes it of one whole leaf."""

    @abstractmethod
    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        """For each question, per leaf, the sum or maximum over its dims; None where not asked."""

    @abstractmethod
    def totals(self, products: Sequence[Factors]) -> tuple[Tensor, ...]:
        """For each tree, or product of two, the sum over all elements of all leaves, 0-d."""

    # Called by the transforms that `optim.base` makes

    @abstractmethod
    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        """Run a pointwise update."""

    def run_fused(
        self, fused: Fused, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree | None, Any]:
        """Run a pointwise update's kernel where it can run: it adds the updates to the params, and
        None are left to be added."""
        # In one process nothing is donated
        return self.run_pointwise(fused.plain, updates, state, params)

    def beside(self, state: Any, params: Tree) -> Any:
        """All of a transform's state beside its params, for functions that read it by themselves:
        it may lie elsewhere."""
        return state

    def init_whole(self, part: WholeLeaf, params: Tree) -> Any:
        """The state of a whole-leaf transform: a tree shaped like params of `Owned`."""
        leaves, treedef = optree.tree_flatten(params)
        states = self._init_leaves(part, leaves)
        return treedef.unflatten([Owned(state, i) for i, state in enumerate(states)])

    @abstractmethod
    def _init_leaves(self, part: WholeLeaf, leaves: list[Tensor]) -> Sequence[Any]:
        """The states of a whole-leaf transform, leaf by leaf, as they are here."""

    @abstractmethod
    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        """Run a whole-leaf update, each leaf at its owner."""

    @abstractmethod
    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        """The trees' whole leaves, on every rank; refused where one whole tree has over `limit`
        bytes."""

    @abstractmethod
    def cut(self, tree: Tree) -> Tree:
        """Of a tree of whole leaves, the elements that are here."""

    def init_whole_tree(self, init: Callable[[Tree], Any], params: Tree, limit: int) -> Any:
        """The state of a whole-tree transform."""
        return init(*self.gather([params], limit))

    def run_whole_tree(
        self, update: Callable[..., Any], trees: list[Tree], state: Any, limit: int
    ) -> tuple[Tree, Any]:
        """Run a whole-tree update. `trees`: the updates, and the params where it wants them."""
        # Every rank runs it on the same values, and so comes to the same result
        updates, *params = self.gather(trees, limit)
        made, new_state = update(updates, self.beside(state, trees[0]), *params)
        return self.cut(made), new_state

    def _per_leaf(
        self, answer: Callable[[Tensor, Extent, Shape], Tensor], tree: Tree, dim: Dim
    ) -> Tree:
        """Per leaf, `answer(leaf, extent, dims)`; None where the leaf is None, or is not asked."""

        # Mapped over the extents' structure: a leaf that is None in `tree` comes here, too
        def one(extent: Extent, leaf: Tensor | None) -> Tensor | None:
            dims = dims_of(dim, extent.shape)
            return None if leaf is None or dims is None else answer(leaf, extent, dims)

        return tree_map(one, self.extents, tree)


def _one_or_all(answers: Iterable[Any]) -> Any:
    """The answer about one tree, or a tuple of the answers about several."""
    found = tuple(answers)
    return found[0] if len(found) == 1 else found


class Refusing:
    """The `across` of a pointwise transform: it refuses every question. Chains and wrappers call
    the rest: all there is lies beside the params, is dense, and is run as it is."""

    def dense(self, updates: Tree) -> Tree:
        return updates

    def beside(self, state: Any, params: Tree) -> Any:
        return state

    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return part.update(updates, state, params)

    def __getattr__(self, question: str) -> NoReturn:
        raise TransformError(
            f"a pointwise transform asked across.{question}, so it isn't pointwise. "
            "Remedy: make it with optim.with_statistics"
        )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over tensors of this one: itself, float32 for the half precisions, and
    int64 for integers and bools, as torch's own."""
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    # In bool a sum says whether any is true, and in a narrow integer it wraps around: on a rank
    # otherwise than of the whole leaf
    return dtype if dtype.is_complex else torch.int64


def reduced_dtype(dtype: torch.dtype, op: DimOp) -> torch.dtype:
    """The dtype of sums, or of maxima, over tensors of this one."""
    return sum_dtype(dtype) if op == "sum" else dtype


def widest_dtype(tensors: Iterable[Tensor], least: torch.dtype = torch.bool) -> torch.dtype:
    """The dtype to which torch promotes the tensors' together, `least` among them."""
    return functools.reduce(torch.promote_types, dict.fromkeys(x.dtype for x in tensors), least)


def smallest(dtype: torch.dtype) -> float:
    """The maximum of no elements: -inf, or the smallest of the integers or bools."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def reduce_leaf(x: Tensor, op: LeafOp) -> Tensor:
    """All elements of a tensor in one, 0-d; the maximum of none is `smallest`."""
    # Of no elements torch has no maximum
    if op == "max":
        return x.max() if x.numel() else x.new_full((), smallest(x.dtype))
    # Half-precision squares would overflow, so sums and norms are taken in float32 at least
    if op == "norm":
        norm: Tensor = torch.linalg.vector_norm(x, dtype=sum_dtype(x.dtype))
        # Of one element torch takes no square. Ranks add squares, so that a norm whose square
        # overflows, or is lost below the smallest number, must do so in one process, too.
        return norm.square().sqrt()
    return x.sum(dtype=sum_dtype(x.dtype))


def reduce_over(x: Tensor, dims: Shape, op: DimOp) -> Tensor:
    """The sum or maximum of a tensor over these dims; a copy where there are none, of which torch
    would take all."""
    dtype = reduced_dtype(x.dtype, op)
    if not dims:
        return x.to(dtype, copy=True)
    if op == "sum":
        return x.sum(dims, dtype=dtype)
    # Of no elements torch has no maximum
    return x.amax(dims) if x.numel() else x.new_full(without((*x.shape,), dims), smallest(dtype))


def norms_of(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each leaf, whose square may be out of range, from one kernel per dtype."""
    leaves = [elements(leaf) for leaf in leaves]
    norms = list(leaves)
    for dtype, positions in grouped((leaf.dtype, i) for i, leaf in enumerate(leaves)).items():
        own = torch._foreach_norm([leaves[i] for i in positions], dtype=sum_dtype(dtype))
        for i, norm in zip(positions, own, strict=True):
            norms[i] = norm
    return norms


def sums_of(factors: Factors) -> list[Tensor]:
    """Leaf by leaf, the sum of the elements of a tree, or of the product of two, 0-d."""

    # A product lives for one leaf, so the peak is that of the largest
    def sum_leaf(a: Tensor, *b: Tensor) -> Tensor:
        if b:
            # Products of half precision would overflow before they are summed
            a = a.to(sum_dtype(a.dtype)) * b[0]
        # The sum of one number is that number
        return reduce_leaf(a, "sum") if a.ndim else a.to(sum_dtype(a.dtype))

    sums: list[Tensor] = optree.tree_leaves(tree_map(sum_leaf, *factors))
    return sums


def total_of(sums: Sequence[Tensor]) -> Tensor:
    """The sum of 0-d tensors, in the widest of their dtypes, 0-d."""
    if not sums:
        return torch.zeros((), device="cpu")  # float32, on the CPU: no leaf says otherwise
    # One kernel over all of them, in the leaves' order: equal sums give equal bits on every rank
    dtype = widest_dtype(sums)
    return torch.stack([x.to(dtype) for x in sums]).sum()


def dims_of(dim: Dim, shape: Shape) -> Shape | None:
    """The dims, in order, that `dim` names in a tensor of this shape, or None where a function
    `dim` answers None."""
    named = dim(shape) if callable(dim) else dim
    if named is None:
        return None
    dims: set[int] = set()  # counted from the front
    for d in named if isinstance(named, tuple) else (named,):
        from_the_front = d if d >= 0 else d + len(shape)
        if from_the_front in dims or not 0 <= from_the_front < len(shape):
            raise ValueError(
                f"expected distinct dims of a leaf of shape {shape}, got {named}. Remedy: a "
                "function from a leaf's full shape to its dims, or to None where it is not asked"
            )
        dims.add(from_the_front)
    return tuple(sorted(dims))


def without(shape: Shape, dims: Shape) -> Shape:
    """`shape` with `dims` gone: the shape of `sum_dim`'s answer."""
    return tuple(size for d, size in enumerate(shape) if d not in dims)


def with_ones(shape: Shape, dims: Shape) -> Shape:
    """`shape` with 1 for `dims`: in it an answer of `sum_dim` broadcasts to the leaf."""
    return tuple(1 if d in dims else size for d, size in enumerate(shape))


def state_elsewhere(part: WholeLeaf, leaf: Tensor, extent: Extent) -> Any:
    """A leaf's state where another rank owns it: tensors of shape (0,), on the devices that they
    have at the owner."""
    # A meta tensor: the author's `init` runs for its structure and dtypes, and takes no memory
    whole = torch.empty(extent.shape, dtype=leaf.dtype, device="meta")

    # As at the owner: counts that `init` makes on the CPU are there on every rank, and go from rank
    # to rank by the same backend
    def empty(x: Tensor) -> Tensor:
        return x.new_empty(0, device=leaf.device if x.is_meta else x.device)

    return tree_map(empty, part.init(whole))


class Updated(NamedTuple):
    """One leaf after its whole-leaf update."""

    update: Tensor  # whole
    state: Any


def run_batch(
    part: WholeLeaf, updates: Sequence[Tensor], states: Sequence[Any], params: Sequence[Tensor]
) -> list[Updated]:
    """Run a whole-leaf update on some leaves, of one shape; on one leaf, unless it takes batches.

    Args:
        updates: whole leaves.
        states: theirs.
        params: likewise; not looked at where the update wants none.
    """
    given = (updates, states, params) if part.wants_param else (updates, states)
    if not part.batched:
        return [Updated(*part.update(*(column[0] for column in given)))]

    def stack(*leaves: Tensor) -> Tensor:
        return torch.stack(leaves)

    # (k, *shape) for k leaves, and so is each leaf of the states
    made, after = part.update(*(tree_map(stack, *column) for column in given))
    updated = []
    for k, update in enumerate(made.unbind()):
        # Copies, since a view would keep the states of the whole batch alive
        updated.append(Updated(update, tree_map(lambda leaf, k=k: leaf[k].clone(), after)))
    return updated


def note_leaves(error: Exception, paths: Sequence[str]) -> None:
    """Note of which leaves the update was, in an author's function, that failed."""
    error.add_note(f"Raised by the update of {first_few(paths, 3)}.")


def check_limit(extents: Sequence[Extent], leaves: Sequence[Tensor], limit: int) -> None:
    """Refuse a tree too large to be gathered.

    Args:
        extents: for the sizes of the whole leaves.
        leaves: the tree's, whole or in pieces, for their dtypes.
        limit: the most bytes of the whole tree.
    """
    # By full shapes, so that all ranks refuse or none does
    size = 0  # bytes
    for extent, leaf in zip(extents, leaves, strict=True):
        size += extent.numel * leaf.element_size()
    if size > limit:
        raise TransformError(
            f"a whole-tree transform was given a tree of {size} bytes, above its limit of {limit}. "
            "Remedy: use a per-leaf variant, or raise `limit` if every rank can hold that much"
        )
