"""The agreement of ranks on a program: on the arguments of its `init`, on its first value, and in
each step on its results."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from ...groups import labelled
from ...layout.layout import Layout
from ...layout.sharded_tree import ShardedTree
from ...params import is_on_engine
from ...sharded_optim.sharded_state import ShardedOptState
from ...step.loss import Metrics
from ...tree import content_digests, paths
from ...version import __version__
from ..agreement import agree, agree_on_results
from ..background import BackgroundTasks
from ..deferred_values import DigestedFill
from ..options import Options
from .piece_watch import PieceWatch, whole_leaves

_SMALL = 4096  # elements of a tensor that ranks compare in every step


class StepResults(NamedTuple):
    """The results of one step of a program on this rank."""

    step: int  # its number
    calls: Sequence[str]  # of the library: all that the program has made
    value: Any  # the next one
    metrics: Metrics  # by name, 0-d
    num_draws: int  # of `fz.random`
    watch: PieceWatch  # of the program; it has seen nothing where the step isn't looked at
    look: bool  # whether the step is looked at, on all ranks alike


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
        facts: dict[str, Any] = {"value": paths(value), "values": _digests(rest_of(value))}
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
        found |= {f"leaf {path!r}": words for path, words in (told | _digests(near)).items()}
        if look:
            found["whole leaves that the program has made"] = watch.own_whole_leaves(value)
        found["the number of draws of fz.random"] = str(num_draws)
        group = labelled(self._options.group, "step/agreement")
        failed = agree_on_results(step, calls, found, group, failed=self._background.failed())
        self._background.raise_if(failed)


def _is_here(leaf: Any) -> bool:
    """Whether the host reads a value without a wait for a device."""
    return not isinstance(leaf, Tensor) or leaf.is_cpu


def _form_of(leaf: Tensor) -> str:
    """Words for a tensor whose values aren't read. Those of a leaf that differs are read when the
    next step is looked at."""
    return f"a {leaf.dtype} of shape {(*leaf.shape,)} on a device"


def rest_of(value: Any) -> dict[str, Any]:
    """By path, the tensors and numbers of a value that every rank holds whole."""
    leaves = optree.tree_leaves(value, is_leaf=is_on_engine)
    rows = zip(paths(value, is_on_engine), leaves, strict=True)
    return {path: leaf for path, leaf in rows if not is_on_engine(leaf)}


def _whole_leaves(value: Any, kind: type[ShardedTree] | type[ShardedOptState]) -> dict[str, Any]:
    """By path, the tensors and numbers that every rank holds whole: in trees, or in states."""
    nodes = optree.tree_leaves(value, is_leaf=is_on_engine)
    found = {}
    for prefix, node in zip(paths(value, is_on_engine), nodes, strict=True):
        if not isinstance(node, kind):
            continue
        for path, leaf in whole_leaves(node).items():
            if isinstance(leaf, Tensor | int | float | complex):
                found[f"{prefix}.{path}".strip(".")] = leaf
    return found


def _samples(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The first elements of each tensor: digests of all of them would take long."""
    found = {}
    for path, leaf in leaves.items():
        found[path] = leaf.detach().reshape(-1)[:_SMALL] if isinstance(leaf, Tensor) else leaf
    return found


def _numel(leaf: Any) -> int:
    return leaf.numel() if isinstance(leaf, Tensor) else 1


def _digests(rest: Mapping[str, Any]) -> dict[str, str]:
    """Of each leaf by path: equal where values are equal to the bit. Of numbers, themselves."""
    numbers = {path: repr(leaf) for path, leaf in rest.items() if not isinstance(leaf, Tensor)}
    tensors = {path: leaf for path, leaf in rest.items() if isinstance(leaf, Tensor)}
    return numbers | content_digests(tensors)
