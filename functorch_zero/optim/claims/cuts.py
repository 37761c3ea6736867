"""The cut test: a transform makes the same of whole leaves and of the same elements cut otherwise.

On ranks a transform runs on 1-D pieces of leaves, and a pointwise one on any regrouping of them. So
its own work, beside the answers of `across`, may not depend on a leaf's shape, size, position or
path. Nor may it depend on the leaves' order or number, on their strides, or on how often it has
been called.

Note [later counters]: a transform that changes its ways at a later step, by a counter in its state,
does as it should in the first steps. So a test ends with two late ones: the counters in the state
are moved on before them, for every cut alike. One that was 0 at first is moved by `LATER`, and then
to 2 `LATER` - 1, where every period up to 16 ends: there some do their periodic work, and others at
its beginning, as in step 0. Counters are 0-d integers, and 0-d floats that a step has raised by
one. Some transforms can't run so late: a table of learning rates, say, has no row for that step.
One that fails then, on whole leaves, too, is tested again with its counters as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import optree
import torch
from optree import tree_map
from torch import Tensor

from ...errors import TransformError
from ...tree import check_savable, paths
from ..across import Tree
from ..base import Transform
from ..local import Local
from .operators import OperatorWatch

# A multiple of 1 to 16, so that the work of every 10th step, say, comes when it would have come
LATER = 720_720

ROWS_REMEDY = (
    "let each row of the results depend on that row alone: a mean over its columns is x.mean(1). "
    "Make the transform with optim.with_whole_leaves, if it needs several rows at once"
)
CUT_REMEDY = (
    "let each result depend on the values at its own position only, and keep in other state what "
    "all ranks have. For some of the leaves, by path or by whole shape, use optim.masked or "
    "optim.partition. A leaf's whole shape is in across.extents, and sums are asked of across: "
    "make the transform with optim.with_statistics"
)


# The round-off allowed, relative to a leaf's largest value: kernels compute a tensor's last few
# elements in another way, a sigmoid's, say
ROUND_OFF = {torch.float64: 1e-12, torch.float32: 1e-5}


def _flatten(made: list[Tensor], whole: list[Tensor]) -> Sequence[Tensor]:
    return [x.reshape(-1) for x in made]


class TrialCut(NamedTuple):
    """A way to hold the elements of a tree."""

    on: str  # the kind of leaves, for errors
    of: Callable[[Tree], Any]  # from a tree of whole leaves to a tree in this form
    # From the updates of such leaves, and those of whole leaves, to flattened leaves
    flattened: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]] = _flatten


def middle(numel: int) -> int:
    """Where a leaf is cut in two: inside it, if it has two elements, and near its beginning, so
    that a piece is small whatever the leaf."""
    # A single element goes to the first piece, and the second is empty
    return min((numel + 1) // 3, 7) if numel != 1 else 1


# Pieces are copies, since no rank holds another one's


def _first_piece(x: Tensor) -> Tensor:
    return x.reshape(-1)[: middle(x.numel())].clone()


def _second_piece(x: Tensor) -> Tensor:
    return x.reshape(-1)[middle(x.numel()) :].clone()


def _join(tree: Tree) -> Tensor:
    """All leaves as one, the last one first."""
    # Neither their order nor their number nor their shapes are those of the tree
    return torch.cat([x.reshape(-1) for x in reversed(optree.tree_leaves(tree))])


def _split(joined: list[Tensor], whole: list[Tensor]) -> Sequence[Tensor]:
    """The inverse of `_join`."""
    (flat,) = joined
    split: list[Tensor] = list(flat.split([x.numel() for x in reversed(whole)]))
    return split[::-1]


def _laid_out(x: Tensor) -> Tensor:
    """A tensor's values in memory of another order, with gaps, as a view that has been written
    to."""
    strides, step = [], 2
    for size in x.shape:
        strides.append(step)
        step *= max(size, 1)
    view = x.new_zeros(1 + step).as_strided(x.shape, strides, 1)
    return view.copy_(x)


WHOLE = TrialCut("whole leaves", lambda tree: tree)
FIRST_PIECES = TrialCut("1-D pieces", lambda tree: tree_map(_first_piece, tree))
SECOND_PIECES = TrialCut("1-D pieces", lambda tree: tree_map(_second_piece, tree))
SOME_ROWS = TrialCut("some rows", lambda tree: tree_map(lambda x: x[: middle(len(x))], tree))
OTHER_ROWS = TrialCut("some rows", lambda tree: tree_map(lambda x: x[middle(len(x)) :], tree))
LAID_OUT = TrialCut("whole leaves with other strides", lambda tree: tree_map(_laid_out, tree))
JOINED = TrialCut("all leaves joined to one", lambda tree: {"": _join(tree)}, _split)


class _Made(NamedTuple):
    """The results of one step."""

    updates: list[Tensor]  # the leaves
    state: Any  # as the author's function returned it


def difference_of(expected: Tensor, got: Tensor) -> str | None:
    """The first difference that is not round-off."""
    # Nearly always: the same operators on the same values
    if expected.dtype == got.dtype and torch.equal(expected, got):
        return None
    # The bound goes by the coarser of both dtypes, and by the leaf's largest finite value
    dtypes = {expected.dtype, got.dtype}
    bound = 0.0  # of the difference, for integers
    if all(dtype.is_floating_point for dtype in dtypes):
        relative = max(ROUND_OFF.get(d, 4 * torch.finfo(d).eps) for d in dtypes)
        largest = expected.double().nan_to_num(0, 0, 0).abs().max()
        bound = relative * float(largest)
    # In float64, so that the comparison itself rounds nothing
    close = torch.isclose(expected.double(), got.double(), 0, bound, equal_nan=True)
    if bool(close.all()):
        return None
    i = int(close.reshape(-1).logical_not().nonzero()[0])
    want, have = expected.reshape(-1)[i].item(), got.reshape(-1)[i].item()
    return f"element {i} is {want} and {have}"


@dataclass(frozen=True)
class CutTest:
    """The cut test of one transform on one tree.

    Attributes:
        params: whole leaves.
        updates: those of each step, like params; the last ones come twice, in late steps. See Note
            [later counters].
        compare: `(expected, got)` to their difference, None where there is none.
        operators: whether the watch sees each operator, too, on some pieces.
        across_of: the `across` of a run, which begins anew with the first of `pieces`; None: that
            of one process, for transforms that ask nothing.
        pieces: the two cuts whose results, one behind the other, are to be those of whole leaves.
        others: those whose results alone are to be.
        remedy: where they aren't.
    """

    transform: Transform
    params: Tree
    updates: Sequence[Tree]
    compare: Callable[[Tensor, Tensor], str | None] = difference_of
    operators: bool = False
    across_of: Callable[[TrialCut], Any] | None = None
    pieces: tuple[TrialCut, TrialCut] = (FIRST_PIECES, SECOND_PIECES)
    others: Sequence[TrialCut] = ()
    remedy: str = CUT_REMEDY

    @cached_property
    def watch(self) -> OperatorWatch:
        """It sees the runs, and refuses."""
        return OperatorWatch(name_of(self.transform))

    def check(self) -> None:
        """Raise `TransformError` unless the results are the same for all cuts."""
        try:
            self._check(late=True)
        except Exception as error:  # an author's function may raise anything
            # A refusal stands; a failure counts if whole leaves alone would have run so late
            if is_refusal(error) or self._runs_late_on_whole_leaves():
                raise
            self._check(late=False)  # it has no late step, see Note [later counters]

    def _runs_late_on_whole_leaves(self) -> bool:
        """Whether the transform itself runs at later steps, whatever it does on pieces."""
        try:
            self._run(WHOLE, late=True)
        except Exception:
            return False
        return True

    def _check(self, *, late: bool) -> None:
        """`late`: whether counters are moved on; see Note [later counters]."""
        first_pieces, second_pieces = self.pieces
        # First pieces come first: the other runs are given their answers of `across`. Operators are
        # watched there, since they tell the author's line
        first = self._run(first_pieces, late=late, operators=self.operators)
        whole = self._run(WHOLE, late=late)
        second = self._run(second_pieces, late=late)
        # Step by step: one piece behind the other is the leaf, flattened
        for made, a, b in zip(whole, first, second, strict=True):
            self._compare_updates(made, [*map(_concatenate, a.updates, b.updates)], first_pieces)
            self._compare_states(made.state, a.state, b.state)
        for cut in self.others:
            try:
                others = self._run(cut, late=late)
            except Exception as error:
                # It may well refuse leaves with other strides, by a view of them
                if cut is LAID_OUT and not is_refusal(error):
                    continue
                raise
            for made, other in zip(whole, others, strict=True):
                self._compare_updates(made, cut.flattened(other.updates, made.updates), cut)

    def _run(self, cut: TrialCut, *, late: bool, operators: bool = False) -> list[_Made]:
        """All steps on one cut."""
        params = cut.of(self.params)
        # A new `across` per run, since it counts the questions
        across = self.across_of(cut) if self.across_of else Local(params)
        with self.watch.running(cut.on, operators=operators, params=params):
            state = self.transform.init_fn(params, across)
        check_savable(state, "the optimizer's state")
        # As many leaves in every later step, or a checkpoint's paths would change
        num_in_state = optree.tree_structure(state).num_leaves
        made: list[_Made] = []
        before = state
        for move, whole_updates in self._steps(late=late):
            updates = cut.of(whole_updates)
            if move:
                state = _at_a_later_step(state, before, move)
            before = state
            given = {"updates": updates, "state": state, "params": params}
            with self.watch.running(cut.on, operators=operators, **given):
                new, state = self.transform.update_fn(updates, state, params, across)
            # Structures first: the comparison goes leaf by leaf
            self._check_number("state", state, num_in_state)
            self._check_number("updates", new, optree.tree_structure(updates).num_leaves)
            self._check_shapes(new, updates, cut)
            made.append(_Made(optree.tree_leaves(new), state))
        return made

    def _steps(self, *, late: bool) -> list[tuple[int, Tree]]:
        """The updates of each step, and what counters are moved on by before it; see Note [later
        counters]."""
        steps = [(0, updates) for updates in self.updates]
        if late:
            num, last = len(steps), self.updates[-1]
            steps[-1:] = [(LATER, last), (LATER - num - 1, last)]
        return steps

    def _check_number(self, name: str, tree: Any, expected: int) -> None:
        num = optree.tree_structure(tree).num_leaves
        if num != expected:
            story = f"returns {name} of {num} leaves where {expected} are expected"
            self.watch.refuse(story, "keep the structure")

    def _check_shapes(self, new: Any, updates: Tree, cut: TrialCut) -> None:
        rows = zip(optree.tree_leaves(new), optree.tree_leaves(updates), strict=True)
        for i, (x, update) in enumerate(rows):
            if isinstance(x, Tensor) and x.shape == update.shape:
                continue
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x)}"
            story = f"expected shape {tuple(update.shape)}, got {got}"
            self._refuse(f"updates of leaf {paths(updates)[i] or '(root)'}", cut, story)

    def _compare_updates(self, whole: _Made, others: Sequence[Tensor], cut: TrialCut) -> None:
        """`others`: flattened leaves, of this cut."""
        for i, (x, y) in enumerate(zip(whole.updates, others, strict=True)):
            if difference := self.compare(x.reshape(-1), y):
                path = paths(self.params)[i] or "(root)"
                self._refuse(f"updates of leaf {path}", cut, difference)

    def _compare_states(self, whole: Any, first: Any, second: Any) -> None:
        """State that follows a leaf follows its pieces; all other state is the same for all."""
        rows = zip(*map(optree.tree_leaves, (whole, first, second)), strict=True)
        for i, (x, a, b) in enumerate(rows):
            # A whole tree's state is made of meta tensors here, without values to compare
            if not isinstance(x, Tensor) or x.device.type == "meta":
                continue
            # A count, or an answer of `across`: all ranks have it alike
            if x.shape == a.shape == b.shape:
                difference = self.compare(x, a) or self.compare(x, b)
            # It follows a leaf: each rank has the part for its piece
            elif x.numel() == a.numel() + b.numel():
                difference = self.compare(x.reshape(-1), _concatenate(a, b))
            else:
                got = f"{tuple(a.shape)} {tuple(b.shape)}"
                difference = f"expected shape {tuple(x.shape)}, got {got}"
            if difference:
                self._refuse(f"state {paths(whole)[i]}", self.pieces[0], difference)

    def _refuse(self, result: str, cut: TrialCut, difference: str) -> NoReturn:
        if self._changes_with_calls():
            self.watch.refuse(
                "is not a function: repeated on the same leaves, its updates are others. Something "
                "outside of its state changes, such as a count",
                "keep it in the state, which init makes and update returns",
            )
        self.watch.refuse(
            f"depends on how leaves are cut: the {result} of {cut.on} are not those of whole "
            f"leaves: {difference}",
            self.remedy,
        )

    def _changes_with_calls(self) -> bool:
        """Whether two runs on the same whole leaves differ."""
        try:
            once, again = self._run(WHOLE, late=False), self._run(WHOLE, late=False)
        except Exception:  # an author's function may raise anything
            # The difference that was found before is the error to tell then
            return False
        rows = zip(once, again, strict=True)
        return any(
            self.compare(x.reshape(-1), y.reshape(-1)) is not None
            for a, b in rows
            for x, y in zip(a.updates, b.updates, strict=True)
        )


def is_refusal(error: Exception) -> bool:
    """Whether a watch or an `across` refused something, rather than a run of the transform
    failed."""
    # The watch raises its refusals from nothing, and failures from the author's error
    cause = error.__cause__
    return isinstance(error, TransformError) and (
        cause is None or isinstance(cause, TransformError)
    )


def name_of(transform: Transform) -> str:
    """The transform's name; of a chain or wrapper, those of its parts. One that is not `named` has
    the qualified name of its author's update."""
    if transform.parts:
        return " + ".join(name_of(part) for part in transform.parts)
    # A bare `pointwise(...)` has no name that tells its author anything
    update = transform.hyperparams.get("update")
    if inspect.isfunction(update):
        return f"{update.__module__}.{update.__qualname__}"
    return transform.name or "a transform"


def _concatenate(first: Tensor, second: Tensor) -> Tensor:
    # 1-D: the pieces' elements in the leaf's order
    return torch.cat([first.reshape(-1), second.reshape(-1)])


def _at_a_later_step(state: Any, before: Any, later: int) -> Any:
    """The state with its counters, which have room for it, moved on.

    Args:
        before: the state that the last step was given.
    """

    def moved(x: Any, old: Any) -> Any:
        if type(x) is int:
            return x + later
        if not isinstance(x, Tensor) or x.ndim or x.is_meta:
            return x
        if x.is_floating_point():
            has_room = torch.finfo(x.dtype).eps * later < 0.5
            # From 1 on: the state of a 0-d param may well go from 0 to 1
            counts = has_room and bool(old >= 1) and bool(x == old + 1)
        else:
            counts = x.dtype in (torch.int32, torch.int64)
        return x + later if counts else x

    return tree_map(moved, state, before)
