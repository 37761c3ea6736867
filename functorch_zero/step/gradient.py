"""The gradient of a loss in one process, micro-batch by micro-batch: a training step's, and those
that a program takes. It is the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor

from ..errors import StructureError
from ..model.buffer_copies import check_left_in_backward
from ..model.casting import CastParams, as_reduced
from ..model.untouched import Untouched
from ..tree import PyTree
from .backward import gradients, nodes_behind, noting_lost_graphs, refuse_reentrant_checkpoints
from .loss import LossFn, Outcome, call_loss, independent, on_meta, untrained
from .micro_batches import joined, micro_batches, weighted_mean
from .reminder import Reminder
from .rng import MicroStreams
from .scope import given_batch, rank_of_step
from .weights import check_weight_value, unless_weightless

Trees = tuple[PyTree[Tensor], Any]  # one to differentiate, and what the loss reads beside it


def mean_gradients(
    loss_fn: LossFn,
    trees: Trees,
    buffers: PyTree[Tensor],
    batch: Any,
    *,
    count: int,
    streams: MicroStreams,
    look: bool,
    reminder: Reminder,
    scale: float | None = None,
    round_sums: Sequence[bool] = (),
) -> tuple[PyTree[Tensor], Outcome]:
    """The gradients of a loss on a batch (None where frozen), and its results: means over
    micro-batches, by their weights.

    Args:
        loss_fn: called with `trees`, the buffers and a micro-batch.
        trees: whole ones. The first one's leaves are trained where they require grad.
        buffers: the loss is given copies, which go from one micro-batch to the next.
        count: of the micro-batches.
        streams: their random numbers.
        look: whether slow questions about the loss are asked; see `is_looked_at`.
        reminder: warns of micro-batches of unequal sizes, and of lost buffers.
        scale: of the loss; None: it isn't scaled.
        round_sums: where a `Precision` rounds gradients, whether it rounds the mean instead of each
            use's: per leaf of the tree that is differentiated, or one for all. Empty: for none.

    Raises:
        StructureError: the step of a sharded program runs.
    """
    _refuse_in_a_sharded_step()
    leaves, treedef = optree.tree_flatten(trees[0])
    summed = [*round_sums] if len(round_sums) == len(leaves) else [*round_sums] * len(leaves)
    of_sums = treedef.unflatten(summed) if summed else None
    # One for each micro-batch, all at a time: the oracle is simple, not thrifty
    grads_of: list[PyTree[Tensor]] = []  # one tree per micro-batch, whole leaves
    outcomes: list[Outcome] = []
    parts = micro_batches(batch, count)
    for i, part in enumerate(parts):
        with streams(i), torch.enable_grad(), given_batch():
            grads, outcome = _gradients(
                loss_fn, trees, buffers, part, look=look, scale=scale, round_sums=of_sums
            )
        reminder.lost_buffers(outcome.lost)
        outcome = outcome._replace(lost=())
        grads_of.append(grads)
        outcomes.append(outcome)
        # Buffers go on from one micro-batch to the next, as they would over so many steps
        buffers = outcome.buffers
    # No mean, and so no rounding, of a single one
    mean_grads = grads_of[0]
    if len(outcomes) > 1:
        reminder.compare_parts(parts, outcomes[0].weight)
        mean_grads = tree_map(lambda *grads: weighted_mean(grads, outcomes), *grads_of)
    if of_sums is not None:
        mean_grads = as_reduced(mean_grads, trees[0], of_sums)
    return mean_grads, joined(outcomes)


def _refuse_in_a_sharded_step() -> None:
    """Raise where other ranks' parts of the batch would be missing."""
    rank = rank_of_step()
    if rank is not None:
        raise StructureError(
            "a gradient was asked of a tree that is not sharded, or of a single leaf, in a "
            "sharded step: it would be that of this rank's batch alone",
            expected="sharded trees",
            rank=rank,
            remedy="pass the tree to the program's init, which cuts it, or cut it with "
            "fz.shard_tree; differentiate by the whole tree, value_and_grad(loss)(params, "
            "...). By tensors that are the same on every rank, of a loss of such tensors, "
            "torch.func.grad is one process's gradient",
        )


def _gradients(
    loss_fn: LossFn,
    trees: Trees,
    buffers: PyTree[Tensor],
    batch: Any,
    *,
    look: bool,
    scale: float | None,
    round_sums: PyTree[bool] | None,
) -> tuple[PyTree[Tensor], Outcome]:
    """Forward and backward of the loss on one micro-batch: gradients, and its results."""
    tree, read = trees
    leaves, treedef = optree.tree_flatten(tree)
    if not any(leaf.requires_grad for leaf in leaves):
        raise untrained()
    # Autograd leaves of this call's own, on the tree's storage, so that it is in no graph
    own = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
    # The loss must not write to params: a sharded one couldn't, and results would differ
    untouched = Untouched(own, look=look)
    # One cast for both: trees that are only read may have policies too
    of_trees = None if round_sums is None else (round_sums, tree_map(lambda leaf: False, read))
    cast = CastParams((treedef.unflatten(own), read), look=look, round_sums=of_trees)
    outcome = call_loss(loss_fn, cast.params, buffers, batch, dry=on_meta(own))
    if look:
        refuse_reentrant_checkpoints(nodes_behind(outcome.loss))
        check_weight_value(outcome.weight)
    # Before backward, so that the error comes from the loss that wrote
    cast.finish()
    untouched.check(tree)
    grads = _of_leaves(own, outcome, scale)
    check_left_in_backward(outcome.left)

    # A batch that weighs nothing counts for nothing: a mean over no examples is a NaN
    metrics = {}
    for name, value in outcome.metrics.items():
        metrics[name] = unless_weightless(value, outcome.weight)
    loss = unless_weightless(outcome.loss.detach(), outcome.weight)
    return treedef.unflatten(grads), outcome._replace(loss=loss, metrics=metrics, left=())


def _of_leaves(
    leaves: Sequence[Tensor], outcome: Outcome, scale: float | None
) -> list[Tensor | None]:
    """The gradients of the trained leaves, whole, in the leaves' dtypes; None where frozen."""
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    # Backward begins with the loss scale, which is the same as to multiply the loss by it
    seed = None if scale is None else outcome.loss.new_full((), scale)
    with noting_lost_graphs():
        found = gradients(outcome.loss, trained, seed)
    # A loss that reaches no leaf at all is a mistake
    if all(grad is None for grad in found):
        raise independent()
    of_trained = iter(found)
    grads: list[Tensor | None] = []
    for leaf in leaves:
        if not leaf.requires_grad:
            grads.append(None)
            continue
        grad = next(of_trained)
        if grad is None:
            grad = torch.zeros_like(leaf)  # this batch's loss doesn't use the leaf
        if scale is not None:
            # Divided again leaf by leaf, in the gradient's dtype
            grad = grad / scale
        grads.append(unless_weightless(grad, outcome.weight))
    return grads
