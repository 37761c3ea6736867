"""`describe`: a rank's part of a state, unit by unit: dtypes, traffic, place, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import optree
import torch
from torch import Tensor

from .._torch_private import storage_id
from ..errors import StructureError
from ..layout.build import make_layout
from ..layout.layout import Bucket, Cut, Layout
from ..precision import short
from ..runtime.unshard import UNENCODED, Gather
from ..sharded_optim.state_plan import StateLeaf, StatePlan, plan_state
from ..step.state import State, check_state
from ..step.train import TrainStep
from .checks import sharding_of
from .train import ShardedTrainStep


class Row(NamedTuple):
    """The leaves of one unit that are treated alike, or what belongs to no leaf."""

    unit: str
    leaves: tuple[str, ...]  # their paths
    elements: int  # of whole leaves
    storage: tuple[torch.dtype, ...]  # of params, or of what else it is
    compute: torch.dtype | None  # what whole leaves are used in
    wire: tuple[tuple[str, torch.dtype], ...]  # what travels in a step, and in which dtype
    where: str  # params, between steps: "whole", or "1/4" for a piece of four
    nbytes: int  # of params here, padding included
    state: tuple[torch.dtype, ...]  # of the optimizer's state of these leaves
    state_where: str  # "whole", "1/4", "at owners", or ""
    state_nbytes: int  # of it here


class Description(NamedTuple):
    """The holdings of one rank. `str` gives a table."""

    rows: tuple[Row, ...]
    rank: int
    num_ranks: int
    optimizer: str  # as it prints
    seams: str = ""  # what `shard` was given for them, as it prints

    @property
    def nbytes(self) -> int:
        """All that this rank holds, in bytes."""
        return sum(row.nbytes + row.state_nbytes for row in self.rows)

    def __str__(self) -> str:
        head = (
            "unit",
            "leaves",
            "storage",
            "compute",
            "wire",
            "where",
            "bytes",
            "state",
            "where",
            "bytes",
        )
        table = [head, *map(_cells, self.rows)]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
        numbers = [name in ("leaves", "bytes") for name in head]

        def line(cells: tuple[str, ...]) -> str:
            columns = zip(cells, widths, numbers, strict=True)
            return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in columns).rstrip()

        of = f"rank {self.rank} of {self.num_ranks}" if self.num_ranks > 1 else "this process"
        with_seams = f"; {self.seams}" if self.seams else ""
        last = f"{of} holds {self.nbytes:,} bytes; {self.optimizer}{with_seams}"
        return "\n".join([*map(line, table), last])


def _cells(row: Row) -> tuple[str, ...]:
    wire = ", ".join(f"{what} {short(dtype)}" for what, dtype in row.wire)
    return (
        row.unit,
        str(len(row.leaves) or ""),
        _dtypes(row.storage),
        "" if row.compute is None else short(row.compute),
        wire or "-",
        row.where,
        f"{row.nbytes:,}",
        _dtypes(row.state) or "-",
        row.state_where or "-",
        f"{row.state_nbytes:,}",
    )


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(short, dtypes))


def describe(step: TrainStep | ShardedTrainStep, state: State) -> Description:
    """A rank's part of a state, unit by unit: dtypes, traffic, place, bytes. Print it for a table.

    Of a step for one process it describes the whole state. No communication.

    Args:
        step: the step that the state belongs to, from `train_step` or `shard`.
        state: made by `step.init` or returned by the step.

    Raises:
        DonatedError: a step has taken the state's storage.
        StructureError: the state was sharded for another step, level, group or rank.
        TypeError: `state` is no state.

    >>> from functorch_zero import optim, train_step
    >>> step = train_step(lambda params, buffers, batch: params["w"].sum(), optim.adam(0.1))
    >>> describe(step, step.init({"w": torch.zeros(3, requires_grad=True)})).nbytes
    76
    """
    check_state(state)
    if isinstance(step, TrainStep):
        if state.sharding is not None:
            raise StructureError(
                "a sharded state was given with an unsharded step. Remedy: describe it with the "
                "step that made it"
            )
        layout = _whole_layout(state)
        plan = plan_state(step.optimizer.init, layout, layout.trainable, 1)
        return Description(_rows(state, layout, plan, num_ranks=1), 0, 1, repr(step.optimizer))
    sharding = sharding_of(state, step.options)
    plan = step.state_plan(sharding.layout)
    others = state.replace(parts=None)
    gather = step.options.gather
    rows = _rows(others, sharding.layout, plan, num_ranks=step.group.size, gather=gather)
    optimizer = repr(step.unsharded.optimizer)
    rows += _rows_of_parts(step, state)
    seams = ", ".join(f"{name}={one}" for name, one in step.options.seams.items())
    return Description(rows, step.group.rank, step.group.size, optimizer, seams)


def _rows_of_parts(step: ShardedTrainStep, state: State) -> tuple[Row, ...]:
    """A row for each name under which a part keeps something."""
    if state.parts is None:
        return ()
    assert state.sharding is not None
    step.parts(state.sharding.layout).check(state.parts)
    rows, num_ranks = [], step.options.axes.optimizer.size
    for name, carried in step.options.reduction.keeps.items():
        where = {"sum": "a share of the sum", "pieces": _share(num_ranks), "same": "whole"}[carried]
        tensors = optree.tree_leaves(state.parts["reduction"][name])
        rows.append(_plain(f"(reduction: {name})", tensors)._replace(where=where))
    return tuple(rows)


def _whole_layout(state: State) -> Layout:
    """The layout of a state that is not sharded: every bucket whole, on one rank."""
    whole = Cut(level=0, num_pieces=1, num_held=1)
    return make_layout(
        state.params,
        1,
        trainable=lambda path, leaf: leaf.requires_grad,
        cut=lambda path, leaf: whole,
    )


def _rows(
    state: State, layout: Layout, plan: StatePlan, *, num_ranks: int, gather: Gather = UNENCODED
) -> tuple[Row, ...]:
    params, opt_state = state.params, state.opt_state
    rest = state.replace(params=None, opt_state=None)
    leaves, states = optree.tree_leaves(params), optree.tree_leaves(opt_state)
    of_leaf: dict[int, list[tuple[StateLeaf, Tensor]]] = {}
    for planned, x in zip(plan.leaves, states, strict=True):
        if planned.kind != "replicated":
            of_leaf.setdefault(planned.leaf, []).append((planned, x))
    rows = []
    for unit in layout.units:
        for bucket in (layout.buckets[b] for b in unit.buckets):
            follows = [pair for n in bucket.leaves for pair in of_leaf.get(n, ())]
            held, name = [leaves[n] for n in bucket.leaves], unit.name or "root"
            rows.append(
                _row(
                    name,
                    bucket,
                    [layout.leaves[n].path for n in bucket.leaves],
                    held,
                    follows,
                    _wire(bucket, gather) if num_ranks > 1 else (),
                )
            )
    shared = [
        x for planned, x in zip(plan.leaves, states, strict=True) if planned.kind == "replicated"
    ]
    for name, tree in (("(optimizer)", shared), ("(buffers and counts)", rest)):
        tensors = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
        if tensors:
            rows.append(_plain(name, tensors))
    return tuple(rows)


def _row(
    unit: str,
    bucket: Bucket,
    paths: Sequence[str],
    held: Sequence[Tensor],
    state: Sequence[tuple[StateLeaf, Tensor]],
    wire: tuple[tuple[str, torch.dtype], ...],
) -> Row:
    kinds = {planned.kind for planned, _ in state}
    dtypes = [x.dtype for _, x in state]
    where = [_share(bucket.cut.num_pieces)] if "follows" in kinds else []
    return Row(
        unit,
        tuple(paths),
        sum(bucket.numels),
        _distinct(x.dtype for x in held),
        bucket.compute,
        wire,
        _share(bucket.cut.num_held),
        _nbytes(held),
        _distinct(dtypes),
        ", ".join([*where, *(["at owners"] if "owned" in kinds else [])]),
        _nbytes(x for _, x in state),
    )


def _wire(bucket: Bucket, gather: Gather) -> tuple[tuple[str, torch.dtype], ...]:
    """The traffic of a bucket in a step: gathers on use, reductions, and the all-gather after the
    update."""

    def message(dtype: torch.dtype) -> torch.dtype:
        return gather.encode(torch.empty(bucket.piece, dtype=dtype, device="meta")).dtype

    gathers = [("gather", message(bucket.gather))] if bucket.cut.level == 3 else []
    reduces = [("reduce", bucket.reduce)] if bucket.trainable else []
    published = bucket.trainable and bucket.cut.level in (1, 2)
    publishes = [("publish", message(bucket.dtype))] if published else []
    return (*gathers, *reduces, *publishes)


def _plain(name: str, tensors: Sequence[Tensor]) -> Row:
    storage = _distinct(x.dtype for x in tensors)
    return Row(
        name,
        (),
        sum(x.numel() for x in tensors),
        storage,
        None,
        (),
        "whole",
        _nbytes(tensors),
        (),
        "",
        0,
    )


def _share(num_pieces: int) -> str:
    return "whole" if num_pieces == 1 else f"1/{num_pieces}"


def _distinct(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(dict.fromkeys(dtypes))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages that the tensors lie in, each once."""
    return sum({storage_id(x): x.untyped_storage().nbytes() for x in tensors}.values())
