"""The parts of programs: gradients of a loss, and updates applied, on whole or sharded trees.

A function asks the engine of the trees it is given. Trees without one are whole; here is their
arithmetic in one process, which every engine must equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, get_args

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import transforms_active
from ..errors import StructureError, explain
from ..in_a_loss import OF_THIS_RANK, refuse, refuse_gradient
from ..model.lazy_param import LazyParam, make_whole
from ..model.untouched import Untouched, is_looked_at
from ..optim.local import Local
from ..params import Engine, engine_of, is_on_engine, map_nodes, nodes_of, without_engines
from ..shared_elements import check_apart
from ..tree import (
    PyTree,
    check_tensors,
    is_plain,
    named_leaves,
    own_copy,
    paths,
    same_structure,
    trained_leaves,
)
from .gradient import mean_gradients
from .loss import Aux, LossFn, Metrics, Outcome
from .loss_calls import LossCalls, PerLoss
from .micro_batches import check_accumulate
from .nonfinite import NonFiniteGradient, all_finite, not_finite, refusal
from .refit import check_forms, forms_of
from .scope import gradient_in_words, next_streams, scope_here
from .state import State, Trained, check_not_on_meta
from .trainable import check_alike

_ANSWERS = get_args(NonFiniteGradient)

# Of each loss, outside of steps: whichever `value_and_grad(loss)` is called
_CALLS = PerLoss(LossCalls)


def value_and_grad(
    loss: Callable[..., Any],
    *,
    accumulate: int = 1,
    scale: float | Tensor | None = None,
    nonfinite: NonFiniteGradient = "pass",
) -> Callable[..., tuple[Any, Any]]:
    """The function that gives a loss and its gradients.

    `value_and_grad(loss)(tree, *args)` calls `loss(tree, *args)`, which returns a 0-d tensor, or
    `(tensor, Aux(metrics=..., weight=...))`. It gives `(value, grads)`, or
    `((value, metrics), grads)`. Gradients are those of the trained leaves of `tree`, which have
    `requires_grad`, and None elsewhere. What is in `args` is read only: none of it requires grad in
    the loss, which may say `x.requires_grad_()` for a gradient by its input.

    Two more arguments go to the loss by their names, and are those of a training step's loss:

    - `batch=` is cut into `accumulate` micro-batches, as `train_step` cuts it. Each is a call of
      the loss. Value, metrics and gradients are the means by the micro-batches' weights. `args`
      are the same in each call.
    - `buffers=` are whole tensors, of which the loss is given copies. It may write to them, or
      return others as `Aux(buffers=...)`. Each micro-batch is given those of the one before. The
      result is `((value, metrics, buffers), grads)` then.

    Two options are for gradients that aren't finite:

    - `scale=` multiplies the loss before backward, and divides the gradients after it, so that
      float16 holds them: a positive number, or a 0-d tensor, such as `fz.LossScale` finds.
    - `nonfinite=` is the answer to a NaN or an infinity in the loss or a gradient, the same on all
      ranks. With "tell", the results end with a bool more, whether all are finite:
      `((value, metrics, buffers, fine), grads)`; the buffers are those that were given, where they
      are not. With "raise", that is a `NonFiniteError`. "pass" doesn't look, which the host would
      wait for.

    Sharded trees may be anywhere in `tree` and `args`. Then each rank passes its own part of all
    else in `args`, and of the batch. Value and metrics are means over ranks; gradients are of that
    mean, in the form of pieces. Buffers are equal on all ranks, by the rule `sync_buffers` of
    `shard`; for trees of `shard_tree`, it is "mean". Units of read trees are gathered on use, like
    those of `tree`. Every rank calls it. Collectives: those of each level's row in the table of
    `layout/levels.py`, two all-reduces (of the value, and of words of the hosts), and one per
    dtype of the buffers that changed. Integers by "mean" take two where the loss gives a weight.

    Random numbers are torch's own, as they come. Inside of a step they follow from its seed, its
    number, the gradient's number in the step, the micro-batch and the part of the batch instead.

    Raises:
        StructureError: the loss uses no trained leaf, or is no scalar; it writes to `args`, or
            returns buffers without having been given any. The call is inside of another loss, or
            of a transform of torch.func.
        TypeError: micro-batches were asked for, and no `batch=` was given.
        NonFiniteError: as `nonfinite` says; on all ranks, with the leaves' paths.
        NotImplementedError: a scale was given, and the reduction keeps gradients between steps.
        GroupError: ranks have called different things.
        MismatchError: ranks have given other options.

    >>> def loss(params, x):
    ...     return ((params["w"] - x) ** 2).sum()
    >>> value, grads = value_and_grad(loss)({"w": torch.zeros(2, requires_grad=True)}, 1.0)
    >>> value, grads
    (tensor(2.), {'w': tensor([-2., -2.])})
    """
    options = GradientOptions(accumulate, None if scale is None else float(scale), nonfinite)

    def run(tree: Any, *args: Any, buffers: Any = None, batch: Any = None) -> tuple[Any, Any]:
        # Sharded trees among tree or args decide for all: one engine answers
        engine = engine_of(tree, args)
        check_callable_here("fz.value_and_grad", engine)
        call = LossCall(loss, args, buffers, batch, options)
        ask = whole_value_and_grad if engine is None else engine.value_and_grad
        return ask(call, tree)

    return run


def check_callable_here(name: str, engine: Engine | None) -> None:
    """Raise where a gradient can't be taken: inside of a loss, or of a transform of torch.func.

    Args:
        name: of the function that was called.
        engine: of its arguments.
    """
    refuse_gradient(f"{name} was called")
    if transforms_active():
        raise StructureError(
            f"{name} was called inside of a transform of torch.func, such as vmap or grad, and "
            "can't be a part of it",
            rank=None if engine is None else engine.rank,
            remedy="put the transform inside of the loss: vmap over examples, or "
            f"torch.func.grad by fz.unshard(params). {OF_THIS_RANK}",
        )


def read_only(tree: Any) -> Any:
    """A tree without gradients: its tensors require no grad, its sharded trees stay closed.

    A loss is given so what it only reads, and an evaluation all: torch's modules go another way by
    whether a param requires grad, and the leaves of a sharded tree that is only read don't.
    """

    def without_grad(leaf: Any) -> Any:
        # A lazy param never requires grad here, and to detach it would gather it
        if not isinstance(leaf, Tensor) or isinstance(leaf, LazyParam) or not leaf.requires_grad:
            return leaf
        return leaf.detach()

    return map_nodes(without_grad, tree)


@dataclass(frozen=True)
class GradientOptions:
    """The arguments of `value_and_grad` beside the loss. See there."""

    accumulate: int = 1
    scale: float | None = None
    nonfinite: NonFiniteGradient = "pass"

    def __post_init__(self) -> None:
        check_accumulate(self.accumulate)
        # "not (...)" also refuses NaN, which fails every comparison
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be a positive number or None, got {self.scale}")
        if self.nonfinite not in _ANSWERS:
            raise ValueError(f"nonfinite must be one of {_ANSWERS}, got {self.nonfinite!r}")

    @property
    def looks(self) -> bool:
        """Whether anybody wants to know if gradients are finite, for which the host waits."""
        return self.nonfinite != "pass"


_PLAIN_OPTIONS = GradientOptions()


class LossCall:
    """A program's loss and its arguments beside the tree, in one call of `value_and_grad`.

    Attributes:
        args: passed on without gradients; sharded trees among them.
        buffers: {} where none were given.
        batch: None where none was given.
        options: of `value_and_grad`.
        counted: the user's own function, whose calls are counted: a loss made of it may be new in
            each call.
        is_slope: whether the loss is a slope of the user's own; see Note [slope] in `hvp`.
        trying: around the gradient that a slope takes of a loss. Sharded, the engine sets it, where
            that is not one of the whole batch and the call is looked at.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        args: tuple[Any, ...],
        buffers: PyTree[Tensor] | None = None,
        batch: Any = None,
        options: GradientOptions = _PLAIN_OPTIONS,
        *,
        slope_of: Callable[..., Any] | None = None,
    ):
        self.loss, self.args, self.options = loss, read_only(args), options
        self.is_slope = slope_of is not None
        self.counted = loss if slope_of is None else slope_of
        self.takes_buffers = buffers is not None
        self.buffers: PyTree[Tensor] = {} if buffers is None else buffers
        self.batch = batch
        self.trying: Callable[[Tensor], AbstractContextManager[None]] = lambda loss: nullcontext()
        self._has_aux = False  # known once the loss has returned: whether metrics are wanted

    @property
    def caller(self) -> str:
        """The function that was given the loss, for errors."""
        return "fz.hvp" if self.is_slope else "value_and_grad"

    @property
    def takes_batch(self) -> bool:
        """Whether the loss is given a batch by name."""
        return self.batch is not None

    @cached_property
    def data(self) -> Any:
        """This rank's own data, for errors and for sizes: the batch; where none was given, `args`
        without their sharded trees."""
        if self.takes_batch:
            return self.batch
        own = without_engines(self.args)
        return own[0] if len(own) == 1 else own

    def check(self, rank: int | None = None) -> None:
        """Raise unless buffers and batch are as they must be. Buffers are in no graph afterwards.

        Sharded, other ranks must hear of the error: the engine calls this where they do.

        Args:
            rank: for errors.
        """
        self._refuse_sharded("buffers", self.buffers, _WHOLE_BUFFERS, rank)
        remedy = f"pass the tree by its place, {self.caller}(loss)(t, tree)"
        self._refuse_sharded("batch", self.batch, remedy, rank)
        if not all(map(is_plain, optree.tree_leaves(self.buffers))):
            check_tensors(self.buffers, "buffers", dense=False)  # which names the leaf
        # The loss is differentiated by the tree alone. One in no graph stays the same object, also
        # in the next value, where nobody changes it
        self.buffers = read_only(self.buffers)
        count = self.options.accumulate
        if count > 1 and not self.takes_batch:
            raise TypeError(
                explain(
                    f"{self.caller}(accumulate={count}) was given no batch to cut",
                    expected=f"{self.caller}(loss, accumulate=...)(tree, ..., batch=...)",
                    got=f"{len(self.args)} arguments beside the tree, and no batch=",
                    rank=rank,
                    remedy="let the loss have a parameter `batch`, which is a tree of tensors "
                    "with a row per example, and pass it by that name",
                )
            )

    def loss_fn(self, *, look: bool, rank: int | None = None) -> LossFn:
        """The loss in the form of a training step's: of the tree and the arguments, the buffers,
        and a micro-batch.

        Args:
            look: whether the values of arguments are compared, too; see `Untouched`.
            rank: for errors.
        """

        def call(trees: Any, buffers: Any, batch: Any) -> Any:
            tree, args = trees
            named = {}
            if self.takes_buffers:
                named["buffers"] = buffers
            if self.takes_batch:
                named["batch"] = batch
            # A sharded state among them stays closed: a loss can't read it, nor write to it
            own = {n: node for n, node in enumerate(nodes_of(args)) if _is_plain(node)}
            untouched = Untouched([*own.values()], look=look)
            result = self.loss(tree, *args, **named)
            changed = untouched.first_changed()
            if changed is not None:
                path = paths(args, is_on_engine)[[*own][changed]]
                raise _written(self.loss, f"args.{path}", rank)
            self._note_aux(result, rank)
            return result

        return call

    def results(
        self, value: Tensor, metrics: Metrics, buffers: PyTree[Tensor], *, fine: bool
    ) -> Any:
        """The results of the loss, as `value_and_grad` gives them beside the gradients.

        Args:
            fine: loss and gradients are finite, or nobody looks.
        """
        found: list[Any] = [value]
        if self._has_aux or self.takes_buffers:
            found.append(metrics)
        if self.takes_buffers:
            # Those of numbers that are none would be, too
            found.append(buffers if fine else self.buffers)
        if self.options.nonfinite == "tell":
            found.append(fine)
        return found[0] if len(found) == 1 else (*found,)

    def _note_aux(self, result: Any, rank: int | None) -> None:
        aux = result[1] if isinstance(result, tuple) and len(result) == 2 else None
        self._has_aux |= aux is not None
        if isinstance(aux, Aux) and aux.buffers is not None and not self.takes_buffers:
            raise StructureError(
                f"the loss of {self.caller} returned Aux(buffers=...), and was given none",
                rank=rank,
                remedy=f"pass them by name, {self.caller}(loss)(tree, ..., buffers=buffers), "
                "and let the loss have a parameter of that name",
            )

    def _refuse_sharded(self, name: str, argument: Any, remedy: str, rank: int | None) -> None:
        """Raise if a named argument holds a sharded tree."""
        if any(map(is_on_engine, nodes_of(argument))):
            raise StructureError(
                f"{self.caller} was given a sharded tree in {name}=",
                expected="whole tensors",
                rank=rank,
                remedy=remedy,
            )


_WHOLE_BUFFERS = (
    "keep them whole on every rank: let the program's init put them into the value from where it "
    "is defined, not from its arguments; outside of a step, don't shard them"
)


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is a tensor of which writes show: no lazy param, which a pass watches."""
    return type(leaf) in (Tensor, torch.nn.Parameter) and is_plain(leaf) and not transforms_active()


def _written(loss: Callable[..., Any], path: str, rank: int | None) -> StructureError:
    return StructureError(
        f"{getattr(loss, '__qualname__', 'the loss')} has written to one of its arguments in "
        "place, which each rank would keep for itself",
        path=path,
        rank=rank,
        remedy="pass buffers by name, value_and_grad(loss)(tree, ..., buffers=buffers): the "
        "loss may write to them, and they come back equal on all ranks. Of other tensors make "
        "new ones",
    )


def _device_of(tree: Any) -> torch.device:
    """Of its first leaf; the CPU, where it has none."""
    leaves: list[Tensor] = optree.tree_leaves(tree)
    return leaves[0].device if leaves else torch.device("cpu")


class Part(NamedTuple):
    """The part of the batch that this copy of a program is given.

    A proof may run copies side by side, one on each rank's part (`testing.runs`). Nobody else does.
    """

    number: int  # from 0: the losses draw what that rank would draw
    mean: Callable[[PyTree[Tensor], Outcome], tuple[PyTree[Tensor], Outcome]]  # over all copies
    round_sums: tuple[bool, ...] = ()  # as `mean_gradients` takes it


# One process has all of the batch, and its gradients are the mean
_ALL = Part(0, lambda grads, outcome: (grads, outcome))
PART: ContextVar[Part] = ContextVar("PART", default=_ALL)  # so that threads have parts of their own


def whole_value_and_grad(call: LossCall, tree: Any) -> tuple[Any, Any]:
    """The results of a loss, and its gradients, of whole trees; see `value_and_grad`."""
    call.check()
    options, leaves = call.options, optree.tree_leaves(tree)
    # An evaluation's. Such a leaf has no storage to be a leaf of a graph
    if any(map(LazyParam.__instancecheck__, leaves)):
        raise StructureError(
            "a gradient inside of a sharded evaluation was asked for params that are not here "
            "yet. Remedy: make them whole first, `whole = fz.unshard(params)`, and use "
            f"torch.func.grad. {OF_THIS_RANK}."
        )
    if not all(map(is_plain, leaves)):
        check_tensors(tree, "the tree")  # which names the leaf
    check_not_on_meta(tree, call.data)
    scope, part = scope_here(), PART.get()
    calls = _CALLS.of(call.counted) if scope is None else scope.calls
    look = is_looked_at(calls.next_number(call.counted))
    grads, outcome = mean_gradients(
        call.loss_fn(look=look),
        (tree, call.args),
        call.buffers,
        call.data,
        count=options.accumulate,
        streams=next_streams(part.number, _device_of(tree)),
        look=look,
        reminder=calls.reminder,
        scale=options.scale,
        round_sums=part.round_sums,
    )
    grads, outcome = part.mean(grads, outcome)
    fine = not options.looks or all_finite([*optree.tree_leaves(grads), outcome.loss])
    if not fine and options.nonfinite == "raise":
        found = float(outcome.loss), not_finite(named_leaves(grads))
        raise refusal(gradient_in_words(), [found])
    return call.results(outcome.loss, dict(outcome.metrics), outcome.buffers, fine=fine), grads


_LIKE = "pass the trees that fz.value_and_grad and the optimizer gave of these params"


def dot(a: Any, b: Any) -> Tensor:
    """The inner product of two trees of gradients or updates, one 0-d tensor.

    It is taken, and answered, in at least float32. Sharded, it is that of the whole trees, the same
    on every rank; every rank calls it. One all-reduce. Both trees are in pieces then, as gradients
    and updates are. Params, which are held, are refused: pass `fz.pieces(params)`.

    >>> grads = {"w": torch.tensor([3.0, 4.0]), "frozen": None}
    >>> dot(grads, grads).sqrt()
    tensor(5.)
    """
    engine = engine_of(a, b)
    if engine is not None:
        product: Tensor = engine.dot(a, b)
        return product
    same_structure(a, b, what="the second tree", remedy=_LIKE)
    return Local(a).dot(a, b)


def zero_updates(params: Any) -> Any:
    """Updates that change nothing: zeros for trained leaves, None elsewhere.

    Sharded they are in pieces, as gradients and updates are. So a program's `init` makes moments of
    its own of them, and `fz.random` draws vectors like them. No communication.

    >>> frozen = torch.ones(3)
    >>> zero_updates({"w": torch.ones(2, requires_grad=True), "frozen": frozen})
    {'w': tensor([0., 0.]), 'frozen': None}
    """
    engine = engine_of(params)
    if engine is None:
        return tree_map(torch.zeros_like, trained_leaves(params))
    return map_nodes(engine.zero_updates, params)


def pieces(params: Any) -> Any:
    """Params in the form of gradients and updates: None where a leaf isn't trained and, sharded, in
    pieces.

    So `tree_map` combines them with gradients, for a weight decay of your own or a pull towards
    earlier params, and `fz.dot` takes them. They are copies, without gradients: nothing that
    happens to them happens to the params. No communication.

    Raises:
        StructureError: in a loss or a sharded evaluation, where leaves are whole.

    >>> frozen = torch.ones(3)
    >>> pieces({"w": torch.ones(2, requires_grad=True), "frozen": frozen})
    {'w': tensor([1., 1.]), 'frozen': None}
    """
    refuse("fz.pieces was called", _AS_THEY_ARE)
    engine = engine_of(params)
    if engine is not None:
        return map_nodes(engine.pieces, params)
    # Of an evaluation's leaves none says whether it is trained
    if any(isinstance(leaf, LazyParam) for leaf in optree.tree_leaves(params)):
        raise StructureError(
            "fz.pieces was called inside of a sharded evaluation", remedy=_AS_THEY_ARE
        )
    return tree_map(torch.clone, trained_leaves(params))


_AS_THEY_ARE = "use the params as they are: their leaves are whole here"


def copied_like(tree: PyTree[Tensor], like: PyTree[Tensor]) -> PyTree[Tensor]:
    """`fz.shard_tree(tree, layout_like=like)` of whole trees: a copy, which fits `like`."""
    check_tensors(tree, "the tree")
    check_tensors(like, "layout_like")
    check_apart(tree)
    check_like(tree, like)
    return tree_map(own_copy, tree)


def check_like(tree: PyTree[Tensor], like: PyTree[Tensor], rank: int | None = None) -> bool:
    """Raise unless a tree's leaves fit those of `layout_like`: in path, shape and dtype; and
    trained where those are, unless none of the tree's is. Returns whether none is.

    Args:
        like: whole, perhaps without values.
        rank: that cuts the tree by a layout, which `like` is of; None: both trees are whole.
    """
    remedy = "cut it on its own, fz.shard_tree(tree, level=, group=)"
    same_structure(like, tree, what="the tree", rank=rank, remedy=remedy)
    what = "a leaf can't be cut like that of layout_like"
    check_forms(forms_of(like), forms_of(tree), what, rank=rank, remedy=remedy)
    ours, theirs = Trained.of(tree), Trained.of(like)
    # A whole copy that is read only doesn't say which of its leaves were trained; a layout does
    if ours.paths and (theirs.paths or rank is not None):
        check_alike(theirs, ours, what, rank=rank, remedy=remedy)
    return not ours.paths


def unshard(tree: PyTree[Any]) -> PyTree[Any]:
    """A tree with whole leaves; those that are whole already stay as they are.

    Inside of a loss, leaves become whole and differentiable. At level 3 each unit touched is
    all-gathered, all units together as many bytes as the params have. It stays whole until its
    gradient is taken. Outside, a sharded tree becomes the whole tree on every rank, in tensors of
    its own; every rank calls it.

    A sharded state's other parts don't know how they are cut: `step.unshard(state)` does.

    Raises:
        StructureError: the tree holds a sharded state.

    >>> unshard({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    engine = engine_of(tree)
    if engine is None:  # no tree is sharded; inside of a loss, lazy leaves are made whole
        return make_whole(tree)
    # Checked before the first collective, on every rank alike
    for node in optree.tree_leaves(tree, is_leaf=_is_state):
        if _is_state(node) and node.sharding is not None:
            raise StructureError(
                "fz.unshard was given a sharded state, whose optimizer state would stay in pieces. "
                "Remedy: step.unshard(state), or fz.unshard(state.params)"
            )

    def whole(node: Any) -> Any:
        return engine.unshard(node) if is_on_engine(node) else make_whole(node)

    return map_nodes(whole, tree)


def _is_state(node: Any) -> bool:
    return isinstance(node, State)
