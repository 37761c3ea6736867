"""`plan`: the cost of a sharded step, without ranks and without a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import optree
import torch
from optree import PyTree, tree_map
from torch import Tensor, nn

from .._torch_private import VALUE_NEEDED, FakeTensorMode
from ..errors import StructureError, TransformError, explain
from ..groups.mesh import SameData
from ..layout.layout import Layout
from ..layout.levels import LevelRule, levels_of
from ..model.casting import PrecisionRules
from ..model.functionalize import Apply, functionalize
from ..model.units import Units
from ..optim.base import Transform
from ..runtime.prefetch import Overlap
from ..sharded.api import shard
from ..sharded.notes import codecs_of, elements_by_unit, found_units, notes_of, tables_of
from ..sharded.options import ShardOptions
from ..sharded.program.step import ShardedStep
from ..step.loss import Aux, LossFn
from ..step.program_step import ProgramStep
from ..step.train import TrainStep, train_step, with_loss
from ..tree import PATTERNS, path_matches
from .imagined_ranks import imagined, lone_rank
from .imagined_step import BETWEEN, imagine
from .live_bytes import ValueNeeded
from .report import Bandwidth, Plan, balance_of
from .stand_in_loss import loss_through_units
from .watch import MemoryWatch, rows_asked_of


def plan(
    model_or_params: nn.Module | PyTree[Tensor],
    optimizer: Transform | ProgramStep | ShardedStep,
    *,
    level: LevelRule | None = None,
    ranks: int | None = None,
    rank: int = 0,
    units: Units = None,
    precision: PrecisionRules = None,
    batch: Any = None,
    buffers: PyTree[Tensor] | None = None,
    shard_size: int | None = None,
    same_data: SameData | None = None,
    bandwidth: Bandwidth | None = None,
    rows: Mapping[str, int] | None = None,
    **of_shard: Unpack[ShardOptions],
) -> Plan:
    """Memory and traffic of `shard(train_step(loss, optimizer), level=level)` on each of `ranks`
    ranks.

    No rank is started, nothing is communicated and nothing of the model's size is allocated: the
    model may be on the meta device, ranks may be 100,000. It is the sharded step itself that runs,
    on tensors that have no values.

    Args:
        model_or_params: a module, or the params that `functionalize` made of one (or any tree of
            tensors). Of a program, the argument of its `init`, or a tuple of them.
        optimizer: a transform; a step that `train_step` made of one and a loss; or one of
            `program_step`. Or what `shard` made of a step: then level, ranks, this rank and all
            options are its own, and none is given here.
        level: as for `shard`: 0 to 3, a name, or levels by leaf.
        ranks: how many.
        rank: whose plan.
        units, precision: as for `functionalize`, when a module is given; params have theirs.
        batch: a sample of one rank's batch; tensors on the meta device will do. With it the loss is
            run on fake tensors: activations are measured, and the collectives are those of this
            loss. A module given without a `train_step` is its own loss: it is called with the
            batch, or with a tuple's parts. Without a batch, units are taken to be entered once each
            in the layout's order, and their backward to need their weights. A program needs one,
            a tuple where its step takes several arguments.
        buffers: for the loss, when params are given.
        shard_size: of a mesh of two axes (`HybridGroup`), the ranks along the shard axis. None:
            there is one axis.
        same_data: as for `HybridGroup`: the axis along which all ranks have the same part of the
            batch.
        bandwidth: bytes per second that a rank can send, one way: the plan then says how long its
            communication takes at least. Of a mesh, perhaps by axis: see `Plan.seconds`.
        rows: of each table (`level="table"`), by pattern of its path, the number of different rows
            that a rank's lookup asks for: what a batch names, which has no values here. Without a
            batch each table needs one. With one, a table that isn't named is taken to be asked for
            another row by each id.
        of_shard: the other options of `shard`, by their names.

    The step planned is the first one of the optimizer, with the order of units known, as from the
    second one on. Its peak counts tensors: params, state, gradients, gathered params, activations
    and, over gloo, the room of a reduction. It counts neither the memory that an operator uses
    inside, nor the process itself.

    Raises:
        TypeError: an option is given beside a sharded step, which has its own.
        TransformError: the optimizer asks for a value on the host. Where it asks yes or no, as
            `apply_if_finite` does, yes is assumed, and `assumed` says so.
        StructureError: the loss, or the program, asks for a value, or for a shape that depends on
            values.

    >>> import torch
    >>> from functorch_zero import optim
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    >>> made = plan(model, optim.adamw(1e-3), level=3, ranks=64)
    >>> made.num_params, made.params, made.state // made.params
    (2002000, 125184, 2)
    """
    if isinstance(model_or_params, ProgramStep | Transform):
        raise TypeError(
            explain(
                "plan takes what is planned before its step",
                expected="fz.plan(params, step, ...), or a module and an optimizer",
                got=f"a {type(model_or_params).__name__} first",
            )
        )
    sharded: ShardedStep | None = None
    if isinstance(optimizer, ShardedStep):
        told = {"level": level, "ranks": ranks, "shard_size": shard_size, "same_data": same_data}
        _check_told_once({**told, "rank": rank or None, **of_shard})
        sharded, optimizer = optimizer, optimizer.unsharded
    if isinstance(optimizer, ProgramStep) and not isinstance(optimizer, TrainStep):
        others = {"units": units, "precision": precision, "buffers": buffers}
        work = _work_of_program(optimizer, model_or_params, batch, others)
    else:
        work = _work_of_training(model_or_params, optimizer, batch, buffers, units, precision)
    if sharded is None:
        if level is None or ranks is None:
            raise TypeError("plan takes level=... and ranks=..., or a step that shard has made")
        group = lone_rank(rank, ranks, shard_size, same_data)
        sharded = shard(work.step, level=level, group=group, **of_shard)
    # Losses may bring constants of their own, which are real tensors
    fake = None if batch is None else FakeTensorMode(allow_non_fake_inputs=True)
    rows = rows or {}
    _check_numbers(rows)
    lie_on, watch = _device_of(work.trees), MemoryWatch(fake, rows)
    # Those on meta may become any device's
    device = torch.device("cpu") if lie_on.type == "meta" else lie_on
    options = replace(
        sharded.options,
        # A reduction over gloo takes room, and over NCCL it takes none
        axes=imagined(sharded.options.axes, watch, swaps=device.type == "cpu"),
        # The stand-ins may lie on another device than the leaves
        overlap=sharded.options.overlap or Overlap.by_default(device),
    )
    # Shapes, strides, dtypes and devices stay; elements go
    inputs = tree_map(partial(_without_value, fake=fake, device=device), (work.trees, work.args))
    with _values_refused(watch), _told_of_lists(batch):
        found = imagine(work.step, options, watch, lie_on, *inputs)
    layout = found.layout
    _check_tables(rows, layout, all_named=batch is None)
    group, samples = options.group, watch.samples
    notes = codecs_of(layout, group.size)
    notes += notes_of(elements_by_unit(layout), group.size, tables_of(layout))
    if work.optimizer is not None:
        notes = found_units(layout.units) + notes
    return Plan(
        level=options.levels.number,
        levels=tuple(levels_of(layout)),
        num_ranks=group.size,
        rank=group.rank,
        num_params=sum(leaf.numel for leaf in layout.leaves),
        params=found.params,
        state=found.state,
        buffers=found.buffers,
        parts=found.parts,
        gradients=found.gradients,
        stored=found.stored,
        # The most at one moment, over all
        gathered=max(sample.gathered for sample in samples),
        samples=tuple(samples),
        collectives=tuple(watch.recorded),
        balance=None if work.optimizer is None else balance_of(work.optimizer, layout),
        traced=batch is not None,
        assumed=watch.live.assumed,
        mesh=options.axes.mesh,
        notes=notes,
        bandwidth=bandwidth,
    )


def _check_told_once(told: Mapping[str, Any]) -> None:
    """Raise if an argument is given beside a step of `shard`, which has it: one of the two would
    not be planned."""
    for name, value in told.items():
        if value is not None:
            raise TypeError(
                f"plan takes {name} from the sharded step, and was given {name}={value!r}. "
                "Remedy: leave it out, or plan the step that shard was given"
            )


def _check_numbers(rows: Mapping[str, int]) -> None:
    """Raise unless these are numbers of rows."""
    for pattern, num in rows.items():
        if type(num) is not int or num < 0:
            raise ValueError(f"rows[{pattern!r}] must be a number of rows, got {num!r}")


def _check_tables(rows: Mapping[str, int], layout: Layout, *, all_named: bool) -> None:
    """Raise unless each pattern names a table of this layout, and, with `all_named`, each table has
    one."""
    tables = tables_of(layout)
    for pattern in rows:
        if not any(path_matches(path, pattern) for path in tables):
            raise StructureError(
                "a pattern of `rows` names no table",
                path=pattern,
                expected=f"one of {tables}" if tables else 'a leaf of level="table"',
                remedy=PATTERNS,
            )
    for path in tables if all_named else ():
        if rows_asked_of(path, rows) is None:
            raise StructureError(
                "a plan without a batch can't know how many rows of a table a lookup asks for",
                path=path,
                remedy=f'plan(..., rows={{"{path}": 5_000}}), say, or batch=...',
            )


class _Work(NamedTuple):
    """A step to imagine, and its inputs."""

    step: ProgramStep
    trees: tuple[Any, ...]  # the arguments of `init`
    args: tuple[Any, ...]  # those of the step, after its state: one rank's
    optimizer: Transform | None = None  # of a training step


def _work_of_program(step: ProgramStep, given: Any, batch: Any, others: Mapping[str, Any]) -> _Work:
    """A program, and its inputs; `others` are arguments of `plan` that it has no use for."""
    for name, argument in others.items():
        if argument is not None:
            raise StructureError(
                f"{name} is of a training step, and a program was given. Remedy: leave it out; "
                "pass the trees of its init, such as the params of functionalize"
            )
    if batch is None:
        raise StructureError(
            "a plan of a program runs it, and needs a batch. Remedy: batch=..., a sample of one "
            "rank's, or a tuple of the step's arguments"
        )
    args = batch if type(batch) is tuple else (batch,)
    return _Work(step, given if type(given) is tuple else (given,), args)


def _work_of_training(
    given: Any,
    optimizer: Transform | TrainStep,
    batch: Any,
    buffers: PyTree[Tensor] | None,
    units: Units,
    precision: PrecisionRules,
) -> _Work:
    """A training step and its inputs, of params or of a module, which is its own loss where none is
    given. Without a batch a loss that goes through all units stands in."""
    # An optimizer alone: `_no_loss` marks the place of its loss
    step = optimizer if isinstance(optimizer, TrainStep) else train_step(_no_loss, optimizer)
    params: Any = given
    own_buffers: Any = {}
    if isinstance(given, nn.Module):
        apply, params, own_buffers = functionalize(given, units, precision=precision)
        if step.loss_fn is _no_loss:
            step = with_loss(step, _called(apply))
    elif units is not None or precision is not None:
        raise StructureError(
            "units and precision are of a module, and params were given, which have theirs from "
            "functionalize"
        )
    if batch is not None and step.loss_fn is _no_loss:
        raise StructureError(
            "a plan with a batch needs the step's loss: pass train_step(loss, optimizer)"
        )
    if batch is None:
        step = with_loss(step, loss_through_units(given))
        batch = torch.empty(step.accumulate, device="meta")  # rows for the micro-batches
    return _Work(
        step,
        (params, own_buffers if buffers is None else buffers),
        (batch,),
        step.optimizer,
    )


@contextmanager
def _told_of_lists(batch: Any) -> Iterator[None]:
    """Around a call with the batch: where it fails, and the batch is a list, say that a tuple would
    have been taken apart."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if isinstance(batch, list):
            error.add_note(
                "batch=[...] is one argument. Remedy: batch=(x, y) for two arguments; a list or a "
                "dict is one, as it is in a step's call."
            )
        raise


def _device_of(params: PyTree[Tensor]) -> torch.device:
    """The device of the params; meta where all are there."""
    devices = [leaf.device for leaf in optree.tree_leaves(params) if not leaf.is_meta]
    return devices[0] if devices else torch.device("meta")


def _no_loss(params: Any, buffers: Any, batch: Any) -> Any:
    """The loss of a step that was made of an optimizer alone: a stand-in takes its place."""
    raise AssertionError


def _called(apply: Apply) -> LossFn:
    """The module as its own loss."""

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        # A tuple is the arguments of a call, as it is for a data loader
        arguments = batch if isinstance(batch, tuple) else (batch,)
        output, new_buffers = apply(params, buffers, *arguments)
        return output, Aux(buffers=new_buffers)

    return loss


def _without_value(x: Any, fake: FakeTensorMode | None, device: torch.device) -> Any:
    """A tensor of the same form that takes no room: on the meta device, or a fake one on its own
    device, which is `device` for those without values already."""
    if not isinstance(x, Tensor):
        return x
    if fake is None:
        device = torch.device("meta")
    elif not x.is_meta:
        device = x.device
    with fake or nullcontext():  # fake tensors are made inside of their mode
        return torch.empty_strided(
            x.size(), x.stride(), dtype=x.dtype, device=device, requires_grad=x.requires_grad
        )


@contextmanager
def _values_refused(watch: MemoryWatch) -> Iterator[None]:
    """Say who needs a value that is not there: the optimizer, or the loss."""
    try:
        yield
    except (ValueNeeded, *VALUE_NEEDED) as error:
        # The phase at the time of the error says whose code asked
        if watch.phase == "optimizer":
            raise TransformError(
                "the optimizer reads values of tensors on the host, which a plan does not have. "
                "Remedy: compute with torch.where instead of `if`, or plan with another optimizer "
                "of the same needs"
            ) from error
        if watch.phase == BETWEEN:
            raise StructureError(
                "the program reads values of tensors on the host, which a plan does not have. "
                "Remedy: compute with torch.where instead of `if` and float"
            ) from error
        raise StructureError(
            "the loss reads values of tensors on the host, which a plan does not have. Remedy: "
            "plan with a loss whose shapes and branches do not depend on values, or without a batch"
        ) from error
