"""`PretendedRank`: an `across` without a group, whose answers are the same however leaves are
cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch
from optree import tree_leaves, tree_map, tree_structure
from torch import Tensor

from ...errors import TransformError
from ...layout.extent import Extent
from ...tree import PyTree, paths
from ..across import (
    Dim,
    DimOp,
    Factors,
    LeafOp,
    Pointwise,
    Question,
    Refusing,
    Shape,
    Tree,
    WholeLeaf,
    run_batch,
    state_elsewhere,
    with_ones,
)
from ..local import Local
from ..random_numbers import Kind, Number
from ..shapes_only import ShapesOnly
from .cuts import FIRST_PIECES, SECOND_PIECES, WHOLE, TrialCut, middle
from .operators import OperatorWatch

T = TypeVar("T")  # an answer

# Few enough for milliseconds per transform
MOST = 4096  # elements that are tried of a leaf
CORNER = 4  # elements per dim of a leaf on which a whole-leaf function is repeated


def block_of(shape: Shape) -> Shape:
    """The shape of a block of a tensor's first elements: all of them, or at most `MOST`. They are
    elements [0, numel) of the flattened tensor, as an `Extent` needs them."""
    block: Shape = ()
    size = 1  # elements of a row of the block, so far
    for length in reversed(shape):
        # From the last dim on: whole rows, as many as there is room for
        block = (min(length, max(MOST // max(size, 1), 1)), *block)
        size *= block[0]
    return block


_OTHER_QUESTIONS = "asks across for other things on some pieces of leaves than on others"
_SAME_QUESTIONS = "ask the same questions on every rank"


REPEAT_REMEDY = (
    "draw random numbers from a torch.Generator, seeded by a number in the state, and keep nothing "
    "outside of the state"
)
WRITE_REMEDY = "make new tensors, and let the update say how the param moves"
BATCH_REMEDY = (
    "the first dim counts leaves, so take sums and norms over the others: u.flatten(1).norm(dim=1)"
)
# Of an update's largest element: what half precisions, in another order, may make of it
ROUNDED = 0.1


class _Answer(NamedTuple):
    """A question that the first rank has asked, and the answer."""

    question: tuple[Any, ...]  # its name, and the facts about it that are the same on every rank
    answer: Any


class PretendedRank(ShapesOnly):
    """The `across` of a rank that holds a block of each leaf, or one of its pieces, and owns none.

    Its answers have the shapes and dtypes of real ones. Sums are those of the first rank, written
    to `answers` for the others; sums over dims are ones. Each question is a collective, so the
    others must ask what the first rank has asked, in its order.

    Args:
        tree: of full leaves; only their shapes are read.
        cut: `FIRST_PIECES` for the first rank, `SECOND_PIECES`, or `WHOLE` for the blocks as they
            are.
        watch: that of the transform, which pauses while an answer is made.
        answers: the first rank's questions and the answers, which it writes there.
        tried: the whole leaves that authors' functions have been tried with, by author, shape and
            dtype, to which it adds.
    """

    def __init__(
        self,
        tree: Tree,
        cut: TrialCut,
        watch: OperatorWatch,
        answers: list[_Answer],
        tried: set[Any],
    ):
        # The full shape, which decisions go by, and the range that this rank has of the block
        def here(leaf: Tensor) -> Extent:
            numel = math.prod(block_of(leaf.shape))
            start = middle(numel) if cut is SECOND_PIECES else 0
            stop = middle(numel) if cut is FIRST_PIECES else numel
            return Extent(tuple(leaf.shape), start, stop)

        self.extents = tree_map(here, tree)
        self._is_whole, self._watch, self._answers = cut is WHOLE, watch, answers
        self._tried = tried
        # None: this is the first rank, which asks; the others iterate over a copy
        self._told = None if cut is FIRST_PIECES else iter([*answers])
        # An author's `init` may be slow, and runs once for all leaves of a kind
        self._states: dict[Any, Any] = {}  # that others own, by author, shape and dtype

    def _answer(self, question: tuple[Any, ...], ask: Callable[[], T]) -> T:
        """The first rank's answer to a question: the first rank asks and notes it, the others must
        ask the same."""
        # An answer's own sums are no operators of the author
        with self._watch.paused():
            if self._told is None:
                answer = ask()
                self._answers.append(_Answer(question, answer))
            else:
                asked, answer = next(self._told, _Answer((), ()))
                # On real ranks these would be two different collectives: a hang, or wrong numbers
                if asked != question:
                    raise TransformError(f"it {_OTHER_QUESTIONS}. Remedy: {_SAME_QUESTIONS}")
            # Clones: an author may write over an answer, and another rank gets it next
            copy: T = tree_map(torch.clone, answer)
            return copy

    def _ask(self, *question: Any) -> None:
        """A question whose answer isn't compared, since any will do."""
        self._answer(question, tuple)

    def check_all_asked(self) -> None:
        """Refuse the transform if the first rank has asked more."""
        if self._told is not None and next(self._told, None) is not None:
            self._watch.refuse(_OTHER_QUESTIONS, _SAME_QUESTIONS)

    def reduce(self, trees: Sequence[Tree], op: LeafOp) -> tuple[Tree, ...]:
        question = "reduce", op, _num_leaves(trees)
        return self._answer(question, lambda: Local.reduce(self, trees, op))

    def totals(self, products: Sequence[Factors]) -> tuple[Tensor, ...]:
        question = "totals", _num_leaves(products)
        return self._answer(question, lambda: Local.totals(self, products))

    def reduce_dims(self, questions: Sequence[Question], op: DimOp) -> tuple[Tree, ...]:
        self._ask("reduce_dims", op, _num_leaves([tree for tree, _ in questions]))
        with self._watch.paused():
            return super().reduce_dims(questions, op)

    def spread(self, tree: Tree, dim: Dim) -> Tree:
        def spread_one(x: Tensor, extent: Extent, dims: Shape) -> Tensor:
            full = x.reshape(with_ones(extent.shape, dims)).expand(extent.shape)
            shape = block_of(extent.shape)
            # In new memory: an author may write over an answer
            block = full[tuple(map(slice, shape))].reshape(-1).clone()
            # Whole leaves keep their dims, pieces are 1-D
            return block.view(shape) if self._is_whole else block[extent.in_leaf]

        with self._watch.paused():
            return self._per_leaf(spread_one, tree, dim)

    def _draw(self, kind: Kind, like: Tree, seed: Number, step: Number) -> Tree:
        # Read before the pause: a seed made of values of leaves is refused
        numbers = index(seed), index(step)
        with self._watch.paused():
            return super()._draw(kind, like, *numbers)

    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return updates, state  # checked on its own

    def _init_leaves(self, part: WholeLeaf, leaves: list[Tensor]) -> Sequence[Any]:
        self._ask("init_whole", len(leaves))
        # As a rank that owns none of them: tensors of shape (0,)
        states = []
        for leaf, extent in zip(leaves, tree_leaves(self.extents), strict=True):
            kind = part, extent.shape, leaf.dtype
            if kind not in self._states:  # else made for a leaf like this one
                with self._watch.paused():
                    self._states[kind] = state_elsewhere(part, leaf, extent)
            states.append(self._states[kind])
        return states

    def run_whole(
        self, part: WholeLeaf, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        self._ask("run_whole", _num_leaves([updates]))
        if self._is_whole:
            rows = zip(paths(updates), tree_leaves(updates), tree_leaves(params), strict=True)
            for path, update, param in rows:
                kind = part, update.shape, update.dtype
                if kind not in self._tried:
                    self._tried.add(kind)
                    self._check_whole_leaf(part, path, update, param)
        return tree_map(torch.clone, updates), state

    def _check_whole_leaf(self, part: WholeLeaf, path: str, update: Tensor, param: Tensor) -> None:
        """Refuse an author's function that makes another update of the same arguments: by random
        numbers, say, that ranks draw in another order; or beside another leaf in a batch. And
        one that writes to the param."""
        # A corner of the leaf: some functions take the cube of its elements
        corner = tuple(slice(CORNER) for _ in param.shape)
        writes = False  # to the param

        def run(*factors: float) -> Tensor:
            """Two updates of the corner, the second of the first one's state, beside those of its
            multiples."""
            factors = 1, *factors
            own = [factor * param[corner] for factor in factors]
            states = [part.init(leaf) for leaf in own]
            made = []
            for _ in range(2):
                updated = run_batch(
                    part, [factor * update[corner] for factor in factors], states, own
                )
                states = [new.state for new in updated]
                made.append(updated[0].update)
            nonlocal writes
            writes = writes or not torch.equal(own[0], param[corner])
            return torch.stack(made).nan_to_num()

        with self._watch.paused():
            try:
                first, second = run(), run()
            except Exception:  # the leaf here may be a block of one, or its state an empty one
                return
            # Beside one so large that a mixture of both is no rounding, but no larger: a right
            # function, too, may fail on a leaf whose numbers are far from 1
            beside = run(-10.0) if part.batched else first
        # Ranks hold some leaves whole, as one process does, and copies of the others: written to in
        # one place, and not in the other
        if writes:
            self._watch.refuse(f"changes its input in place: param of leaf {path}", WRITE_REMEDY)
        if not torch.equal(first, second):
            story = f"is not a function: repeated, its update of leaf {path} is another one"
            self._watch.refuse(story, REPEAT_REMEDY)
        if first.numel() and bool((beside - first).abs().max() > ROUNDED * first.abs().max()):
            story = f"makes another update of leaf {path} in a batch of two than alone"
            self._watch.refuse(story, BATCH_REMEDY)

    def gather(self, trees: list[Tree], limit: int) -> list[Tree]:
        self._ask("gather", _num_leaves(trees))
        return super().gather(trees, limit)

    def init_whole_tree(self, init: Callable[[Tree], Any], params: Tree, limit: int) -> Any:
        # Whole trees may be treated in any way
        with self._watch.paused():
            return super().init_whole_tree(init, params, limit)

    def run_whole_tree(
        self, update: Callable[..., Any], trees: list[Tree], state: Any, limit: int
    ) -> tuple[Tree, Any]:
        self._ask("run_whole_tree", _num_leaves(trees))
        # As in `run_whole`: shapes are all that the rest of a chain sees
        return tree_map(torch.clone, trees[0]), state


def _num_leaves(trees: Sequence[Any]) -> list[int]:
    """The number of leaves of each tree, or product of two."""
    return [tree_structure(tree).num_leaves for tree in trees]


class Silent(Refusing):
    """The `across` of a transform that says it is pointwise but looks at paths or shapes: it
    refuses every question."""

    def __init__(self, across: PretendedRank):
        # Asked by chains, masks and labels rather than by the author of an update
        self.extents, self.keep = across.extents, across.keep
        self._across = across

    def run_pointwise(
        self, part: Pointwise, updates: Tree, state: Any, params: Tree
    ) -> tuple[Tree, Any]:
        return self._across.run_pointwise(part, updates, state, params)

    def select(self, mask: PyTree[bool]) -> Silent:
        return Silent(self._across.select(mask))
