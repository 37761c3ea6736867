"""`describe`: a rank's part of a state, unit by unit: dtypes, traffic, bytes, and the share of the
whole that is here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from optree import tree_map
from torch import Tensor

from .._torch_private import storage_id
from ..compress import Form
from ..errors import StructureError
from ..layout.build import make_layout
from ..layout.layout import Bucket, Cut, Layout
from ..layout.sharded_tree import ShardedTree
from ..params import as_local, is_on_engine
from ..precision import short
from ..sharded_optim.sharded_state import ShardedOptState
from ..sharded_optim.state_plan import StateLeaf, StatePlan, plan_state
from ..step.program_step import ProgramStep
from ..step.state import State, check_state, marked
from ..step.train import TrainStep
from ..tree import named_leaves, paths
from .drawing import Bar, table_html
from .notes import found_units, notes_of, wire_of
from .options import Options
from .placed import StatePlaces, Stored, stored_flats, stored_tensors
from .program.step import ShardedProgramStep


class Row(NamedTuple):
    """The leaves of one bucket, or tensors that belong to no leaf."""

    unit: str
    leaves: tuple[str, ...]  # their paths
    elements: int  # of whole leaves
    storage: tuple[torch.dtype, ...]  # of the params, or of the tensors
    compute: torch.dtype | None  # the dtype that whole leaves are used in; None: no loss uses them
    wire: tuple[tuple[str, Form], ...]  # messages of a step, and their dtypes or codecs
    # The leaves, between steps: "whole", "1/4" for a piece of four, or "1/4, whole as bfloat16"
    where: str
    nbytes: int  # of params here, padding included
    state: tuple[torch.dtype, ...]  # dtypes of the optimizer's state of these leaves
    state_where: str  # "whole", "1/4", "at owners", or ""
    state_nbytes: int  # of the optimizer's state here


class Description(NamedTuple):
    """The holdings of one rank. It prints as a table; a notebook shows bars."""

    rows: tuple[Row, ...]
    rank: int
    num_ranks: int
    optimizer: str  # as it prints
    # The objects that `shard` was given for seams, as they print, and its `reduce_bucket`
    seams: str = ""
    mesh: str = ""  # the sizes of its axes, and the one of the same data
    # State and params that lie in places. Gradients and saved tensors follow from the loss, which
    # a plan runs.
    stored: tuple[Stored, ...] = ()
    # The units that `functionalize` found where none were chosen, and why: a line per kind
    found: tuple[str, ...] = ()

    @property
    def params_nbytes(self) -> int:
        """What this rank holds of the params, in bytes, padding included."""
        return sum(row.nbytes for row in self.rows)

    @property
    def state_nbytes(self) -> int:
        """What it holds of the optimizer's state, in bytes."""
        return sum(row.state_nbytes for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Both."""
        return self.params_nbytes + self.state_nbytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about sparse gradients, and about a unit of more than half of the parameters."""
        elements: dict[str, int] = {}
        tables = set()
        for row in self.rows:
            if row.leaves:
                elements[row.unit] = elements.get(row.unit, 0) + row.elements
            if any(message == "rows" for message, _ in row.wire):
                tables.add(row.unit)
        return notes_of(elements, self.num_ranks, tables)

    def __repr__(self) -> str:
        # At a prompt and in a notebook, too
        return str(self)

    def __str__(self) -> str:
        table = [_HEAD, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [_line(cells, widths) for cells in table]
        with_seams = f"; {self.seams}" if self.seams else ""
        lines.append(f"{self._total}; {self.optimizer}{with_seams}")
        if self.mesh:
            lines.append(f"mesh: {self.mesh}")
        for kind, held, read, written in self.stored:
            lines.append(
                f"elsewhere: {held:,} of these bytes ({kind}); a step reads {read:,} and writes "
                f"{written:,}"
            )
        if self.num_ranks > 1:
            lines.append(_TRAFFIC)
        lines += self.found + self.notes
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        bars = []
        for row in self.rows:
            held, state = f"{row.nbytes:,}", f"{row.state_nbytes:,}"
            cells = (row.unit, row.where, held, row.state_where or "-", state)
            kind = "params" if row.leaves else "other tensors"
            bars.append(Bar(cells, {kind: row.nbytes, "optimizer state": row.state_nbytes}))
        head = ("unit", "where", "bytes", "optimizer state", "bytes")
        return table_html(self._total, head, bars, text=str(self))

    @property
    def _total(self) -> str:
        holder = "this process"
        if self.num_ranks > 1:
            holder = f"rank {self.rank} of {self.num_ranks}"
        return f"{holder} holds {self.nbytes:,} bytes"


# Which a loss decides: a plan runs it
_TRAFFIC = "bytes per step, and their least time: fz.plan(params, step, batch=..., bandwidth=...)"
_HEAD = (
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
_NUMBERS = ("leaves", "bytes")  # columns that are aligned to the right


def _cells(row: Row) -> tuple[str, ...]:
    """The row's entries, a cell per column of the head.

    Tensors that belong to no leaf have no number of leaves and no compute dtype: "". Nor have trees
    in pieces a compute dtype. "-" says that nothing travels, or that there is no optimizer's state.
    """
    compute = "" if row.compute is None else short(row.compute)
    wire = ", ".join(f"{message} {short(form)}" for message, form in row.wire)
    params = (
        row.unit,
        str(len(row.leaves) or ""),
        _dtypes(row.storage),
        compute,
        wire or "-",
        row.where,
        f"{row.nbytes:,}",
    )
    state = (_dtypes(row.state) or "-", row.state_where or "-", f"{row.state_nbytes:,}")
    return params + state


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    columns = []
    for name, cell, width in zip(_HEAD, cells, widths, strict=True):
        columns.append(cell.rjust(width) if name in _NUMBERS else cell.ljust(width))
    return "  ".join(columns).rstrip()


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(short, dtypes))


AnyStep = ProgramStep | ShardedProgramStep


def describe(step: AnyStep, state: State) -> Description:
    """A rank's part of a state, unit by unit: dtypes, traffic, bytes, and the share of the whole.
    Print it for a table.

    Of a step for one process it describes the whole state. No communication. How many bytes a step
    sends, and the least time for them, follow from its loss: `plan(params, step, batch=...,
    bandwidth=...)` of the same sharded step gives both.

    Args:
        step: the step that the state belongs to, from `train_step`, `program_step` or `shard`.
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
    if isinstance(step, ProgramStep) and state.sharding is not None:
        raise StructureError(
            "a sharded state was given with an unsharded step. Remedy: describe it with the step "
            "that made it"
        )
    if isinstance(step, TrainStep):
        return _describe_whole(step, state)
    if isinstance(step, ProgramStep):
        rows = [_plain(name, tensors) for name, tensors in _by_field(state).items()]
        return Description(tuple(rows), rank=0, num_ranks=1, optimizer=repr(step))
    if not isinstance(step.unsharded, TrainStep):
        return _describe_program(step, state)
    step.check_state(state)
    layout, plan = state.params.sharding.layout, state.value.opt_state.holding.plan
    # The parts have rows of their own, which say how they are carried
    others = state.replace(parts=None)
    rows = _rows(others, layout, plan, sends=step.group.size > 1)
    rows += _rows_of_parts(step, state)
    stored = _Elsewhere(step.options)
    stored.see_params(state.params)
    stored.see_state(state.value.opt_state)
    found = found_units(layout.units)
    return _on_this_rank(step, rows, repr(step.unsharded.optimizer), stored, found)


def _on_this_rank(
    step: ShardedProgramStep,
    rows: Sequence[Row],
    optimizer: str,
    stored: _Elsewhere,
    found: tuple[str, ...],
) -> Description:
    options = step.options
    seams = [f"{name}={seam}" for name, seam in options.printed_seams.items()]
    if options.reduce_bucket:
        seams.append(f"reduce_bucket={options.reduce_bucket:,} bytes")
    return Description(
        rows=tuple(rows),
        rank=step.group.rank,
        num_ranks=step.group.size,
        optimizer=optimizer,
        seams=", ".join(seams),
        mesh=options.axes.mesh,
        stored=stored.by_kind,
        found=found,
    )


class _Elsewhere:
    """The tensors that lie in places, of the trees and states that it has seen."""

    def __init__(self, options: Options):
        self._places = options.places
        self._state: list[Tensor] = []
        self._params: list[Tensor] = []
        self._trained: list[Tensor] = []  # of the params, those that a step writes

    def see_params(self, tree: ShardedTree) -> None:
        """A tree of a state, held as params are."""
        places, layout = self._places.params, tree.sharding.layout
        if places is None:
            return
        flats = tree.flats()
        self._params += stored_flats(places, flats, layout)
        if not tree.holding.read_only:
            self._trained += stored_flats(places, flats, layout, trained=True)

    def see_state(self, state: ShardedOptState) -> None:
        """An optimizer's state."""
        plan, layout = state.holding.plan, state.holding.sharding.layout
        places = StatePlaces.of(self._places.state, plan, layout)
        self._state += stored_tensors(places, state.as_it_lies)

    @property
    def by_kind(self) -> tuple[Stored, ...]:
        state, params = _nbytes(self._state), _nbytes(self._params)
        found = {
            "state": Stored("state", state, state, state),
            "params": Stored("params", params, params, _nbytes(self._trained)),
        }
        return tuple(found[kind] for kind in self._places.given if kind in found)


def _describe_whole(step: TrainStep, state: State) -> Description:
    """The description of an unsharded state: every bucket whole, in one process."""
    # As if sharded at level 0 over one rank
    whole = Cut(level=0, num_pieces=1, num_held=1)
    layout = make_layout(
        marked(state),
        1,
        trainable=lambda path, leaf: leaf.requires_grad,
        cut=lambda path, leaf, dtypes: whole,
    )
    plan = plan_state(step.optimizer.init, layout, layout.trainable, 1)
    rows = _rows(state, layout, plan, sends=False)
    return Description(
        rows=tuple(rows),
        rank=0,
        num_ranks=1,
        optimizer=repr(step.optimizer),
        found=found_units(layout.units),
    )


def _describe_program(step: ShardedProgramStep, state: State) -> Description:
    """The description of a program's state on a rank: a row per bucket of each tree, and a row per
    optimizer's state."""
    step.check_state(state)
    sends = step.group.size > 1
    rows, stored = list[Row](), _Elsewhere(step.options)
    found: tuple[str, ...] = ()  # in the trees that losses use
    nodes = optree.tree_leaves(state.value, is_leaf=is_on_engine)
    for name, node in zip(paths(state.value, is_on_engine), nodes, strict=True):
        if isinstance(node, ShardedTree):
            own_name = name or node.holding.name
            rows += _rows_of_tree(own_name, node, sends=sends)
            if node.holding.form == "held":
                stored.see_params(node)
                found += found_units(node.sharding.layout.units, own_name)
        elif isinstance(node, ShardedOptState):
            stored.see_state(node)
            tensors = [x for x in optree.tree_leaves(node.as_it_lies) if isinstance(x, Tensor)]
            shares = _shares(node.holding.plan.leaves, step.options.axes.optimizer.size)
            rows.append(_plain(name, tensors, shares or "whole"))
    # Sharded nodes and parts are left out: they have rows of their own
    others = state.replace(parts=None)
    others = tree_map(lambda x: None if is_on_engine(x) else x, others, is_leaf=is_on_engine)
    rest = [x for x in optree.tree_leaves(others) if isinstance(x, Tensor)]
    rows.append(_plain("(the rest)", rest))
    rows += _rows_of_parts(step, state)
    return _on_this_rank(step, rows, repr(step.unsharded), stored, found)


def _rows_of_tree(name: str, tree: ShardedTree, *, sends: bool) -> list[Row]:
    """A row per bucket of a sharded tree that has leaves here. `sends`: whether there are other
    ranks."""
    layout, is_in_pieces = tree.sharding.layout, tree.holding.form == "pieces"
    leaves, published = layout.treedef.flatten_up_to(tree.local_tree), tree.published()
    rows = []
    for unit in layout.units:
        for b in unit.buckets:
            bucket = layout.buckets[b]
            names = tuple(f"{name}.{layout.leaves[n].path}".lstrip(".") for n in bucket.leaves)
            # In pieces, frozen leaves are None, and so are all of a tree that is read only
            held = [leaves[n] for n in bucket.leaves if leaves[n] is not None]
            if not held:
                continue
            # No step takes gradients of a tree that is read only, nor updates it
            is_updated = bucket.trainable and not tree.holding.read_only
            wire = wire_of(bucket, is_updated) if sends and not is_in_pieces else ()
            own_name = f"{name}.{unit.name or 'root'}".lstrip(".")
            row = _row(own_name, bucket, names, held, published[b], (), wire)
            if is_in_pieces:
                # As of gradients, which no loss uses
                row = row._replace(where=_share(bucket.cut.num_pieces), compute=None)
            rows.append(row)
    return rows


def _shares(leaves: Iterable[StateLeaf], num_pieces: int) -> str:
    """The share of these leaves of an optimizer's state that is here; "" where they belong to no
    param."""
    # A chain may hold both kinds of state for one param
    kinds = {leaf.kind for leaf in leaves}
    shares = []
    if not kinds.isdisjoint({"follows", "rows"}):
        shares.append(_share(num_pieces))
    if "owned" in kinds:
        shares.append("at owners")
    return ", ".join(shares)


def _by_field(state: State) -> dict[str, list[Tensor]]:
    """The tensors of a whole state, by the first name of their paths."""
    fields: dict[str, list[Tensor]] = {}
    for path, leaf in named_leaves(state).items():
        if isinstance(leaf, Tensor):
            fields.setdefault(path.partition(".")[0], []).append(leaf)
    return fields


def _rows_of_parts(step: ShardedProgramStep, state: State) -> list[Row]:
    """A row for each name under which a part keeps something."""
    if state.parts is None:
        return []
    step.parts_of(state).check(state.parts)
    # The share that is here, by how the reduction carries a tensor
    shares = {
        "sum": "a share of the sum",
        "pieces": _share(step.options.axes.optimizer.size),
        "same": "whole",
    }
    rows = []
    for name, carried in step.options.reduction.keeps.items():
        tensors = optree.tree_leaves(state.parts["reduction"][name])
        rows.append(_plain(f"(reduction: {name})", tensors, shares[carried]))
    return rows


def _rows(state: State, layout: Layout, plan: StatePlan, *, sends: bool) -> list[Row]:
    """A row per bucket, in the order of the units, and those of tensors that belong to no leaf.

    `sends`: whether there are other ranks.
    """
    params: list[Tensor] = optree.tree_leaves(as_local(state.params))
    is_sharded = isinstance(state.params, ShardedTree)
    published = state.params.published() if is_sharded else [None] * len(layout.buckets)
    # By the param's number: its leaves of the optimizer's state
    slots_of: dict[int, list[_Slot]] = {n: [] for n in range(len(params))}
    shared: list[Any] = []  # belongs to no leaf: the optimizer's counts and their like
    for planned, x in zip(plan.leaves, optree.tree_leaves(as_local(state.opt_state)), strict=True):
        if planned.kind == "replicated":
            shared.append(x)
        else:
            slots_of[planned.leaf].append(_Slot(planned, x))
    rows = []
    for unit in layout.units:
        for b in unit.buckets:
            bucket = layout.buckets[b]
            names = tuple(layout.leaves[n].path for n in bucket.leaves)
            held = [params[n] for n in bucket.leaves]
            slots = [slot for n in bucket.leaves for slot in slots_of[n]]
            wire = wire_of(bucket, bucket.trainable) if sends else ()
            row = _row(unit.name or "root", bucket, names, held, published[b], slots, wire)
            rows.append(row)
    # Buffers, counters, the seed and the loss scale
    rest = state.replace(params=None, opt_state=None)
    for name, tree in (("(optimizer)", shared), ("(buffers and counts)", rest)):
        tensors = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
        if tensors:
            rows.append(_plain(name, tensors))
    return rows


class _Slot(NamedTuple):
    """A leaf of the optimizer's state that belongs to a param."""

    planned: StateLeaf
    tensor: Tensor  # this rank's part


def _row(
    unit: str,
    bucket: Bucket,
    paths: tuple[str, ...],
    held: Sequence[Tensor],
    published: Tensor | None,
    slots: Sequence[_Slot],
    wire: tuple[tuple[str, Form], ...],
) -> Row:
    """The row of a bucket.

    Args:
        held: the bucket's leaves as this rank holds them between steps.
        published: the published flat beside them, if there is one.
        slots: of all of the bucket's leaves.
    """
    # Without padding, which the bytes include
    numel = sum(bucket.numels)
    state = [slot.tensor for slot in slots]
    here = [*held] if published is None else [*held, published]
    form = short(bucket.gather)
    return Row(
        unit=unit,
        leaves=paths,
        elements=numel,
        storage=_distinct_dtypes(held),
        compute=bucket.compute,
        wire=wire,
        where=_share(bucket.cut.num_held) + ("" if published is None else f", whole as {form}"),
        nbytes=_nbytes(here),
        state=_distinct_dtypes(state),
        state_where=_shares([slot.planned for slot in slots], bucket.cut.num_pieces),
        state_nbytes=_nbytes(state),
    )


def _plain(name: str, tensors: Sequence[Tensor], where: str = "whole") -> Row:
    """The row of tensors that belong to no leaf."""
    return Row(
        unit=name,
        leaves=(),
        elements=sum(x.numel() for x in tensors),
        storage=_distinct_dtypes(tensors),
        compute=None,
        wire=(),
        where=where,
        nbytes=_nbytes(tensors),
        state=(),
        state_where="",
        state_nbytes=0,
    )


def _share(num_pieces: int) -> str:
    return "whole" if num_pieces == 1 else f"1/{num_pieces}"


def _distinct_dtypes(tensors: Iterable[Tensor]) -> tuple[torch.dtype, ...]:
    """In the order in which they come first."""
    return tuple(dict.fromkeys(x.dtype for x in tensors))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that the tensors lie in, each once: leaves share their flat's."""
    # A view counts as all of its storage, which it keeps alive
    storages = {storage_id(x): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())
