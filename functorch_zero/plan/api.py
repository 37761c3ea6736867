"""`plan`: what a sharded step will cost, without ranks and without a value."""

from __future__ import annotations

from typing import Any

import optree
from optree import PyTree
from torch import Tensor, nn

from .. import reports
from ..buffers import check_buffer_rule
from ..errors import StructureError
from ..functional import functionalize
from ..groups.counting import CountingGroup
from ..layout import Layout, Unit, make_layout
from ..levels import find_level
from ..optim.base import Transform
from ..step import LossFn, Trainable, mark_trainable
from ..units import Units
from .derived import DerivedPass, record_publishing, saved_by_names
from .recording import Recorder
from .records import Sample
from .report import Plan
from .sizes import gradient_bytes, params_bytes, state_sizes
from .traced import Trace, TracedPass
from .update import plan_update


def plan(
    model_or_params: nn.Module | PyTree[Tensor],
    optimizer: Transform,
    *,
    level: int | str,
    ranks: int,
    rank: int = 0,
    units: Units = None,
    trainable: Trainable = None,
    batch: Any = None,
    loss: LossFn | None = None,
    buffers: PyTree[Tensor] | None = None,
    buffer_rule: str = "mean",
    reshard_after_forward: bool = True,
    accumulate: int = 1,
) -> Plan:
    """What `shard(train_step(loss, optimizer), level=level)` will hold and send on each of `ranks` ranks.

    No rank is started, nothing is communicated and nothing of the model's size is allocated: the model may be on the
    meta device, ranks may be 100,000.

    Args:
        model_or_params: a module, or the params that `functionalize` made of one (or any tree of tensors).
        optimizer: a transform.
        level: 0 to 3, or its name.
        ranks: how many.
        rank: whose plan.
        units: as for `functionalize`, when a module is given.
        trainable: as for `train_step`.
        batch: a sample of one rank's batch; tensors on the meta device will do. With it the loss is run on fake
            tensors: activations are measured, and the collectives are those of this loss. Without it, units are taken
            to be entered once each in the layout's order, and their backward to need their weights.
        loss: with a batch, the loss function of the step; None: the module called with `*batch`, if that gives a
            scalar.
        buffers: for the loss, when params are given.
        buffer_rule, reshard_after_forward: as `buffers` and `reshard_after_forward` for `shard`.
        accumulate: as for `train_step`: the batch is that of all micro-batches together.

    The peak counts tensors: params, state, gradients, gathered params, activations and, over gloo, the room of a
    reduction. It does not count what an operator uses inside, nor the process itself.

    >>> import torch
    >>> from functorch_zero import optim
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    >>> made = plan(model, optim.adamw(1e-3), level=3, ranks=64)
    >>> made.num_params, made.params, made.state // made.params
    (2002000, 125184, 2)
    """
    params, loss, buffers = _inputs(model_or_params, units, loss, buffers)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to ranks - 1, got rank {rank} and ranks {ranks}")
    row, rule = find_level(level), check_buffer_rule(buffer_rule)
    params = mark_trainable(params, trainable)
    layout = make_layout(
        params, ranks, trainable=lambda path, leaf: leaf.requires_grad, cut=lambda path, leaf: row.cut(ranks)
    )
    group = Recorder(rank, ranks)
    sizes = state_sizes(optimizer, layout, ranks if row.cuts_state else 1)
    held = params_bytes(layout, row), sizes.at(layout, rank if row.cuts_state else 0)
    buffer_bytes = sum(b.nbytes for b in optree.tree_leaves(buffers))
    base = held[0] + buffer_bytes, held[1]
    keeps = not reshard_after_forward
    if batch is None:
        num_saved = _num_saved(model_or_params, layout)
        derived = DerivedPass(layout, row, group, keeps=keeps, num_saved=num_saved, base=base)
        samples, trace = derived.run(accumulate), Trace([], (), False)
    else:
        if loss is None:
            raise StructureError("a plan with a batch needs the step's loss: pass loss=loss_fn")
        trace = TracedPass(layout, row, group, loss, keeps=keeps, base=base, rule=rule, accumulate=accumulate).run(
            buffers, batch
        )
        samples = trace.samples
    _record_metrics(group, trace, buffers)
    group.phase = "optimizer"
    cost = plan_update(optimizer, layout, row, group)
    reduced = gradient_bytes(layout, row)
    samples.append(Sample("optimizer", *base, reduced, 0, cost.extra))
    record_publishing(group, layout, row)
    return Plan(
        level=row.number,
        num_ranks=ranks,
        rank=rank,
        num_params=sum(leaf.numel for leaf in layout.leaves),
        params=held[0],
        gradients=reduced,
        state=held[1],
        buffers=buffer_bytes,
        gathered=max(sample.gathered for sample in samples),
        samples=tuple(samples),
        collectives=tuple(group.recorded),
        balance=sizes.balance,
        traced=batch is not None,
    )


def _inputs(
    given: Any, units: Units, loss: LossFn | None, buffers: PyTree[Tensor] | None
) -> tuple[PyTree[Tensor], LossFn | None, PyTree[Tensor]]:
    """Params, loss and buffers of a module or of params."""
    if not isinstance(given, nn.Module):
        if units is not None:
            raise StructureError(
                "units are found in a module, and params were given, which have theirs from functionalize"
            )
        return given, loss, {} if buffers is None else buffers
    apply, params, own = functionalize(given, units)

    def called(params: Any, buffers: Any, batch: Any) -> Any:
        from ..step import Aux

        arguments = batch if isinstance(batch, tuple) else (batch,)
        output, new = apply(params, buffers, *arguments)
        return output, Aux(buffers=new)

    return params, called if loss is None else loss, own if buffers is None else buffers


def _record_metrics(group: Recorder, trace: Trace, buffers: PyTree[Tensor]) -> None:
    """The one all-reduce of metrics, as the step does it. It comes before the buffers'."""
    counting = CountingGroup(group.size)
    values = dict.fromkeys(("loss", *trace.metrics), 0.0)
    flags = [False] * len(optree.tree_leaves(buffers))
    reports.average(values, 1.0 if trace.weighted else None, counting, [], flags)
    after = [c for c in group.recorded if c.phase == "buffers"]
    del group.recorded[len(group.recorded) - len(after) :]
    group.phase = "metrics"
    for call in counting.calls:
        group.note(call)
    group.recorded += after


def _num_saved(given: Any, layout: Layout) -> Any:
    """How many leaves each unit's backward needs: by the names of leaves, and none of an embedding alone."""
    by_names = saved_by_names(layout)
    if not isinstance(given, nn.Module):
        return by_names
    lookups = {f"{path}.weight".lstrip(".") for path, m in given.named_modules() if isinstance(m, nn.Embedding)}

    def num_saved(unit: Unit) -> int:
        leaves = {layout.leaves[n].path for b in unit.buckets for n in layout.buckets[b].leaves}
        return 0 if leaves <= lookups else by_names(unit)

    return num_saved
