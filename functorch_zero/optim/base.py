"""Transforms: a pure `init`/`update` pair, and the part of a tensor that it must see (`needs`).

Every update has the one signature `(updates, state, params, across) -> (updates, state)`. The five
constructors lift an author's functions to it, once; whatever runs differently on pieces goes
through `across`, so nothing here knows that ranks exist. Masked-out and frozen leaves are None in
every tree, which optree skips.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError, TransformError
from ..in_a_loss import refuse_update
from ..params import engine_of
from ..tree import (
    check_savable,
    copied_if_in,
    dtensor_class,
    is_dtensor,
    named_leaves,
    same_structure,
    storages,
    trained_leaves,
)
from .across import Across, Fused, Pointwise, Refusing, Shape, Tree, WholeLeaf
from .apply_updates import apply_whole
from .arguments import check_is_transform, check_number, check_takes
from .arithmetic import Number
from .leaf_forms import in_forms, refuse_complex
from .local import Local
from .naming import Named, named
from .state_checks import check_opt_state, note_other_dtype, outline_of
from .touched_rows import init_by_rows, name_of, update_by_rows

# An author's functions; the constructors below say which arguments they take
Init = Callable[..., Any]
Update = Callable[..., tuple[Any, Any]]
# From the number of steps before this one, 0-d int64, to a number or a 0-d tensor; its `double()`
# keeps torch from computing in float32
Schedule = Callable[[Tensor], Any]
NumberOrSchedule = Number | Schedule  # of a hyperparameter, as optax's ScalarOrSchedule


class Needs(enum.IntEnum):
    """The part of a tensor that a transform must see, from least to most."""

    POINTWISE = 0
    """Each element's own values."""
    STATISTICS = 1
    """Sums over a leaf, over some dims of it, or over all leaves, asked of `across`."""
    WHOLE_ROWS = 2
    """A whole row of a tensor at a time, of those whose gradient isn't all zeros."""
    WHOLE_LEAF = 3
    """A whole tensor at a time."""
    WHOLE_TREE = 4
    """Everything at once."""


@dataclass(frozen=True, repr=False, eq=False)
class Transform(Named):
    """A pure part of an optimizer. Make one with the constructors below rather than directly.

    It prints as the call that made it, of the innermost constructor or the outermost factory that
    is `named`.

    Attributes:
        init_fn: `init` with `across`.
        update_fn: `update` with `across`. Vectors of its own state may lie in a place, from where
            `across.beside` brings them.
        needs: the part of a tensor that it must see.
        parts: of a chain or wrapper, the transforms inside, for whoever checks them.
        plain: the same as functions of any grouping of the leaves, if it is pointwise and treats
            all leaves alike.
        fused: the same as one kernel, params included; then there is `plain`, too.
        ending: of a chain or wrapper with a kernel in its last part, its `update_and_add`.
        takes_rows: whether updates may have `Rows` in place of tensors; else they are made dense.
    """

    init_fn: Callable[[Tree, Across], Any]
    update_fn: Callable[[Tree, Any, Tree, Across], tuple[Tree, Any]]
    needs: Needs
    parts: tuple[Transform, ...] = ()
    plain: Pointwise | None = None
    fused: Fused | None = None
    ending: Callable[..., tuple[Tree | None, Any]] | None = None
    takes_rows: bool = field(default=False, kw_only=True)
    # Outlines of (params, state) that belong together, of one process; few, often one
    known: list[Any] = field(default_factory=list, init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.needs, Needs):
            raise TypeError(
                f"a transform must say what it needs: expected a Needs, got {self.needs!r}. "
                "Remedy: make it with optim.pointwise, with_statistics, with_whole_rows, "
                "with_whole_leaves or with_whole_tree"
            )

    def init(self, params: Tree, across: Across | None = None) -> Any:
        """The first state, of the trained leaves of params.

        Without `across`, the params are a program's: a sharded tree, whose engine answers, or whole
        leaves of which those with `requires_grad` are trained. With it, they are the leaves that
        the transform is to see, None where frozen.
        """
        if across is not None:
            return self.init_fn(params, across)
        refuse_update("an optimizer's init was called")
        # A sharded tree brings its engine, which calls `init_fn` with this rank's pieces
        engine = engine_of(params)
        if engine is not None:
            return engine.init(self, params)
        _refuse_dtensors(params)
        # One process: whole leaves, None where frozen, and no state hangs on the params' graph
        view = trained_leaves(params)
        state = self.init_fn(view, Local(view))
        check_savable(state, "the optimizer's state")
        self._remember(outline_of((view, state)))
        return state

    def update(
        self,
        updates: Tree,
        state: Any,
        params: Tree,
        across: Across | None = None,
    ) -> tuple[Tree, Any]:
        """New updates, from gradients or the updates of the transform before, and the next state.

        `across`: as in `init`. Without it, no argument is written to.
        """
        if across is not None:
            updates = updates if self.takes_rows else across.dense(updates)
            return self.update_fn(updates, state, params, across)
        refuse_update("an optimizer's update was called")
        # As in `init`: pieces on a rank, whole leaves in one process
        engine = engine_of(updates, params)
        if engine is not None:
            return engine.update(self, updates, state, params)
        return self._update_whole(updates, state, params)

    def _update_whole(self, updates: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        """`update` of a program's whole trees."""
        _refuse_dtensors(params)
        # A frozen leaf has no update; in `view` it has no param either
        with torch.no_grad():
            try:
                view = tree_map(_where_given, updates, params, none_is_leaf=True)
            except ValueError:
                # In our words: where they differ, and what to do
                remedy = "pass the params that the gradients are of"
                same_structure(
                    updates, params, what="the tree of params", none_is_leaf=True, remedy=remedy
                )
                raise
            across = Local(view)
            self.check_whole(state, view, what="the optimizer's state")
            try:
                new, after = self.update_fn(updates, state, view, across)
            except Exception as error:
                note_other_dtype(error, partial(self.init_on_meta, view), state)
                raise
            # The caller may write to these trees later; a state must not follow
            return new, copied_if_in(after, updates, new, view)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel may run in `update_and_add`."""
        return self.fused is not None or self.ending is not None

    def update_and_add(
        self, updates: Tree, state: Any, params: Tree, across: Across
    ) -> tuple[Tree | None, Any]:
        """As `update`, of an optimizer's last part: kernels add their updates to the params.
        Returns the updates that are left to be added, None where a kernel has added them all, and
        the next state."""
        # Both take rows
        if self.ending is not None:
            return self.ending(updates, state, params, across)
        if self.fused is not None:
            return across.run_fused(self.fused, updates, state, params)
        return self.update(updates, state, params, across)

    def check_whole(self, state: Any, params: Tree, *, what: str) -> None:
        """Raise unless `init` makes such a state of these params, in one process: another
        transform's may have the same leaves, and another net's be broadcast.

        An `init` that can't run on the meta device can't tell.

        Args:
            state: the one to check.
            params: the trained leaves, None elsewhere.
            what: the state's name, for the error.
        """
        outline = outline_of((params, state))
        if outline in self.known:
            return
        # A state from elsewhere, a checkpoint say: only `init` can tell
        try:
            expected = self.init_on_meta(params)
        except Exception:
            expected = state  # it asks for values, or for a device
        check_opt_state(expected, state, what=what)
        self._remember(outline)

    def init_on_meta(self, params: Tree) -> Any:
        """A first state of one process without values, which takes no memory. Nothing is drawn from
        the global random state."""
        devices = {leaf.device for leaf in optree.tree_leaves(params) if leaf.is_cuda}
        metas = tree_map(lambda p: torch.empty_like(p, device="meta"), params)
        # What `init` draws elsewhere is undone
        with torch.random.fork_rng(devices=devices):
            return self.init_fn(metas, Local(metas))

    def _remember(self, outline: Any) -> None:
        if outline not in self.known:
            self.known.append(outline)

    def apply(
        self,
        grads: Tree,
        state: Any,
        params: Tree,
        *,
        see: Callable[[Tree], object] | None = None,
        donate: bool = False,
    ) -> tuple[Tree, Any]:
        """The next params and the next state: `update`, and its updates added to params.

        No argument is written to. Collectives, of sharded trees: those that the transform asks for,
        and those of `fz.apply_updates`.

        Args:
            see: called with the updates before they are added, while params are as they were: for
                their norms, say. They are good until it returns. No fused kernel runs then, which
                would make no updates.
            donate: sharded, whether a step that writes over params and state may write over the
                gradients, too, which nobody can read any more then. In other steps no fused kernel
                runs then: they make the unsharded step's bits.

        Raises:
            DonatedError: the gradients were given away before.

        >>> import functorch_zero as fz
        >>> optimizer = fz.optim.sgd(0.5)
        >>> params = {"w": torch.ones(2, requires_grad=True)}
        >>> params, state = optimizer.apply({"w": torch.ones(2)}, optimizer.init(params), params)
        >>> params["w"]
        tensor([0.5000, 0.5000], requires_grad=True)
        """
        refuse_update("an optimizer's apply was called")
        engine = engine_of(grads, params)
        if engine is not None:
            return engine.apply(self, grads, state, params, see=see, donate=donate)
        updates, state = self._update_whole(grads, state, params)
        if see is not None:
            see(updates)
        return apply_whole(params, updates), state


def _refuse_dtensors(params: Tree) -> None:
    """Raise if a leaf is a DTensor: in a state, its whole shape and its part would be mixed up."""
    # By class, of which there are few
    kinds = {*map(type, optree.tree_leaves(params))}
    if not any(issubclass(kind, dtensor_class()) for kind in kinds):
        return
    path = next(path for path, leaf in named_leaves(params).items() if is_dtensor(leaf))
    raise StructureError(
        "a transform was given DTensors, of which it sees either too much or too little",
        path=path,
        expected="a plain tensor, or a sharded tree of this library",
        got="a DTensor",
        remedy="optim.to_torch(transform, model) is an optimizer for models of DTensors",
    )


def _where_given(update: Tensor | None, param: Tensor) -> Tensor | None:
    return None if update is None else param.detach()


class Chain(Transform):
    """Made by `chain`: the state is a tuple of the links' states."""


class EmptyState(NamedTuple):
    """The state of a transform that has none."""


def init_empty(params: Tree) -> EmptyState:
    """The `init` of a transform without state."""
    return EmptyState()


@named
def pointwise(
    init: Init, update: Update, *, in_place: Update | None = None, in_parts: bool = False
) -> Transform:
    """A transform each of whose results depends on the values at one position only.

    Args:
        init: `(params) -> state`.
        update: `(updates, state, params) -> (updates, state)`, or with `across` as a fourth
            argument, which refuses every question. Trees may be any regrouping of the params'
            elements, so only elementwise operators will do, and no leaf is 0-d (a scalar's shape is
            (1,)); state leaves that aren't shaped like a param (a step count) must not depend on
            the values.
        in_place: the same to the bit, written over the updates and over state leaves shaped like
            params, but over no counts and no params. A sharded step takes it where these were
            donated: fewer temporaries, no copies.
        in_parts: whether a complex leaf is seen as its real and imaginary parts, a real leaf
            (..., 2), as torch.optim's do. Else it is seen as it is.

    Sharded, it runs on pieces, bucket by bucket, without communication. `testing.check_transform`
    checks the claim.

    >>> def update(updates, state, params):
    ...     return tree_map(torch.neg, updates), state
    >>> negate = pointwise(init_empty, update)
    >>> negate.needs
    <Needs.POINTWISE: 0>
    """
    # There is one `across` for all calls: it has no state, and answers nothing
    refusing: Any = Refusing()  # typed as any `across`
    begin = _lifted_init(init, by="pointwise's init")

    def asks_nothing(update: Update, name: str) -> Update:
        run = _lifted_update(update, by=f"pointwise's {name}")
        return lambda updates, state, params: run(updates, state, params, refusing)

    part = Pointwise(
        lambda params: begin(params, refusing),
        asks_nothing(update, "update"),
        asks_nothing(in_place, "in_place") if in_place else None,
    )
    return of_pointwise(in_forms(part, in_parts=in_parts))


def of_pointwise(part: Pointwise, *inside: Transform) -> Transform:
    """The transform of functions of any grouping of the leaves, which `across` therefore runs by
    the bucket.

    Args:
        part: the functions.
        inside: of a wrapper, the transforms that these call.
    """

    def init(params: Tree, across: Across) -> Any:
        return part.init(params)

    def update(updates: Tree, state: Any, params: Tree, across: Across) -> tuple[Tree, Any]:
        return across.run_pointwise(part, updates, state, params)

    return Transform(init, update, Needs.POINTWISE, inside, plain=part, takes_rows=True)


def keeping_zeros(transform: Transform) -> Transform:
    """A pointwise transform that makes zeros of zeros, reads no params, and has no state shaped
    like them: it then sees the rows alone of an update in rows."""
    assert transform.plain is not None
    return of_pointwise(replace(transform.plain, keeps_zeros=True))


@named
def with_statistics(init: Init, update: Update) -> Transform:
    """A transform that needs sums, norms, maxima or means over whole tensors, or over some dims of
    them.

    Args:
        init: `(params) -> state` or `(params, across) -> state`; `across.extents` has each leaf's
            full shape.
        update: `(updates, state, params, across) -> (updates, state)`; leaves may be 1-D pieces of
            tensors, so all that concerns more than one element is asked of `across`.

    Sharded, it runs on pieces; each question is one all-reduce of scalars or vectors for all leaves
    together, and one more where integers are asked about beside floating-point numbers.
    """
    begin = _lifted_init(init, by="with_statistics's init")
    run = _lifted_update(update, by="with_statistics's update")

    return Transform(
        begin,
        _apart(lambda u, s, p, across: run(u, across.beside(s, p), p, across)),
        Needs.STATISTICS,
    )


def _numel(shape: Shape) -> float:
    return float(torch.Size(shape).numel())


@named
def with_whole_leaves(
    init: Callable[[Tensor], Any],
    update: Callable[..., tuple[Tensor, Any]],
    *,
    cost: Callable[[Shape], float] = _numel,
    batched: bool = False,
) -> Transform:
    """A transform that needs one whole tensor at a time.

    Args:
        init: `(param) -> state` of one leaf.
        update: `(update, state) -> (update, state)` of one leaf, or `(update, state, param)`; the
            third argument costs sending the param too. With `batched`, tensors and state leaves
            have a leading dim that counts leaves of one shape; init is per leaf all the same.
        cost: that of an update of a leaf of this full shape, for balancing owners.

    Sharded, each leaf has an owner, who alone holds its state and runs it: one all-to-all in, one
    out, about 2S/N bytes per rank (3S/N when `update` wants the param).
    """
    check_takes(init, ("param",), 1, by="with_whole_leaves' init")
    run, wants_param = _lifted_of_leaf(update, by="with_whole_leaves' update")
    spec = WholeLeaf(_made_of_tensors(init), run, wants_param, cost, batched)
    return _of_whole(spec, Needs.WHOLE_LEAF)


@named
def with_whole_rows(
    init: Callable[[Tensor], Any], update: Callable[..., tuple[Tensor, Any]]
) -> Transform:
    """A transform of rows, which sees those alone that were touched: whose update so far, such as
    the gradient, isn't all zeros. The others' updates are zeros, and their state stays as it is.

    Row i of a leaf (n, ...) is `leaf[i]`, flattened: all rows of a leaf are a tensor (n, columns).
    A vector's rows have one column.

    Args:
        init: `(param) -> state` of all rows of one leaf (n, columns). Tensors of the state have n
            rows, such as (n, columns), or (n,) for one number per row; or they are 0-d.
        update: `(update, state) -> (update, state)`, or `(update, state, param)`, of the k rows of
            a leaf that were touched, (k, columns), and the same rows of the state's tensors. A row
            of the results depends on that row alone. 0-d tensors are given and returned as they
            are, also where k is 0.

    Sharded, each rank runs it on the rows that it holds, and nothing is sent, where pieces are of
    whole rows. Other leaves have an owner, as in `with_whole_leaves`.

    >>> def sign_of_sum(update, state):
    ...     return update.sum(1, keepdim=True).sign().expand_as(update), state
    >>> with_whole_rows(lambda param: (), sign_of_sum).needs
    <Needs.WHOLE_ROWS: 2>
    """
    check_takes(init, ("param",), 1, by="with_whole_rows' init")
    run, wants_param = _lifted_of_leaf(update, by="with_whole_rows' update")
    spec = WholeLeaf(
        _made_of_tensors(init_by_rows(init)),
        update_by_rows(run),
        wants_param,
        _numel,
        batched=False,
        by_rows=True,
        in_place=update_by_rows(run, in_place=True),
    )
    return _of_whole(spec, Needs.WHOLE_ROWS)


def _of_whole(part: WholeLeaf, needs: Needs) -> Transform:
    """The transform of a whole-leaf author's functions."""
    return Transform(
        lambda params, across: across.init_whole(part, params),
        _apart(lambda u, s, p, across: across.run_whole(part, u, s, p)),
        needs,
        takes_rows=True,
    )


@named
def with_whole_tree(init: Init, update: Update, *, limit: int = 64 * 2**20) -> Transform:
    """A transform that needs every tensor whole, at once: for trees of at most `limit` bytes,
    gathered on every rank.

    Args:
        init: `(params) -> state`, of whole params.
        update: `(updates, state) -> (updates, state)`, of whole trees, or
            `(updates, state, params)`; the third argument costs gathering the params too. Every
            rank runs it and holds its state.
        limit: bytes of one whole tree, params or updates, above which it refuses, naming the size.

    Sharded, one all-to-all per dtype brings every rank the elements that it lacks: S (N-1)/N bytes
    (twice that with params).
    """
    check_takes(init, ("params",), 1, by="with_whole_tree's init")
    # Read off the signature: params that the author doesn't take are not gathered
    num_taken = check_takes(update, _OF_TREES[:3], 2, by="with_whole_tree's update")
    run = _with_first(num_taken, update)

    def update_tree(updates: Tree, state: Any, params: Tree, across: Across) -> tuple[Tree, Any]:
        trees = [updates, params] if num_taken > 2 else [updates]
        return across.run_whole_tree(run, trees, state, limit)

    return Transform(
        lambda params, across: across.init_whole_tree(init, params, limit),
        _apart(update_tree),
        Needs.WHOLE_TREE,
    )


@named
def chain(*transforms: Transform) -> Transform:
    """Run transforms one after the other, each on the updates of the one before. The state is a
    tuple of theirs.

    Neighbouring pointwise links run as one, so that a bucket's temporaries are a bucket's.
    """
    for i, t in enumerate(transforms):
        check_is_transform(f"chain's argument {i}", t)

    # One state per transform, also of those that run merged: merging shows in no checkpoint
    def init(params: Tree, across: Across) -> tuple[Any, ...]:
        return tuple(t.init(params, across) for t in transforms)

    # Found once per chain, not once per step
    runs = _runs(transforms)

    def update(updates: Tree, state: Any, params: Tree, across: Across) -> Any:
        new: list[Any] = []  # the links' states
        for run in runs:
            # The run's share of the chain's state: one entry per transform in it
            old = tuple(state[len(new) : len(new) + len(run.transforms)])
            if run.merged is not None:
                updates, states = across.run_pointwise(run.merged, updates, old, params)
                new += states
                continue
            # Statistics, whole leaves, or leaves told apart: a run of one transform
            updates, one = run.transforms[0].update(updates, old[0], params, across)
            new.append(one)
        return updates, tuple(new)

    # A chain must see as much as its most demanding part; an empty one sees nothing
    needs = max((t.needs for t in transforms), default=Needs.POINTWISE)
    # Pointwise throughout: then the chain itself can merge with its neighbours in another chain
    plain = runs[0].merged if len(runs) == 1 else None
    ending = _ending_of(transforms)
    return Chain(init, update, needs, transforms, plain, ending=ending, takes_rows=True)


def _ending_of(transforms: tuple[Transform, ...]) -> Callable[..., Any] | None:
    """A chain's `ending`; None where its last part has no kernel."""
    # A kernel adds its updates to the params, so it can only be the end
    if not transforms or not transforms[-1].has_kernel:
        return None
    head, last = chain(*transforms[:-1]), transforms[-1]

    def ending(updates: Tree, state: Any, params: Tree, across: Across) -> Any:
        *before, own = state
        updates, states = head.update_fn(updates, tuple(before), params, across)
        left, own = last.update_and_add(updates, own, params, across)
        return left, (*states, own)

    return ending


def last_kernel(t: Transform) -> Fused | None:
    """The kernel that adds all updates of a transform: its own, or that of a chain's last link."""
    # A last link may be a chain itself
    while t.fused is None and isinstance(t, Chain) and t.parts:
        t = t.parts[-1]
    return t.fused


def real_only(transform: Transform) -> Transform:
    """The transform with an `init` that refuses complex leaves, by path."""
    return checked(transform, lambda params, across: refuse_complex(params))


def checked(transform: Transform, check: Callable[[Tree, Across], None]) -> Transform:
    """The transform with a check of the params before its `init`: errors come there rather than in
    the first step. It must fail on every rank or on none."""

    def init(params: Tree, across: Across) -> Any:
        check(params, across)
        return transform.init_fn(params, across)

    return replace(transform, init_fn=init)


class _Run(NamedTuple):
    """Neighbours in a chain that run together."""

    transforms: tuple[Transform, ...]
    merged: Pointwise | None  # all of them as one; None for one alone that has no `plain`


def _runs(transforms: tuple[Transform, ...]) -> list[_Run]:
    """The longest runs of transforms that have `plain`; the others alone."""
    runs: list[_Run] = []
    for is_plain, neighbours in groupby(transforms, lambda t: t.plain is not None):
        run = tuple(neighbours)
        runs += [_Run(run, _merge(run))] if is_plain else [_Run((t,), None) for t in run]
    return runs


def _merge(run: tuple[Transform, ...]) -> Pointwise:
    """Pointwise transforms, one after the other, as one."""
    # All of them: a run holds transforms that have `plain`
    links = [t.plain for t in run if t.plain is not None]

    def init(params: Tree) -> tuple[Any, ...]:
        return tuple(part.init(params) for part in links)

    def updating(*, in_place: bool) -> Update:
        def update(updates: Tree, state: Any, params: Tree) -> tuple[Tree, tuple[Any, ...]]:
            new: list[Any] = []
            # Ids of the storages that the step gave away; the links may write to no others
            donated = storages(updates) if in_place else set()
            for part, old in zip(links, state, strict=True):
                run = part.update
                # Updates that lie elsewhere, or in a new state, belong to a link or its author
                if in_place and part.in_place and storages(updates) <= donated - storages(new):
                    run = part.in_place
                updates, one = run(updates, old, params)
                new.append(one)
            return updates, tuple(new)

        return update

    keeps_zeros = all(part.keeps_zeros for part in links)
    in_place = updating(in_place=True) if any(part.in_place for part in links) else None
    return Pointwise(init, updating(in_place=False), in_place, keeps_zeros)


def value_of(number: NumberOrSchedule, count: Tensor) -> Any:
    """A hyperparameter at step `count` (0-d int64): schedules are called with it, numbers are
    themselves.

    Raises:
        TypeError: a schedule returns no number.
        ValueError: it returns a number with dims.
    """
    if not callable(number):
        return number
    value = number(count)
    # Python's floats need no look, and a compiled kernel has none
    if not isinstance(value, float) and not torch.compiler.is_compiling():
        name = getattr(number, "__qualname__", None) or getattr(number, "name", "a schedule")
        check_number(f"the result of the schedule {name}", value)
    return value


def step_count() -> Tensor:
    """A step counter: 0-d int64 on the CPU, where reading it waits for no device."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


# The arguments of an author's update; `init` of trees has the last two
_OF_TREES = "updates", "state", "params", "across"
_OF_A_LEAF = "update", "state", "param"


def _lifted_init(author: Init, *, by: str) -> Init:
    """An author's `init` of trees, as one that is given params and `across`; `by`: as in
    `check_takes`."""
    num_taken = check_takes(author, _OF_TREES[2:], 1, by=by)
    return lambda *given: author(*given[:num_taken])


def _lifted_update(author: Update, *, by: str) -> Update:
    """An author's `update` of trees likewise."""
    return _with_first(check_takes(author, _OF_TREES, 3, by=by), author)


def _lifted_of_leaf(author: Update, *, by: str) -> tuple[Update, bool]:
    """A whole-leaf author's `update`, with an error that names it where it makes other shapes than
    it was given; and whether it takes the param."""
    # Read off the signature: a param that the author doesn't take is not sent to the owner
    num_taken = check_takes(author, _OF_A_LEAF, 2, by=by)
    run = _with_first(num_taken, author)

    def update(*given: Any) -> tuple[Tensor, Any]:
        made = run(*given)
        # Structures aren't compared, only the leaves' shapes in order
        expected, got = (
            [tuple(x.shape) for x in optree.tree_leaves(tree)] for tree in (given[:2], made)
        )
        if expected != got:
            raise TransformError(
                f"{name_of(author)} must make an update and a state of the shapes it was given",
                expected=expected,
                got=got,
                remedy="keep all dims, those that count rows or the leaves of a batch, too: a mean "
                "over columns is x.mean(1)",
            )
        return made

    return update, num_taken > 2


def _with_first(num_taken: int, author: Update) -> Update:
    """An author's `update`, that takes so many of the arguments that it is given; with an error
    that names it where it forgets the state."""

    def run(*given: Any) -> tuple[Any, Any]:
        made = author(*given[:num_taken])
        if isinstance(made, tuple) and len(made) == 2:
            return made
        kind = f"{len(made)} things" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise TransformError(
            f"{name_of(author)} must return (updates, state), got {kind}. Remedy: return the "
            "state, too; `()` where there is none"
        )

    return run


def _made_of_tensors(init: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A whole-leaf author's `init`, with an error where the state has other things than tensors."""

    def run(param: Tensor) -> Any:
        state = init(param)
        for path, leaf in named_leaves(state).items():
            if not isinstance(leaf, Tensor):
                raise TransformError(
                    f"{name_of(init)} makes a state of other things than "
                    "tensors, which ranks can't send to each other",
                    path=path,
                    expected="a tensor",
                    got=type(leaf).__name__,
                    remedy="torch.tensor(number); optim.step_count() for a count",
                )
        return state

    return run


def _apart(update: Update) -> Update:
    """`update`, whose state lies apart from what later links may write over."""

    def run(updates: Tree, state: Any, params: Tree, across: Across) -> tuple[Tree, Any]:
        new, after = update(updates, state, params, across)
        return new, across.keep(after, updates, new, params)

    return run


def tree_zeros_like(tree: Tree) -> Tree:
    """Zeros shaped like each leaf."""

    def zeros_like(x: Tensor) -> Tensor:
        # torch's own imports sympy for the strides of a first meta tensor, half a second
        return x.new_zeros(x.shape) if x.is_meta else torch.zeros_like(x)

    return tree_map(zeros_like, tree)
