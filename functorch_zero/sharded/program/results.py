"""The results of a step of a program, as ranks compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ...layout.sharded_tree import ShardedTree
from ...params import OnEngine, is_on_engine
from ...sharded_optim.sharded_state import ShardedOptState
from ...step.loss import Metrics
from ...tree import content_digests, paths
from ..readable import values_in_words
from .ledger import SMALL
from .value import unsharded_leaves, whole_leaves


class StepResults(NamedTuple):
    """The results of one step of a program on this rank."""

    args: Sequence[Any]  # of the step, after the state: this rank's part of the batch
    value: Any  # the next one
    metrics: Metrics  # by name, 0-d
    num_draws: int  # of `fz.random`
    look: bool  # whether the step is looked at, on all ranks alike


def facts_of(results: StepResults) -> dict[str, Any]:
    """The results as plain data, equal on ranks whose results are equal to the bit. Causes come
    before their effects."""
    value, look = results.value, results.look
    facts: dict[str, Any] = {}
    for name, metric in results.metrics.items():
        known = look or _is_here(metric)
        facts[f"metric {name!r}"] = repr(float(metric)) if known else _form_of(metric)
    for path, words in _in_words(_compared_leaves(value, look), look).items():
        facts[f"leaf {path!r}"] = words
    return facts


def named_nodes(value: Any) -> dict[str, OnEngine]:
    """The sharded trees and states of a next value, by name for errors."""
    nodes = optree.tree_leaves(value, is_leaf=is_on_engine)
    rows = zip(paths(value, is_on_engine), nodes, strict=True)
    return {f"the next value's tree {path!r}": node for path, node in rows if is_on_engine(node)}


def values_of(results: StepResults) -> dict[str, str]:
    """For an error: words for the values of which the facts are digests, by the facts' names."""
    leaves = _compared_leaves(results.value, results.look)
    read = {path: x for path, x in leaves.items() if isinstance(x, Tensor)}
    if not results.look:
        read = {path: x for path, x in read.items() if _is_here(x)}
    return {f"leaf {path!r}": values_in_words(x) for path, x in read.items()}


def _compared_leaves(value: Any, look: bool) -> dict[str, Any]:
    """By path, the leaves that every rank holds and that ranks compare in this step: small tensors
    in each, large ones where the step is looked at, since their digests take time."""
    leaves = unsharded_leaves(value)
    if not look:
        return {path: leaf for path, leaf in leaves.items() if _numel(leaf) <= SMALL}
    # A program may have put a count or a rate of its own into an optimizer's state
    states = _whole_leaves(value, ShardedOptState)
    # A branch that one rank took in a step that nobody looked at shows in most of the elements.
    # Leaves that the program has made itself in this step are compared whole, as its operations
    trees = _samples(_whole_leaves(value, ShardedTree))
    return leaves | states | trees


def _in_words(leaves: Mapping[str, Any], look: bool) -> dict[str, str]:
    """Of each leaf by path: equal where values are. Values on a device are only read where the step
    is looked at."""
    unread = {} if look else {path: leaf for path, leaf in leaves.items() if not _is_here(leaf)}
    forms = {path: _form_of(leaf) for path, leaf in unread.items()}
    return forms | _digests({path: leaf for path, leaf in leaves.items() if path not in unread})


def _is_here(leaf: Any) -> bool:
    """Whether the host reads a value without a wait for a device."""
    return not isinstance(leaf, Tensor) or leaf.is_cpu


def _form_of(leaf: Tensor) -> str:
    """Words for a tensor whose values aren't read. Those of a leaf that differs are read when the
    next step is looked at."""
    return f"a {leaf.dtype} of shape {(*leaf.shape,)} on a device"


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
        found[path] = leaf.detach().reshape(-1)[:SMALL] if isinstance(leaf, Tensor) else leaf
    return found


def _numel(leaf: Any) -> int:
    return leaf.numel() if isinstance(leaf, Tensor) else 1


def _digests(rest: Mapping[str, Any]) -> dict[str, str]:
    """Of each leaf by path: equal where values are equal to the bit. Of numbers, themselves."""
    numbers = {path: repr(leaf) for path, leaf in rest.items() if not isinstance(leaf, Tensor)}
    tensors = {path: leaf for path, leaf in rest.items() if isinstance(leaf, Tensor)}
    return numbers | content_digests(tensors)
