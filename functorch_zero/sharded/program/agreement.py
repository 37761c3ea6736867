"""The agreement of ranks on a program: on the arguments of its `init`, on its first value, and in
each step on its results."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch

from ...errors import GroupError, MismatchError
from ...groups import labelled
from ...groups.protocol import Group
from ...layout.layout import Layout
from ...layout.sharded_tree import ShardedTree
from ...sharded_optim.sharded_state import ShardedOptState
from ...tree import content_digests, paths
from ...version import __version__
from ..agreement import agree, first_difference, shortened
from ..background import BackgroundTasks
from ..deferred_values import DigestedFill
from ..options import Options
from ..words import tell
from .results import (
    _SMALL,
    StepResults,
    _form_of,
    _is_here,
    _numel,
    _samples,
    _whole_leaves,
    digests,
)
from .value import rest_of


class Agreement(Protocol):
    """The comparison of a program's ranks: each method raises, on every rank, where they differ."""

    def on_arguments(
        self, given: Mapping[str, Any], layouts: Mapping[str, Layout], seed: int | None
    ) -> None:
        """Compare the arguments of `init`, by name.

        Args:
            given: all of them.
            layouts: of the trees that are cut.
            seed: of the first state.
        """
        ...

    def on_first_value(self, value: Any, fills: Mapping[str, DigestedFill]) -> None:
        """Compare what `init` has made.

        Args:
            value: as it returned it.
            fills: of trees whose values each rank has made, and which could not be compared before.
        """
        ...

    def before_call(self, step: int, calls: Sequence[str]) -> None:
        """Compare the calls of the library that the program has made, the next one last.

        Args:
            step: its number.
            calls: see Note [calls of a program] in `library_calls`.
        """
        ...

    def before_writing(self, step: int, calls: Sequence[str]) -> None:
        """Make sure that all ranks are at this step, and that none has failed."""
        ...

    def on_results(self, results: StepResults) -> None:
        """Compare the results of a step."""
        ...


class ProgramAgreement:
    """The `Agreement` of ranks that are there. Each method is one exchange, or one all-reduce of
    words.

    Args:
        options: those of `shard`.
        background: the step's tasks, whose failures all ranks learn here.
    """

    def __init__(self, options: Options, background: BackgroundTasks):
        self._options, self._background = options, background

    def on_arguments(
        self, given: Mapping[str, Any], layouts: Mapping[str, Layout], seed: int | None
    ) -> None:
        options = self._options
        # Plain data, and causes before their effects
        facts: dict[str, Any] = {
            "functorch_zero": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "ranks": options.group.size,
            "level": options.levels.describe(),
            "options": options.describe(),
            "seed": seed,
        }
        for name, layout in layouts.items():
            facts[f"layout of {name}"] = layout.describe()
            facts[f"levels of {name}"] = {leaf.path: leaf.cut.level for leaf in layout.leaves}
        for name in layouts:
            facts[f"values of {name}"] = content_digests(given[name])
        agree(labelled(options.group, "init/agreement"), facts)

    def on_first_value(self, value: Any, fills: Mapping[str, DigestedFill]) -> None:
        # Nothing else would show that the rest beside sharded trees differs
        facts: dict[str, Any] = {"value": paths(value), "values": digests(rest_of(value))}
        for name, fill in fills.items():
            facts[f"deferred values of {name}"] = fill.digests
        agree(labelled(self._options.group, "init/agreement"), facts)

    def before_call(self, step: int, calls: Sequence[str]) -> None:
        self._compare_calls(step, calls, "step/calls")

    def before_writing(self, step: int, calls: Sequence[str]) -> None:
        failed = self._compare_calls(step, calls, "step/before writing")
        self._background.raise_if(failed)

    def _compare_calls(self, step: int, calls: Sequence[str], label: str) -> bool:
        """Compare the calls so far. Returns whether a background task of any rank has failed."""
        group = labelled(self._options.group, label)
        return agree_on_results(step, calls, {}, group, failed=self._background.failed())

    def on_results(self, results: StepResults) -> None:
        step, calls, value, metrics, num_draws, watch, look = results
        # Small tensors in every step, large ones now and then: their digests take time
        limit = math.inf if look else _SMALL
        rest = {path: leaf for path, leaf in rest_of(value).items() if _numel(leaf) <= limit}
        # A program may have put a count or a rate of its own into an optimizer's state
        if look:
            rest |= _whole_leaves(value, ShardedOptState)
        # A branch that one rank took in a step that nobody looked at shows in most of the elements.
        # Leaves that the program has made itself in this step are compared whole, as its operations
        if look:
            rest |= _samples(_whole_leaves(value, ShardedTree))
        operations = watch.operations(value) if look else ()
        # Causes before their effects
        found: dict[str, Any] = {}
        for i, told_of in enumerate(operations, 1):
            found[f"operation {i} on parts of leaves"] = told_of
        for name, metric in metrics.items():
            known = look or _is_here(metric)
            found[f"metric {name!r}"] = float(metric).hex() if known else _form_of(metric)
        near = {path: leaf for path, leaf in rest.items() if look or _is_here(leaf)}
        told = {path: _form_of(leaf) for path, leaf in rest.items() if path not in near}
        found |= {f"leaf {path!r}": words for path, words in (told | digests(near)).items()}
        if look:
            found["whole leaves that the program has made"] = watch.own_whole_leaves(value)
        found["the number of draws of fz.random"] = str(num_draws)
        group = labelled(self._options.group, "step/agreement")
        failed = agree_on_results(step, calls, found, group, failed=self._background.failed())
        self._background.raise_if(failed)


def agree_on_results(
    step: int,
    calls: Sequence[str],
    found: Mapping[str, Any],
    group: Group,
    *,
    failed: bool,
) -> bool:
    """Raise, on every rank, unless all ranks have made the same calls in a program, and its results
    are equal to the bit. Returns whether any rank has `failed`. One all-reduce of words; only when
    ranks differ, an exchange of JSON.

    Args:
        step: its number.
        calls: of the library so far; see Note [calls of a program] in `library_calls`.
        found: the results as plain data, equal where values are equal to the bit; causes before
            their effects.
        failed: whether a background task of this rank has.
    """
    # Ranks at different calls of a step send equal lengths, since `tell` does
    words = [f"step {step}", f"{len(calls)} calls", *calls, *map(repr, found.items())]
    told = tell(words, [failed], group)
    if told.alike:
        return told.flags[0]
    messages = group.exchange(json.dumps([step, calls, found]).encode())
    everyone = [json.loads(message) for message in messages]
    steps = [message[0] for message in everyone]
    if len(set(steps)) > 1:
        raise GroupError(
            f"the ranks are at different steps: {steps}, in the order of ranks. Remedy: make every "
            "rank take the same steps"
        )
    _check_calls(step, [message[1] for message in everyone], group.rank)
    first = everyone[0][2]
    rank, theirs = next((rank, each[2]) for rank, each in enumerate(everyone) if each[2] != first)
    name, ours, other = first_difference(first, theirs)
    raise MismatchError(
        f"the program's results differ between ranks: {name} is {shortened(ours)} on rank 0 and "
        f"{shortened(other)} on rank {rank} (this is rank {group.rank}). Remedy: make of each "
        "rank's own batch only what fz.value_and_grad gives, a loss and Aux(metrics=...), which "
        "are means over ranks"
    )


def _check_calls(step: int, calls: Sequence[Sequence[str]], own_rank: int) -> None:
    """Raise `GroupError` unless all ranks, in their order, have made the same calls."""
    for rank, theirs in enumerate(calls):
        if theirs == calls[0]:
            continue
        # An end that comes sooner is a difference, too
        rows = enumerate(zip_longest(calls[0], theirs, fillvalue=_NO_CALL), start=1)
        number, (expected, other) = next((n, pair) for n, pair in rows if pair[0] != pair[1])
        raise GroupError(
            f"the ranks make different calls in step {step} of a program: call {number} is "
            f"{expected} on rank 0, and {other} on rank {rank} (this is rank {own_rank}). Remedy: "
            "make the same calls of the library on every rank, in the same order; branch on a "
            "number that is the same on all ranks, such as a metric that the loss gives by "
            "fz.Aux(metrics=...)"
        )


_NO_CALL = "missing"
