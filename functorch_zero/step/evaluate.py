"""The evaluation step for one process: no gradients, on the params or on other leaves of the
state, such as averages; or on a program's value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..model.casting import CastParams
from ..model.lazy_param import make_whole
from ..model.untouched import Untouched, is_looked_at
from ..params import nodes_of
from ..tree import PyTree, check_tensors, merge, same_structure, trained_leaves
from .loss import (
    Aux,
    Metrics,
    check_has_values,
    check_metrics,
    constant,
    constants,
    naming_batch,
    on_meta,
)
from .metrics import check_names
from .program import read_only
from .program_step import device_of
from .refit import check_forms, forms_of
from .reminder import Reminder
from .rng import Streams, replayed
from .scope import given_batch
from .state import State, TrainValue, check_policies, check_state, marked
from .weights import as_weight, check_weight, check_weight_value, unless_weightless

CHOSEN = "the tree that eval_step(params=...) gave"


@dataclass(frozen=True)
class EvalStep:
    """`step(state, batch) -> metrics` for one process, without gradients. Made by `eval_step`."""

    fn: Callable[..., Any]  # (params, buffers, batch), or (value, *args) -> metrics or Aux
    # (opt_state, trained leaves) -> the leaves to evaluate on; None: the params
    params: Callable[[Any, PyTree[Tensor]], PyTree[Tensor]] | None = None
    metrics: tuple[str, ...] = ()  # names of those wanted beside its own: "weight"
    reminder: Reminder = field(default_factory=Reminder, repr=False, compare=False)
    # A state may be evaluated on many batches, so that its step doesn't count calls
    calls: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @torch.no_grad()
    def __call__(self, state: State, *args: Any) -> Any:
        """Metrics of a whole batch, 0-d, and the rows if `fn` gives any; the state stays as it
        is. Of a program's state, `args` are all arguments of `fn` after the value."""
        check_state(state)
        if state.sharding is not None:
            raise StructureError(
                "an unsharded eval step was given a sharded state. Remedy: `fz.shard(eval_step, "
                "...)`"
            )
        read, *others = self.arguments(state, args, self._chosen)
        own = tree_map(lambda x: x if isinstance(x, Tensor) else None, read)  # without numbers
        with replayed(state.seed, state.step, 0, device_of(own)):
            look = is_looked_at(next(self.calls))
            untouched = Untouched(optree.tree_leaves(own), look=look)  # they are the state's own
            cast = CastParams(read, look=look)
            with given_batch():
                found = call_eval(self.fn, (cast.params, *others), args)
            cast.finish()
            untouched.check(own)
        if look:
            check_weight_value(found.weight)
        # A weightless batch has metrics 0, as in training
        metrics = {}
        for name, value in found.metrics.items():
            metrics[name] = unless_weightless(value, found.weight)
        weight = None if found.weight is None else as_weight(found.weight)
        return found.with_rows(metrics | total_weight(self.metrics, metrics, weight))

    def arguments(
        self, state: State, args: tuple[Any, ...], choose: Callable[[State], PyTree[Tensor]]
    ) -> tuple[Any, ...]:
        """The arguments of `fn`: first the tree that it reads, of a state's own leaves, or params
        that are chosen of a training step's state.

        Args:
            choose: chooses them.
        """
        value = state.value
        if isinstance(value, TrainValue):
            check_policies(state, value.params)
            params = value.params if self.params is None else choose(state)
            return read_only(params), tree_map(torch.clone, value.buffers), *args
        if self.params is not None:
            raise StructureError(
                "eval_step(params=...) chooses params of a training step's state, and was given "
                "a program's state. Remedy: leave it out; the function is given the program's "
                "value, and reads the tree that it likes, such as value.average"
            )
        given: tuple[Any, ...] = read_only((value, *args))
        return given

    def _chosen(self, state: State) -> PyTree[Tensor]:
        """The params that a whole state is evaluated on. Frozen leaves are its own."""
        view = trained_leaves(marked(state))
        # The same numbers on every rank, if it draws some
        with Streams(state.seed, state.step).of_program(device_of(state.params)):
            found = self.chosen(state.opt_state, view)
        check_tensors(found, CHOSEN)
        return merge(found, state.params)

    def chosen(self, opt_state: Any, params: PyTree[Tensor]) -> PyTree[Tensor]:
        """The trained leaves that `self.params` chooses to evaluate on, in the form of those given:
        whole, or this rank's pieces."""
        assert self.params is not None
        found = self.params(opt_state, params)
        same_structure(params, found, what=CHOSEN)
        check_fits(params, found, by="eval_step(params=...)")
        return found


def check_fits(params: PyTree[Tensor], chosen: PyTree[Tensor], *, by: str) -> None:
    """Raise if a chosen leaf has another shape or dtype than the param whose place it takes.

    Ranks hold it in the param's place, and would round it to the param's dtype.
    """
    check_forms(
        forms_of(params),
        forms_of(chosen),
        f"{by} gave a leaf that can't take its param's place",
        remedy="cast it there, `average.to(param.dtype)`, on the unsharded step too",
    )


def eval_step(
    fn: Callable[..., Any],
    *,
    params: Callable[[Any, PyTree[Tensor]], PyTree[Tensor]] | None = None,
    metrics: Sequence[str] = (),
) -> EvalStep:
    """Make an evaluation step: `fn(params, buffers, batch)` returns metrics by name, or
    `Aux(metrics=…, weight=…)`. It may return a pair of these and rows, any tree: predictions, say.
    Then the step returns `(metrics, rows)`.

    Given the state of a program, the step calls `fn(value, *args)`. It reads any of the value's
    trees; an optimizer's state is the program's own business.

    Sharded, metrics are averaged over ranks as a train step's are. Rows are each rank's own.

    Args:
        fn: the function to evaluate.
        params: leaves to evaluate it on instead of the params: `(opt_state, params) -> params`, of
            the trained leaves (None elsewhere), such as `optim.ema_params`. Sharded, it sees and
            gives leaves in pieces, of which ranks hold parts at levels 1 to 3. Functions of parts
            that aren't elementwise raise StructureError. Levels 1 and 2 gather what it gives, one
            all-gather per trained bucket. With `state_axes="both"` there is one more along the
            replicate axis, at level 3 too.
        metrics: names of more metrics. "weight" is the sum of the weights over all ranks' batches,
            0-d float64: by it, means over batches become one over a data set.
    """
    names = check_names(metrics)
    for name in names:
        if name != "weight":
            raise ValueError(f"an evaluation has no metric {name!r} to add. Remedy: 'weight'")
    return EvalStep(fn, params, names)


class Evaluated(NamedTuple):
    """The results of one call of an evaluation."""

    metrics: Metrics  # by name, 0-d
    weight: Tensor | float | None  # >= 0; None: it gave none
    rows: tuple[Any] | tuple[()]  # one tree, of this rank's own; empty: it gave none

    def with_rows(self, metrics: Metrics) -> Any:
        """The result of an evaluation step: its metrics, and the rows if there are any."""
        return (metrics, *self.rows) if self.rows else metrics


def call_eval(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    batch: tuple[Any, ...],
    rank: int | None = None,
) -> Evaluated:
    """Call a user's evaluation, and check its results.

    Args:
        fn: the evaluation.
        args: of the call: first the params, or a program's value.
        batch: those among them that are the batch, for errors.
        rank: for errors, too.
    """
    dry = on_meta(nodes_of(args[0]))
    with naming_batch(batch[0] if len(batch) == 1 else batch, given_to="evaluation"):
        result = fn(*args)
    rows: tuple[Any] | tuple[()] = ()
    if isinstance(result, tuple) and len(result) == 2:
        # A param among them is whole, and not gathered when the units are gone
        result, rows = result[0], (make_whole(result[1]),)
    # A plain mapping is metrics without a weight
    if isinstance(result, Mapping):
        result = Aux(metrics=result)
    if not isinstance(result, Aux):
        got = type(result).__name__
        raise TypeError(
            "an eval function returns metrics by name, fz.Aux(metrics=...), or one of them and "
            f'rows; got {got}. Remedy: return {{"loss": loss}}, say'
        )
    check_weight(result.weight, rank)
    check_metrics(result.metrics, rank)
    check_has_values(result.metrics, rank, dry=dry)
    if result.buffers is not None:
        raise StructureError(
            "an evaluation returned Aux(buffers=...), and it keeps the state as it is",
            rank=rank,
            remedy="leave them out; a train_step keeps buffers, for example with a learning "
            "rate of 0",
        )
    return Evaluated(constants(result.metrics), constant(result.weight), rows)


def total_weight(
    names: Sequence[str], metrics: Metrics, weight: Tensor | None, rank: int | None = None
) -> Metrics:
    """The metric "weight" by name, if it is among those asked for.

    Args:
        names: those that were asked for.
        metrics: the evaluation's own.
        weight: the sum over all batches, 0-d float64; None: the evaluation gave none.
    """
    if "weight" not in names:
        return {}
    if weight is None:
        raise StructureError(
            "eval_step(metrics=['weight']) has no weight to tell",
            rank=rank,
            remedy="return fz.Aux(metrics=..., weight=...) from the evaluation",
        )
    if "weight" in metrics:
        raise StructureError(
            'an evaluation has a metric "weight" itself', rank=rank, remedy="rename it"
        )
    return {"weight": weight}
